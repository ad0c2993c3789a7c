//! How a [`VmStat`] makes its counters and gives them their blocks.
//!
//! Several threads and signal handlers may count for the first time at once. None of them waits,
//! and all of them end on the fast path. Each thread that finds a step undone does it:
//!
//! 1. `counters`: the thread makes the counters, without blocks, and publishes them by one
//!    compare-exchange. A thread that is too late frees its own counters. Until step 3 is done,
//!    adds go to the counters' bases.
//! 2. `claimed`: the thread allocates all blocks in a row, prepares them, and publishes their
//!    offset. A thread that is too late frees its own blocks (`counter_units/lazy.rs`).
//! 3. The thread gives each counter its block of `claimed`. All threads give a counter the same
//!    block, so their order does not matter.
//! 4. `run`: the thread stores the offset. From then on, the fast path finds the blocks.

use super::ZONES_A_NODE;
use super::follow::{self, Table};
use super::{Item, VmStat, normal_threshold};
use crate::counter::shards::{SIZE, Shards};
use crate::counter::{CounterError, PerCpuCounter, register_fork, watch_block};
use crate::topology::{NodeId, facts};
use crate::{mempolicy, nodes, shepherd, sys};
use core::ptr::null_mut;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

impl<I: Item> VmStat<I> {
    /// Returns all counters. Makes them if necessary, and gives them their blocks if there is
    /// memory for blocks. Returns `None` without memory for the counters.
    pub(super) fn open(&self) -> Option<&[PerCpuCounter]> {
        if self.counters().is_empty() {
            self.make_counters()?;
        }
        // Acquire pairs with the release in `settle`: a thread that sees the offset also sees each
        // counter with its block.
        if self.run.load(Acquire) == 0 {
            self.settle();
        }
        Some(self.counters())
    }

    /// Makes the counters. If another thread was faster, keeps that thread's counters. Returns
    /// `None` without memory.
    #[cold]
    pub(super) fn make_counters(&self) -> Option<()> {
        mempolicy::init();
        let nodes = nodes::real();
        let zones = nodes * ZONES_A_NODE;
        let each = Self::EACH;
        let bytes = Self::bytes(nodes * each);
        let head = sys::map_memory(bytes)?.as_ptr().cast::<Table>();
        let cpus = facts::cpus_online();
        // SAFETY: the mapping has room for the head and for `nodes * each` counters, and no other
        // thread knows it yet.
        let table = unsafe {
            head.write(Table::new(cpus, nodes * each, each));
            head.add(1).cast::<PerCpuCounter>()
        };
        for node in 0..nodes {
            let threshold = normal_threshold(cpus, memory_of(node));
            for at in node * each..(node + 1) * each {
                let counter = PerCpuCounter::new().with_batch(threshold);
                // SAFETY: the mapping has room for `nodes * each` counters, and no other thread
                // knows it yet.
                unsafe { table.add(at).write(counter) };
            }
        }
        // Every thread stores the same number.
        self.zones.store(zones, Relaxed);
        // Release pairs with the acquire in `counters`: a thread that sees the table's address also
        // sees the table's content and `zones`.
        let published = self
            .counters
            .compare_exchange(null_mut(), table, Release, Relaxed);
        if published.is_err() {
            // SAFETY: the exchange failed, so no other thread knows the table. Its counters have no
            // blocks, so they need no drop.
            unsafe { sys::unmap(head.cast(), bytes) };
        }
        Some(())
    }

    /// The number of counters of each node.
    pub(super) const EACH: usize = ZONES_A_NODE * I::NAMES.len();

    /// Returns the size of the mapping that holds a [`Table`] and this many counters.
    fn bytes(counters: usize) -> usize {
        let bytes = size_of::<Table>() + counters * size_of::<PerCpuCounter>();
        bytes.next_multiple_of(sys::page_size())
    }

    /// Returns the table in front of the counters, or null until the counters are made.
    fn head(&self) -> *mut Table {
        // Acquire pairs with the release in `make_counters`: a thread that sees the address also
        // sees the table.
        let counters = self.counters.load(Acquire);
        if counters.is_null() {
            return null_mut();
        }
        // SAFETY: `make_counters` put the counters behind a `Table` in one mapping.
        unsafe { counters.cast::<Table>().sub(1) }
    }

    /// Returns the table of the counters, or `None` until the counters are made.
    pub(super) fn table(&self) -> Option<&Table> {
        // SAFETY: `make_counters` wrote a `Table` there, which stays until `drop`.
        unsafe { self.head().as_ref() }
    }

    /// Gives each counter its block of one row, and so opens the fast path. Does nothing if the row
    /// cannot be allocated: there is no memory, another thread forks, or the caller is a handler
    /// that interrupted an allocation.
    #[cold]
    fn settle(&self) {
        let counters = self.counters();
        let Some(run) = self.claim(counters) else {
            return;
        };
        for (at, counter) in counters.iter().enumerate() {
            counter.adopt(run + at * SIZE);
        }
        // Release pairs with the acquires of `run`: a thread that sees the offset also sees each
        // counter with its block.
        self.run.store(run, Release);
    }

    /// Returns the offset of the row of blocks. The first call allocates the row. Returns `None` if
    /// there is no memory, if another thread forks, or if the caller is a handler that interrupted
    /// an allocation.
    pub(super) fn claim(&self, counters: &[PerCpuCounter]) -> Option<usize> {
        let prepare = |row| {
            for (at, counter) in counters.iter().enumerate() {
                // SAFETY: the row was just allocated with one block for each counter, and no other
                // thread knows it.
                unsafe { Shards::at(row + at * SIZE) }.open(counter.first_batch());
            }
            row
        };
        self.claimed
            .get_or_alloc(counters.len() * SIZE, register_fork, prepare)
    }

    /// Returns all counters, each with its block.
    pub(super) fn open_all(&self) -> Result<&[PerCpuCounter], CounterError> {
        let counters = self.open().ok_or(CounterError::OutOfMemory)?;
        // Acquire pairs with the release in `settle`: a thread that sees the offset also sees each
        // counter with its block.
        match self.run.load(Acquire) {
            0 => Err(CounterError::OutOfMemory),
            _ => Ok(counters),
        }
    }

    /// Returns the counters that exist, zone by zone.
    pub(super) fn counters(&self) -> &[PerCpuCounter] {
        // Acquire pairs with the release in `make_counters`: a thread that sees the address also
        // sees the counters and `zones`.
        let table = self.counters.load(Acquire);
        if table.is_null() {
            return &[];
        }
        // Relaxed: `make_counters` stored `zones` before it published the table.
        let zones = self.zones.load(Relaxed);
        // SAFETY: `make_counters` wrote this many counters to the table before it published the
        // table. They stay until `drop`.
        unsafe { core::slice::from_raw_parts(table, zones * I::NAMES.len()) }
    }
}

impl<I: Item> shepherd::sealed::Watch for VmStat<I> {
    fn set_watched(&self, watched: bool) -> bool {
        self.open_all().is_ok_and(|counters| {
            // Acquire pairs with the release in `settle`. `open_all` made sure that `run` is the
            // offset of the first block.
            let run = self.run.load(Acquire);
            // SAFETY: `open_all` made sure that each counter has its block. `drop` takes the table
            // out of the list before it unmaps the table.
            let followed = !watched || unsafe { follow::insert(self.head()) };
            followed && (0..counters.len()).all(|at| watch_block(run + at * SIZE, SIZE, watched))
        })
    }
}

impl<I: Item> Drop for VmStat<I> {
    fn drop(&mut self) {
        let (head, number) = (self.head(), self.counters().len());
        // SAFETY: `make_counters` wrote a `Table` there. Only this function unmaps it.
        if head.is_null() || !unsafe { follow::remove(head) } {
            return;
        }
        // A thread may have ended before it gave each counter its block of the row. Only a counter
        // that has its block frees it. So `settle` gives out the other blocks.
        if self.claimed.get().is_some() {
            self.settle();
        }
        let counters = core::ptr::slice_from_raw_parts_mut(self.counters.load(Relaxed), number);
        // SAFETY: `make_counters` wrote the counters to a mapping of this size. `drop` has the only
        // reference, and the table is in no list, so no thread uses them any more.
        unsafe {
            counters.drop_in_place();
            sys::unmap(head.cast(), Self::bytes(number));
        }
    }
}

/// Returns the bytes of memory of node `node`.
pub(super) fn memory_of(node: usize) -> u64 {
    let all = sys::physical_memory() as u64;
    match nodes::real() {
        1 => all,
        nodes => facts::memory_of(NodeId(nodes::id(node)))[0].unwrap_or(all / nodes as u64),
    }
}
