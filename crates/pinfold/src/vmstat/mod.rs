//! Statistics by item and zone, kept as the kernel's `vmstat` keeps them.
//!
//! A *zone* is a node's memory of one page size. Each zone and item has a [counter](crate::counter)
//! whose batch is the zone's *threshold*: small differences stay with the CPU, and larger ones are
//! folded into the zone's total. The totals of a zone's items lie together, and so do the words of
//! all items on one CPU.
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
//! assert_eq!(POOL.sum(Pool::Free), 999);
//! assert!(POOL.read(Pool::Free).abs_diff(999) <= POOL.error_bound(Pool::Free));
//! assert_eq!(POOL.to_string(), "nr_free 999\nnr_dirty 1\n");
//! ```

mod compare;
mod events;
mod follow;
mod open;
#[cfg(test)]
mod tests;
mod threshold;

pub use events::VmEvents;
pub use threshold::{MAX_THRESHOLD, normal_threshold, pressure_threshold};

use crate::counter::PerCpuCounter;
use crate::counter::shards::{Direction, MAX_BATCH, REFUSED, SIZE, Shards};
use crate::counter_units::LazyBlock;
use crate::topology::NodeId;
use crate::{mempolicy, nodes};
use core::fmt;
use core::marker::PhantomData;
use core::ptr::null_mut;
use core::sync::atomic::Ordering::{Acquire, Relaxed};
use core::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize};

/// Zones of each node: its memory in normal pages, and its memory in huge pages.
const ZONES_A_NODE: usize = 2;

/// Names a node's memory of one page size.
///
/// Nodes are numbered as everywhere in the library, for example in
/// [`KmemCache::alloc_node`](crate::slab::KmemCache::alloc_node) and
/// [`NUMA_STAT`](crate::arena::NUMA_STAT): the nodes with memory that this process could use when
/// it started have the numbers from 0 on, in the order of the system's ids.
/// [`normal_of`](Self::normal_of) and [`huge_of`](Self::huge_of) take the system's id instead.
///
/// The node of a `Zone` need not exist. A [`VmStat`] counts nothing for such a zone:
/// the zone reads as 0, and [`VmStat::lost`] counts the adds.
///
/// ```
/// use pinfold::topology::NodeId;
/// use pinfold::vmstat::{VmStat, Zone};
///
/// pinfold::vmstat_items! {
///     pub enum Ring {
///         Used = "nr_used",
///     }
/// }
///
/// static RING: VmStat<Ring> = VmStat::new();
/// let nowhere = Zone::normal(1000);
/// RING.inc(nowhere, Ring::Used);
/// assert!(!RING.has(nowhere));
/// assert_eq!((RING.sum_zone(nowhere, Ring::Used), RING.lost()), (0, 1));
/// assert_eq!(Zone::normal_of(NodeId(1000)), None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Zone(usize);

impl Zone {
    /// Returns the zone of node `node`'s memory in pages of the usual size.
    #[inline(always)]
    pub const fn normal(node: usize) -> Zone {
        Zone(node.saturating_mul(ZONES_A_NODE))
    }

    /// Returns the zone of node `node`'s memory in huge pages.
    #[inline(always)]
    pub const fn huge(node: usize) -> Zone {
        Zone(node.saturating_mul(ZONES_A_NODE).saturating_add(1))
    }

    /// Returns the zone of a node's memory in pages of the usual size, by the system's id of the
    /// node. Returns `None` if this process could not use the node when it started.
    pub fn normal_of(node: NodeId) -> Option<Zone> {
        mempolicy::init();
        nodes::with_id(node.0).map(Zone::normal)
    }

    /// Returns the zone of a node's memory in huge pages, by the system's id of the node. Returns
    /// `None` if this process could not use the node when it started.
    pub fn huge_of(node: NodeId) -> Option<Zone> {
        mempolicy::init();
        nodes::with_id(node.0).map(Zone::huge)
    }
}

/// Names what is counted: the variants of an enum, numbered from 0.
/// [`vmstat_items!`](crate::vmstat_items) declares such an enum.
///
/// ```
/// use pinfold::vmstat::{Item, VmStat, Zone};
///
/// #[derive(Clone, Copy)]
/// struct Queue(usize);
///
/// impl Item for Queue {
///     const NAMES: &'static [&'static str] = &["queue_0", "queue_1"];
///     fn index(self) -> usize {
///         self.0
///     }
/// }
///
/// let waiting: VmStat<Queue> = VmStat::new();
/// waiting.inc(Zone::normal(0), Queue(1));
/// assert_eq!(waiting.to_string(), "queue_0 0\nqueue_1 1\n");
/// ```
pub trait Item: Copy + 'static {
    /// The items' names, in the order of their numbers, as [`VmStat`] prints them.
    const NAMES: &'static [&'static str];
    /// Returns the item's number, which is below `NAMES.len()`.
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

/// Counts all items in all zones. A static can hold the counts.
///
/// Counting is one critical section, in any thread or signal handler. A CPU folds when it has
/// counted more than the threshold since its last fold, and then half a threshold in advance.
///
/// Memory is allocated when the first thing is counted: for each zone and item, 152 bytes for the
/// counter, 32 bytes for its total, and 32 bytes on each CPU that counts. So two items share a
/// cache line of each CPU. The kernel's differences are bytes, and 64 share one.
///
/// ```
/// use pinfold::vmstat::{VmStat, Zone};
///
/// pinfold::vmstat_items! {
///     pub enum Ring { Used = "nr_used" }
/// }
///
/// let rings: VmStat<Ring> = VmStat::new();
/// rings.add(Zone::huge(0), Ring::Used, 5);
/// let zones = [Zone::normal(0), Zone::huge(0)];
/// assert_eq!(zones.map(|zone| rings.sum_zone(zone, Ring::Used)), [0, 5]);
/// ```
#[derive(Debug)]
pub struct VmStat<I: Item> {
    /// The offset of the block of the first zone's first item. The other blocks follow, zone by
    /// zone. 0 until each counter has its block.
    run: AtomicUsize,
    /// The number of zones; set before `counters`.
    zones: AtomicUsize,
    /// The counters, in the order of the blocks; null until they are made. A [`follow::Table`] is
    /// in front of them.
    counters: AtomicPtr<PerCpuCounter>,
    /// The row of blocks that the counters are being given.
    claimed: LazyBlock,
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
    /// Returns counts at 0.
    pub const fn new() -> Self {
        VmStat {
            run: AtomicUsize::new(0),
            zones: AtomicUsize::new(0),
            counters: AtomicPtr::new(null_mut()),
            claimed: LazyBlock::new(),
            lost: AtomicU64::new(0),
            items: PhantomData,
        }
    }

    /// Adds 1.
    #[inline(always)]
    pub fn inc(&self, zone: Zone, item: I) {
        self.add(zone, item, 1);
    }

    /// Subtracts 1.
    #[inline(always)]
    pub fn dec(&self, zone: Zone, item: I) {
        self.add(zone, item, -1);
    }

    /// Adds `delta`, of any size and sign, from any thread or signal handler. Never waits, and
    /// counts nothing twice.
    ///
    /// An add for a zone that does not exist, or without memory for the counters, is lost:
    /// [`lost`](Self::lost) counts it.
    ///
    /// # Panics
    ///
    /// If [`Item::index`] returns a number for which there is no name.
    #[inline(always)]
    pub fn add(&self, zone: Zone, item: I, delta: i64) {
        let item = item.index();
        assert!(item < I::NAMES.len(), "an item without a name");
        // Acquire pairs with the release in `settle`: a thread that sees the offset also sees the
        // blocks prepared.
        let run = self.run.load(Acquire);
        // Relaxed: `zones` was stored before `run`, so a thread that sees `run` sees `zones`. The
        // first node's zones exist on every machine, so they need no load.
        let inside = zone.0 < ZONES_A_NODE || zone.0 < self.zones.load(Relaxed);
        if run != 0 && inside && delta.unsigned_abs() <= MAX_BATCH {
            let block = run + SIZE * (zone.0 * I::NAMES.len() + item);
            // SAFETY: the zone exists and the item has a name, so `block` is one of this `VmStat`'s
            // blocks. The blocks are freed only when the `VmStat` is dropped.
            let shards = unsafe { Shards::at(block) };
            let (direction, size) = (Direction::of(delta), delta.abs());
            let left = shards.add(direction, size);
            if left >= 0 || self.finish_add(shards, direction, size, left) {
                return;
            }
        }
        self.add_slow(zone.0, item, delta);
    }

    /// Finishes an add after which [`Shards::add`] returned `left`, a negative number. Returns
    /// false if nothing was added.
    #[cold]
    #[inline(never)]
    fn finish_add(&self, shards: Shards, direction: Direction, size: i64, left: i64) -> bool {
        self.follow_cpus();
        if left == REFUSED {
            return !shards.is_claimed_here() && shards.add_slow(direction, size, true);
        }
        shards.fold_past_batch(direction);
        true
    }

    #[cold]
    #[inline(never)]
    fn add_slow(&self, zone: usize, item: usize, delta: i64) {
        let counter = self
            .open()
            .and_then(|counters| Self::one_of(counters, zone, item));
        match counter {
            // Acquire pairs with the release in `settle`: a thread that sees the offset also sees
            // that the counter has its block.
            Some(counter) if self.run.load(Acquire) != 0 => counter.add(delta),
            Some(counter) => counter.add_to_base(delta),
            None => {
                self.lost.fetch_add(1, Relaxed);
            }
        }
    }

    /// Returns the counter of an item in a zone, or `None` if the zone does not exist.
    fn one_of(counters: &[PerCpuCounter], zone: usize, item: usize) -> Option<&PerCpuCounter> {
        let zones = counters.len().checked_div(I::NAMES.len()).unwrap_or(0);
        // The zone exists, so the index does not overflow.
        let exists = zone < zones && item < I::NAMES.len();
        exists.then(|| counters.get(zone * I::NAMES.len() + item))?
    }

    /// Returns the counters of an item, one for each zone.
    fn of(&self, item: I) -> impl Iterator<Item = &PerCpuCounter> {
        self.of_nth(item.index())
    }

    /// Returns the counters of item number `nth`, one for each zone, or none if the item has no
    /// name.
    pub(crate) fn of_nth(&self, nth: usize) -> impl Iterator<Item = &PerCpuCounter> {
        let names = I::NAMES.len();
        let known = if nth < names { self.counters() } else { &[] };
        known.iter().skip(nth).step_by(names.max(1))
    }

    /// Returns an item's approximate total over all zones, off by at most
    /// [`error_bound`](Self::error_bound). A few loads for each zone. All reads return 0 for an
    /// item whose number has no name.
    pub fn read(&self, item: I) -> i64 {
        self.of(item)
            .fold(0, |sum, zone| sum.wrapping_add(zone.read()))
    }

    /// Returns an item's approximate total in one zone. Off by at most twice the zone's threshold
    /// for each CPU that counts, and by what the last [`fold`](Self::fold) found there, which is at
    /// most as much again.
    pub fn read_zone(&self, zone: Zone, item: I) -> i64 {
        self.in_zone(zone, item).map_or(0, PerCpuCounter::read)
    }

    /// Returns how far [`read`](Self::read) may be off now.
    pub fn error_bound(&self, item: I) -> u64 {
        self.of(item).map(PerCpuCounter::error_bound).sum()
    }

    /// Returns an item's exact total over all zones: each zone's part was its value at one moment
    /// during the call. Interrupts no CPU.
    ///
    /// The zones are summed one after the other. So an amount that moves from one zone to another
    /// during the call may count in both or in neither.
    pub fn sum(&self, item: I) -> i64 {
        self.of(item)
            .fold(0, |sum, zone| sum.wrapping_add(zone.sum()))
    }

    /// Returns an item's exact total in one zone: its value at one moment during the call.
    /// Interrupts no CPU.
    #[doc(alias = "zone_page_state_snapshot")]
    pub fn sum_zone(&self, zone: Zone, item: I) -> i64 {
        self.in_zone(zone, item).map_or(0, PerCpuCounter::sum)
    }

    /// Returns the counter of an item in a zone, if both exist yet.
    fn in_zone(&self, zone: Zone, item: I) -> Option<&PerCpuCounter> {
        Self::one_of(self.counters(), zone.0, item.index())
    }

    /// Returns whether `zone` exists. Only adds for an existing zone are counted.
    ///
    /// Makes the counters if nothing was counted before. Returns false without memory for them.
    pub fn has(&self, zone: Zone) -> bool {
        self.open()
            .is_some_and(|counters| Self::one_of(counters, zone.0, 0).is_some())
    }

    /// Returns the number of zones, two for each node, or 0 until something is counted.
    pub fn zones(&self) -> usize {
        let zones = self.counters().len().checked_div(I::NAMES.len());
        zones.unwrap_or(0)
    }

    /// Adds what every CPU holds to what [`read`](Self::read) returns, as [`PerCpuCounter::fold`]
    /// does for each zone and item. Returns how many shards hold something, of those whose counter
    /// has changed since the last fold. Runs in the calling thread alone.
    pub fn fold(&self) -> usize {
        self.counters().iter().map(PerCpuCounter::fold).sum()
    }

    /// Makes the counters now, instead of when something is counted first. Returns false without
    /// memory.
    pub fn init(&self) -> bool {
        self.open().is_some()
    }

    /// Returns how many adds were not counted: adds for a zone that does not exist, and adds
    /// without memory for the counters.
    pub fn lost(&self) -> u64 {
        self.lost.load(Relaxed)
    }
}

/// Prints the exact totals as `/proc/vmstat` does: one line `name value` for each item.
impl<I: Item> fmt::Display for VmStat<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, name) in I::NAMES.iter().enumerate() {
            let total = self
                .of_nth(at)
                .fold(0i64, |sum, zone| sum.wrapping_add(zone.sum()));
            writeln!(f, "{name} {total}")?;
        }
        Ok(())
    }
}
