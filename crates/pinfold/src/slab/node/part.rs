//! A part of a cache on one node: a barn and slabs, under one lock. A cache has one part on each
//! node, or more if it is split (`parts`).
//!
//! When a CPU's sheaf is empty or full, moving each of its objects from or to a slab would make the
//! slow path slow. So the CPU exchanges an empty sheaf for a full one at the node's barn, or the
//! reverse. The exchange touches none of the objects. Objects go to slabs only when the barn has
//! more full sheaves than its bound. They come from slabs only when the barn has no full sheaf.
//!
//! The bound of a size class is tight, because other sizes cannot use the memory in a barn. If the
//! program soon allocates again what the barn had no room for, the bound rises by a sheaf each
//! time. It falls again by the sheaves that were idle for half a second.
//!
//! # Who may write what
//!
//! | what | who |
//! |---|---|
//! | [`Stock`]: barn and slabs | the holder of the node's lock |
//! | `set_aside` | any thread, by one compare-exchange (`handler_frees`) |
//! | `events` | `count_in`, under the lock |
//! | `sparse`, `rich` | the holder of the lock; any thread reads them as hints |

use super::purge::PERIODS;
use super::slabs::Slabs;
use crate::arena::{self, NodeRequest};
use crate::lock::{Guard, Llist, Lock, Rank};
use crate::segment::{NodeEvents, SlabEvent};
use crate::slab::cache::descriptor::Descriptor;
use crate::slab::cache::tune::{MAX_BARN, QUARANTINE};
use crate::slab::cpu::sheaf::{Sheaf, SheafList};
use crate::spared;
use core::alloc::Layout;
use core::ptr::NonNull;
use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64};

/// The largest number of empty sheaves in a barn. Any beyond that go to the pool that all caches
/// share (`sheaf`).
const MAX_EMPTY: usize = 10;
/// The same in a split cache, whose CPUs would meet at the pool's lock.
const MAX_EMPTY_SPLIT: usize = 128;

/// A cache is split once threads have waited this often for a part's lock.
const SPLIT_WAITS: u32 = 32;
/// The time within which they must have waited, in milliseconds.
const WAITS_WITHIN: u32 = 500;

/// The least time between two calls of [`Node::release_idle`] that do anything, in milliseconds.
const IDLE_FOR: u32 = 450;

/// The most sheaves that one step of `release_idle` empties: about a thousand objects.
const IDLE_SHEAVES: usize = 8;

/// The capacity of sheaves while a cache's slabs are [sparse](Slabs::is_sparse). An object that
/// moves only between callers and sheaves keeps its slab in use. With small sheaves, more freed
/// objects reach their slabs, and more objects come from the fullest slabs. So the other slabs
/// drain. If allocations and frees come in random order, two freed objects in five reach their
/// slabs from sheaves of two, one in four from sheaves of eight, and one in six from sheaves of
/// sixteen.
const SPARSE_CAPACITY: usize = 2;
/// The largest number of exchanges with small sheaves before the coarse clock advances (some
/// milliseconds). A call that gives a sheaf and takes one counts twice. Later exchanges use sheaves
/// of full size until then, so that a burst stays fast.
const SPARSE_EXCHANGES: u32 = 1024;

/// What the node's lock protects.
pub(crate) struct Stock {
    pub(crate) full: SheafList,
    empty: SheafList,
    pub(crate) slabs: Slabs,
    /// The smallest number of full sheaves since [`Node::release_idle`] last did its work.
    idle: usize,
    /// How many objects the barn had no room for since then. Objects that came back are subtracted.
    overflowed: usize,
    /// How many sheaves a size class's barn may hold beyond its usual bound.
    extra: usize,
    /// When `release_idle` last did its work, in milliseconds, wrapping.
    looked: u32,
    /// Exchanges with small sheaves since the coarse clock showed `counted` milliseconds, wrapping.
    exchanges: u32,
    counted: u32,
}

// SAFETY: the sheaves and slabs in the lists belong to the lock's holder, whichever thread it is.
unsafe impl Send for Stock {}

/// A part of a cache on one node. The parts of different CPUs share no cache line.
#[repr(align(64))]
pub(crate) struct Node {
    pub(crate) stock: Lock<Stock>,
    number: u16,
    /// The objects freed while the lock could not be taken: in a signal handler that interrupted
    /// the holder, or during a fork (`handler_frees`).
    pub(crate) set_aside: Llist,
    /// Where the slow paths count events: in `own_events`, or in the statistics segment.
    pub(crate) events: AtomicPtr<NodeEvents>,
    pub(crate) own_events: &'static NodeEvents,
    /// Whether the slabs are sparse, as last found under the lock.
    sparse: AtomicBool,
    /// Whether many objects are free in the slabs of a split cache, as last found under the lock
    /// (`parts`).
    rich: AtomicBool,
    /// How often threads have waited for the lock since `waits_began`, in milliseconds, wrapping.
    /// Hints: some waits may be missing.
    waits: AtomicU32,
    waits_began: AtomicU32,
}

impl Node {
    const fn new(number: u16, events: &'static NodeEvents) -> Node {
        Node {
            number,
            stock: Lock::new(
                Rank::Nodes,
                Stock {
                    full: SheafList::new(),
                    empty: SheafList::new(),
                    slabs: Slabs::new(number, events),
                    idle: 0,
                    overflowed: 0,
                    extra: 0,
                    looked: 0,
                    exchanges: 0,
                    counted: 0,
                },
            ),
            set_aside: Llist::new(AtomicU64::new(0)),
            events: AtomicPtr::new(core::ptr::from_ref(events).cast_mut()),
            own_events: events,
            sparse: AtomicBool::new(false),
            rich: AtomicBool::new(false),
            waits: AtomicU32::new(0),
            waits_began: AtomicU32::new(0),
        }
    }

    /// Returns whether the slabs are sparse, so that they should drain. If so, a CPU keeps no spare
    /// sheaf. A hint, read without the lock.
    pub(crate) fn is_sparse(&self) -> bool {
        self.sparse.load(Relaxed)
    }

    pub(crate) fn is_rich(&self) -> bool {
        self.rich.load(Relaxed)
    }

    pub(crate) fn set_rich(&self, is_rich: bool) {
        self.rich.store(is_rich, Relaxed);
    }

    /// Takes the lock. Returns `None` in a signal handler that may not wait for it, and if the
    /// caller would have to wait for the forking thread.
    pub(crate) fn stock(&self) -> Option<Guard<'_, Stock>> {
        self.stock.try_lock().or_else(|| {
            let stock = self.stock.lock_or_divert()?;
            self.note_wait();
            Some(stock)
        })
    }

    /// Notes that a thread has waited for the lock, which it holds.
    #[cold]
    fn note_wait(&self) {
        let now = crate::sys::coarse_milliseconds() as u32;
        let is_recent = now.wrapping_sub(self.waits_began.load(Relaxed)) < WAITS_WITHIN;
        let before = match is_recent {
            true => self.waits.load(Relaxed),
            false => {
                self.waits_began.store(now, Relaxed);
                0
            }
        };
        self.waits.store(before.saturating_add(1), Relaxed);
    }

    /// Returns whether threads have waited for the lock so often that the cache should be split. If
    /// so, begins to count anew.
    pub(crate) fn is_crowded(&self) -> bool {
        let is_crowded = self.waits.load(Relaxed) >= SPLIT_WAITS;
        if is_crowded {
            self.waits.store(0, Relaxed);
        }
        is_crowded
    }

    /// Takes the lock as [`stock`](Self::stock) does, but waits for a fork to end.
    pub(crate) fn stock_after_fork(&self) -> Option<Guard<'_, Stock>> {
        self.stock.lock()
    }

    /// Takes the lock to allocate from `cache` or to free to it. Waits for a fork to end, with one
    /// exception: for a cache that [serves malloc](Descriptor::serves_malloc), returns `None`,
    /// because malloc can serve the block from a separate mapping.
    pub(crate) fn stock_of(&self, cache: &Descriptor) -> Option<Guard<'_, Stock>> {
        let stock = self.stock();
        match cache.serves_malloc() {
            true => stock,
            false => stock.or_else(|| self.stock_after_fork()),
        }
    }

    /// Makes `count` parts of a cache, the first of them with number `first`. Returns `None` if the
    /// system has no memory.
    pub(crate) fn make(first: usize, count: usize) -> Option<NonNull<[Node]>> {
        let nodes = arena::alloc_metadata(Layout::array::<Node>(count).ok()?)?.cast::<Node>();
        let events = Layout::array::<NodeEvents>(count).ok()?;
        let events = arena::alloc_metadata(events)?.cast::<NodeEvents>();
        for nth in 0..count {
            // SAFETY: both blocks are new, have room for `count` elements and are never unmapped.
            unsafe {
                events.add(nth).write(NodeEvents::new());
                nodes
                    .add(nth)
                    .write(Node::new((first + nth) as u16, events.add(nth).as_ref()));
            }
        }
        Some(NonNull::slice_from_raw_parts(nodes, count))
    }

    /// Returns the part's number: that of its node, plus a multiple of the count of nodes.
    pub(crate) fn number(&self) -> usize {
        self.number.into()
    }

    /// Makes a destroyed cache's node ready for a new cache. A thread that had pinned the old cache
    /// may have put an empty sheaf into the barn since.
    pub(crate) fn renew(&mut self) {
        if let Some(mut stock) = self.stock_after_fork() {
            while let Some(sheaf) = stock.empty.take() {
                sheaf.discard();
            }
        }
        self.own_events.clear();
        *self = Node::new(self.number, self.own_events);
    }

    /// Exchanges `empty` for a sheaf with objects, from the barn or filled from slabs.
    ///
    /// # Errors
    ///
    /// * Returns `empty` if the lock cannot be taken.
    /// * Returns an empty sheaf if the slabs have no free objects, and the node has no memory for a
    ///   slab or none may be made (`grows`).
    /// * Returns `None` if the system has no memory for a sheaf.
    pub(crate) fn exchange_for_full(
        &self,
        cache: &Descriptor,
        request: NodeRequest,
        empty: Option<Sheaf>,
        grows: bool,
    ) -> Result<Sheaf, Option<Sheaf>> {
        let Some(mut stock) = self.stock_of(cache) else {
            self.count(SlabEvent::AllocLockless, grows.into());
            return Err(empty);
        };
        self.sparse.store(stock.slabs.is_sparse(cache), Relaxed);
        self.take_back(cache, &mut stock);
        // A hardened cache takes full sheaves from the barn only in `exchange_quarantined`.
        let from_barn = cache.hardening.is_none();
        if let Some(full) = from_barn.then(|| stock.take_full()).flatten() {
            if let Some(empty) = empty {
                stock.put_empty(cache, empty);
            }
            stock.idle = stock.idle.min(stock.full.length);
            stock.count(SlabEvent::AllocSlowpath, 1);
            stock.count(SlabEvent::BarnGet, 1);
            return Ok(full);
        }
        let mut sheaf = match empty {
            Some(mut sheaf) => {
                sheaf.resize(stock.capacity(cache));
                sheaf
            }
            None => stock.take_empty(cache).ok_or(None)?,
        };
        let slots = sheaf.slots();
        let taken = stock.slabs.take(cache, request, slots, grows);
        cache.note_free(self, &stock);
        if taken < slots.len() {
            slots.copy_within(slots.len() - taken.., 0);
        }
        sheaf.set_len(taken);
        if taken == 0 && !grows {
            // The caller asks again, and counts then.
            return Err(Some(sheaf));
        }
        stock.count(SlabEvent::AllocSlowpath, 1);
        stock.count(SlabEvent::BarnGetFail, 1);
        stock.count(SlabEvent::Refilled, taken);
        stock.count(SlabEvent::SheafRefill, taken);
        stock.note_return(taken);
        match taken {
            0 => Err(Some(sheaf)),
            _ => Ok(sheaf),
        }
    }

    /// Exchanges `empty` for the oldest full sheaf of a hardened cache, if at least [`QUARANTINE`]
    /// full sheaves remain in the barn.
    ///
    /// # Errors
    ///
    /// Returns `empty` if there are too few full sheaves, or the lock cannot be taken.
    pub(crate) fn exchange_quarantined(
        &self,
        cache: &Descriptor,
        empty: Option<Sheaf>,
    ) -> Result<Sheaf, Option<Sheaf>> {
        let Some(mut stock) = self.stock() else {
            return Err(empty);
        };
        if stock.full.length <= QUARANTINE {
            return Err(empty);
        }
        let full = stock.take_oldest().ok_or(None)?;
        stock.count(SlabEvent::AllocSlowpath, 1);
        if let Some(empty) = empty {
            stock.put_empty(cache, empty);
        }
        stock.idle = stock.idle.min(stock.full.length);
        stock.count(SlabEvent::BarnGet, 1);
        Ok(full)
    }

    /// Exchanges `full`, which goes to the barn, for a sheaf with room. If the barn then has too
    /// many full sheaves, the objects of the oldest go to their slabs.
    ///
    /// # Errors
    ///
    /// Returns `full` if the lock cannot be taken. Returns `None` if there is no memory for a new
    /// sheaf.
    pub(crate) fn exchange_for_empty(
        &self,
        cache: &Descriptor,
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
            stock.put_full(sheaf);
            if let Some(mut flushed) = self.flush_oldest(cache, &mut stock) {
                let capacity = stock.capacity(cache);
                drop(stock);
                flushed = cache.hand_over(flushed);
                flushed.resize(capacity);
                return Ok(flushed);
            }
        }
        stock.take_empty(cache).ok_or(None)
    }

    /// Takes a sheaf of which at least the first object is of this part. Puts the sheaf into the
    /// barn and returns an empty one, if the barn has room for it. Otherwise gives the part's own
    /// objects to their slabs and returns the sheaf with the others. Counts `frees` frees.
    pub(crate) fn take_in(&self, cache: &Descriptor, mut sheaf: Sheaf, frees: usize) -> Sheaf {
        let Some(mut stock) = self.stock() else {
            self.count(SlabEvent::FreeLockless, frees);
            cache.set_all_aside(sheaf.objects());
            sheaf.set_len(0);
            return sheaf;
        };
        stock.count(SlabEvent::FreeSlowpath, frees);
        let is_mostly_full = sheaf.len() > cache.capacity() / 2;
        if is_mostly_full
            && stock.full.length < stock.barn_most(cache)
            && let Some(empty) = stock.take_empty(cache)
        {
            stock.count(SlabEvent::BarnPut, 1);
            stock.put_full(sheaf);
            return empty;
        }
        self.flush(cache, &mut stock, &mut sheaf);
        sheaf
    }

    /// Returns an empty sheaf. Returns `None` if the lock cannot be taken, or there is no memory.
    pub(crate) fn empty_sheaf(&self, cache: &Descriptor) -> Option<Sheaf> {
        let mut stock = self.stock_of(cache)?;
        stock.take_empty(cache)
    }

    /// Puts a sheaf into the barn. If the barn then has too many full sheaves, gives the objects of
    /// the oldest to their slabs. If the lock cannot be taken, sets each object aside.
    pub(crate) fn put(&self, cache: &Descriptor, mut sheaf: Sheaf) {
        let Some(mut stock) = self.stock() else {
            // A signal handler interrupted the holder, or another thread forks.
            cache.set_all_aside(sheaf.objects());
            return sheaf.discard();
        };
        if sheaf.is_empty() {
            stock.put_empty(cache, sheaf);
            return;
        }
        stock.count(SlabEvent::BarnPut, 1);
        stock.put_full(sheaf);
        match self.flush_oldest(cache, &mut stock) {
            Some(flushed) if flushed.is_empty() => stock.put_empty(cache, flushed),
            Some(flushed) => {
                drop(stock);
                cache.hand_over(flushed).discard();
            }
            None => {}
        }
    }

    /// While the barn has more full sheaves than its bound, gives the objects of the oldest sheaf
    /// to their slabs, if they are of this part. Flushes at most two sheaves. The newest sheaves
    /// stay, because their objects are likelier to be in the processor's caches. Returns a sheaf
    /// that it flushed, if any, with the objects of other parts.
    fn flush_oldest(&self, cache: &Descriptor, stock: &mut Stock) -> Option<Sheaf> {
        let most = stock.barn_most(cache);
        let mut flushed = None;
        for _ in 0..2 {
            if stock.full.length <= most {
                break;
            }
            let mut oldest = stock.take_oldest()?;
            stock.count(SlabEvent::BarnPutFail, 1);
            // While slabs drain, the barn has no room because it is to have none.
            if !stock.is_draining(cache) {
                stock.overflowed += oldest.len();
            }
            self.flush(cache, stock, &mut oldest);
            let has_others = !oldest.is_empty();
            if let Some(other) = flushed.replace(oldest) {
                stock.put_empty(cache, other);
            }
            if has_others {
                break;
            }
        }
        flushed
    }

    /// Fills `objects` from slabs, from its start. Makes slabs only if the part `grows`. Returns
    /// how many objects it took.
    pub(crate) fn take_objects(
        &self,
        cache: &Descriptor,
        request: NodeRequest,
        objects: &mut [*mut u8],
        grows: bool,
    ) -> usize {
        let Some(mut stock) = self.stock_of(cache) else {
            return 0;
        };
        self.take_back(cache, &mut stock);
        let taken = stock.slabs.take(cache, request, objects, grows);
        cache.note_free(self, &stock);
        stock.count(SlabEvent::Refilled, taken);
        let length = objects.len();
        objects.copy_within(length - taken.., 0);
        taken
    }

    /// Gives those objects to their slabs that are of this part. Moves the others to the front, and
    /// returns how many there are. Sets all objects aside if the lock cannot be taken.
    ///
    /// # Safety
    ///
    /// The caller owns the objects, which are free.
    pub(crate) unsafe fn give_objects(&self, cache: &Descriptor, objects: &mut [*mut u8]) -> usize {
        let Some(mut stock) = self.stock() else {
            cache.set_all_aside(objects);
            return 0;
        };
        // SAFETY: the lock is held. The caller promises that it owns the objects.
        let others = unsafe { stock.give(cache, objects) };
        cache.note_free(self, &stock);
        stock.count(SlabEvent::Flushed, objects.len() - others);
        others
    }

    /// Moves the objects of the barn, and those set aside, to their slabs. Gives all empty slabs
    /// back to the arena, and returns their number. Does nothing if the lock cannot be taken.
    pub(crate) fn shrink(&self, cache: &Descriptor) -> usize {
        self.empty(cache, self.stock_after_fork())
    }

    /// Drops all sheaves of the barn, the objects that were set aside, and all slabs, whatever
    /// objects are in use. The caller frees the slabs' runs. Does nothing and returns false in a
    /// signal handler that may not wait for the lock.
    pub(crate) fn abandon(&self, cache: &Descriptor) -> bool {
        let Some(mut stock) = self.stock_after_fork() else {
            return false;
        };
        while let Some(mut sheaf) = stock.take_full() {
            sheaf.set_len(0);
            sheaf.discard();
        }
        core::iter::from_fn(|| stock.empty.take()).for_each(Sheaf::discard);
        self.set_aside.del_all();
        for _ in 0..stock.slabs.abandon(cache) {
            cache.uncharge();
        }
        true
    }

    /// Does what [`shrink`](Self::shrink) does, but does nothing if it would have to wait for a
    /// fork.
    pub(crate) fn give_all(&self, cache: &Descriptor) {
        self.empty(cache, self.stock());
    }

    fn empty(&self, cache: &Descriptor, stock: Option<Guard<'_, Stock>>) -> usize {
        let Some(mut stock) = stock else {
            return 0;
        };
        self.take_back(cache, &mut stock);
        while let Some(mut sheaf) = stock.take_full() {
            self.flush_all(cache, &mut stock, &mut sheaf);
            sheaf.discard();
        }
        core::iter::from_fn(|| stock.empty.take()).for_each(Sheaf::discard);
        let released = stock.slabs.shrink(cache);
        cache.note_free(self, &stock);
        released
    }

    /// Gives back what was not needed for [`IDLE_FOR`] milliseconds: objects of full sheaves to
    /// their slabs, empty slabs to the arena, and pages of free objects to the system. Also looks
    /// whether the slabs are sparse: a CPU with two full sheaves makes no exchange, which would
    /// look.
    ///
    /// Does a small step, because the caller may be an allocation, and other threads wait for the
    /// lock meanwhile. Returns whether there is more to do now.
    pub(crate) fn release_idle(&self, cache: &Descriptor, now: u32) -> bool {
        let Some(mut stock) = self.stock() else {
            return false;
        };
        if now.wrapping_sub(stock.looked) >= IDLE_FOR {
            self.take_back(cache, &mut stock);
            let sheaves = stock.idle.min(IDLE_SHEAVES);
            for _ in 0..sheaves {
                if let Some(mut sheaf) = stock.take_oldest() {
                    self.flush_all(cache, &mut stock, &mut sheaf);
                    stock.put_empty(cache, sheaf);
                }
            }
            stock.idle -= sheaves;
            stock.extra = stock.extra.saturating_sub(sheaves);
            let goes_on = stock.idle > 0 || stock.slabs.release_idle(cache);
            cache.note_free(self, &stock);
            if goes_on {
                return true;
            }
            while stock.empty.length > MAX_EMPTY {
                stock.empty.take().into_iter().for_each(Sheaf::discard);
            }
            stock.looked = now;
            stock.overflowed = 0;
            stock.idle = stock.full.length;
            self.sparse.store(stock.slabs.is_sparse(cache), Relaxed);
            stock.slabs.begin_purge();
        }
        // While a thread has isolated its CPU, memory waits.
        stock.slabs.is_purging() && !spared::any() && stock.slabs.purge_idle(cache, PERIODS)
    }

    /// Gives back pages of free objects in some slabs, however lately the slabs were used. Returns
    /// whether there may be more such slabs.
    pub(crate) fn purge_more(&self, cache: &Descriptor) -> bool {
        let stock = self.stock();
        stock.is_some_and(|mut stock| stock.slabs.purge_idle(cache, 0))
    }

    /// Gives the objects of a sheaf to their slabs. Sets those of other parts aside there, so that
    /// no object is ever in hand without a lock: a thread that destroys the cache would miss it.
    fn flush_all(&self, cache: &Descriptor, stock: &mut Stock, sheaf: &mut Sheaf) {
        self.flush(cache, stock, sheaf);
        cache.set_all_aside(sheaf.objects());
        sheaf.set_len(0);
    }

    /// Gives those objects of a sheaf to their slabs that are of this part, and leaves the others.
    fn flush(&self, cache: &Descriptor, stock: &mut Stock, sheaf: &mut Sheaf) {
        let objects = sheaf.objects();
        // SAFETY: the lock is held. The objects in a sheaf are free.
        let others = unsafe { stock.give(cache, objects) };
        cache.note_free(self, stock);
        let flushed = objects.len() - others;
        stock.count(SlabEvent::Flushed, flushed);
        stock.count(SlabEvent::SheafFlush, flushed);
        sheaf.set_len(others);
    }
}

impl Stock {
    /// Returns whether the slabs are sparse, and few exchanges used small sheaves lately.
    fn is_draining(&self, cache: &Descriptor) -> bool {
        self.exchanges <= SPARSE_EXCHANGES && self.slabs.is_sparse(cache)
    }

    /// Returns whether this exchange uses small sheaves and keeps no full sheaf in the barn, so
    /// that sparse slabs drain. (A hardened cache keeps full-size sheaves, and its quarantine in
    /// the barn.) Counts the exchange.
    fn drains(&mut self, cache: &Descriptor) -> bool {
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

    /// Returns the most full sheaves that the barn holds now. Counts the exchange.
    fn barn_most(&mut self, cache: &Descriptor) -> usize {
        match self.drains(cache) {
            // A hardened cache allocates nothing from these, so its slabs drain all the same.
            true if cache.hardening.is_some() => QUARANTINE,
            true => 0,
            false => cache.barn_most(self.slabs.count, self.extra),
        }
    }

    /// Notes that `taken` objects came from slabs. The bound rises by a sheaf if the barn lately
    /// had no room for as many.
    fn note_return(&mut self, taken: usize) {
        if taken > 0 && self.overflowed >= taken {
            self.overflowed -= taken;
            self.extra = (self.extra + 1).min(MAX_BARN);
        }
    }

    /// Returns the capacity for a sheaf that is about to be filled or emptied.
    fn capacity(&mut self, cache: &Descriptor) -> usize {
        match cache.hardening.is_none() && self.drains(cache) {
            true => cache.capacity().min(SPARSE_CAPACITY),
            false => cache.capacity(),
        }
    }

    /// Returns an empty sheaf, from the barn or a new one. Returns `None` if there is no memory.
    fn take_empty(&mut self, cache: &Descriptor) -> Option<Sheaf> {
        match self.empty.take() {
            Some(mut sheaf) => {
                sheaf.resize(self.capacity(cache));
                Some(sheaf)
            }
            None => Sheaf::new(self.capacity(cache)),
        }
    }

    /// Gives the part's own objects back to their slabs. Moves the others to the front, and returns
    /// how many there are. Ends the process if one of the objects is not of this cache, or is not
    /// in use.
    ///
    /// # Safety
    ///
    /// No thread uses the objects.
    pub(crate) unsafe fn give(&mut self, cache: &Descriptor, objects: &mut [*mut u8]) -> usize {
        // SAFETY: the caller promises unused objects.
        match unsafe { self.slabs.give(cache, objects) } {
            Ok(others) => others,
            Err(wrong) => cache.refuse(wrong),
        }
    }

    fn put_full(&mut self, sheaf: Sheaf) {
        self.count(SlabEvent::BarnObjects, sheaf.len());
        self.full.put(sheaf);
    }

    /// Takes the full sheaf that was put last.
    fn take_full(&mut self) -> Option<Sheaf> {
        let sheaf = self.full.take()?;
        self.discount(SlabEvent::BarnObjects, sheaf.len());
        Some(sheaf)
    }

    /// Takes the full sheaf that has been in the barn the longest.
    fn take_oldest(&mut self) -> Option<Sheaf> {
        let sheaf = self.full.take_oldest()?;
        self.discount(SlabEvent::BarnObjects, sheaf.len());
        Some(sheaf)
    }

    fn put_empty(&mut self, cache: &Descriptor, sheaf: Sheaf) {
        let most = match cache.is_split() {
            true => MAX_EMPTY_SPLIT,
            false => MAX_EMPTY,
        };
        if self.empty.length < most {
            self.empty.put(sheaf);
        } else {
            sheaf.discard();
        }
    }
}
