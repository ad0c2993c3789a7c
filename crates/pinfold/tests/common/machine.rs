//! The test machine as `cargo xtask vm` describes it, and functions that change it.

use super::{Random, StopAtEnd};
use std::fs;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// A node of the test machine.
#[derive(Debug)]
pub struct Node {
    pub id: usize,
    pub cpus: Vec<usize>,
    pub mebibytes: u64,
    /// The distances to all nodes, in the order of their ids.
    pub distances: Vec<u32>,
}

/// Returns the nodes that `cargo xtask vm` made: for each,
/// `id:cpu,cpu:mebibytes:distance,distance`.
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

/// Returns the id of the nearest node with memory.
pub fn nearest_with_memory(nodes: &[Node], node: &Node) -> usize {
    let with_memory = nodes.iter().zip(&node.distances);
    let nearest = with_memory
        .filter(|(to, _)| to.mebibytes > 0)
        .min_by_key(|(_, distance)| **distance);
    nearest.unwrap().0.id
}

/// Asks the kernel which node holds the page of each address. Returns a negative error number for a
/// page that does not exist.
pub fn where_lie(addresses: &[usize]) -> Vec<i32> {
    let mut found = vec![i32::MIN; addresses.len()];
    // SAFETY: both arrays have `addresses.len()` elements. Without a list of target nodes, the
    // kernel moves no pages.
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

/// Makes a thread run on these CPUs only. Returns false if the thread has ended, or if none of the
/// CPUs is online.
pub fn try_move(thread: i32, cpus: &[usize]) -> bool {
    // SAFETY: `cpu_set_t` is plain integers, for which zeroes are valid. The kernel reads
    // `size_of::<cpu_set_t>()` bytes of the set.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        cpus.iter().for_each(|&cpu| libc::CPU_SET(cpu, &mut set));
        libc::sched_setaffinity(thread, size_of::<libc::cpu_set_t>(), &raw const set) == 0
    }
}

/// Makes a thread run on these CPUs only. Thread 0 is the calling thread.
pub fn move_to(thread: i32, cpus: &[usize]) {
    assert!(try_move(thread, cpus), "CPUs {cpus:?}");
}

/// Makes the calling thread run on these CPUs only. Returns false if none of them is online.
pub fn try_move_to(cpus: &[usize]) -> bool {
    try_move(0, cpus)
}

/// Returns the CPUs that a thread may run on.
pub fn affinity(thread: i32) -> Vec<usize> {
    // SAFETY: `cpu_set_t` is plain integers, for which zeroes are valid. The kernel writes at most
    // `size_of::<cpu_set_t>()` bytes to the set, and `CPU_ISSET` gets numbers within its 1024 bits.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::sched_getaffinity(thread, size_of::<libc::cpu_set_t>(), &raw mut set);
        (0..1024)
            .filter(|&cpu| libc::CPU_ISSET(cpu, &set))
            .collect()
    }
}

/// Reads one of the kernel's lists below /sys/devices/system/cpu, such as `0-3,7`.
pub fn listed(file: &str) -> Vec<usize> {
    let text = fs::read_to_string(format!("/sys/devices/system/cpu/{file}")).unwrap();
    let range = |item: &str| {
        let (first, last) = item.split_once('-').unwrap_or((item, item));
        Some(first.parse::<usize>().ok()?..=last.parse().ok()?)
    };
    text.trim().split(',').filter_map(range).flatten().collect()
}

/// Returns the CPUs that are isolated or without a tick.
pub fn quiet_cpus() -> Vec<usize> {
    let mut cpus = [listed("isolated"), listed("nohz_full")].concat();
    cpus.sort_unstable();
    cpus.dedup();
    cpus
}

/// Returns the CPUs that are online and neither isolated nor without a tick.
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
        assert!(
            begin.elapsed() < Duration::from_secs(20),
            "{what}: not after 20 seconds"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Returns the CPUs that tests switch off and on: all housekeeping CPUs except 0.
pub fn to_switch() -> Vec<usize> {
    housekeeping().into_iter().filter(|&cpu| cpu != 0).collect()
}

/// Switches CPUs off and on while six threads run `work`, with each thread's number and the flag
/// that stops it.
///
/// Calls `look` after every switch.
pub fn while_cpus_come_and_go(
    seconds: u64,
    work: impl Fn(u64, &AtomicBool) + Sync,
    look: impl Fn(),
) {
    let cpus = to_switch();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        for nth in 0..6 {
            let (work, stop) = (&work, &stop);
            scope.spawn(move || work(nth, stop));
        }
        let begin = Instant::now();
        let mut random = Random::new(1);
        while begin.elapsed() < Duration::from_secs(seconds) {
            let first = random.below(cpus.len() as u64) as usize;
            let off: Vec<_> = (0..2)
                .map(|next| Off::new(cpus[(first + next) % cpus.len()]))
                .collect();
            look();
            drop(off);
            look();
        }
    });
    assert_eq!(to_switch(), cpus);
}

/// Moves the thread to any possible CPU, or allows all of them if that CPU is off.
pub fn wander(random: &mut Random) {
    let all = listed("possible").len() as u64;
    if !try_move_to(&[random.below(all) as usize]) {
        let everywhere: Vec<_> = (0..all as usize).collect();
        try_move_to(&everywhere);
    }
}
