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
use super::{CPUS_MOST, CpuSet, NodeId, NodeSet, Topology, figures, node_path};
use crate::sys;
use core::ffi::CStr;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};

const ISOLATED: &CStr = c"/sys/devices/system/cpu/isolated";
const NOHZ_FULL: &CStr = c"/sys/devices/system/cpu/nohz_full";
const WITH_MEMORY: &CStr = c"/sys/devices/system/node/has_memory";
const WITH_CPUS: &CStr = c"/sys/devices/system/node/has_cpu";
const ONLINE: &CStr = c"/sys/devices/system/node/online";

/// The CPUs that the library should not interrupt: isolated CPUs, and CPUs without a periodic tick.
struct Quiet {
    cpus: [AtomicU64; CPUS_MOST / 64],
    any: AtomicBool,
}

static QUIET: Quiet = Quiet::new();
/// The number of nodes with memory, at least 1. It is 0 until the facts are known.
static NODES: AtomicUsize = AtomicUsize::new(0);

impl Quiet {
    const fn new() -> Quiet {
        Quiet {
            cpus: [const { AtomicU64::new(0) }; CPUS_MOST / 64],
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
            (0..CPUS_MOST).for_each(|cpu| self.insert(cpu));
        }
        // Without the option, the kernel prints "(null)".
        let _ = for_each_number(nohz_full, |cpu| self.insert(cpu));
    }
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
    let mut nodes = 0;
    if for_each_number(WITH_MEMORY, |_| nodes += 1).is_err() {
        nodes = 1;
    }
    // Release pairs with the acquire in `read_once`: a thread that sees the number of nodes also
    // sees the quiet CPUs.
    NODES.store(nodes.max(1), Release);
}

/// Updates the CPUs that the library should not interrupt, from a fresh description of the machine.
/// For threads with enough stack to hold a `Topology`.
pub(crate) fn follow(machine: &Topology) {
    read_once();
    QUIET.replace(&machine.isolated, &machine.nohz_full);
}

/// Returns whether the library should not interrupt the CPU, by the facts of the last [`read_once`]
/// or [`follow`].
pub(crate) fn is_quiet_cpu(cpu: usize) -> bool {
    read_once();
    QUIET.contains(cpu)
}

/// Returns whether there is any CPU for which [`is_quiet_cpu`] is true.
pub(crate) fn any_quiet() -> bool {
    read_once();
    QUIET.any.load(Relaxed)
}

/// Returns whether more than one node has memory.
pub(crate) fn has_several_nodes() -> bool {
    read_once();
    // Relaxed: `read_once` has just loaded the same word with acquire, and the word no longer
    // changes.
    NODES.load(Relaxed) > 1
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
        Ok(Some(range)) if range.last >= CPUS_MOST => Some(ListError::TooLarge),
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
    use super::{Quiet, for_each_number, for_each_word};
    use crate::topology::{CpuSet, ListError};
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
