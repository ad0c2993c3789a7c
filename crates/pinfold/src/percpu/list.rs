//! A list of items for each CPU.
//!
//! # The protocol
//!
//! A list's head lies in per-CPU memory, so that a push needs no atomic instruction. Another CPU
//! must not change that head while a push or a pop is under way: the push or the pop would
//! overwrite the change, and items would be lost or given out twice.
//!
//! A list has a head in each CPU's unit, and one in the list itself, the *spilled* head.
//!
//! * A unit's head has two kinds of writers: an operation of a thread on its current unit, through
//!   the table [`LIST_UNITS`], and `take_all` from any CPU, after it has stopped that unit in the
//!   table, so that pushes and pops there fail.
//! * A push for which there is no unit goes to the spilled head, by compare-exchange. Items leave
//!   the spilled head all at once, by an exchange with null. A push therefore has no ABA problem:
//!   if the head is the same address again, linking the new node to it is still correct.
//! * A thread that takes the items of all CPUs holds [`READERS`]. It stops every index in the
//!   table, fences once, takes the heads, and resumes. Meanwhile pushes go to the spilled head, and
//!   pops find nothing. So no operation is under way when a head changes from afar.

use super::ring::READERS;
use crate::counter_units::{self, LazyBlock};
use crate::fork;
use crate::lock::{Hooks, Llist, Rank};
use core::cell::UnsafeCell;
use core::fmt;
use core::marker::PhantomData;
use core::ptr::NonNull;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{AcqRel, Acquire};
use pinfold_rseq::{Backend, FenceError, Units, fence, near};

/// Bytes of a list's head.
const SIZE: usize = 8;

/// A second table of the units that `counter_units` made. Stopping an index in this table stops
/// lists, but not the counters of the same unit.
// `near!` needs it.
#[used]
static LIST_UNITS: Units = Units::new();

#[inline(always)]
fn units() -> &'static Units {
    near!(LIST_UNITS, Units)
}

/// Gives this CPU its unit in both tables. Returns false if it cannot get one now.
fn prepare_here() -> bool {
    let Some(index) = counter_units::install_here() else {
        return false;
    };
    if LIST_UNITS.unit(index).is_null() {
        // `take_heads` works on the indexes that have a unit when it takes this lock. Only tries
        // the lock, because this may be a signal handler that interrupted another lock's holder.
        let Some(_reading) = READERS.try_lock() else {
            return false;
        };
        let unit = counter_units::word_at(index, 0).as_ptr();
        // If another thread was faster, it has installed the same unit.
        let _ = LIST_UNITS.install(index, unit.cast());
    }
    true
}

/// Makes forks wait for the holder of [`READERS`] and for the locks of the per-CPU memory.
pub(super) fn register_fork() -> bool {
    static HOOKS: [Hooks; 1] = [Hooks::locks(Rank::Readers, |visit| visit(READERS.word()))];
    fork::register(&HOOKS) && counter_units::register_fork()
}

/// An item of a [`PerCpuList`].
///
/// ```
/// use pinfold::percpu::Node;
///
/// let node = Node::new(5);
/// assert_eq!(node.value, 5);
/// ```
#[derive(Debug)]
#[repr(C)]
pub struct Node<T> {
    /// The address of the next item of the list, or 0.
    next: UnsafeCell<u64>,
    /// What the item carries.
    pub value: T,
}

impl<T> Node<T> {
    /// Returns an item that is in no list.
    pub const fn new(value: T) -> Self {
        Node {
            next: UnsafeCell::new(0),
            value,
        }
    }
}

/// A list with a part for each CPU. The last item pushed on a CPU is the first popped there.
///
/// A push or a pop is one critical section. Items are [`Node`]s that live as long as the process:
/// statics, leaked boxes, or objects of a cache. While a node is in the list, the list has the only
/// reference to it.
///
/// ```
/// use pinfold::percpu::{Node, PerCpuList};
///
/// static FREE: PerCpuList<[u8; 4096]> = PerCpuList::new();
///
/// // Takes a buffer that this CPU has used lately, or makes one.
/// let buffer = FREE
///     .pop()
///     .unwrap_or_else(|| Box::leak(Box::new(Node::new([0; 4096]))));
/// buffer.value[0] = 1;
/// FREE.push(buffer);
/// ```
// The C header declares this layout.
#[repr(C)]
pub struct PerCpuList<T: Send + 'static> {
    block: LazyBlock,
    /// The items that were pushed on CPUs without a unit.
    spilled: Llist,
    items: PhantomData<fn(Node<T>) -> Node<T>>,
}

impl<T: Send + 'static> PerCpuList<T> {
    /// Returns an empty list. A static can hold it. Allocates nothing.
    pub const fn new() -> Self {
        PerCpuList {
            block: LazyBlock::new(),
            spilled: Llist::new(AtomicU64::new(0)),
            items: PhantomData,
        }
    }

    /// Puts `node` in front of this CPU's items. Never fails: if the CPU has no memory for the
    /// list, the node goes to the items that all CPUs share. Costs one critical section.
    #[inline]
    pub fn push(&self, node: &'static mut Node<T>) {
        let item: *mut Node<T> = node;
        let pushed = self.block.get().is_some_and(|offset| {
            // SAFETY: the offset is that of this list's head. Only list operations change the head,
            // and `take_all` after it has stopped them. The node begins with the word for the next
            // item, and belongs to this function.
            unsafe { units().list_push(offset, item.cast()) }
        });
        if !pushed {
            self.push_slow(item);
        }
    }

    #[cold]
    #[inline(never)]
    fn push_slow(&self, item: *mut Node<T>) {
        if self.push_here(item) {
            return;
        }
        // SAFETY: the node belongs to this function until it is in the list.
        let link = |next| unsafe { item.cast::<u64>().write(next) };
        self.spilled.add(item as u64, link);
    }

    /// Takes the first of this CPU's items. If there is none, takes one of the items that all CPUs
    /// share. Does not look at other CPUs' items. Costs one critical section.
    #[inline]
    pub fn pop(&self) -> Option<&'static mut Node<T>> {
        let popped = self.block.get().and_then(|offset| {
            // SAFETY: the offset is that of this list's head. Only list operations change the head,
            // and `take_all` after it has stopped them. Nodes live as long as the process.
            NonNull::new(unsafe { units().list_pop(offset) })
        });
        match popped {
            // SAFETY: `push` took a unique reference to the node, and this thread has just taken
            // the node off the list.
            Some(item) => Some(unsafe { &mut *item.cast().as_ptr() }),
            None => self.pop_spilled(),
        }
    }

    /// Takes an item that all CPUs share, and moves the others to this CPU's list, if it has one.
    fn pop_spilled(&self) -> Option<&'static mut Node<T>> {
        let mut spilled = self.take_spilled();
        let first = spilled.next();
        while let Some(node) = spilled.next() {
            let item: *mut Node<T> = node;
            if !self.push_here(item) {
                // There is no list here. Puts all of them back at once, unless another thread has
                // pushed an item meanwhile.
                // SAFETY: this thread took the chain, so the node belongs to it.
                unsafe { item.cast::<u64>().write(spilled.next) };
                if !self.spilled.restore(item as u64) {
                    Items::new(item as u64).for_each(|node| self.push_slow(node));
                }
                break;
            }
        }
        first
    }

    /// Pushes `item` on this CPU's list, which it makes if need be. Returns false if it cannot.
    fn push_here(&self, item: *mut Node<T>) -> bool {
        self.prepare().is_some_and(|offset| {
            // SAFETY: the offset is that of this list's head. Only list operations change the head,
            // and `take_all` after it has stopped them. The item belongs to the caller.
            unsafe { units().list_push(offset, item.cast()) }
        })
    }

    fn take_spilled(&self) -> Items<T> {
        if self.spilled.is_empty() {
            return Items::new(0);
        }
        Items::new(self.spilled.del_all())
    }

    /// Takes all of this CPU's items, the last pushed first. If there are none, takes the items
    /// that all CPUs share. Costs one critical section.
    pub fn take(&self) -> Items<T> {
        // SAFETY: as in `pop`.
        let taken = self.block.get().map(|at| unsafe { units().list_take(at) });
        match taken.filter(|first| !first.is_null()) {
            Some(first) => Items::new(first as u64),
            None => self.take_spilled(),
        }
    }

    /// Takes the items of all CPUs, and calls `f` with each. Returns the number of items.
    ///
    /// Finds every item whose push ended before the call, unless another thread has taken it or is
    /// moving it between CPUs. `f` may push into this list. If `f` panics, the items that it has
    /// not got are never used again.
    ///
    /// Interrupts each CPU that runs a thread of this process, once (see [`fence`]), unless the
    /// lists of all CPUs are empty. Pushes go to the shared items meanwhile. Waits while another
    /// thread takes the items of all CPUs or reads a ring. Not for signal handlers.
    ///
    /// Without restartable sequences, waits at most about a second for a thread that was preempted
    /// while it changed a list. Then skips that CPU's items.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel or a sandbox does not allow the fence. Returns it with
    /// `EDEADLK` if a signal handler calls this function and has interrupted a reader, or another
    /// holder of a lock of the library. Only the shared items are taken then.
    pub fn take_all(&self, mut f: impl FnMut(&'static mut Node<T>)) -> Result<usize, FenceError> {
        let mut count = 0;
        let mut give = |node: &'static mut Node<T>| {
            count += 1;
            f(node);
        };
        let heads = self.block.get().map_or(Ok(0), take_heads::<T>);
        Items::new(*heads.as_ref().unwrap_or(&0)).for_each(&mut give);
        self.take_spilled().for_each(&mut give);
        heads.map(|_| count)
    }

    #[cold]
    fn prepare(&self) -> Option<usize> {
        let offset = self
            .block
            .get_or_alloc(SIZE, register_fork, |offset| offset)?;
        prepare_here().then_some(offset)
    }
}

/// Takes the items of all CPUs from the list whose heads are at `offset`, and returns the first. On
/// an error, no item was taken.
fn take_heads<T: 'static>(offset: usize) -> Result<u64, FenceError> {
    let Some(_reading) = READERS.lock() else {
        let errno = libc::EDEADLK;
        return Err(FenceError { errno });
    };
    // The set of these indexes stays the same while this thread holds the lock.
    let used = || counter_units::used().filter(|&index| !LIST_UNITS.unit(index).is_null());
    let head = |index| counter_units::word_at(index, offset);
    // Acquire: this thread sees the items that it is about to take.
    if used().all(|index| head(index).load(Acquire) == 0) {
        return Ok(0);
    }
    used().for_each(|index| LIST_UNITS.stop(index));
    // With restartable sequences, the fence ends the operations that have begun. On atomics, they
    // end when this thread gets the unit's lock.
    let rseq = matches!(pinfold_rseq::backend(), Backend::Rseq(_));
    let fenced = if rseq { fence() } else { Ok(()) };
    let mut first = 0;
    for index in used() {
        if fenced.is_err() || !LIST_UNITS.await_stopped(index) {
            LIST_UNITS.resume_untouched(index);
            continue;
        }
        let head = head(index).swap(0, AcqRel);
        LIST_UNITS.resume(index);
        if let Some(last) = Items::<T>::new(head).last() {
            *last.next.get_mut() = first;
            first = head;
        }
    }
    fenced.map(|()| first)
}

impl<T: Send + 'static> Drop for PerCpuList<T> {
    /// Frees the heads. Items that are still in the list are never used again.
    fn drop(&mut self) {
        // SAFETY: `prepare` allocated the block with this size. `drop` has the only reference, so
        // no thread works on the block any more.
        unsafe { self.block.free(SIZE) };
    }
}

impl<T: Send + 'static> Default for PerCpuList<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T: Send + 'static> fmt::Debug for PerCpuList<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PerCpuList").finish_non_exhaustive()
    }
}

/// Items that were taken off a [`PerCpuList`]. Dropping the iterator leaks the items that it has
/// not returned.
pub struct Items<T: 'static> {
    next: u64,
    items: PhantomData<&'static mut Node<T>>,
}

impl<T> Items<T> {
    fn new(first: u64) -> Self {
        Items {
            next: first,
            items: PhantomData,
        }
    }
}

impl<T> Iterator for Items<T> {
    type Item = &'static mut Node<T>;

    fn next(&mut self) -> Option<Self::Item> {
        let item = core::ptr::with_exposed_provenance_mut::<Node<T>>(self.next as usize);
        // SAFETY: the chain was taken off a list as a whole, so this iterator has the only
        // references to its nodes, which live as long as the process.
        let node = unsafe { item.as_mut() }?;
        self.next = *node.next.get_mut();
        Some(node)
    }
}

impl<T> fmt::Debug for Items<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Items").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::boxed::Box;

    /// The only test of this process that uses lists, because it needs CPUs that have no list yet.
    #[test]
    fn no_cpu_gets_its_first_list_while_another_thread_takes_all_items() {
        let list = PerCpuList::new();
        let reading = READERS.lock();
        list.push(Box::leak(Box::new(Node::new(5))));
        assert!(counter_units::used().all(|index| LIST_UNITS.unit(index).is_null()));
        assert!(!list.spilled.is_empty());
        drop(reading);
        let node = list.pop().unwrap();
        list.push(node);
        assert!(list.spilled.is_empty());
        assert_eq!(list.take_all(|node| assert_eq!(node.value, 5)), Ok(1));
    }
}
