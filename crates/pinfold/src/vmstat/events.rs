//! Counts of events by item: what only grows.

use super::Item;
use crate::counter::{order_own_adds, register_fork};
use crate::percpu::{self, shared, units};
use core::fmt;
use core::marker::PhantomData;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use core::sync::atomic::{AtomicU64, AtomicUsize};

/// No block yet.
const NOWHERE: usize = 0;

/// How often each item's event occurred, as the kernel's `vm_event` counts: eight bytes an item on each CPU that counts, packed;
/// usable in statics.
///
/// An event is one critical section of one add, in any thread or signal handler.
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
    /// The offset of the first item's word.
    place: AtomicUsize,
    /// Adds that found no memory.
    lost: AtomicU64,
    items: PhantomData<fn(I)>,
}

impl<I: Item> Default for VmEvents<I> {
    fn default() -> Self {
        Self::new()
    }
}

impl<I: Item> VmEvents<I> {
    /// Counts at 0.
    pub const fn new() -> Self {
        VmEvents {
            place: AtomicUsize::new(NOWHERE),
            lost: AtomicU64::new(0),
            items: PhantomData,
        }
    }

    /// Bytes of the items' words on one CPU.
    const fn size() -> usize {
        8 * I::NAMES.len()
    }

    /// Counts one.
    #[inline(always)]
    pub fn inc(&self, item: I) {
        self.add(item, 1);
    }

    /// Counts `n`.
    ///
    /// # Panics
    ///
    /// When [`Item::index`] says more than there are names.
    #[inline(always)]
    pub fn add(&self, item: I, n: u64) {
        let item = item.index();
        assert!(item < I::NAMES.len(), "an item without a name");
        let place = self.place.load(Acquire);
        // SAFETY: the item's word lies in the block.
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
        // SAFETY: as in `add`.
        if !unsafe { units().add(place + 8 * item, n) } {
            shared(place + 8 * item).fetch_add(n, Relaxed);
        }
    }

    /// How often `item` occurred: at least as often as when the call began, at most as often as when it ended. Reads a word for
    /// each CPU.
    pub fn sum(&self, item: I) -> u64 {
        self.sum_of(item.index())
    }

    fn sum_of(&self, item: usize) -> u64 {
        order_own_adds();
        let place = self.place.load(Acquire);
        if place == NOWHERE || item >= I::NAMES.len() {
            return 0;
        }
        let at = place + 8 * item;
        let mut sum = shared(at).load(Acquire);
        percpu::for_each_used(at, |[word]| sum = sum.wrapping_add(word.load(Acquire)));
        sum
    }

    /// How many adds found no memory to be counted in.
    pub fn lost(&self) -> u64 {
        self.lost.load(Relaxed)
    }

    /// Where the items' words are in every unit, made if need be: for whoever shows units to other processes.
    pub(crate) fn place(&self) -> Option<usize> {
        let place = self.place.load(Acquire);
        if place != NOWHERE {
            return Some(place);
        }
        let fresh = register_fork()
            .then(|| percpu::alloc(Self::size()))
            .flatten()?;
        match self.place.compare_exchange(NOWHERE, fresh, AcqRel, Acquire) {
            Ok(_) => Some(fresh),
            Err(theirs) => {
                // SAFETY: nobody else knows of it.
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
            // SAFETY: `place` allocated the block. `drop` has the only reference, so that nothing
            // counts in the block any more.
            unsafe { percpu::free(place, Self::size()) };
        }
    }
}

/// The items' counts in the form of `/proc/vmstat`: a line `name value` each.
impl<I: Item> fmt::Display for VmEvents<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, name) in I::NAMES.iter().enumerate() {
            writeln!(f, "{name} {}", self.sum_of(at))?;
        }
        Ok(())
    }
}
