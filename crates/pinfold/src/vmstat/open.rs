//! How a [`VmStat`] opens: makes its counters and gives them their blocks.
//!
//! Several threads, and signal handlers, may count for the first time at once. None of them waits,
//! and all of them end on the fast path. Each step is done by every thread that finds it undone:
//!
//! 1. `counters`: a thread makes the counters, without blocks, and publishes them by one
//!    compare-exchange. A thread that was slower gives its own ones back. Until step 3 is done,
//!    adds go to the counters' bases.
//! 2. `claimed`: a thread allocates all blocks in a row, prepares them, and publishes their offset
//!    by one compare-exchange. A thread that was slower gives its own ones back.
//! 3. Each thread gives each counter its block of `claimed`. All threads give the same blocks, so
//!    that it does not matter which of them comes first.
//! 4. `run`: each thread stores the offset. The fast path finds the blocks from then on.

use super::zone::ZONES_A_NODE;
use super::{Item, VmStat, normal_threshold};
use crate::counter::shards::{SIZE, Shards};
use crate::counter::{CounterError, PercpuCounter, register_fork, watch_block};
use crate::topology::{NodeId, facts};
use crate::{mempolicy, nodes, percpu, shepherd, sys};
use core::ptr::null_mut;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

impl<I: Item> VmStat<I> {
    /// All counters, made if need be, and with their blocks if there is room.
    pub(super) fn open(&self) -> Option<&[PercpuCounter]> {
        if self.counters().is_empty() {
            self.make_counters()?;
        }
        // Acquire pairs with the release in `settle`.
        if self.run.load(Acquire) == 0 {
            self.settle();
        }
        Some(self.counters())
    }

    /// Makes the counters, unless another thread does so meanwhile. `None` without memory.
    #[cold]
    pub(super) fn make_counters(&self) -> Option<()> {
        mempolicy::init();
        let nodes = nodes::real();
        let zones = nodes * ZONES_A_NODE;
        let each = ZONES_A_NODE * I::NAMES.len();
        let bytes = (nodes * each * size_of::<PercpuCounter>()).next_multiple_of(sys::page_size());
        let table = sys::map_memory(bytes)?.as_ptr().cast::<PercpuCounter>();
        for node in 0..nodes {
            let threshold = normal_threshold(pinfold_rseq::possible(), memory_of(node));
            for at in node * each..(node + 1) * each {
                // SAFETY: within the mapping, which no other thread knows of.
                unsafe { table.add(at).write(PercpuCounter::make(0, threshold, 0)) };
            }
        }
        // Every thread stores the same number.
        self.zones.store(zones, Relaxed);
        // Release pairs with the acquire in `counters`, which then sees the table and `zones`.
        let published = self
            .counters
            .compare_exchange(null_mut(), table, Release, Relaxed);
        if published.is_err() {
            // SAFETY: no other thread knows of the table. Counters without a block hold nothing.
            unsafe { sys::unmap(table.cast(), bytes) };
        }
        Some(())
    }

    /// Gives each counter its block of one row, and so opens the fast path. Does nothing where the
    /// blocks cannot be had: in a handler that interrupted their allocation, or without memory.
    #[cold]
    fn settle(&self) {
        let counters = self.counters();
        // Acquire pairs with the release in `claim`: the blocks are prepared.
        let run = match self.claimed.load(Acquire) {
            0 => self.claim(counters),
            run => run,
        };
        if run == 0 {
            return;
        }
        for (at, counter) in counters.iter().enumerate() {
            counter.adopt(run + at * SIZE);
        }
        // Release pairs with the acquires of `run`: every counter has its block.
        self.run.store(run, Release);
    }

    /// The offset of the row of blocks, allocated if need be; 0 where it cannot be had.
    pub(super) fn claim(&self, counters: &[PercpuCounter]) -> usize {
        let size = counters.len() * SIZE;
        let Some(fresh) = register_fork().then(|| percpu::alloc(size)).flatten() else {
            return 0;
        };
        for (at, counter) in counters.iter().enumerate() {
            // SAFETY: within the row that was just allocated.
            unsafe { Shards::at(fresh + at * SIZE) }.open(counter.first_batch());
        }
        // Release: a thread that sees the offset sees the blocks prepared.
        match self.claimed.compare_exchange(0, fresh, AcqRel, Acquire) {
            Ok(_) => fresh,
            Err(claimed) => {
                // SAFETY: no other thread knows of the row.
                unsafe { percpu::free(fresh, size) };
                claimed
            }
        }
    }

    /// All counters, with their blocks.
    pub(super) fn open_all(&self) -> Result<&[PercpuCounter], CounterError> {
        let counters = self.open().ok_or(CounterError::OutOfMemory)?;
        // Acquire pairs with the release in `settle`.
        match self.run.load(Acquire) {
            0 => Err(CounterError::OutOfMemory),
            _ => Ok(counters),
        }
    }

    /// The counters that there are, zone by zone.
    pub(super) fn counters(&self) -> &[PercpuCounter] {
        let table = self.counters.load(Acquire);
        if table.is_null() {
            return &[];
        }
        // Relaxed: `make_counters` stored `zones` before it published the table.
        let zones = self.zones.load(Relaxed);
        // SAFETY: `make_counters` wrote that many counters there, which stay as long as this does.
        unsafe { core::slice::from_raw_parts(table, zones * I::NAMES.len()) }
    }
}

impl<I: Item> shepherd::sealed::Watch for VmStat<I> {
    fn set_watched(&self, watched: bool) -> bool {
        self.open_all().is_ok_and(|counters| {
            // Acquire pairs with the release in `settle`.
            let run = self.run.load(Acquire);
            (0..counters.len()).all(|at| watch_block(run + at * SIZE, SIZE, watched))
        })
    }
}

impl<I: Item> Drop for VmStat<I> {
    fn drop(&mut self) {
        let counters = core::ptr::from_ref(self.counters()).cast_mut();
        if self.counters().is_empty() {
            return;
        }
        // A thread may have left before each counter had its block. Each gives its block back.
        if *self.claimed.get_mut() != 0 {
            self.settle();
        }
        let bytes = size_of_val(self.counters()).next_multiple_of(sys::page_size());
        // SAFETY: `make_counters` wrote the counters to a mapping of that size. `drop` has the only
        // reference.
        unsafe {
            counters.drop_in_place();
            sys::unmap(counters.cast(), bytes);
        }
    }
}

/// Bytes of memory of node `node`.
fn memory_of(node: usize) -> u64 {
    let all = sys::physical_memory() as u64;
    match nodes::real() {
        1 => all,
        nodes => facts::memory_of(NodeId(nodes::id(node)))[0].unwrap_or(all / nodes as u64),
    }
}
