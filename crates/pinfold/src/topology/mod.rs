//! The machine: its CPUs, nodes, distances and isolated CPUs, and which of them this process may
//! use.
//!
//! Everything is read from files below a root folder, which tests replace. Only the affinity mask
//! comes from a system call, which is made for the real root only. Nothing allocates. A machine
//! without NUMA has one node, 0, with all CPUs.

mod affinity;
pub(crate) mod cgroup;
pub(crate) mod facts;
mod list;
mod set;

pub(crate) use affinity::affinity_of;
#[doc(hidden)]
pub use affinity::{affinity, set_affinity};
#[doc(hidden)]
pub use facts::{FAKE_NODES_VARIABLE, parse_fake_nodes};
pub(crate) use set::bits;
pub use set::{ListError, Set};

use crate::sys::{self, FileError, Text, read_file_below};
use core::ffi::CStr;
use pinfold_rseq::MAX_INDEX;
use set::number;

/// CPU numbers are below this.
pub const MAX_CPUS: usize = MAX_INDEX;
/// Node numbers are below this: the number of nodes with the kernel's largest `CONFIG_NODES_SHIFT`.
pub const MAX_NODES: usize = 1024;

/// A CPU's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CpuId(pub usize);

/// A node's number. Numbers can have gaps, and node 0 need not exist.
///
/// ```
/// use pinfold::topology::{NodeId, NodeSet};
/// let nodes: NodeSet = "0,2".parse()?;
/// assert!(nodes.iter().map(NodeId).eq([NodeId(0), NodeId(2)]));
/// # Ok::<(), pinfold::topology::ListError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub usize);

/// A set of CPUs. Plain data of 1 KiB.
pub type CpuSet = Set<{ MAX_CPUS / 64 }>;
/// A set of nodes. Plain data of 128 bytes.
pub type NodeSet = Set<{ MAX_NODES / 64 }>;

/// The file whose content makes no sense, and what is wrong with it.
///
/// ```
/// use pinfold::topology::Topology;
///
/// if let Err(error) = Topology::system() {
///     eprintln!("{error}"); // For example: /sys/devices/system/cpu/online: not a list of numbers
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TopologyError {
    /// The file, below the root folder.
    pub file: &'static str,
    /// What is wrong with the file's content.
    pub what: ListError,
}

pinfold_rseq::error_texts! { TopologyError:
    TopologyError { file, what } => "/{file}: {what}; is the right sysfs mounted?";
}

/// The CPUs and nodes of a machine.
///
/// ```
/// use pinfold::topology::Topology;
///
/// let machine = Topology::system()?;
/// println!("{} CPUs, nodes {}", machine.online.len(), machine.nodes);
/// assert!(!machine.housekeeping().is_empty());
/// # Ok::<(), pinfold::topology::TopologyError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Topology {
    /// CPUs that can ever exist.
    pub possible: CpuSet,
    /// CPUs that are online.
    pub online: CpuSet,
    /// CPUs that the scheduler does not balance (`isolcpus=`, isolated cpuset partitions).
    pub isolated: CpuSet,
    /// CPUs without a periodic tick (`nohz_full=`).
    pub nohz_full: CpuSet,
    /// CPUs that this process may run on, by its affinity and its cgroup's cpuset.
    pub allowed: CpuSet,
    /// Nodes that are online.
    pub nodes: NodeSet,
    /// Nodes that have memory.
    pub with_memory: NodeSet,
    /// The folder with the machine's files: `/`, except in tests.
    root: Text<1024>,
}

impl Topology {
    /// Reads the machine that this process runs on. About ten file reads; caches nothing.
    ///
    /// A file that is missing, empty or unreadable has a default: all CPUs that the C library
    /// knows, no isolation, one node.
    ///
    /// # Errors
    ///
    /// [`TopologyError`] if a file's content makes no sense.
    pub fn system() -> Result<Topology, TopologyError> {
        let mut topology = Topology::read_below(b"/")?;
        if let Some(affinity) = affinity() {
            topology.allowed = topology.allowed.and(&affinity);
        }
        Ok(topology)
    }

    /// Reads the machine whose files are below `root`, as [`system`](Self::system) does, but
    /// without the affinity.
    ///
    /// # Errors
    ///
    /// [`TopologyError`] if a file's content makes no sense.
    pub(crate) fn read_below(root: &[u8]) -> Result<Topology, TopologyError> {
        let cpus = |file| list_in(root, file).map(|set| set.filter(|set| !set.is_empty()));
        let online = cpus("sys/devices/system/cpu/online")?;
        let possible = cpus("sys/devices/system/cpu/possible")?;
        let possible = possible.or_else(|| online.clone()).unwrap_or_else(all_cpus);
        let online: CpuSet = online.unwrap_or_else(|| possible.clone());
        // Without the option, the kernel prints "(null)".
        let nohz = "sys/devices/system/cpu/nohz_full";
        let nohz_full = list_in(root, nohz).unwrap_or_default().unwrap_or_default();
        let isolated = cpus("sys/devices/system/cpu/isolated")?.unwrap_or_default();
        let mut nodes: NodeSet =
            list_in(root, "sys/devices/system/node/online")?.unwrap_or_default();
        let mut with_memory =
            list_in(root, "sys/devices/system/node/has_memory")?.unwrap_or_default();
        if nodes.is_empty() {
            nodes.insert(0);
        }
        if with_memory.is_empty() {
            with_memory = nodes.clone();
        }
        let mut path = Text::new();
        if !path.push(root) {
            // The system finds no file by an empty path, and this path ends at its NUL. So reads
            // below a path that is too long find no files.
            path.push(b"\0");
        }
        let cgroup = cgroup_cpus(root)?.unwrap_or_else(|| online.clone());
        Ok(Topology {
            allowed: online.and(&cgroup),
            possible,
            online,
            isolated,
            nohz_full,
            nodes,
            with_memory,
            root: path,
        })
    }

    /// Returns the folder with the machine's files.
    pub(crate) fn root(&self) -> &[u8] {
        self.root.get()
    }

    /// Returns the CPUs that background work should run on: the allowed CPUs that are neither
    /// isolated nor without a tick. If there is no such CPU, returns all allowed ones.
    pub fn housekeeping(&self) -> CpuSet {
        let quiet = self
            .allowed
            .without(&self.isolated)
            .without(&self.nohz_full);
        if quiet.is_empty() {
            self.allowed.clone()
        } else {
            quiet
        }
    }

    /// Returns the CPUs of a node. One file read. Without the file, a machine's only node 0 has all
    /// possible CPUs, and any other node has none.
    ///
    /// # Errors
    ///
    /// [`TopologyError`] if the file's content makes no sense.
    pub fn cpus_of(&self, node: NodeId) -> Result<CpuSet, TopologyError> {
        let found = list_of_node(self.root(), node)?;
        Ok(found.unwrap_or_else(|| {
            if node.0 == 0 && self.nodes.len() == 1 {
                self.possible.clone()
            } else {
                CpuSet::default()
            }
        }))
    }

    /// Returns how many bytes of memory a node has, as the kernel manages it; an equal share of the
    /// machine's memory if the file does not say. One file read.
    pub fn memory_of(&self, node: NodeId) -> u64 {
        let share = || (sys::physical_memory() / self.with_memory.len().max(1)) as u64;
        let total = node_path(node, "meminfo")
            .and_then(|path| sys::with_path_below(self.root(), &path.get()[1..], figures))
            .and_then(|[total, _]| total);
        total.unwrap_or_else(share)
    }

    /// Returns the distance from CPUs of node `from` to memory of node `to`, as the firmware states
    /// it; 10 is local. One file read. If the file does not say, 10 for the same node and 20 for
    /// another.
    pub fn distance(&self, from: NodeId, to: NodeId) -> u32 {
        let mut text = [0u8; 8 * 1024];
        let row = self.nodes.iter().position(|node| node == to.0);
        let known = row.and_then(|row| {
            let path = node_path(from, "distance")?;
            let text = read_file_below(self.root(), &path.get()[1..], &mut text).ok()?;
            let mut words = text
                .split(u8::is_ascii_whitespace)
                .filter(|word| !word.is_empty());
            number(words.nth(row)?).ok()?.try_into().ok()
        });
        known.unwrap_or(if from == to { 10 } else { 20 })
    }
}

/// Returns the path of a node's file.
fn node_path(node: NodeId, file: &str) -> Option<Text<64>> {
    let mut digits = [0u8; 20];
    let mut path = Text::new();
    let length = sys::decimal(node.0, &mut digits);
    let parts = [
        &b"/sys/devices/system/node/node"[..],
        &digits[..length],
        b"/",
        file.as_bytes(),
    ];
    parts
        .into_iter()
        .all(|part| path.push(part))
        .then_some(path)
}

/// Reads from a node's `meminfo` how many bytes of memory the node has, and how many of these are
/// free or hold files that the kernel can drop. A line reads "Node 0 MemTotal:   16000000 kB".
fn figures(meminfo: &CStr) -> [Option<u64>; 2] {
    const NAMES: [&[u8]; 4] = [
        b"MemTotal:",
        b"MemFree:",
        b"Active(file):",
        b"Inactive(file):",
    ];
    let mut found = [None; 4];
    let mut wanted = None;
    facts::for_each_word(meminfo, |word| {
        if let Some(place) = wanted {
            let kib = number(word).ok();
            found[place] = kib.map(|kib| (kib as u64).saturating_mul(1024));
        }
        wanted = NAMES.iter().position(|name| *name == word);
    });
    let [total, free, active, inactive] = found;
    let files: u64 = active.unwrap_or(0);
    let files = files.saturating_add(inactive.unwrap_or(0));
    [total, free.map(|free| files.saturating_add(free))]
}

fn list_of_node(root: &[u8], node: NodeId) -> Result<Option<CpuSet>, TopologyError> {
    const NAME: &str = "sys/devices/system/node/nodeN/cpulist";
    let mut text = [0u8; 8 * 1024];
    let Some(path) = node_path(node, "cpulist") else {
        return Ok(None);
    };
    list_of(NAME, read_file_below(root, &path.get()[1..], &mut text))
}

/// Returns the list in a file; `None` if the file cannot be read.
fn list_in<const WORDS: usize>(
    root: &[u8],
    file: &'static str,
) -> Result<Option<Set<WORDS>>, TopologyError> {
    let mut text = [0u8; 8 * 1024];
    list_of(file, read_file_below(root, file.as_bytes(), &mut text))
}

fn list_of<const WORDS: usize>(
    file: &'static str,
    text: Result<&[u8], FileError>,
) -> Result<Option<Set<WORDS>>, TopologyError> {
    match text {
        Ok(text) => parse(file, text).map(Some),
        Err(FileError::TooLarge) => Err(TopologyError {
            file,
            what: ListError::TooLarge,
        }),
        Err(FileError::Unreadable) => Ok(None),
    }
}

fn parse<const WORDS: usize>(file: &'static str, text: &[u8]) -> Result<Set<WORDS>, TopologyError> {
    Set::parse(text).map_err(|what| TopologyError { file, what })
}

/// Returns the CPUs that this process's cgroup may use: the list in `cpuset.cpus.effective` (second
/// version) or `cpuset.effective_cpus` (first version) of the cgroup, or of the nearest cgroup
/// above it whose list is not empty.
fn cgroup_cpus(root: &[u8]) -> Result<Option<CpuSet>, TopologyError> {
    let mut text = [0u8; 4096];
    let Ok(groups) = read_file_below(root, b"proc/self/cgroup", &mut text) else {
        return Ok(None);
    };
    for line in groups.split(|&byte| byte == b'\n') {
        let mut fields = line.splitn(3, |&byte| byte == b':');
        let (Some(id), Some(controllers), Some(group)) =
            (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        let found = if id == b"0" && controllers.is_empty() {
            cpus_of_group(root, b"sys/fs/cgroup", group, b"/cpuset.cpus.effective")?
        } else if controllers
            .split(|&byte| byte == b',')
            .any(|name| name == b"cpuset")
        {
            cpus_of_group(
                root,
                b"sys/fs/cgroup/cpuset",
                group,
                b"/cpuset.effective_cpus",
            )?
        } else {
            None
        };
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(None)
}

fn cpus_of_group(
    root: &[u8],
    mount: &[u8],
    group: &[u8],
    file: &[u8],
) -> Result<Option<CpuSet>, TopologyError> {
    let mut group = group.strip_suffix(b"/").unwrap_or(group);
    loop {
        let mut path = Text::<1024>::new();
        if ![mount, group, file].into_iter().all(|part| path.push(part)) {
            return Ok(None);
        }
        let mut text = [0u8; 8 * 1024];
        if let Ok(text) = read_file_below(root, path.get(), &mut text) {
            let cpus: CpuSet = parse("sys/fs/cgroup/…/cpuset.cpus.effective", text)?;
            if !cpus.is_empty() {
                return Ok(Some(cpus));
            }
        }
        match group.iter().rposition(|&byte| byte == b'/') {
            Some(end) => group = &group[..end],
            None => return Ok(None),
        }
    }
}

/// Returns the CPUs on which background work of the calling thread disturbs no isolated CPU.
/// Returns `None`, usually without reading a file, if no CPU is isolated or without a tick.
#[doc(hidden)]
pub fn housekeeping_where_some_are_isolated() -> Option<CpuSet> {
    facts::any_quiet().then(housekeeping_now)?
}

/// Not inlined, so that the caller needs stack for the sets only if there are isolated CPUs.
#[cold]
#[inline(never)]
fn housekeeping_now() -> Option<CpuSet> {
    let list = |file| list_in::<{ MAX_CPUS / 64 }>(b"/", file).ok().flatten();
    let files = [
        "sys/devices/system/cpu/isolated",
        "sys/devices/system/cpu/nohz_full",
    ];
    let some = files
        .map(list)
        .into_iter()
        .flatten()
        .any(|set| !set.is_empty());
    some.then(|| {
        Topology::system()
            .ok()
            .map(|machine| machine.housekeeping())
    })?
}

/// Returns the CPUs from 0 on, as many as the C library knows.
fn all_cpus() -> CpuSet {
    // SAFETY: `sysconf` takes a plain number and has no preconditions.
    let count = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_CONF) };
    let mut set = CpuSet::default();
    (0..usize::try_from(count).unwrap_or(1).max(1)).for_each(|cpu| set.insert(cpu));
    set
}

#[cfg(test)]
mod tests {
    use super::{NodeId, figures, node_path};
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt;

    #[test]
    fn file_pages_count_as_free() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("sys/devices/system/node/node1");
        std::fs::create_dir_all(&folder).unwrap();
        let text = "\
Node 1 MemTotal:         1000 kB
Node 1 MemFree:            10 kB
Node 1 Active(anon):      500 kB
Node 1 Inactive(anon):    100 kB
Node 1 Active(file):      200 kB
Node 1 Inactive(file):     90 kB
Node 1 Unevictable:         0 kB
";
        let text = [text, &"Node 1 Mlocked:             0 kB\n".repeat(40)].concat();
        std::fs::write(folder.join("meminfo"), text).unwrap();
        let path = folder.join("meminfo");
        let path = CString::new(path.as_os_str().as_bytes()).unwrap();
        assert_eq!(figures(&path), [Some(1000 << 10), Some(300 << 10)]);
        assert_eq!(figures(c"/no/such/file"), [None, None]);
        // A figure that overflows when it is converted to bytes counts as the largest number.
        let most = u64::MAX >> 10;
        let text = std::format!(
            "MemTotal: {} MemFree: {most} Active(file): {most}",
            most + 1
        );
        std::fs::write(folder.join("meminfo"), text).unwrap();
        assert_eq!(figures(&path), [Some(u64::MAX), Some(u64::MAX)]);
    }

    #[test]
    fn node_path_is_the_files_path() {
        let path = node_path(NodeId(1023), "meminfo").unwrap();
        assert_eq!(
            path.as_c_str(),
            c"/sys/devices/system/node/node1023/meminfo"
        );
        assert!(node_path(NodeId(usize::MAX), "a file with a long name").is_none());
    }
}
