//! A list that threads add to without a lock, and that one thread takes whole.
//!
//! A thread that may not wait for a lock still has to leave an object for the next holder. Other
//! threads, and signal handlers that interrupt this thread, may do the same at this moment. So no
//! step of an addition may wait for another thread or frame. The kernel has the same list for
//! interrupt handlers, under the same name.
//!
//! # Steps
//!
//! An item is named by a number other than 0, mostly its address. It holds a *link*: the number of
//! the item that was added before it, or 0.
//!
//! 1. [`Llist::add`] reads the number of the first item, and stores it as the new item's link.
//! 2. With one compare-exchange, it makes the new item the first. If the first item is not that of
//!    step 1 any more, it goes back to step 1.
//! 3. [`Llist::del_all`] takes the whole chain with one exchange.
//!
//! | an item | may be used by |
//! |---|---|
//! | before step 2 | the thread that adds it |
//! | between steps 2 and 3 | no thread |
//! | after step 3 | the thread that took the chain |
//!
//! # Why no item is lost, or taken twice
//!
//! * At every moment, the links lead from the first item to each item in the list. Step 2 adds one
//!   item in front of the chain that its link leads to, and step 3 gives the whole chain to one
//!   thread.
//! * Between steps 1 and 2, other threads may take the first item and add it again. Step 2 then
//!   succeeds, and this is right: the link only says which item is first. (An operation that took
//!   one item off the front would fail here, because it would store a link that it read before. So
//!   there is no such operation.)
//! * Step 2 has release order and step 3 has acquire order. All changes of the first item are
//!   read-modify-writes, so step 3 acquires from each addition, not only from the last one. The
//!   thread that takes the chain sees every link, and all that was done before each addition.
//! * A handler that interrupts a thread between steps 1 and 2 may add items, or take them all. The
//!   thread then finds another first item and goes back to step 1, or finds the same one.
//! * The child of a fork gets the list between two steps. It has all items that were added. It has
//!   no item that another thread of the parent had not added yet, or had taken.

use super::primitive::AtomicU64;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// The first item's number, or 0.
#[repr(transparent)]
pub(crate) struct Llist(AtomicU64);

impl Llist {
    /// Returns an empty list. `first` is 0.
    pub(crate) const fn new(first: AtomicU64) -> Self {
        Llist(first)
    }

    /// Returns whether the list has no item. A caller that mostly finds the list empty calls this
    /// before [`del_all`](Self::del_all), so that the list's cache line stays shared between the
    /// CPUs.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.load(Relaxed) == 0
    }

    /// Adds `item`, which the caller owns and gives up. `link` stores its argument as the item's
    /// link. It is called again each time that another thread has changed the list.
    pub(crate) fn add(&self, item: u64, link: impl Fn(u64)) {
        let mut first = self.0.load(Relaxed);
        loop {
            link(first);
            // Release pairs with the acquire in `del_all`: the thread that takes the item sees its
            // link, and what this thread did before.
            match self.0.compare_exchange(first, item, Release, Relaxed) {
                Ok(_) => return,
                Err(other) => first = other,
            }
        }
    }

    /// Takes all items. Returns the number of the one that was added last, or 0.
    pub(crate) fn del_all(&self) -> u64 {
        // Acquire pairs with the releases in `add` and `restore`.
        self.0.swap(0, Acquire)
    }

    /// Puts back a chain that the caller took, or its rest from `first` on. Fails, and returns
    /// false, if another thread has added an item meanwhile.
    pub(crate) fn restore(&self, first: u64) -> bool {
        // Release pairs with the acquire in `del_all`.
        let restored = self.0.compare_exchange(0, first, Release, Relaxed);
        restored.is_ok()
    }
}

/// Returns the items of a chain that the caller took, the last added first. `next` reads an item's
/// link, before the iterator returns the item.
pub(crate) fn chain(mut first: u64, next: impl Fn(u64) -> u64) -> impl Iterator<Item = u64> {
    core::iter::from_fn(move || {
        let item = (first != 0).then_some(first)?;
        first = next(item);
        Some(item)
    })
}
