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
mod open;
#[cfg(test)]
mod tests;
mod zone;

pub use events::VmEvents;
use zone::ZONES_A_NODE;
pub use zone::Zone;

use crate::counter::shards::{SIZE, Shards};
use crate::counter::{CounterError, PercpuCounter};
use core::fmt;
use core::marker::PhantomData;
use core::ptr::null_mut;
use core::sync::atomic::Ordering::{Acquire, Relaxed};
use core::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize};

/// The largest threshold, as in the kernel, where differences are bytes.
pub const THRESHOLD_MOST: u64 = 125;

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

/// The counts of all items in all zones; usable in statics.
///
/// Counting is one critical section, in any thread or signal handler; once in a threshold it folds.
/// A static takes memory when the first thing is counted: for each zone and item 128 bytes for the
/// counter, 32 for its total, and 32 on each CPU that counts.
#[derive(Debug)]
pub struct VmStat<I: Item> {
    /// The offset of the first zone's first item's block; the others follow, zone by zone. 0 until
    /// each counter has its block.
    run: AtomicUsize,
    /// How many zones there are; set before `counters`.
    zones: AtomicUsize,
    /// The counters, in the order of the blocks; null until there are any.
    counters: AtomicPtr<PercpuCounter>,
    /// The offset of the blocks that the counters are being given; 0 until there are blocks.
    claimed: AtomicUsize,
    /// Adds that were not counted.
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
            claimed: AtomicUsize::new(0),
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
    /// An add for a zone that is not there, or without memory for the counters, only counts for
    /// [`lost`](Self::lost).
    ///
    /// # Panics
    ///
    /// When [`Item::index`] says more than there are names.
    #[inline(always)]
    pub fn add(&self, zone: Zone, item: I, delta: i64) {
        let item = item.index();
        assert!(item < I::NAMES.len(), "an item without a name");
        // Acquire pairs with the release in `settle`.
        let run = self.run.load(Acquire);
        // Relaxed: `zones` was stored before `run`. Every machine has the first node's zones.
        let inside = zone.0 < ZONES_A_NODE || zone.0 < self.zones.load(Relaxed);
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
        let counter = self
            .open()
            .and_then(|counters| Self::one_of(counters, zone, item));
        match counter {
            // Acquire pairs with the release in `settle`: the counter has its block.
            Some(counter) if self.run.load(Acquire) != 0 => counter.add(delta),
            Some(counter) => counter.add_to_base(delta),
            None => {
                self.lost.fetch_add(1, Relaxed);
            }
        }
    }

    /// The counter of an item in a zone, if that is there.
    fn one_of(counters: &[PercpuCounter], zone: usize, item: usize) -> Option<&PercpuCounter> {
        let zones = counters.len().checked_div(I::NAMES.len()).unwrap_or(0);
        // Within the table, so that neither operation overflows.
        (zone < zones).then(|| counters.get(zone * I::NAMES.len() + item))?
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
        Self::one_of(self.counters(), zone.0, item.index())
    }

    /// Returns whether adds for `zone` are counted: whether its node is there. Makes the counters
    /// if nothing was counted before; false without memory.
    pub fn has(&self, zone: Zone) -> bool {
        self.open()
            .is_some_and(|counters| Self::one_of(counters, zone.0, 0).is_some())
    }

    /// How many zones there are: two a node. 0 as long as nothing was counted.
    pub fn zones(&self) -> usize {
        let zones = self.counters().len().checked_div(I::NAMES.len());
        zones.unwrap_or(0)
    }

    /// The threshold in a zone: how much a CPU may keep to itself. 0 of a zone that is not there.
    pub fn threshold(&self, zone: Zone) -> u64 {
        let counters = self.open().unwrap_or_default();
        Self::one_of(counters, zone.0, 0).map_or(0, PercpuCounter::batch)
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
        let mut counters = self.open_all()?.iter();
        counters.try_for_each(|counter| counter.set_batch(threshold))
    }

    /// Puts the thresholds back to what the formula says.
    ///
    /// # Errors
    ///
    /// As for [`set_threshold`](Self::set_threshold).
    pub fn set_normal_threshold(&self) -> Result<(), CounterError> {
        let mut counters = self.open_all()?.iter();
        counters.try_for_each(|counter| counter.set_batch(counter.first_batch()))
    }

    /// Brings what every CPU has counted into the totals; returns how many shards had moved. Runs here alone.
    pub fn fold(&self) -> usize {
        self.counters().iter().map(PercpuCounter::fold).sum()
    }

    /// Makes the counters now, and not when something is counted first. False when there is no memory.
    pub fn init(&self) -> bool {
        self.open().is_some()
    }

    /// How many adds were not counted: those for a zone that is not there, and those that found no
    /// memory for the counters.
    pub fn lost(&self) -> u64 {
        self.lost.load(Relaxed)
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
