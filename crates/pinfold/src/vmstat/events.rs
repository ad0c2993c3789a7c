//! Counts of events by item, which only grow.

use super::Item;
use crate::counter::{order_own_adds, register_fork};
use crate::percpu::{self, shared, units};
use core::fmt;
use core::marker::PhantomData;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use core::sync::atomic::{AtomicU64, AtomicUsize};

/// The offset that means "no block yet".
const NOWHERE: usize = 0;

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
    /// The offset of the first item's word; the other items' words follow.
    place: AtomicUsize,
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
    pub const fn new() -> Self {
        VmEvents {
            place: AtomicUsize::new(NOWHERE),
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
        // Acquire pairs with the release in `place`: a thread that sees the offset also sees the
        // block zeroed.
        let place = self.place.load(Acquire);
        // SAFETY: a place other than `NOWHERE` is the offset of this `VmEvents`' block, which is
        // freed only when the `VmEvents` is dropped. `item` is below the number of names, so its
        // word lies in the block.
        if place == NOWHERE || !unsafe { units().add(place + 8 * item, n) } {
            self.add_slow(item, n);
        }
    }

    #[cold]
    #[inline(never)]
    fn add_slow(&self, item: usize, n: u64) {
        let Some(place) = self.place() else {
            self.lost.fetch_add(1, Relaxed);
            return;
        };
        percpu::install_here();
        // SAFETY: `place` is the offset of this `VmEvents`' block, and `add` has checked that the
        // item's word lies in the block.
        if !unsafe { units().add(place + 8 * item, n) } {
            shared(place + 8 * item).fetch_add(n, Relaxed);
        }
    }

    /// Returns how often `item` occurred. The result contains all events before the call, and
    /// perhaps some during the call. Reads one word for each CPU.
    pub fn sum(&self, item: I) -> u64 {
        self.sum_of(item.index())
    }

    fn sum_of(&self, item: usize) -> u64 {
        order_own_adds();
        // Acquire pairs with the release in `place`: a thread that sees the offset also sees the
        // block zeroed.
        let place = self.place.load(Acquire);
        if place == NOWHERE || item >= I::NAMES.len() {
            return 0;
        }
        let at = place + 8 * item;
        let mut sum = shared(at).load(Acquire);
        percpu::for_each_used(at, |[word]| sum = sum.wrapping_add(word.load(Acquire)));
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
    pub(crate) fn place(&self) -> Option<usize> {
        let place = self.place.load(Acquire);
        if place != NOWHERE {
            return Some(place);
        }
        let fresh = register_fork()
            .then(|| percpu::alloc(Self::size()))
            .flatten()?;
        // Release: a thread that sees the offset also sees the block zeroed. Acquire: this thread
        // sees the same if another thread was faster.
        match self.place.compare_exchange(NOWHERE, fresh, AcqRel, Acquire) {
            Ok(_) => Some(fresh),
            Err(theirs) => {
                // SAFETY: the exchange failed, so `fresh` was never published. Only this thread
                // knows the block.
                unsafe { percpu::free(fresh, Self::size()) };
                Some(theirs)
            }
        }
    }
}

impl<I: Item> Drop for VmEvents<I> {
    fn drop(&mut self) {
        let place = *self.place.get_mut();
        if place != NOWHERE {
            // SAFETY: `place` allocated the block with this size. `drop` has the only reference, so
            // no thread counts in the block any more.
            unsafe { percpu::free(place, Self::size()) };
        }
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
