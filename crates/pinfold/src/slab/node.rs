//! A cache's part on one node: the barn, and the slabs.
//!
//! The barn holds full and empty sheaves, so that a CPU that runs out of either exchanges one for the other under the
//! lock, without touching the objects. Only beyond the barn's bounds do objects go to and come from slabs.

use super::cache::{self, Cache};
use super::harden::QUARANTINE;
use super::info::Reading;
use super::purge::PERIODS;
use super::sheaf::{Sheaf, SheafList};
use super::slabs::{Slabs, slab_of};
use crate::lock::{Guard, Lock};
use crate::page::{self, Ask};
use crate::segment::{NodeEvents, SlabEvent};
use core::alloc::Layout;
use core::ptr::null_mut;
use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicBool, AtomicPtr};

/// Empty sheaves that a barn keeps; more go to the pool that all caches share.
const EMPTY_MOST: usize = 10;

/// How long something must have been idle to be given back, in milliseconds.
const IDLE_FOR: u32 = 450;

/// Objects in a sheaf of a cache whose slabs are sparse. Objects that move between callers and
/// sheaves only keep their slabs in use. Small sheaves send more frees to the slabs, and more
/// allocations to the fullest slabs, so that the sparse slabs drain.
const SPARSE_CAPACITY: usize = 8;
/// Exchanges with small sheaves in a tick of the coarse clock, some milliseconds. Beyond that,
/// sheaves have their full size, so that a burst is not slowed down.
const SPARSE_EXCHANGES: u32 = 256;

/// What the node's lock protects.
pub(super) struct Stock {
    full: SheafList,
    empty: SheafList,
    pub(super) slabs: Slabs,
    /// The fewest full sheaves there were since [`Node::release_idle`] last looked.
    idle: usize,
    /// When it looked, in milliseconds, wrapping.
    looked: u32,
    /// Exchanges with small sheaves since the coarse clock showed `counted` milliseconds, wrapping.
    exchanges: u32,
    counted: u32,
}

// SAFETY: sheaves in the lists and slabs belong to whoever holds the lock.
unsafe impl Send for Stock {}

/// A cache's part on one node.
pub(super) struct Node {
    pub(super) stock: Lock<Stock>,
    /// Objects freed while the lock could not be had: by a signal handler that interrupted a
    /// holder, or while another thread forked. Each holds a link to the next.
    pub(super) set_aside: AtomicPtr<u8>,
    /// Where the slow paths count: `own_events`, or the row in the statistics segment.
    pub(super) events: AtomicPtr<NodeEvents>,
    pub(super) own_events: &'static NodeEvents,
    /// Whether the slabs were sparse when a sheaf was exchanged last.
    sparse: AtomicBool,
}

impl Node {
    const fn new(events: &'static NodeEvents) -> Node {
        Node {
            stock: Lock::new(Stock {
                full: SheafList::new(),
                empty: SheafList::new(),
                slabs: Slabs::new(events),
                idle: 0,
                looked: 0,
                exchanges: 0,
                counted: 0,
            }),
            set_aside: AtomicPtr::new(null_mut()),
            events: AtomicPtr::new(core::ptr::from_ref(events).cast_mut()),
            own_events: events,
            sparse: AtomicBool::new(false),
        }
    }

    /// Whether sparse slabs are to drain: then a CPU keeps no spare sheaf. A guess, without the lock.
    pub(super) fn is_sparse(&self) -> bool {
        self.sparse.load(Relaxed)
    }

    /// Takes the lock. Returns `None` if an interrupted frame of this thread holds this lock.
    /// Returns `None` too if the thread would have to wait, and an interrupted frame of it holds a
    /// lock that comes later in the lock order, or the holder is the forking thread.
    pub(super) fn stock(&self) -> Option<Guard<'_, Stock>> {
        self.stock.lock_or_divert(cache::is_lock_held)
    }

    /// Takes the lock as [`stock`](Self::stock) does, but waits until a fork is over.
    pub(super) fn stock_after_fork(&self) -> Option<Guard<'_, Stock>> {
        self.stock.lock_unless(cache::is_lock_held)
    }

    /// Takes the lock to allocate from `cache` or to free to it. Only malloc's caches have another
    /// way than to wait until a fork is over: a mapping for each block.
    pub(super) fn stock_of(&self, cache: &Cache) -> Option<Guard<'_, Stock>> {
        match cache.class() {
            Some(_) => self.stock(),
            None => self.stock_after_fork(),
        }
    }

    /// Whether a thread holds it.
    pub(super) fn is_held_by(&self, thread: u64) -> bool {
        self.stock.is_held_by(thread)
    }

    /// One for each node of the machine.
    pub(super) fn make_all() -> Option<&'static [Node]> {
        let count = crate::nodes::count();
        let nodes = page::alloc_meta(Layout::array::<Node>(count).ok()?)?.cast::<Node>();
        let events = page::alloc_meta(Layout::array::<NodeEvents>(count).ok()?)?;
        let events = events.cast::<NodeEvents>();
        for nth in 0..count {
            // SAFETY: both have room for `count` and are this function's. `alloc_meta` gave memory
            // that stays.
            unsafe {
                events.add(nth).write(NodeEvents::new());
                nodes.add(nth).write(Node::new(events.add(nth).as_ref()));
            }
        }
        // SAFETY: all written above; lives for ever.
        Some(unsafe { core::slice::from_raw_parts(nodes.as_ptr(), count) })
    }

    /// A sheaf with objects in exchange for an empty one, or for none: from the barn, else filled from slabs.
    ///
    /// Returns the sheaf given when there is nothing to fill it with.
    pub(super) fn exchange_for_full(
        &self,
        cache: &Cache,
        ask: Ask,
        empty: Option<Sheaf>,
    ) -> Result<Sheaf, Option<Sheaf>> {
        let Some(mut stock) = self.stock_of(cache) else {
            self.count(SlabEvent::AllocLockless, 1);
            return Err(empty);
        };
        stock.count(SlabEvent::AllocSlowpath, 1);
        self.sparse.store(stock.slabs.is_sparse(cache), Relaxed);
        self.take_back(cache, &mut stock);
        // What was freed to a hardened cache has its way through `exchange_quarantined`.
        let from_barn = cache.hardening.is_none();
        if let Some(full) = from_barn.then(|| stock.full.take()).flatten() {
            if let Some(empty) = empty {
                stock.put_empty(empty);
            }
            stock.idle = stock.idle.min(stock.full.length);
            stock.count(SlabEvent::BarnGet, 1);
            return Ok(full);
        }
        stock.count(SlabEvent::BarnGetFail, 1);
        let mut sheaf = match empty {
            Some(mut sheaf) => {
                sheaf.resize(stock.capacity(cache));
                sheaf
            }
            None => stock.take_empty(cache).ok_or(None)?,
        };
        let slots = sheaf.slots();
        let taken = stock.slabs.take(cache, ask, slots);
        if taken < slots.len() {
            slots.copy_within(slots.len() - taken.., 0);
        }
        sheaf.set_len(taken);
        stock.count(SlabEvent::Refilled, taken);
        stock.count(SlabEvent::SheafRefill, taken);
        if taken == 0 {
            Err(Some(sheaf))
        } else {
            Ok(sheaf)
        }
    }

    /// For a hardened cache: the oldest full sheaf, when enough others came after it, in exchange for an empty one, or for none.
    ///
    /// Returns the sheaf given when there is none.
    pub(super) fn exchange_quarantined(
        &self,
        empty: Option<Sheaf>,
    ) -> Result<Sheaf, Option<Sheaf>> {
        let Some(mut stock) = self.stock() else {
            return Err(empty);
        };
        if stock.full.length <= QUARANTINE {
            return Err(empty);
        }
        let full = stock.full.take_oldest().ok_or(None)?;
        stock.count(SlabEvent::AllocSlowpath, 1);
        if let Some(empty) = empty {
            stock.put_empty(empty);
        }
        stock.idle = stock.idle.min(stock.full.length);
        stock.count(SlabEvent::BarnGet, 1);
        Ok(full)
    }

    /// A sheaf with room in exchange for a full one, or for none: the full one goes to the barn, and when that has enough,
    /// the oldest one's objects go to their slabs.
    ///
    /// Returns the sheaf given when the lock cannot be had, and nothing when there is no memory for a first sheaf.
    pub(super) fn exchange_for_empty(
        &self,
        cache: &Cache,
        full: Option<Sheaf>,
    ) -> Result<Sheaf, Option<Sheaf>> {
        let Some(mut stock) = self.stock_of(cache) else {
            self.count(SlabEvent::FreeLockless, 1);
            return Err(full);
        };
        stock.count(SlabEvent::FreeSlowpath, 1);
        self.sparse.store(stock.slabs.is_sparse(cache), Relaxed);
        if let Some(sheaf) = full {
            stock.count(SlabEvent::BarnPut, 1);
            stock.full.put(sheaf);
            if let Some(mut emptied) = self.flush_oldest(cache, &mut stock) {
                emptied.resize(stock.capacity(cache));
                return Ok(emptied);
            }
        }
        stock.take_empty(cache).ok_or(None)
    }

    /// An empty sheaf; `None` when the lock cannot be had, or there is no memory.
    pub(super) fn empty_sheaf(&self, cache: &Cache) -> Option<Sheaf> {
        let mut stock = self.stock_of(cache)?;
        stock.take_empty(cache)
    }

    /// Puts a sheaf, whatever is in it, into the barn, or its objects into their slabs.
    pub(super) fn put(&self, cache: &Cache, mut sheaf: Sheaf) {
        let Some(mut stock) = self.stock() else {
            // A signal handler interrupted the holder, or another thread forks: each object goes
            // aside.
            for &mut object in sheaf.objects() {
                self.set_aside(cache, object);
            }
            return sheaf.discard();
        };
        if sheaf.is_empty() {
            stock.put_empty(sheaf);
            return;
        }
        stock.count(SlabEvent::BarnPut, 1);
        stock.full.put(sheaf);
        if let Some(emptied) = self.flush_oldest(cache, &mut stock) {
            stock.put_empty(emptied);
        }
    }

    /// When the barn has more full sheaves than it may, gives the oldest one's objects to their slabs: the newest are
    /// likelier to be in the processor's caches. Returns that sheaf.
    fn flush_oldest(&self, cache: &Cache, stock: &mut Stock) -> Option<Sheaf> {
        let most = match stock.drains(cache) {
            true => 0,
            false => cache.barn_most(stock.slabs.count),
        };
        let mut emptied = None;
        for _ in 0..2 {
            if stock.full.length <= most {
                break;
            }
            let mut oldest = stock.full.take_oldest()?;
            stock.count(SlabEvent::BarnPutFail, 1);
            self.flush(cache, stock, &mut oldest);
            if let Some(other) = emptied.replace(oldest) {
                stock.put_empty(other);
            }
        }
        emptied
    }

    /// Takes objects from slabs, past the sheaves; returns how many.
    pub(super) fn take_objects(&self, cache: &Cache, ask: Ask, objects: &mut [*mut u8]) -> usize {
        let Some(mut stock) = self.stock_of(cache) else {
            return 0;
        };
        self.take_back(cache, &mut stock);
        let taken = stock.slabs.take(cache, ask, objects);
        stock.count(SlabEvent::Refilled, taken);
        let length = objects.len();
        objects.copy_within(length - taken.., 0);
        taken
    }

    /// Gives objects of this node to their slabs, past the sheaves.
    ///
    /// # Safety
    ///
    /// The objects are the caller's and of this node.
    pub(super) unsafe fn give_objects(&self, cache: &Cache, objects: &[*mut u8]) {
        let Some(mut stock) = self.stock() else {
            objects
                .iter()
                .for_each(|&object| self.set_aside(cache, object));
            return;
        };
        stock.count(SlabEvent::Flushed, objects.len());
        // SAFETY: the caller's promise.
        unsafe { stock.slabs.give(cache, objects) };
    }

    /// Moves everything in the barn to slabs and gives empty slabs back; returns how many slabs.
    pub(super) fn shrink(&self, cache: &Cache) -> usize {
        let stock = self.stock_after_fork();
        stock.map_or(0, |mut stock| self.empty(cache, &mut stock))
    }

    /// As [`shrink`](Self::shrink), unless it would have to wait for a fork.
    pub(super) fn give_all(&self, cache: &Cache) {
        if let Some(mut stock) = self.stock() {
            self.empty(cache, &mut stock);
        }
    }

    fn empty(&self, cache: &Cache, stock: &mut Stock) -> usize {
        self.take_back(cache, stock);
        while let Some(mut sheaf) = stock.full.take() {
            self.flush(cache, stock, &mut sheaf);
            sheaf.discard();
        }
        while let Some(sheaf) = stock.empty.take() {
            sheaf.discard();
        }
        stock.slabs.shrink(cache)
    }

    /// Gives back what nobody needed since the last call, if that is [`IDLE_FOR`] ago: objects of full sheaves to their
    /// slabs, empty slabs to the arena, pages of free objects to the system.
    pub(super) fn release_idle(&self, cache: &Cache, now: u32) {
        let Some(mut stock) = self.stock() else {
            return;
        };
        if now.wrapping_sub(stock.looked) < IDLE_FOR {
            return;
        }
        stock.looked = now;
        self.take_back(cache, &mut stock);
        for _ in 0..stock.idle {
            if let Some(mut sheaf) = stock.full.take_oldest() {
                self.flush(cache, &mut stock, &mut sheaf);
                stock.put_empty(sheaf);
            }
        }
        stock.idle = stock.full.length;
        stock.slabs.release_idle(cache);
        stock.slabs.purge_idle(cache, PERIODS);
    }

    /// Gives more pages of free objects back, of slabs that were left alone for `periods`. Returns
    /// whether there may be more.
    pub(super) fn purge_more(&self, cache: &Cache, periods: u32) -> bool {
        let stock = self.stock();
        stock.is_some_and(|mut stock| stock.slabs.purge_idle(cache, periods))
    }

    /// Returns how many objects are not free in their slab: those that callers, CPUs' sheaves or
    /// the barn hold.
    pub(super) fn in_use(&self, cache: &Cache) -> usize {
        self.stock_after_fork()
            .map_or(0, |stock| stock.slabs.in_use(cache))
    }

    /// Adds what is here to `reading`: slabs, the barn's sheaves and the objects in both, and what was counted.
    pub(super) fn tally(&self, cache: &Cache, reading: &mut Reading) {
        let Some(mut stock) = self.stock_after_fork() else {
            return;
        };
        // What handlers have set aside is free: else it would look as if it were in use.
        self.take_back(cache, &mut stock);
        reading.usage.barn_sheaves += stock.full.length;
        reading.usage.barn_objects += stock.full.objects();
        self.add_events(&mut reading.counts);
        stock.slabs.tally(cache, &mut reading.usage);
    }

    /// Checks the slabs' invariants, and that no object in the barn is also free in its slab.
    pub(super) fn validate(&self, cache: &Cache) -> Result<(), (&'static str, *const u8)> {
        let Some(mut stock) = self.stock_after_fork() else {
            return Ok(());
        };
        stock.slabs.validate(cache)?;
        let mut looked_at = SheafList::new();
        let mut answer = Ok(());
        while let Some(mut sheaf) = stock.full.take() {
            for &mut object in sheaf.objects() {
                // SAFETY: the page map is asked first; a slab's frame is readable, and the lock is held.
                let free = page::entry(object as usize) != cache.slot
                    || unsafe { (*slab_of(object)).is_free(cache, object) };
                if free {
                    answer = Err(("object in the barn is free or foreign", object.cast_const()));
                }
            }
            looked_at.put(sheaf);
        }
        while let Some(sheaf) = looked_at.take() {
            stock.full.put(sheaf);
        }
        answer
    }

    fn flush(&self, cache: &Cache, stock: &mut Stock, sheaf: &mut Sheaf) {
        let objects = sheaf.objects();
        stock.count(SlabEvent::Flushed, objects.len());
        stock.count(SlabEvent::SheafFlush, objects.len());
        // SAFETY: objects in a sheaf were freed by their owners; sheaves that come here hold this node's only.
        unsafe { stock.slabs.give(cache, objects) };
        sheaf.set_len(0);
    }
}

impl Stock {
    /// Returns whether this exchange uses small sheaves and no barn, so that sparse slabs drain.
    fn drains(&mut self, cache: &Cache) -> bool {
        if !self.slabs.is_sparse(cache) {
            return false;
        }
        let now = crate::sys::coarse_milliseconds() as u32;
        if now != self.counted {
            (self.counted, self.exchanges) = (now, 0);
        }
        self.exchanges += 1;
        self.exchanges <= SPARSE_EXCHANGES
    }

    /// Objects that a sheaf filled or emptied now holds.
    fn capacity(&mut self, cache: &Cache) -> usize {
        match self.drains(cache) {
            true => cache.capacity().min(SPARSE_CAPACITY),
            false => cache.capacity(),
        }
    }

    /// An empty sheaf, from the barn or a new one; `None` when there is no memory.
    fn take_empty(&mut self, cache: &Cache) -> Option<Sheaf> {
        match self.empty.take() {
            Some(mut sheaf) => {
                sheaf.resize(self.capacity(cache));
                Some(sheaf)
            }
            None => Sheaf::new(self.capacity(cache)),
        }
    }

    fn put_empty(&mut self, sheaf: Sheaf) {
        if self.empty.length < EMPTY_MOST {
            self.empty.put(sheaf);
        } else {
            sheaf.discard();
        }
    }
}
