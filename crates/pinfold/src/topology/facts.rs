//! The facts that the allocator has to know about the machine. They are read once.
//!
//! A thread that allocates may have little stack, and after start-up it may be forbidden to open
//! files. So the first allocation reads these facts into statics, a small piece of a file at a
//! time. Later, a fact costs a load.
//!
//! The statics do not follow changes of the machine. A shepherd's thread, which may open files,
//! updates them by [`follow`].

use super::list::List;
use super::set::{ListError, Set, number};
use super::{CpuSet, MAX_CPUS, NodeId, NodeSet, Topology, figures, node_path};
use crate::{spared, sys};
use core::ffi::CStr;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use pinfold_rseq::{Index, env};

/// The environment variable that sets the number of made-up nodes (module `nodes`).
pub const FAKE_NODES_VARIABLE: &str = "PINFOLD_FAKE_NODES";
/// The maximum number of made-up nodes.
pub(crate) const MAX_FAKE_NODES: usize = 63;

const ISOLATED: &CStr = c"/sys/devices/system/cpu/isolated";
const NOHZ_FULL: &CStr = c"/sys/devices/system/cpu/nohz_full";
const WITH_MEMORY: &CStr = c"/sys/devices/system/node/has_memory";
const WITH_CPUS: &CStr = c"/sys/devices/system/node/has_cpu";
const ONLINE: &CStr = c"/sys/devices/system/node/online";
const ONLINE_CPUS: &CStr = c"/sys/devices/system/cpu/online";

/// The CPUs that the library should not interrupt: isolated CPUs, and CPUs without a periodic tick.
struct Quiet {
    cpus: [AtomicU64; MAX_CPUS / 64],
    any: AtomicBool,
}

static QUIET: Quiet = Quiet::new();
/// The number of CPUs that are online, or 0 until it is known.
static CPUS: AtomicUsize = AtomicUsize::new(0);
/// One more than the largest number of a CPU that was online when the facts were read, or 0 until
/// then.
static CPUS_AT_START: AtomicUsize = AtomicUsize::new(0);
/// The number of nodes with memory that this process may use, at least 1. It is 0 until the facts
/// are known.
static NODES: AtomicUsize = AtomicUsize::new(0);
/// The number of made-up nodes, or 0 if the environment asks for none.
static FAKE_NODES: AtomicUsize = AtomicUsize::new(0);

impl Quiet {
    const fn new() -> Quiet {
        Quiet {
            cpus: [const { AtomicU64::new(0) }; MAX_CPUS / 64],
            any: AtomicBool::new(false),
        }
    }

    fn insert(&self, cpu: usize) {
        if let Some(word) = self.cpus.get(cpu / 64) {
            word.fetch_or(1 << (cpu % 64), Relaxed);
            self.any.store(true, Relaxed);
        }
    }

    fn contains(&self, cpu: usize) -> bool {
        let word = self.cpus.get(cpu / 64);
        word.is_some_and(|word| word.load(Relaxed) >> (cpu % 64) & 1 == 1)
    }

    /// Replaces the CPUs by the CPUs of both sets.
    fn replace(&self, isolated: &CpuSet, nohz_full: &CpuSet) {
        let sets = isolated.words.iter().zip(nohz_full.words);
        for (word, (isolated, nohz_full)) in self.cpus.iter().zip(sets) {
            word.store(isolated | nohz_full, Relaxed);
        }
        let any = !(isolated.is_empty() && nohz_full.is_empty());
        self.any.store(any, Relaxed);
    }

    /// Adds the CPUs of both files. If the list of isolated CPUs makes no sense, adds all CPUs,
    /// because each of them may be isolated.
    fn read(&self, isolated: &CStr, nohz_full: &CStr) {
        if for_each_number(isolated, |cpu| self.insert(cpu)).is_err() {
            (0..MAX_CPUS).for_each(|cpu| self.insert(cpu));
        }
        // Without the option, the kernel prints "(null)".
        let _ = for_each_number(nohz_full, |cpu| self.insert(cpu));
    }
}

/// Reads a value of [`FAKE_NODES_VARIABLE`]: a number from 1 to 63. Returns `None` for anything
/// else.
pub fn parse_fake_nodes(value: &[u8]) -> Option<usize> {
    let nodes = number(value).ok()?;
    (1..=MAX_FAKE_NODES).contains(&nodes).then_some(nodes)
}

/// Reads the facts on the first call. Later calls cost a load. Threads that call this function at
/// the same time read the same facts.
pub(crate) fn read_once() {
    // Acquire pairs with the release in `read`: a thread that sees the number of nodes also sees
    // the quiet CPUs.
    if NODES.load(Acquire) == 0 {
        read();
    }
}

#[cold]
#[inline(never)]
fn read() {
    QUIET.read(ISOLATED, NOHZ_FULL);
    sys::commits_strictly();
    sys::address_space_left();
    sys::physical_memory();
    pinfold_rseq::possible();
    let mut cpus = 0;
    let read = for_each_number(ONLINE_CPUS, |cpu| cpus = cpus.max(cpu + 1));
    if read != Ok(true) || cpus == 0 {
        cpus = pinfold_rseq::possible();
    }
    // If two threads read at once, both keep the number that was stored first.
    let _ = CPUS_AT_START.compare_exchange(0, cpus, Relaxed, Relaxed);
    let fake = env::parsed(FAKE_NODES_VARIABLE, parse_fake_nodes);
    FAKE_NODES.store(fake.unwrap_or(0), Relaxed);
    // A process on a machine with one node makes no system call for policies, because some
    // sandboxes kill a process for such a call.
    let with_memory = nodes_with_memory().filter(|nodes| nodes.len() > 1);
    let nodes = with_memory.map_or(1, |nodes| usable(&nodes).len());
    // Release pairs with the acquire in `read_once`: a thread that sees the number of nodes also
    // sees the quiet CPUs.
    NODES.store(nodes.max(1), Release);
}

/// Updates the CPUs that the library should not interrupt, and the number of CPUs that are online,
/// from a fresh description of the machine.
/// For threads with enough stack to hold a `Topology`.
pub(crate) fn follow(machine: &Topology) {
    read_once();
    QUIET.replace(&machine.isolated, &machine.nohz_full);
    CPUS.store(machine.online.len().max(1), Relaxed);
}

/// Returns how many CPUs are online, by the last [`look_at_cpus`] or [`follow`]. The first call
/// reads a file. Later calls cost a load.
pub(crate) fn cpus_online() -> usize {
    match CPUS.load(Relaxed) {
        0 => look_at_cpus(),
        cpus => cpus,
    }
}

/// Returns one more than the largest number of a CPU that was online at the start. Returns
/// [`possible`](pinfold_rseq::possible) if the facts are not read yet. Always the same once they
/// are. Costs a load.
pub(crate) fn cpus_at_start() -> usize {
    match CPUS_AT_START.load(Relaxed) {
        0 => pinfold_rseq::possible(),
        cpus => cpus,
    }
}

/// Reads how many CPUs are online now. If the file cannot be read, takes all possible CPUs.
pub(crate) fn look_at_cpus() -> usize {
    let mut cpus = 0;
    let read = for_each_number(ONLINE_CPUS, |_| cpus += 1);
    if read != Ok(true) || cpus == 0 {
        cpus = pinfold_rseq::possible();
    }
    CPUS.store(cpus, Relaxed);
    cpus
}

/// Returns whether the library should not interrupt the CPU, by the facts of the last [`read_once`]
/// or [`follow`], or because a thread has isolated it.
pub(crate) fn is_quiet_cpu(cpu: usize) -> bool {
    read_once();
    QUIET.contains(cpu) || spared::contains(cpu)
}

/// Returns whether there is any CPU for which [`is_quiet_cpu`] is true.
pub(crate) fn any_quiet() -> bool {
    read_once();
    QUIET.any.load(Relaxed) || spared::any()
}

/// Returns whether this process may use the memory of more than one node.
pub(crate) fn has_several_nodes() -> bool {
    read_once();
    // Relaxed: `read_once` has just loaded the same word with acquire, and the word no longer
    // changes.
    NODES.load(Relaxed) > 1
}

/// Returns the number of made-up nodes, if the environment asks for any (module `nodes`).
pub(crate) fn fake_nodes() -> Option<usize> {
    read_once();
    // Relaxed: `read_once` has just loaded `NODES` with acquire, and the number was stored before.
    Some(FAKE_NODES.load(Relaxed)).filter(|&nodes| nodes > 0)
}

/// Chooses the backend, once. Returns false while another thread is choosing, or a frame that this
/// signal handler interrupted. The caller must not install a unit then, because operations of two
/// backends could use the unit.
///
/// With several nodes, a unit's memory must lie on its CPU's node. With isolated CPUs, a thread
/// that works for other CPUs must know which words belong to an isolated one. So units belong to
/// CPU numbers on such machines, and to concurrency ids on others.
pub(crate) fn choose_backend() -> bool {
    if !pinfold_rseq::decided() {
        let several = fake_nodes().map_or_else(has_several_nodes, |nodes| nodes > 1);
        pinfold_rseq::init(index_for(several, any_quiet()));
    }
    pinfold_rseq::decided()
}

/// Returns the index of units by default.
fn index_for(several_nodes: bool, any_quiet: bool) -> Index {
    match several_nodes || any_quiet {
        true => Index::Cpu,
        false => Index::Cid,
    }
}

/// Returns those nodes of `with_memory` that this process may use. One system call.
pub(crate) fn usable(with_memory: &NodeSet) -> NodeSet {
    match sys::allowed_nodes() {
        Some(words) => with_memory.and(&Set { words }),
        None => with_memory.clone(),
    }
}

/// Reads which nodes have memory. One file read.
pub(crate) fn nodes_with_memory() -> Option<NodeSet> {
    nodes_in(WITH_MEMORY)
}

/// Reads which nodes have CPUs. One file read.
pub(crate) fn nodes_with_cpus() -> Option<NodeSet> {
    nodes_in(WITH_CPUS)
}

/// Reads which nodes are online. One file read.
pub(crate) fn nodes_online() -> Option<NodeSet> {
    nodes_in(ONLINE)
}

fn nodes_in(file: &CStr) -> Option<NodeSet> {
    let mut nodes = Set::default();
    let read = for_each_number(file, |node| nodes.insert(node));
    read.ok().filter(|&read| read).map(|_| nodes)
}

/// Calls `each` for each CPU of a node. One file read.
pub(crate) fn for_each_cpu_of(node: NodeId, each: impl FnMut(usize)) {
    if let Some(path) = node_path(node, "cpulist") {
        // If the list makes no sense, `each` gets the numbers in front of the fault.
        let _ = for_each_number(path.as_c_str(), each);
    }
}

/// Calls `each` for each online node, in ascending order. Passes the online node's place in this
/// order, and the distance from the CPUs of `node` to the online node's memory. One file read.
pub(crate) fn for_each_distance(node: NodeId, mut each: impl FnMut(usize, usize)) {
    let Some(path) = node_path(node, "distance") else {
        return;
    };
    let mut place = 0;
    for_each_word(path.as_c_str(), |word| {
        if let Ok(distance) = number(word) {
            each(place, distance);
        }
        place += 1;
    });
}

/// Reads how many bytes of memory a node has, and how many of these are free or hold files that the
/// kernel can drop. Each is `None` if the file does not say. One file read.
pub(crate) fn memory_of(node: NodeId) -> [Option<u64>; 2] {
    node_path(node, "meminfo").map_or([None; 2], |path| figures(path.as_c_str()))
}

/// Calls `each` for each number of the list in a file. Returns false if the file cannot be read.
///
/// # Errors
///
/// [`ListError`] if the file holds something else. `each` was called for the numbers in front of
/// the fault.
#[inline(never)]
fn for_each_number(file: &CStr, mut each: impl FnMut(usize)) -> Result<bool, ListError> {
    let mut list = List::default();
    let mut wrong = None;
    let mut found = |range: Result<Option<super::list::Range>, ListError>| match range {
        Ok(Some(range)) if range.last >= MAX_CPUS => Some(ListError::TooLarge),
        Ok(Some(range)) => {
            range.numbers().for_each(&mut each);
            None
        }
        Ok(None) => None,
        Err(error) => Some(error),
    };
    let read = sys::read_in_pieces(file, |piece| {
        for &byte in piece {
            if wrong.is_none() {
                wrong = found(list.feed(byte));
            }
        }
    });
    match wrong.or_else(|| found(list.end())) {
        Some(error) => Err(error),
        None => Ok(read),
    }
}

/// Calls `each` for each word of a file. Cuts a word after 24 bytes.
pub(super) fn for_each_word(file: &CStr, mut each: impl FnMut(&[u8])) {
    let mut word = [0u8; 24];
    let mut length = 0;
    sys::read_in_pieces(file, |piece| {
        for &byte in piece {
            if !byte.is_ascii_whitespace() {
                if let Some(place) = word.get_mut(length) {
                    *place = byte;
                    length += 1;
                }
            } else if length > 0 {
                each(&word[..length]);
                length = 0;
            }
        }
    });
    if length > 0 {
        each(&word[..length]);
    }
}

#[cfg(test)]
mod tests {
    use super::{Quiet, for_each_number, for_each_word, index_for};
    use crate::sys;
    use crate::topology::{CpuSet, ListError, NodeSet};
    use pinfold_rseq::Index;
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt;
    use std::string::String;
    use std::vec::Vec;

    fn file(text: &str) -> (tempfile::TempDir, CString) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, text).unwrap();
        let path = CString::new(path.as_os_str().as_bytes()).unwrap();
        (folder, path)
    }

    #[test]
    fn units_belong_to_cpus_where_that_matters() {
        assert_eq!(index_for(false, false), Index::Cid);
        assert_eq!(index_for(true, false), Index::Cpu);
        assert_eq!(index_for(false, true), Index::Cpu);
    }

    #[test]
    fn long_lists_are_read_in_pieces() {
        let text: Vec<String> = (0..900).map(|n| std::format!("{}", 2 * n)).collect();
        let (_folder, path) = file(&(text.join(",") + "\n"));
        let mut numbers = Vec::new();
        assert_eq!(for_each_number(&path, |n| numbers.push(n)), Ok(true));
        assert!(numbers.into_iter().eq((0..900).map(|n| 2 * n)));
    }

    #[test]
    fn what_is_no_list_is_an_error() {
        for (text, error) in [
            ("0-3,x", ListError::Syntax),
            ("3-1", ListError::Syntax),
            ("1,", ListError::Syntax),
            ("0-8192", ListError::TooLarge),
            ("99999999999999999999", ListError::TooLarge),
        ] {
            let (_folder, path) = file(text);
            assert_eq!(for_each_number(&path, |_| {}), Err(error), "{text}");
        }
        assert_eq!(for_each_number(c"/no/such/file", |_| {}), Ok(false));
    }

    #[test]
    fn quiet_cpus_are_the_isolated_and_those_without_a_tick() {
        let (_first, isolated) = file("2-3\n");
        let (_second, nohz) = file("8190\n");
        let (_third, null) = file("(null)\n");
        let (_fourth, wrong) = file("two\n");
        let quiet = Quiet::new();
        quiet.read(c"/no/such/file", &null);
        assert!(!quiet.any.load(super::Relaxed));
        quiet.read(&isolated, &nohz);
        let cpus: Vec<usize> = (0..9000).filter(|&cpu| quiet.contains(cpu)).collect();
        assert_eq!(cpus, [2, 3, 8190]);
        // If the list makes no sense, every CPU may be isolated, so that the library interrupts
        // none.
        quiet.read(&wrong, &null);
        assert!((0..8192).all(|cpu| quiet.contains(cpu)));
        quiet.replace(&CpuSet::default(), &[5].into_iter().collect());
        assert!(quiet.any.load(super::Relaxed) && quiet.contains(5) && !quiet.contains(2));
        quiet.replace(&CpuSet::default(), &CpuSet::default());
        assert!(!quiet.any.load(super::Relaxed) && !quiet.contains(5));
    }

    #[test]
    fn the_kernel_and_the_status_file_allow_the_same_nodes() {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let list = |line: &'static str| status.lines().find_map(|text| text.strip_prefix(line));
        let (Some(words), Some(list)) = (sys::allowed_nodes(), list("Mems_allowed_list:")) else {
            return;
        };
        assert_eq!(
            NodeSet::parse(list.trim().as_bytes()),
            Ok(NodeSet { words })
        );
    }

    #[test]
    fn words_across_pieces_are_whole() {
        let text = "word ".repeat(200) + "last";
        let (_folder, path) = file(&text);
        let mut words = 0;
        for_each_word(&path, |word| {
            words += 1;
            assert_eq!(word, if words == 201 { &b"last"[..] } else { b"word" });
        });
        assert_eq!(words, 201);
    }
}
