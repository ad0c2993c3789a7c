//! The nodes that the allocator tells apart: their numbers, the current one, and their order by
//! distance.
//!
//! Nodes are numbered from 0 without gaps. They are those nodes of the system that have memory
//! which this process may use, in the order of the system's ids. A machine without NUMA has one
//! node.
//!
//! # The kernel's node
//!
//! A process may have been started with a memory policy of its own (by `numactl`,
//! `pinfold run --policy` or `PINFOLD_POLICY`). If the allocator took memory from chosen nodes, it
//! would override that policy. So on a machine with several nodes such a process has one more
//! number, the last: the *kernel's node*. Memory of that number has no policy, so the kernel places
//! its pages by the process's policy. Every allocation without a policy of its own comes from the
//! kernel's node.
//!
//! # Made-up nodes
//!
//! For tests on machines with one node, [`FAKE_NODES_VARIABLE`](facts::FAKE_NODES_VARIABLE) in the
//! environment sets the number of nodes, like the kernel's `numa=fake=`:
//!
//! * CPU c is on node c modulo that number.
//! * All memory comes from the system's node 0.
//! * Distances are those on a ring.
//!
//! The allocator then keeps the memory of different nodes apart, and sends freed objects back to
//! their nodes, as on a machine with that many nodes.

use crate::topology::{NodeId, NodeSet, facts};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU8, AtomicU32, AtomicUsize};
use pinfold_rseq::{Backend, Index, MAX_INDEX, backend};

/// The maximum number of nodes, including the kernel's. A machine with more nodes counts as having
/// one.
pub(crate) const MAX_NODES: usize = 64;
const _: () = assert!(facts::MAX_FAKE_NODES < MAX_NODES);

/// Bits 0 to 7 hold one less than the number of all nodes, including the kernel's. Bits 8 to 15
/// hold one less than the number of nodes with memory. [`KNOWN`] is set too. The word is 0 until
/// [`know`] stores it.
///
/// Packed into one word, whose numbers are written once, because per-node tables are sized from
/// them and never resized. [`THREADS_DIFFER`] is in this word because an allocation loads the word
/// anyway.
static NUMBERS: AtomicU32 = AtomicU32::new(0);
/// The first bit of the number of nodes with memory.
const REAL_SHIFT: u32 = 8;
const KNOWN: u32 = 1 << 16;
/// Some thread may have another policy than the one that the process was started with. Set at any
/// time after [`KNOWN`].
const THREADS_DIFFER: u32 = 1 << 17;
/// The system's id of each node.
static IDS: [AtomicUsize; MAX_NODES] = [const { AtomicUsize::new(0) }; MAX_NODES];
/// One more than the node of each CPU, or [`UNKNOWN`] for a CPU that was offline when the machine
/// was read. Zero at the start, so that the table takes no room in the library's file.
static OF_CPU: [AtomicU8; MAX_INDEX] = [const { AtomicU8::new(UNKNOWN) }; MAX_INDEX];
const UNKNOWN: u8 = 0;
/// For each node, all nodes from the nearest to the farthest.
static BY_DISTANCE: [[AtomicU8; MAX_NODES]; MAX_NODES] =
    [const { [const { AtomicU8::new(0) }; MAX_NODES] }; MAX_NODES];

/// Returns whether the machine's nodes are known.
pub(crate) fn are_known() -> bool {
    // Acquire pairs with the release in `know`: a thread that sees the numbers also sees the tables
    // filled in.
    NUMBERS.load(Acquire) != 0
}

/// Stores how many nodes have memory, and whether there is also the kernel's node. The tables must
/// be filled in before. Only the first call has an effect.
///
/// Two threads that start at once find the same machine, but may find different policies.
pub(crate) fn know(real: usize, kernels: bool) {
    let others = real as u32 - 1;
    let numbers = KNOWN | others << REAL_SHIFT | (others + u32::from(kernels));
    // Release pairs with the acquires in `are_known`, `count` and `real`: a thread that sees the
    // numbers also sees the tables filled in.
    let _ = NUMBERS.compare_exchange(0, numbers, Release, Relaxed);
}

/// Notes that threads may have policies of their own. The nodes must be known.
pub(crate) fn threads_differ() {
    // Relaxed: a thread depends on its own changes only, which come before this in program order.
    NUMBERS.fetch_or(THREADS_DIFFER, Relaxed);
}

/// Returns whether threads may have policies of their own. One load.
#[inline]
pub(crate) fn may_threads_differ() -> bool {
    NUMBERS.load(Relaxed) & THREADS_DIFFER != 0
}

/// Fills the tables with made-up nodes if the environment asks for them. Returns their number.
pub(crate) fn make_up() -> Option<usize> {
    let nodes = facts::fake_nodes()?;
    for (cpu, node) in OF_CPU.iter().enumerate() {
        node.store((cpu % nodes) as u8 + 1, Relaxed);
    }
    for (from, places) in BY_DISTANCE.iter().enumerate().take(nodes) {
        // The order is: one ahead, one behind, two ahead, two behind, and on.
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

/// Gives numbers to the system's nodes in `usable`, and returns how many nodes these are. Returns
/// `None` if there are fewer than 2 or more than `MAX_NODES` - 1 of them.
pub(crate) fn number(usable: &NodeSet) -> Option<usize> {
    let nodes = usable.len();
    if !(2..MAX_NODES).contains(&nodes) {
        return None;
    }
    for (node, id) in usable.iter().enumerate() {
        IDS[node].store(id, Relaxed);
    }
    Some(nodes)
}

/// Fills in the tables of the system's node `from`, which may have no number. `nodes` are numbered,
/// and `nearest_first` are the system's nodes with memory.
pub(crate) fn set_order(from: NodeId, nodes: usize, nearest_first: impl Iterator<Item = NodeId>) {
    let numbered = |node: NodeId| (0..nodes).find(|&number| id(number) == node.0);
    let mine = numbered(from);
    for (place, to) in nearest_first.filter_map(numbered).enumerate() {
        // The first usable node is the nearest. A node with usable memory is its own nearest. The
        // CPUs of a node without usable memory use the nearest node that has some.
        if place == 0 {
            facts::for_each_cpu_of(from, |cpu| {
                if let Some(node) = OF_CPU.get(cpu) {
                    node.store(to as u8 + 1, Relaxed);
                }
            });
        }
        if let Some(from) = mine {
            BY_DISTANCE[from][place].store(to as u8, Relaxed);
        }
    }
}

/// Returns the number of nodes, including the kernel's. At least 1. One load.
pub(crate) fn count() -> usize {
    // Acquire pairs with the release in `know`: a thread that sees the numbers also sees the tables
    // filled in.
    (NUMBERS.load(Acquire) & 0xff) as usize + 1
}

/// Returns the number of nodes with memory, without the kernel's. At least 1. One load.
pub(crate) fn real() -> usize {
    // Acquire pairs with the release in `know`: a thread that sees the numbers also sees the tables
    // filled in.
    (NUMBERS.load(Acquire) >> REAL_SHIFT & 0xff) as usize + 1
}

/// Returns the system's id of node `node`. Made-up nodes have the id 0.
pub(crate) fn id(node: usize) -> usize {
    IDS[node].load(Relaxed)
}

/// Returns the number of the node with the system's id `id`, if that node has usable memory. The id
/// of a made-up node is its number.
pub(crate) fn with_id(id: usize) -> Option<usize> {
    (0..real()).find(|&node| id_or_number(node) == id)
}

/// Returns the id of node `node` in policies: the system's id, or the number of a made-up node.
pub(crate) fn id_or_number(node: usize) -> usize {
    if are_made_up() { node } else { id(node) }
}

/// Returns the `nth` nearest node from `node`. A node is its own nearest.
pub(crate) fn nearest(node: usize, nth: usize) -> usize {
    usize::from(BY_DISTANCE[node][nth].load(Relaxed))
}

/// Returns the nodes to ask when an allocation wants memory of `from`: `from` itself, the other
/// nodes by distance, and last the kernel's node.
///
/// For the kernel's node, no other node is asked. Memory of the other nodes has a policy, which
/// would override the process's policy.
pub(crate) fn fallback(from: usize) -> impl Iterator<Item = usize> {
    let real = real();
    let by_distance = if is_the_kernels(from) { 0 } else { real };
    let the_kernels = real..count();
    (0..by_distance)
        .map(move |nth| nearest(from, nth))
        .chain(the_kernels)
}

/// Returns whether the nodes are made up.
pub(crate) fn are_made_up() -> bool {
    facts::fake_nodes().is_some()
}

/// Returns whether `node` is the kernel's node.
pub(crate) fn is_the_kernels(node: usize) -> bool {
    node >= real()
}

/// Returns the node for an allocation without a policy: the kernel's node if there is one,
/// otherwise the node of the CPU that the thread runs on.
///
/// The thread may have moved by the time this returns. Costs one comparison on a machine with one
/// node.
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

/// Returns the node of the CPU that the thread runs on.
pub(crate) fn of_this_cpu() -> usize {
    if real() == 1 {
        return 0;
    }
    let cpu = match backend() {
        // A concurrency id is not the number of a CPU.
        // SAFETY: `sched_getcpu` has no preconditions.
        Backend::Rseq(Index::Cid) => unsafe { libc::sched_getcpu() as usize },
        _ => pinfold_rseq::current(),
    };
    match OF_CPU.get(cpu).map_or(1, |node| node.load(Relaxed)) {
        UNKNOWN => ask_for_node(cpu),
        node => usize::from(node - 1).min(real() - 1),
    }
}

/// Returns the node of the CPU on which the thread runs now, and stores it in the table. For a CPU
/// that came online after the machine was read.
///
/// Asks the kernel for that CPU and its node. Stores nothing if the thread has left `cpu`. Costs
/// one system call, usually once for each CPU. A node without usable memory counts as node 0.
#[cold]
fn ask_for_node(cpu: usize) -> usize {
    let (mut now, mut id) = (0u32, 0u32);
    let (to, and) = ((&raw mut now) as usize, (&raw mut id) as usize);
    // SAFETY: `now` and `id` are writable. The kernel ignores the third argument.
    let answer = unsafe { pinfold_rseq::syscall(libc::SYS_getcpu, [to, and, 0]) };
    let node = with_id(id as usize).unwrap_or(0);
    if answer.is_ok()
        && now as usize == cpu
        && let Some(place) = OF_CPU.get(cpu)
    {
        place.store(node as u8 + 1, Relaxed);
    }
    node
}
