//! Statistics by item and zone, kept as the kernel's `vmstat` keeps them.
//!
//! A *zone* is a node's memory of one page size. For each zone and item there is a [counter](crate::counter) whose batch is the
//! zone's *threshold*: small differences stay with the CPU, larger ones are folded into the zone's total. The totals of a
//! zone's items lie together, and a CPU's words of all items lie together.
//!
//! ```
//! use pinfold::vmstat::{VmStat, Zone};
//!
//! pinfold::vmstat_items! {
//!     /// What the buffer pool counts.
//!     pub enum Pool {
//!         Free = "nr_free",
//!         Dirty = "nr_dirty",
//!     }
//! }
//!
//! static POOL: VmStat<Pool> = VmStat::new();
//! POOL.add(Zone::normal(0), Pool::Free, 1000);
//! POOL.dec(Zone::normal(0), Pool::Free);
//! POOL.inc(Zone::huge(0), Pool::Dirty);
//! assert_eq!(POOL.snapshot(Pool::Free), 999);
//! assert!(POOL.read(Pool::Free).abs_diff(999) <= POOL.error_bound(Pool::Free));
//! assert_eq!(POOL.to_string(), "nr_free 999\nnr_dirty 1\n");
//! ```

mod events;

pub use events::VmEvents;

use crate::counter::shards::{SIZE, Shards};
use crate::counter::{CounterError, PercpuCounter, watch_block};
use crate::topology::{NodeId, facts};
use crate::{percpu, sys};
use core::fmt;
use core::marker::PhantomData;
use core::ptr::null_mut;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use core::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize};

/// The largest threshold, as in the kernel, where differences are bytes.
pub const THRESHOLD_MOST: u64 = 125;
/// Zones of a node: its memory in normal pages, and in huge ones.
const ZONES_A_NODE: usize = 2;
/// More nodes than this share the first one's zones.
const NODES_MOST: usize = 64;

/// What is counted: an enum's variants, numbered from 0. [`vmstat_items!`](crate::vmstat_items) writes it.
pub trait Item: Copy + 'static {
    /// The items' names, as [`VmStat`] prints them, by number.
    const NAMES: &'static [&'static str];
    /// The number: below `NAMES.len()`.
    fn index(self) -> usize;
}

/// Declares an enum of items with their names.
///
/// ```
/// pinfold::vmstat_items! {
///     /// What is counted.
///     pub enum Cache {
///         /// Found there.
///         Hit = "cache_hit",
///         Miss = "cache_miss",
///     }
/// }
/// use pinfold::vmstat::Item;
/// assert_eq!(Cache::NAMES[Cache::Miss.index()], "cache_miss");
/// ```
#[macro_export]
macro_rules! vmstat_items {
    ($(#[$meta:meta])* $visible:vis enum $name:ident { $($(#[$about:meta])* $item:ident = $text:literal),+ $(,)? }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(missing_docs, reason = "the names say it")]
        $visible enum $name { $($(#[$about])* $item),+ }

        impl $crate::vmstat::Item for $name {
            const NAMES: &'static [&'static str] = &[$($text),+];
            #[inline(always)]
            fn index(self) -> usize {
                self as usize
            }
        }
    };
}

/// A node's memory of one page size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Zone(usize);

impl Zone {
    /// The memory of node `node` in pages of the usual size. Nodes are numbered from 0, those with memory in the order of the
    /// system's numbers; one that is not there counts as the first.
    #[inline(always)]
    pub const fn normal(node: usize) -> Zone {
        Zone(node * ZONES_A_NODE)
    }

    /// The memory of node `node` in huge pages.
    #[inline(always)]
    pub const fn huge(node: usize) -> Zone {
        Zone(node * ZONES_A_NODE + 1)
    }
}

/// The counts of all items in all zones; usable in statics.
///
/// Counting is one critical section, in any thread or signal handler; once in a threshold it folds. A static takes memory when
/// the first thing is counted: for each zone and item 32 bytes, twice, and 32 more on each CPU that counts.
#[derive(Debug)]
pub struct VmStat<I: Item> {
    /// The offset of the first zone's first item's block; the others follow, zone by zone. 0 until there are any.
    run: AtomicUsize,
    /// How many zones there are; set before `run`.
    zones: AtomicUsize,
    /// The counters, in the order of the blocks; null until there are any.
    counters: AtomicPtr<PercpuCounter>,
    /// Adds that found no memory for the counters.
    lost: AtomicU64,
    items: PhantomData<fn(I)>,
}

impl<I: Item> Default for VmStat<I> {
    fn default() -> Self {
        Self::new()
    }
}

impl<I: Item> VmStat<I> {
    /// Counts at 0.
    pub const fn new() -> Self {
        VmStat {
            run: AtomicUsize::new(0),
            zones: AtomicUsize::new(0),
            counters: AtomicPtr::new(null_mut()),
            lost: AtomicU64::new(0),
            items: PhantomData,
        }
    }

    /// Adds 1.
    #[inline(always)]
    pub fn inc(&self, zone: Zone, item: I) {
        self.add(zone, item, 1);
    }

    /// Takes 1 away.
    #[inline(always)]
    pub fn dec(&self, zone: Zone, item: I) {
        self.add(zone, item, -1);
    }

    /// Adds `delta`, of any size and sign, from anywhere; never waits, and nothing is lost or doubled.
    ///
    /// # Panics
    ///
    /// When [`Item::index`] says more than there are names.
    #[inline(always)]
    pub fn add(&self, zone: Zone, item: I, delta: i64) {
        let item = item.index();
        assert!(item < I::NAMES.len(), "an item without a name");
        // Acquire pairs with the release in `open`.
        let run = self.run.load(Acquire);
        let inside = zone.0 < ZONES_A_NODE || zone.0 < self.zones.load(Acquire);
        if run != 0 && inside && delta != i64::MIN {
            let block = run + SIZE * (zone.0 * I::NAMES.len() + item);
            // SAFETY: the block of a zone and item that are there; a run is never freed while its `VmStat` lives.
            let shards = unsafe { Shards::at(block) };
            let (down, size) = (delta < 0, delta.abs());
            if shards.add(down, size) || shards.add_after_making_room(down, size, true) {
                return;
            }
        }
        self.add_slow(zone.0, item, delta);
    }

    #[cold]
    #[inline(never)]
    fn add_slow(&self, zone: usize, item: usize, delta: i64) {
        match self.counter(zone, item) {
            Some(counter) => counter.add(delta),
            None => {
                self.lost.fetch_add(1, AcqRel);
            }
        }
    }

    /// The counter of an item in a zone, made if need be.
    fn counter(&self, zone: usize, item: usize) -> Option<&PercpuCounter> {
        let counters = self.open()?;
        let zones = counters.len() / I::NAMES.len();
        let zone = if zone < zones {
            zone
        } else {
            zone % ZONES_A_NODE
        };
        counters.get(zone * I::NAMES.len() + item)
    }

    /// All counters, made if need be.
    fn open(&self) -> Option<&[PercpuCounter]> {
        let there = self.counters();
        if !there.is_empty() {
            return Some(there);
        }
        // Most machines have one node: a process's start shall not read its whole description.
        let several = facts::has_several_nodes();
        let with_memory = several.then(facts::nodes_with_memory).flatten();
        let nodes = with_memory
            .as_ref()
            .map_or(1, |nodes| nodes.len().clamp(1, NODES_MOST));
        let zones = nodes * ZONES_A_NODE;
        let count = zones * I::NAMES.len();
        let bytes = count * size_of::<PercpuCounter>();
        let table = sys::map_memory(bytes.next_multiple_of(sys::page_size()))?;
        let table = table.as_ptr().cast::<PercpuCounter>();
        for node in 0..nodes {
            let id = with_memory
                .as_ref()
                .and_then(|nodes| nodes.iter().nth(node));
            let [memory, _] = id.map_or([None; 2], |id| facts::memory_of(NodeId(id)));
            let memory = memory.unwrap_or((sys::physical_memory() / nodes) as u64);
            let threshold = normal_threshold(pinfold_rseq::possible(), memory);
            for at in 0..ZONES_A_NODE * I::NAMES.len() {
                let at = node * ZONES_A_NODE * I::NAMES.len() + at;
                // SAFETY: within the mapping, which nobody else knows of.
                unsafe { table.add(at).write(PercpuCounter::make(0, threshold, 0)) };
            }
        }
        self.zones.store(zones, Release);
        // Release pairs with the acquire in `counters`.
        match self
            .counters
            .compare_exchange(null_mut(), table, AcqRel, Acquire)
        {
            Ok(_) => self.open_run(count),
            // SAFETY: nobody else knows of it; counters without a block have nothing to give back.
            Err(_) => unsafe { sys::unmap(table.cast(), bytes.next_multiple_of(sys::page_size())) },
        }
        Some(self.counters())
    }

    /// Gives the counters blocks that lie together. Without room for that each takes its own, and all adds the slow way.
    fn open_run(&self, count: usize) {
        let place = || percpu::alloc(count * SIZE);
        let Some(run) = crate::counter::register_fork().then(place).flatten() else {
            return;
        };
        let mut all = true;
        for (at, counter) in self.counters().iter().enumerate() {
            all &= counter.settle(run + at * SIZE);
        }
        // A counter that somebody was quicker to count with has a block of its own, and keeps it.
        if all {
            self.run.store(run, Release);
        }
    }

    /// The counters that there are, zone by zone.
    fn counters(&self) -> &[PercpuCounter] {
        let table = self.counters.load(Acquire);
        if table.is_null() {
            return &[];
        }
        // SAFETY: `open` wrote that many counters there, which stay as long as this does.
        unsafe { core::slice::from_raw_parts(table, self.zones.load(Acquire) * I::NAMES.len()) }
    }

    fn of(&self, item: I) -> impl Iterator<Item = &PercpuCounter> {
        self.counters()
            .iter()
            .skip(item.index())
            .step_by(I::NAMES.len())
    }

    /// An item's total over all zones, approximately: the sum of its zones' totals, off by at most
    /// [`error_bound`](Self::error_bound). A few loads a zone.
    pub fn read(&self, item: I) -> i64 {
        self.of(item)
            .fold(0, |sum, zone| sum.wrapping_add(zone.read()))
    }

    /// An item's total in one zone, approximately: off by at most its threshold for each CPU that counts.
    pub fn read_zone(&self, zone: Zone, item: I) -> i64 {
        self.in_zone(zone, item).map_or(0, PercpuCounter::read)
    }

    /// How far [`read`](Self::read) may be off now.
    pub fn error_bound(&self, item: I) -> u64 {
        self.of(item).map(PercpuCounter::error_bound).sum()
    }

    /// An item's total over all zones, exactly: each zone's value was its value at one moment during the call. (An item that moves
    /// from one zone to another meanwhile may be seen in both or neither; in one zone it is exact to the moment.) Disturbs no
    /// CPU.
    pub fn snapshot(&self, item: I) -> i64 {
        self.of(item)
            .fold(0, |sum, zone| sum.wrapping_add(zone.sum()))
    }

    /// An item's total in one zone, exactly.
    pub fn snapshot_zone(&self, zone: Zone, item: I) -> i64 {
        self.in_zone(zone, item).map_or(0, PercpuCounter::sum)
    }

    fn in_zone(&self, zone: Zone, item: I) -> Option<&PercpuCounter> {
        self.counters().get(zone.0 * I::NAMES.len() + item.index())
    }

    /// How many zones there are: two a node. 0 as long as nothing was counted.
    pub fn zones(&self) -> usize {
        let zones = self.counters().len().checked_div(I::NAMES.len());
        zones.unwrap_or(0)
    }

    /// The threshold in a zone: how much a CPU may keep to itself.
    pub fn threshold(&self, zone: Zone) -> u64 {
        self.counter(zone.0, 0).map_or(0, PercpuCounter::batch)
    }

    /// Sets the threshold of every zone and item, for a time when totals matter (the kernel does so under memory pressure); fewer
    /// differences stay with the CPUs then.
    ///
    /// Lowering it interrupts each CPU that runs a thread of this process, once for each zone and item. Not for signal
    /// handlers.
    ///
    /// # Errors
    ///
    /// As for [`PercpuCounter::set_batch`]; the thresholds that come before stay set.
    pub fn set_threshold(&self, threshold: u64) -> Result<(), CounterError> {
        let counters = self.open().ok_or(CounterError::OutOfMemory)?;
        counters
            .iter()
            .try_for_each(|counter| counter.set_batch(threshold))
    }

    /// Puts the thresholds back to what the formula says.
    ///
    /// # Errors
    ///
    /// As for [`set_threshold`](Self::set_threshold).
    pub fn set_normal_threshold(&self) -> Result<(), CounterError> {
        let counters = self.open().ok_or(CounterError::OutOfMemory)?;
        counters
            .iter()
            .try_for_each(|counter| counter.set_batch(counter.first_batch()))
    }

    /// Brings what every CPU has counted into the totals; returns how many shards had moved. Runs here alone.
    pub fn fold(&self) -> usize {
        self.counters().iter().map(PercpuCounter::fold).sum()
    }

    /// Makes the counters now, and not when something is counted first. False when there is no memory.
    pub fn init(&self) -> bool {
        self.open().is_some()
    }

    /// How many adds found no memory to be counted in.
    pub fn lost(&self) -> u64 {
        self.lost.load(Acquire)
    }

    /// Has every shepherd fold these counts, or not any more. False without memory.
    pub(crate) fn watch(&self, watched: bool) -> bool {
        self.open().is_some_and(|counters| {
            counters.iter().all(|counter| {
                counter
                    .place()
                    .is_some_and(|shards| watch_block(shards.offset(), SIZE, watched))
            })
        })
    }
}

/// The items' exact totals in the form of `/proc/vmstat`: a line `name value` each.
impl<I: Item> fmt::Display for VmStat<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, name) in I::NAMES.iter().enumerate() {
            let zones = self.counters().iter().skip(at).step_by(I::NAMES.len());
            let total = zones.fold(0i64, |sum, zone| sum.wrapping_add(zone.sum()));
            writeln!(f, "{name} {total}")?;
        }
        Ok(())
    }
}

impl<I: Item> Drop for VmStat<I> {
    fn drop(&mut self) {
        let counters = core::ptr::from_ref(self.counters()).cast_mut();
        if self.counters().is_empty() {
            return;
        }
        let bytes = size_of_val(self.counters()).next_multiple_of(sys::page_size());
        // SAFETY: `open` wrote the counters to a mapping of that size, which is nobody else's any more. Each gives its block back.
        unsafe {
            counters.drop_in_place();
            sys::unmap(counters.cast(), bytes);
        }
    }
}

/// The kernel's threshold for a zone: min(125, 2 fls(CPUs) (1 + fls(memory / 128 MiB))), where fls is the position of the
/// highest bit, from 1. From `calculate_normal_threshold` in mm/vmstat.c.
///
/// ```
/// // The kernel's own examples: 1 CPU and 128 MiB; 2 CPUs and 2 GiB; 64 CPUs and 64 GiB.
/// assert_eq!(pinfold::vmstat::normal_threshold(1, 128 << 20), 4);
/// assert_eq!(pinfold::vmstat::normal_threshold(2, 2 << 30), 24);
/// assert_eq!(pinfold::vmstat::normal_threshold(64, 64 << 30), 125);
/// ```
pub fn normal_threshold(cpus: usize, memory_bytes: u64) -> u64 {
    let fls = |n: u64| u64::from(u64::BITS - n.leading_zeros());
    let threshold = 2 * fls(cpus as u64) * (1 + fls(memory_bytes >> 27));
    threshold.clamp(1, THRESHOLD_MOST)
}
