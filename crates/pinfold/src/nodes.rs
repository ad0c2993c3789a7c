//! How many nodes the allocator tells apart, which is the current one, and which is next when one is full.
//!
//! Nodes are numbered densely here, from 0, in the order of the system's ids of those that have memory which this process may
//! use; a machine without NUMA has one.
//!
//! # The kernel's node
//!
//! A process that was started with a memory policy of its own (`numactl`, `pinfold run --policy`, `PINFOLD_POLICY`) on a machine
//! of several nodes has one number more, the last. Memory of that number bears no policy, so that the kernel places
//! every page of it by the process's. All that has no policy of its own is allocated there.
//!
//! # Nodes that are not there
//!
//! For tests on machines with one node, [`FAKE_VARIABLE`] in the environment of a starting process gives the number of nodes, as the
//! kernel's `numa=fake=`: CPU c is on node c modulo that number, and all their memory is asked of the system's node 0. What
//! the allocator keeps apart by node, and what it sends home, is then what it would be on a machine with so many; distances are
//! as on a ring.

use crate::topology::{NodeId, NodeSet, facts};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicUsize};
use pinfold_rseq::{Backend, Index, MAX_INDEX, backend};

/// Nodes that the allocator tells apart, the kernel's included; machines with more are taken to have one.
pub(crate) const MAX_NODES: usize = 64;

/// The environment variable that makes nodes up.
const FAKE_VARIABLE: &str = "PINFOLD_FAKE_NODES";

/// How many numbers there are, and how many of them are nodes: one less than each, and [`KNOWN`]; 0 until [`init`] is over. One word,
/// written once: what there is one of for each must not change in number.
static NUMBERS: AtomicU32 = AtomicU32::new(0);
/// Where in it the number of nodes is.
const REAL_SHIFT: u32 = 8;
const KNOWN: u32 = 1 << 16;
static FAKE: AtomicBool = AtomicBool::new(false);
/// The system's id of each node.
static IDS: [AtomicUsize; MAX_NODES] = [const { AtomicUsize::new(0) }; MAX_NODES];
/// One more than the node of each CPU, or [`UNKNOWN`]: a CPU that was offline when the machine was
/// read. All zero at the start, so that the library's file holds nothing of the table.
static OF_CPU: [AtomicU8; MAX_INDEX] = [const { AtomicU8::new(UNKNOWN) }; MAX_INDEX];
const UNKNOWN: u8 = 0;
/// For each node all nodes, the nearest first.
static BY_DISTANCE: [[AtomicU8; MAX_NODES]; MAX_NODES] =
    [const { [const { AtomicU8::new(0) }; MAX_NODES] }; MAX_NODES];

/// Whether the machine's nodes are known.
pub(crate) fn are_known() -> bool {
    // Acquire pairs with the release in `init`.
    NUMBERS.load(Acquire) != 0
}

/// What [`init`] has to be told of the machine by the module that knows policies.
pub(crate) trait Known {
    /// The nodes that the process may use, if that is known.
    fn allowed(&self) -> Option<NodeSet>;
    /// Whether the process's memory is placed by a policy of its own.
    fn policy(&self) -> bool;
    /// Calls the function for each node with each node that has memory, the nearest first.
    fn by_distance(&self, with_memory: &NodeSet, each: &mut impl FnMut(NodeId, NodeId));
}

/// Reads the machine's nodes, once, before anything is made that there is one of for each; of those with memory the allowed ones.
/// With a policy there is a kernel's node, where there are several. A machine that cannot be read has one.
pub(crate) fn init(known: &impl Known) {
    // Two threads at once find the same machine, but each its own policy: the first one's counts.
    let real = fake().unwrap_or_else(|| {
        // Most machines have one node: one file answers for them.
        let several = facts::has_several_nodes().then(|| machine(known));
        several.flatten().unwrap_or(1)
    });
    let kernels = real > 1 && known.policy();
    let others = real as u32 - 1;
    let numbers = KNOWN | others << REAL_SHIFT | (others + u32::from(kernels));
    // Release pairs with the acquires below.
    let _ = NUMBERS.compare_exchange(0, numbers, Release, Relaxed);
}

/// Makes nodes up, where that is asked for.
fn fake() -> Option<usize> {
    let mut buffer = [0; 4];
    let text = pinfold_rseq::env::read(FAKE_VARIABLE, &mut buffer)?;
    let nodes = core::str::from_utf8(text).ok()?.parse().ok()?;
    if !(1..MAX_NODES).contains(&nodes) {
        return None;
    }
    FAKE.store(true, Relaxed);
    for (cpu, node) in OF_CPU.iter().enumerate() {
        node.store((cpu % nodes) as u8 + 1, Relaxed);
    }
    for (from, places) in BY_DISTANCE.iter().enumerate().take(nodes) {
        // One ahead, one behind, two ahead, two behind…
        for (nth, place) in places.iter().enumerate().take(nodes) {
            let away = nth.div_ceil(2);
            let to = if nth % 2 == 1 {
                from + away
            } else {
                from + nodes - away
            };
            place.store((to % nodes) as u8, Relaxed);
        }
    }
    Some(nodes)
}

/// Reads the machine; how many nodes it has, if several.
#[cold]
#[inline(never)]
fn machine(known: &impl Known) -> Option<usize> {
    let with_memory = facts::nodes_with_memory()?;
    let usable = match known.allowed() {
        Some(allowed) => with_memory.and(&allowed),
        None => with_memory.clone(),
    };
    let nodes = usable.len();
    if !(2..MAX_NODES).contains(&nodes) {
        return None;
    }
    for (node, id) in usable.iter().enumerate() {
        IDS[node].store(id, Relaxed);
    }
    let number = |node: NodeId| (0..nodes).find(|&number| id(number) == node.0);
    let mut filled = [0u8; MAX_NODES];
    let mut last = None;
    known.by_distance(&with_memory, &mut |from, to| {
        let Some(to) = number(to) else {
            return;
        };
        if last != Some(from) {
            last = Some(from);
            // CPUs of a node without usable memory use the nearest that has some; a node is its own nearest.
            facts::for_each_cpu_of(from, |cpu| {
                if let Some(node) = OF_CPU.get(cpu) {
                    node.store(to as u8 + 1, Relaxed);
                }
            });
        }
        if let Some(from) = number(from) {
            let place = usize::from(filled[from]);
            BY_DISTANCE[from][place].store(to as u8, Relaxed);
            filled[from] = (place + 1).min(MAX_NODES - 1) as u8;
        }
    });
    Some(nodes)
}

/// How many numbers there are, the kernel's node included; at least 1.
pub(crate) fn count() -> usize {
    // Acquire pairs with the release in `init`.
    (NUMBERS.load(Acquire) & 0xff) as usize + 1
}

/// How many nodes with memory there are, at least 1.
pub(crate) fn real() -> usize {
    // Acquire pairs with the release in `init`.
    (NUMBERS.load(Acquire) >> REAL_SHIFT & 0xff) as usize + 1
}

/// The system's id of node `node`.
pub(crate) fn id(node: usize) -> usize {
    IDS[node].load(Relaxed)
}

/// The number of the node with the system's id `id`, if it has memory that may be used. Made-up nodes have the ids that they have
/// here.
pub(crate) fn with_id(id: usize) -> Option<usize> {
    (0..real()).find(|&node| id_or_number(node) == id)
}

/// What policies call node `node`: the system's id, or the number of one that is made up.
pub(crate) fn id_or_number(node: usize) -> usize {
    if are_made_up() { node } else { id(node) }
}

/// The `nth` nearest node from `node`; it is its own nearest.
pub(crate) fn nearest(node: usize, nth: usize) -> usize {
    usize::from(BY_DISTANCE[node][nth].load(Relaxed))
}

/// The nodes to ask when `from` should give memory, it first: the others by distance, the kernel's node last. For the kernel's node
/// no other stands in: memory there bears a policy, which would hold instead of the process's.
pub(crate) fn fallback(from: usize) -> impl Iterator<Item = usize> {
    let real = real();
    let by_distance = if is_the_kernels(from) { 0 } else { real };
    let the_kernels = real..count();
    (0..by_distance)
        .map(move |nth| nearest(from, nth))
        .chain(the_kernels)
}

/// Whether nodes are made up.
pub(crate) fn are_made_up() -> bool {
    FAKE.load(Relaxed)
}

/// Whether memory of that number is left to the kernel's policies.
pub(crate) fn is_the_kernels(node: usize) -> bool {
    node >= real()
}

/// Where to allocate what has no policy of its own: the kernel's node if there is one, else the node of the CPU the thread runs
/// on; it may run elsewhere by the time this returns. One test where there is one node.
#[inline]
pub(crate) fn current() -> usize {
    let count = count();
    if count == 1 {
        return 0;
    }
    if is_the_kernels(count - 1) {
        return count - 1;
    }
    of_this_cpu()
}

/// The node of the CPU the thread runs on.
pub(crate) fn of_this_cpu() -> usize {
    if real() == 1 {
        return 0;
    }
    let cpu = match backend() {
        // A concurrency id is no CPU's number.
        // SAFETY: no preconditions.
        Backend::Rseq(Index::Cid) => unsafe { libc::sched_getcpu() as usize },
        _ => pinfold_rseq::current(),
    };
    match OF_CPU.get(cpu).map_or(1, |node| node.load(Relaxed)) {
        UNKNOWN => ask_for_node(cpu),
        node => usize::from(node - 1).min(real() - 1),
    }
}

/// The node of a CPU that came online after the machine was read: the kernel's word for the CPU that the thread runs on by now. One
/// system call, once for a CPU; a node without memory counts as the first.
#[cold]
fn ask_for_node(cpu: usize) -> usize {
    let (mut now, mut id) = (0u32, 0u32);
    // SAFETY: both are writable.
    let answer = crate::sys::keep_errno(|| unsafe {
        let null = core::ptr::null_mut::<u8>();
        libc::syscall(libc::SYS_getcpu, &raw mut now, &raw mut id, null)
    });
    let node = with_id(id as usize).unwrap_or(0);
    if answer == 0
        && now as usize == cpu
        && let Some(place) = OF_CPU.get(cpu)
    {
        place.store(node as u8 + 1, Relaxed);
    }
    node
}
