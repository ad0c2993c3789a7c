//! What tests of policies need from a machine: pages, mounts, cgroups, CPUs.

#![allow(dead_code, reason = "each test uses some of it")]

use pinfold::mempolicy::{PageNode, nodes_of_pages};
use pinfold::topology::{CpuSet, NodeId, NodeSet, Topology};
use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::ptr::null_mut;

pub const PAGE: usize = 4096;

pub fn set(nodes: &[usize]) -> NodeSet {
    nodes.iter().copied().collect()
}

/// Moves the thread to the CPUs of a node. Returns false if the node has none.
pub fn run_on(topology: &Topology, node: NodeId) -> bool {
    let cpus: CpuSet = topology.cpus_of(node).unwrap();
    // SAFETY: `cpu_set_t` is plain integers, for which zeroes are valid: an empty set.
    let mut mask: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `mask` is a valid set, and numbers of existing CPUs are within its size.
    cpus.iter()
        .for_each(|cpu| unsafe { libc::CPU_SET(cpu, &mut mask) });
    // SAFETY: the kernel reads `size_of_val(&mask)` bytes of the mask.
    unsafe { libc::sched_setaffinity(0, size_of_val(&mask), &raw const mask) == 0 }
}

/// Returns the first two numbers of the kernel's version.
pub fn kernel() -> (u32, u32) {
    let text = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = text.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    let mut next = || numbers.next().unwrap().unwrap();
    (next(), next())
}

/// Pages of 4 KiB that do not exist until they are touched.
pub struct Pages {
    at: *mut u8,
    count: usize,
}

impl Pages {
    pub fn new(count: usize) -> Pages {
        Pages::map(count, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)
    }

    pub fn shared(file: &File, count: usize) -> Pages {
        Pages::map(count, libc::MAP_SHARED, file.as_raw_fd())
    }

    fn map(count: usize, flags: i32, fd: i32) -> Pages {
        let both = libc::PROT_READ | libc::PROT_WRITE;
        // Leaves an unmapped page on both sides. Otherwise the kernel could join the range with a
        // neighbour that has the same policy.
        // SAFETY: without an address, `mmap` replaces no other mapping.
        let hole = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            libc::mmap(
                null_mut(),
                (count + 2) * PAGE,
                libc::PROT_NONE,
                flags,
                -1,
                0,
            )
        };
        assert_ne!(hole, libc::MAP_FAILED);
        // SAFETY: `MAP_FIXED` replaces the inner pages of `hole`, which this function has just
        // mapped.
        let at = unsafe {
            let inner = hole.cast::<u8>().add(PAGE).cast();
            libc::mmap(inner, count * PAGE, both, flags | libc::MAP_FIXED, fd, 0)
        };
        assert_ne!(at, libc::MAP_FAILED);
        // SAFETY: the range was mapped above. A kernel without huge pages refuses, which changes
        // nothing.
        unsafe { libc::madvise(at, count * PAGE, libc::MADV_NOHUGEPAGE) };
        Pages {
            at: at.cast(),
            count,
        }
    }

    pub fn at(&self, page: usize) -> *const u8 {
        self.at.wrapping_add(page * PAGE)
    }

    pub fn size(&self) -> usize {
        self.count * PAGE
    }

    /// Writes to each page, in order.
    pub fn touch(&self) {
        (0..self.count).for_each(|n| self.touch_page(n));
    }

    /// Writes to one page.
    pub fn touch_page(&self, n: usize) {
        assert!(n < self.count);
        // SAFETY: `n` is below `count`, so the byte is in this mapping, which is writable.
        unsafe { self.at.add(n * PAGE).write_volatile(n as u8) };
    }

    /// Returns whether all pages hold what `touch` wrote.
    pub fn unharmed(&self) -> bool {
        // SAFETY: `n` is below `count`, so the byte is in this mapping, which is readable.
        (0..self.count).all(|n| unsafe { self.at.add(n * PAGE).read_volatile() } == n as u8)
    }

    /// Returns the node of each page.
    pub fn nodes(&self) -> Vec<NodeId> {
        let list: Vec<_> = (0..self.count).map(|n| self.at(n)).collect();
        let mut nodes = vec![PageNode::UNKNOWN; self.count];
        nodes_of_pages(&list, &mut nodes).unwrap();
        nodes.iter().map(|node| node.node().unwrap()).collect()
    }

    /// Returns the node of each page. Another mapping of the same file has touched the pages.
    pub fn nodes_after_touch(&self) -> Vec<NodeId> {
        assert!(self.unharmed());
        self.nodes()
    }

    /// Returns the range's policy as the kernel shows it, with the nodes that the user nodes have
    /// come to.
    pub fn policy_in_numa_maps(&self) -> String {
        let maps = fs::read_to_string("/proc/self/numa_maps").unwrap();
        let begin = format!("{:x} ", self.at.addr());
        let line = maps
            .lines()
            .find_map(|line| line.strip_prefix(&begin))
            .unwrap();
        // The line ends here, because the pages are untouched.
        line.trim_end().to_owned()
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        let (hole, size) = (self.at.wrapping_sub(PAGE), (self.count + 2) * PAGE);
        // SAFETY: `map` mapped exactly these pages, and `drop` has the only reference to them.
        unsafe { libc::munmap(hole.cast(), size) };
    }
}

/// A mounted tmpfs with a policy.
pub struct TmpfsMount {
    folder: tempfile::TempDir,
    path: CString,
}

impl TmpfsMount {
    pub fn new(policy: &str) -> io::Result<TmpfsMount> {
        let folder = tempfile::tempdir()?;
        let path = CString::new(folder.path().as_os_str().as_encoded_bytes())?;
        let options = CString::new(format!("mpol={policy},size=1m"))?;
        // SAFETY: all pointers are to strings that end in NUL and outlive the call.
        let mounted = unsafe {
            let (name, options) = (c"tmpfs".as_ptr(), options.as_ptr());
            libc::mount(name, path.as_ptr(), name, 0, options.cast())
        };
        match mounted {
            0 => Ok(TmpfsMount { folder, path }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Returns the policy as the kernel shows it.
    pub fn policy(&self) -> Option<String> {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        let path = self.folder.path().to_str().unwrap();
        let line = mounts.lines().find(|line| line.contains(path)).unwrap();
        // The policy is the last option, in front of "0 0". It may contain blanks and commas.
        let (_, policy) = line.split_once(",mpol=")?;
        let policy = policy.strip_suffix(" 0 0").unwrap();
        Some(policy.to_owned())
    }
}

impl Drop for TmpfsMount {
    fn drop(&mut self) {
        // SAFETY: the path ends in NUL and outlives the call.
        unsafe { libc::umount2(self.path.as_ptr(), libc::MNT_DETACH) };
    }
}

/// A cgroup of the second version with a cpuset. The process leaves the cgroup when this is
/// dropped.
pub struct Group(PathBuf);

const GROUPS: &str = "/sys/fs/cgroup";

impl Group {
    pub fn new(name: &str) -> Group {
        fs::write(format!("{GROUPS}/cgroup.subtree_control"), "+cpuset").unwrap();
        let path = PathBuf::from(GROUPS).join(name);
        fs::create_dir(&path).unwrap();
        Group(path)
    }

    /// Sets the nodes that its processes may use.
    pub fn allow(&self, nodes: &NodeSet) {
        fs::write(self.0.join("cpuset.mems"), nodes.to_string()).unwrap();
    }

    /// Moves this process into the cgroup.
    pub fn enter(&self) {
        fs::write(self.0.join("cgroup.procs"), std::process::id().to_string()).unwrap();
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let all = format!("{GROUPS}/cgroup.procs");
        let _ = fs::write(all, std::process::id().to_string());
        let _ = fs::remove_dir(&self.0);
    }
}

/// While this exists, the kernel's messages go to its log only, not to the console.
pub struct Quiet(String);

const LEVEL: &str = "/proc/sys/kernel/printk";

impl Quiet {
    pub fn new() -> Quiet {
        let before = fs::read_to_string(LEVEL).unwrap();
        fs::write(LEVEL, "1").unwrap();
        Quiet(before)
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        let _ = fs::write(LEVEL, &self.0);
    }
}
