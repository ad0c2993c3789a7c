//! How many nodes the allocator tells apart, and which of them is the current one.
//!
//! Nodes are numbered densely here, from 0, in the order of the system's ids; a machine without NUMA has one.

use crate::page::MAX_NODES;
use core::sync::atomic::Ordering::{Acquire, Relaxed};
use core::sync::atomic::{AtomicU8, AtomicUsize};
use pinfold_rseq::MAX_INDEX;

static COUNT: AtomicUsize = AtomicUsize::new(1);
/// The system's id of each node.
static IDS: [AtomicUsize; MAX_NODES] = [const { AtomicUsize::new(0) }; MAX_NODES];
/// The node of each CPU.
static OF_CPU: [AtomicU8; MAX_INDEX] = [const { AtomicU8::new(0) }; MAX_INDEX];

/// Reads the machine's nodes, once, before the first allocation.
pub(crate) fn init() {}

/// How many nodes there are, at least 1.
pub(crate) fn count() -> usize {
    // Acquire pairs with the release in `init`.
    COUNT.load(Acquire)
}

/// The system's id of node `node`.
pub(crate) fn id(node: usize) -> usize {
    IDS[node].load(Relaxed)
}

/// The node of the CPU the thread runs on; it may run elsewhere by the time this returns. One test where there is one
/// node.
#[inline]
pub(crate) fn current() -> usize {
    if count() == 1 {
        return 0;
    }
    // SAFETY: no preconditions.
    let cpu = unsafe { libc::sched_getcpu() };
    let node = OF_CPU
        .get(cpu as usize)
        .map_or(0, |node| node.load(Relaxed));
    usize::from(node).min(count() - 1)
}
