//! Counts of events by item, which only grow.

use super::Item;
use crate::counter::{order_own_adds, register_fork};
use crate::counter_units::{self, LazyBlock, shared, units};
use core::fmt;
use core::marker::PhantomData;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{Acquire, Relaxed};

/// Counts how often each item's event occurred, as the kernel's `vm_event` counts do. A static can
/// hold the counts.
///
/// An event is one critical section of one add, in any thread or signal handler. Each CPU that
/// counts takes eight bytes for each item, packed.
///
/// ```
/// use pinfold::vmstat::VmEvents;
///
/// pinfold::vmstat_items! {
///     pub enum Fault {
///         Minor = "pgfault",
///         Major = "pgmajfault",
///     }
/// }
///
/// static FAULTS: VmEvents<Fault> = VmEvents::new();
/// FAULTS.inc(Fault::Minor);
/// FAULTS.add(Fault::Major, 2);
/// assert_eq!(FAULTS.to_string(), "pgfault 1\npgmajfault 2\n");
/// ```
#[derive(Debug)]
pub struct VmEvents<I: Item> {
    /// The items' words, in the order of their numbers.
    block: LazyBlock,
    /// Adds that were not counted, because the words could not be allocated.
    lost: AtomicU64,
    items: PhantomData<fn(I)>,
}

impl<I: Item> Default for VmEvents<I> {
    fn default() -> Self {
        Self::new()
    }
}

impl<I: Item> VmEvents<I> {
    /// Returns counts at 0.
    ///
    /// ```
    /// pinfold::vmstat_items! {
    ///     pub enum Fault { Minor = "pgfault", Major = "pgmajfault" }
    /// }
    ///
    /// let faults = pinfold::vmstat::VmEvents::<Fault>::new();
    /// assert_eq!(faults.to_string(), "pgfault 0\npgmajfault 0\n");
    /// ```
    pub const fn new() -> Self {
        VmEvents {
            block: LazyBlock::new(),
            lost: AtomicU64::new(0),
            items: PhantomData,
        }
    }

    /// Returns the bytes of all items' words on one CPU.
    const fn size() -> usize {
        8 * I::NAMES.len()
    }

    /// Counts one event of `item`.
    #[inline(always)]
    pub fn inc(&self, item: I) {
        self.add(item, 1);
    }

    /// Counts `n` events of `item`.
    ///
    /// # Panics
    ///
    /// If [`Item::index`] returns a number for which there is no name.
    #[inline(always)]
    pub fn add(&self, item: I, n: u64) {
        let item = item.index();
        assert!(item < I::NAMES.len(), "an item without a name");
        let added = self.block.get().is_some_and(|offset| {
            // SAFETY: `offset` is that of this `VmEvents`' block, which is freed only when the
            // `VmEvents` is dropped. `item` is below the number of names, so its word lies in the
            // block.
            unsafe { units().add(offset + 8 * item, n) }
        });
        if !added {
            self.add_slow(item, n);
        }
    }

    #[cold]
    #[inline(never)]
    fn add_slow(&self, item: usize, n: u64) {
        let Some(offset) = self.block() else {
            self.lost.fetch_add(1, Relaxed);
            return;
        };
        // SAFETY: `offset` is that of this `VmEvents`' block, and `add` has checked that the item's
        // word lies in the block.
        unsafe { counter_units::add_slow(offset + 8 * item, n) };
    }

    /// Returns how often `item` occurred. The result contains all events before the call, and
    /// perhaps some during the call. Reads one word for each CPU.
    pub fn sum(&self, item: I) -> u64 {
        self.sum_of(item.index())
    }

    /// Returns how often item number `item` occurred, or 0 if there is no such item.
    pub(crate) fn sum_of(&self, item: usize) -> u64 {
        order_own_adds();
        let Some(offset) = self.block.get().filter(|_| item < I::NAMES.len()) else {
            return 0;
        };
        let at = offset + 8 * item;
        let mut sum = shared(at).load(Acquire);
        counter_units::for_each_used(at, |[word]| sum = sum.wrapping_add(word.load(Acquire)));
        sum
    }

    /// Returns how many adds were not counted, because the items' words could not be allocated.
    /// Usually there was no memory for them.
    pub fn lost(&self) -> u64 {
        self.lost.load(Relaxed)
    }

    /// Returns the offset of the items' words in every unit, and allocates the words if there are
    /// none. Returns `None` if the words cannot be allocated. Other processes find the words in the
    /// statistics segment by this offset.
    pub(crate) fn block(&self) -> Option<usize> {
        self.block
            .get_or_alloc(Self::size(), register_fork, |offset| offset)
    }
}

impl<I: Item> Drop for VmEvents<I> {
    fn drop(&mut self) {
        // SAFETY: `block` allocated the block with this size. `drop` has the only reference, so no
        // thread counts in the block any more.
        unsafe { self.block.free(Self::size()) };
    }
}

/// Prints the counts as `/proc/vmstat` does: one line `name value` for each item.
impl<I: Item> fmt::Display for VmEvents<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, name) in I::NAMES.iter().enumerate() {
            writeln!(f, "{name} {}", self.sum_of(at))?;
        }
        Ok(())
    }
}
