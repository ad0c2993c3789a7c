//! The test machine as its maker describes it, and what tests do to it.

use std::fs;
use std::time::{Duration, Instant};

/// A node that is there.
#[derive(Debug)]
pub struct Node {
    pub id: usize,
    pub cpus: Vec<usize>,
    pub mebibytes: u64,
    /// How far the nodes that are there are, in order of their numbers.
    pub distances: Vec<u32>,
}

/// The nodes as `cargo xtask vm` made them: `id:cpu,cpu:mebibytes:distance,distance` of each.
pub fn nodes() -> Vec<Node> {
    let said = std::env::var("PINFOLD_MACHINE").expect("set by cargo xtask vm");
    fn numbers<T: std::str::FromStr>(list: &str) -> Vec<T> {
        list.split(',')
            .filter_map(|word| word.parse().ok())
            .collect()
    }
    let node = |text: &str| {
        let fields: Vec<_> = text.split(':').collect();
        Node {
            id: fields[0].parse().unwrap(),
            cpus: numbers(fields[1]),
            mebibytes: fields[2].parse().unwrap(),
            distances: numbers(fields[3]),
        }
    };
    said.split(';').map(node).collect()
}

/// The node with memory that is nearest to `node`.
pub fn nearest_with_memory(nodes: &[Node], node: &Node) -> usize {
    let with_memory = nodes.iter().zip(&node.distances);
    let nearest = with_memory
        .filter(|(to, _)| to.mebibytes > 0)
        .min_by_key(|(_, distance)| **distance);
    nearest.unwrap().0.id
}

/// The node that the page of each address lies on, as the kernel says; negative errors for pages that are not there.
pub fn where_lie(addresses: &[usize]) -> Vec<i32> {
    let mut found = vec![i32::MIN; addresses.len()];
    // SAFETY: both arrays have as many elements as said; no pages are moved without a list of nodes.
    let done = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            0,
            addresses.len(),
            addresses.as_ptr(),
            std::ptr::null::<i32>(),
            found.as_mut_ptr(),
            0,
        )
    };
    assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
    found
}

fn set_affinity(thread: i32, cpus: &[usize]) -> bool {
    // SAFETY: cpu_set_t is plain integers; the call gets its size.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        cpus.iter().for_each(|&cpu| libc::CPU_SET(cpu, &mut set));
        libc::sched_setaffinity(thread, size_of::<libc::cpu_set_t>(), &raw const set) == 0
    }
}

/// Has a thread, 0 for the calling one, run on these CPUs.
pub fn move_to(thread: i32, cpus: &[usize]) {
    assert!(set_affinity(thread, cpus), "CPUs {cpus:?}");
}

/// As [`move_to`] for the calling thread; false when none of them is there.
pub fn try_move_to(cpus: &[usize]) -> bool {
    set_affinity(0, cpus)
}

/// The CPUs that a thread may run on.
pub fn affinity(thread: i32) -> Vec<usize> {
    // SAFETY: as in `set_affinity`.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::sched_getaffinity(thread, size_of::<libc::cpu_set_t>(), &raw mut set);
        (0..1024)
            .filter(|&cpu| libc::CPU_ISSET(cpu, &set))
            .collect()
    }
}

/// A list of the kernel's below /sys/devices/system/cpu, which is `0-3,7` at most.
pub fn listed(file: &str) -> Vec<usize> {
    let text = fs::read_to_string(format!("/sys/devices/system/cpu/{file}")).unwrap();
    let range = |item: &str| {
        let (first, last) = item.split_once('-').unwrap_or((item, item));
        Some(first.parse::<usize>().ok()?..=last.parse().ok()?)
    };
    text.trim().split(',').filter_map(range).flatten().collect()
}

/// CPUs that are online, isolated or without a tick.
pub fn quiet_cpus() -> Vec<usize> {
    let mut cpus = [listed("isolated"), listed("nohz_full")].concat();
    cpus.sort_unstable();
    cpus.dedup();
    cpus
}

/// CPUs that are online and neither isolated nor without a tick.
pub fn housekeeping() -> Vec<usize> {
    let quiet = quiet_cpus();
    let mut online = listed("online");
    online.retain(|cpu| !quiet.contains(cpu));
    online
}

/// Switches a CPU on or off.
pub fn switch(cpu: usize, on: bool) {
    let file = format!("/sys/devices/system/cpu/cpu{cpu}/online");
    fs::write(&file, if on { "1" } else { "0" }).expect(&file);
}

/// A CPU that is off until this is dropped.
pub struct Off(pub usize);

impl Off {
    pub fn new(cpu: usize) -> Self {
        switch(cpu, false);
        Off(cpu)
    }
}

impl Drop for Off {
    fn drop(&mut self) {
        switch(self.0, true);
    }
}

pub fn wait_until(what: &str, done: impl Fn() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < Duration::from_secs(20), "{what}: in vain");
        std::thread::sleep(Duration::from_millis(5));
    }
}
