//! Slabs: runs of granules cut into objects, and a part's lists of slabs.
//!
//! # States of a slab
//!
//! | state | free objects | list |
//! |---|---|---|
//! | full | 0 | none; in a debugged cache, [`FULL`] |
//! | partial | 1 … n−1 | one of [`BINS`] lists, by the number of free objects |
//! | empty | n | [`EMPTY`] |
//!
//! In this module, an object is free if no caller and no sheaf has it. Each slab has a bit for each
//! object, in the private part that the arena keeps for the run's first granule. The bit is set
//! while the object is free. The objects are neither read nor written.
//!
//! # Invariants
//!
//! The holder of the part's lock reads and writes the lists, the slabs and their bits. It keeps
//! these invariants:
//!
//! 1. The field `free` of a slab is the number of its set bits.
//! 2. A slab is in the list that [`list_of`] gives for its `free`.
//! 3. No bit of a slab is set in the words below the word number `hint`.
//! 4. A slab is in the lists of the part whose number it has (`parts`). The part is of the node
//!    whose memory the slab is.
//!
//! # Which slab serves
//!
//! A slab goes back to the arena only when all its objects are free. If refills took objects from
//! any partial slab, a cache whose use has shrunk would keep many slabs with a few objects in use
//! each. So refills take from the fullest partial slab, and the other slabs drain. The order is
//! coarse: a list holds slabs with similar numbers of free objects, in no order.
//!
//! An object that moves only between callers and sheaves never reaches its slab, and keeps the slab
//! in use. So while a cache's slabs have many free objects, its sheaves are small and its barn is
//! empty (`part`). Such slabs are called *sparse* ([`Slabs::is_sparse`]).
//!
//! # How many slabs stay empty
//!
//! | slabs | how many stay empty |
//! |---|---|
//! | of one object, not debugged | none, because the arena serves them as fast |
//! | other | a sixteenth of the cache's slabs on the node |
//! | other, while the empty slabs of all caches have at most [`MAX_KEPT`] granules | two more |
//! | of a debugged cache | always two more |
//!
//! A debugged cache checks an empty slab before the slab goes back, so that it finds writes to the
//! slab's last freed object too. A slab with a fault stays until an allocation from it, or a check
//! of the cache, reports the fault. In such a cache, the slab that became empty first goes back
//! first.
//!
//! All other empty slabs go back at once to the arena, where their runs serve any size. Kept slabs
//! that stay empty for a while go back too ([`Slabs::release_idle`]).

use super::geometry::MAX_OBJECTS;
use super::objects::Objects;
use super::slab_bits::Wrong;
use crate::arena::{self, GRANULE, NodeRequest, Purpose};
use crate::segment::{NodeEvents, SlabEvent};
use core::cell::Cell;
use core::ptr::NonNull;
use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU16, AtomicU64, AtomicUsize};

/// Stands for no slab.
pub(crate) const NIL: u32 = u32::MAX;

/// The number of lists of partial slabs. List 0 has the fullest slabs.
pub(crate) const BINS: usize = 16;
/// The list of empty slabs. The slab that became empty last is first and serves first, because its
/// objects are likely to be in the processor's caches still.
pub(crate) const EMPTY: usize = BINS;
/// The list of a debugged cache's full slabs.
pub(crate) const FULL: usize = BINS + 1;
const LISTS: usize = BINS + 2;
/// Stands for no list.
const NONE: usize = LISTS;

/// The most slabs that one step of [`Slabs::release_idle`] gives back.
const IDLE_SLABS: usize = 4;
/// A node keeps up to 1/`SHARE_EMPTY` of a cache's slabs empty.
const SHARE_EMPTY: usize = 16;
/// A node keeps this many more empty slabs, while all caches together have few empty slabs.
const EMPTY_MORE: usize = 2;
/// All caches together have few empty slabs if these have at most this many granules: 4 MiB.
const MAX_KEPT: usize = (4 << 20) / GRANULE;

/// Slabs are sparse only if more than 1/`SHARE_SPARSE` of the objects in non-empty slabs are free.
const SHARE_SPARSE: usize = 4;
/// Slabs are sparse only if more than this many bytes in non-empty slabs are free.
const MIN_SPARSE: usize = 256 << 10;

/// See [`Slabs::has_many_free`].
const SHARE_FREE: usize = 8;
const MANY_FREE: usize = 256 << 10;

/// A value of `Slab::touched` that is not a period: the slab's free pages went to the system, and
/// no object was taken or given since then.
pub(crate) const PURGED: u32 = u32::MAX;

/// The number of granules in empty slabs of all caches.
static KEPT: AtomicUsize = AtomicUsize::new(0);

/// A slab's record, in the private part of its run's first granule. Only the holder of the node's
/// lock accesses the cells. A thread that holds an object may read `start` and the object's bit
/// without the lock.
#[repr(C)]
pub(crate) struct Slab {
    pub(crate) start: AtomicPtr<u8>,
    pub(crate) cache: Cell<*const Objects>,
    pub(crate) prev: Cell<u32>,
    pub(crate) next: Cell<u32>,
    pub(crate) free: Cell<u32>,
    /// No bit is set in the words of `bits` below this one.
    pub(crate) hint: Cell<u32>,
    /// The last [`Slabs::period`] in which objects were taken from the slab or given to it.
    pub(crate) touched: Cell<u32>,
    /// Whether the run's last page is a guard page.
    pub(crate) guarded: Cell<bool>,
    /// Whether the slab's only object reads as zeroes, because no caller has had the object yet.
    /// The thread that holds the object accesses this.
    pub(crate) fresh: AtomicBool,
    /// The number of the part that has the slab in its lists. A thread that holds an object may
    /// read it without the lock.
    pub(crate) part: AtomicU16,
    pub(crate) bits: [AtomicU64; MAX_OBJECTS / 64],
}

const _: () = assert!(size_of::<Slab>() <= arena::PRIVATE);

/// The slabs of a part of a cache.
pub(crate) struct Slabs {
    /// The first slab of each list.
    first: [u32; LISTS],
    /// A bit for each list that has a slab.
    filled: u32,
    /// The partial slab at which the next purge continues, or [`NIL`] to begin at the first
    /// (`purge`).
    pub(crate) cursor: u32,
    /// Counts the periods of [`release_idle`](Self::release_idle), at most about two a second.
    pub(crate) period: u32,
    pub(crate) empty: usize,
    /// The smallest number of empty slabs since the last call of
    /// [`release_idle`](Self::release_idle).
    idle: usize,
    /// All slabs: full, partial and empty.
    pub(crate) count: usize,
    /// Free objects in all slabs.
    free: usize,
    /// Where the holder of the node's lock counts events.
    pub(crate) events: &'static NodeEvents,
    /// The part's number.
    pub(crate) part: u16,
}

/// Returns the list that a slab of `cache` with `free` free objects belongs in.
pub(crate) fn list_of(cache: &Objects, free: u32) -> usize {
    match free as usize {
        0 if cache.slot_layout.is_none() => NONE,
        0 => FULL,
        free if free == cache.geometry.per_slab => EMPTY,
        // Less than `BINS`: `per_slab` has b + 1 bits, and the shift removes the lowest b − 3 of
        // them.
        free => {
            free >> cache
                .geometry
                .per_slab
                .ilog2()
                .saturating_sub(BINS.ilog2() - 1)
        }
    }
}

/// Returns the slab in which `object` lies.
///
/// # Safety
///
/// The object lies in a slab, which does not go back to the arena while the reference lives. The
/// caller holds the lock of the slab's node, or accesses no cell.
pub(crate) unsafe fn slab_of<'s>(object: *mut u8) -> &'s Slab {
    let record = arena::private_at(arena::head_of(object as usize));
    // SAFETY: the caller promises that this is a slab's record. It was initialised by `add_slab`.
    unsafe { &*record.cast() }
}

/// Returns the slab whose first granule is, or was, number `index`. The caller accesses only
/// atomics, because a thread may make another slab here meanwhile.
///
/// # Safety
///
/// The granule is or was the first of a slab.
pub(crate) unsafe fn slab_of_index<'s>(index: u32) -> &'s Slab {
    // SAFETY: the caller promises that there was a slab's record. The private part stays mapped,
    // and holds nothing else than slabs' records.
    unsafe { &*arena::private_at(index).cast() }
}

impl Slabs {
    pub(crate) const fn new(part: u16, events: &'static NodeEvents) -> Self {
        Slabs {
            first: [NIL; LISTS],
            filled: 0,
            cursor: NIL,
            period: 0,
            empty: 0,
            idle: 0,
            count: 0,
            free: 0,
            events,
            part,
        }
    }

    /// Returns the slab whose first granule is number `index`. The caller holds the node's lock,
    /// without which it cannot reach `self`.
    ///
    /// # Safety
    ///
    /// The granule is the first of a slab of this node.
    pub(crate) unsafe fn slab(&self, index: u32) -> &Slab {
        // SAFETY: the caller promises that this is a slab's record. `add_slab` initialised it.
        unsafe { &*arena::private_at(index).cast() }
    }

    /// Fills `slots` with objects, from its end. A sheaf pops its last slot first, so it hands out
    /// the objects in the order in which they were taken. Returns how many slots it filled: fewer
    /// than all only if no slab may be made (`grows`), or this node has no more memory.
    pub(crate) fn take(
        &mut self,
        cache: &Objects,
        request: NodeRequest,
        slots: &mut [*mut u8],
        grows: bool,
    ) -> usize {
        let mut left = slots.len();
        while left > 0 {
            let fullest = self.fullest();
            let new = || grows.then(|| self.add_slab(cache, request)).flatten();
            let Some(index) = fullest.or_else(new) else {
                break;
            };
            // SAFETY: the slab comes from this node's lists.
            let slab = unsafe { self.slab(index) };
            let before = slab.free.get();
            let taken = slab.take(cache.geometry.size, &mut slots[..left]);
            slab.touched.set(self.period);
            left -= taken;
            self.free -= taken;
            self.file(cache, index, list_of(cache, before));
        }
        self.check(cache);
        slots.len() - left
    }

    /// Gives the part's own objects back to their slabs, and surplus empty slabs back to the arena.
    /// Moves the objects of other parts to the front, and returns how many there are.
    ///
    /// # Errors
    ///
    /// The first wrong address. Objects before it may have been given back.
    ///
    /// # Safety
    ///
    /// No thread uses the objects.
    pub(crate) unsafe fn give(
        &mut self,
        cache: &Objects,
        objects: &mut [*mut u8],
    ) -> Result<usize, Wrong> {
        let (mut at, mut others) = (0, 0);
        while let Some(&object) = objects.get(at) {
            if !cache.contains(object) {
                return Err(Wrong::Foreign(object));
            }
            let index = arena::head_of(object as usize);
            // SAFETY: `contains` found that this is a slab of the cache. Its cells are accessed
            // only if the slab is this part's, whose lock is held.
            let slab = unsafe { self.slab(index) };
            if slab.part.load(Relaxed) != self.part {
                let start = slab.start() as usize;
                let is_beside =
                    |object: usize| object.wrapping_sub(start) < cache.geometry.slab_bytes;
                // The objects after it that are in the same slab need no look at the page map.
                loop {
                    objects.swap(at, others);
                    (at, others) = (at + 1, others + 1);
                    if !objects
                        .get(at)
                        .is_some_and(|&next| is_beside(next as usize))
                    {
                        break;
                    }
                }
                continue;
            }
            let before = slab.free.get();
            let put = slab.put(cache, &objects[at..])?;
            slab.touched.set(self.period);
            at += put;
            self.free += put;
            if before == 0 {
                self.events.add(SlabEvent::FreeAddPartial, 1);
            }
            if self.file(cache, index, list_of(cache, before)) == EMPTY {
                self.events.add(SlabEvent::FreeRemovePartial, 1);
                self.release_surplus(cache);
            }
        }
        self.check(cache);
        Ok(others)
    }

    /// Checks all slabs, in builds with `--cfg paranoid`.
    fn check(&self, cache: &Objects) {
        if cfg!(paranoid) {
            debug_assert!(self.validate(cache).is_ok());
        }
    }

    /// Returns whether the slabs are sparse: so many objects in non-empty slabs are free that the
    /// slabs should drain. (A slab is empty if all its objects are free.)
    pub(crate) fn is_sparse(&self, cache: &Objects) -> bool {
        debug_assert!(self.empty <= self.count);
        debug_assert!(self.free <= self.count * cache.geometry.per_slab);
        let free = self.free - self.empty * cache.geometry.per_slab;
        let all = (self.count - self.empty) * cache.geometry.per_slab;
        free > all / SHARE_SPARSE && free * cache.geometry.size > MIN_SPARSE
    }

    /// Returns whether many objects are free: more than an eighth, and more than [`MANY_FREE`]
    /// bytes. If they `were` many before, half of that is enough, so that the answer seldom
    /// changes.
    pub(crate) fn has_many_free(&self, cache: &Objects, were: bool) -> bool {
        let free = self.free << u32::from(were);
        let all = self.count * cache.geometry.per_slab;
        free > all / SHARE_FREE && free * cache.geometry.size > MANY_FREE
    }

    /// Returns the first slab of the fullest list: a partial slab, or else an empty one.
    fn fullest(&self) -> Option<u32> {
        let usable = self.filled & !(1 << FULL);
        (usable != 0).then(|| self.first[usable.trailing_zeros() as usize])
    }

    /// Moves a slab from list `from` to the list where it belongs, after its number of free objects
    /// has changed. Returns the list where it belongs.
    fn file(&mut self, cache: &Objects, index: u32, from: usize) -> usize {
        // SAFETY: the slab is of this node.
        let free = unsafe { self.slab(index) }.free.get();
        debug_assert!(free as usize <= cache.geometry.per_slab);
        let to = list_of(cache, free);
        if from != to {
            self.unlink(cache, from, index);
            self.link(cache, to, index);
        }
        to
    }

    /// Gives empty slabs back to the arena until the node has as few as it keeps.
    fn release_surplus(&mut self, cache: &Objects) {
        let more = match KEPT.load(Relaxed) > MAX_KEPT {
            true => 0,
            false => EMPTY_MORE,
        };
        // Keeps no slabs of one object, because the arena serves a run as fast as this list does.
        let most = match cache.geometry.per_slab {
            _ if cache.slot_layout.is_some() => self.count / SHARE_EMPTY + EMPTY_MORE,
            1 => 0,
            _ => self.count / SHARE_EMPTY + more,
        };
        while self.empty > most && self.release_empty(cache, 1) == 1 {}
    }

    /// Gives the run of an empty slab back to the arena. If the kernel refuses to open the run's
    /// guard page, keeps the slab and returns false: with a closed page, no other cache could use
    /// the run.
    fn release(&mut self, cache: &Objects, index: u32) -> bool {
        // SAFETY: the slab is of this node.
        let slab = unsafe { self.slab(index) };
        debug_assert_eq!(slab.free.get() as usize, cache.geometry.per_slab);
        // The run begins at a granule's start. The color, by which `start` is higher, is less than
        // a granule.
        let start = slab.start().wrapping_sub(slab.start() as usize % GRANULE);
        // SAFETY: all objects of the slab are free, so no thread uses the run. If the run has a
        // guard page, `close_guard` in `add_slab` closed it.
        if !unsafe { slab.open_guard(start, cache.geometry.granules) } {
            return false;
        }
        self.count -= 1;
        self.free -= cache.geometry.per_slab;
        self.events.add(SlabEvent::SlabFree, 1);
        if let Some(start) = NonNull::new(start) {
            // SAFETY: all objects of the slab are free and the slab is in no list, so no thread
            // uses the run.
            unsafe { arena::free_run(start) };
        }
        cache.uncharge();
        true
    }

    /// Forgets all slabs, and returns how many there were. The caller frees their runs, whatever
    /// objects are in use.
    pub(crate) fn abandon(&mut self, cache: &Objects) -> usize {
        KEPT.fetch_sub(self.empty * cache.geometry.granules, Relaxed);
        self.events.add(SlabEvent::SlabFree, self.count);
        let period = self.period;
        let before = core::mem::replace(self, Slabs::new(self.part, self.events));
        self.period = period;
        before.count
    }

    /// Gives the runs of all empty slabs back to the arena. Returns how many slabs went back.
    pub(crate) fn shrink(&mut self, cache: &Objects) -> usize {
        self.release_empty(cache, usize::MAX)
    }

    /// Gives back to the arena at most [`IDLE_SLABS`] of the slabs that stayed empty for a period.
    /// Returns whether there are more. If there are none, begins the next period.
    pub(crate) fn release_idle(&mut self, cache: &Objects) -> bool {
        let most = self.idle.min(IDLE_SLABS);
        let left = self.idle - most;
        if self.release_empty(cache, most) == most && left > 0 {
            self.idle = left;
            return true;
        }
        self.idle = self.empty;
        // The remainder is never equal to `PURGED`, which marks purged slabs.
        self.period = (self.period + 1) % PURGED;
        false
    }

    fn release_empty(&mut self, cache: &Objects, most: usize) -> usize {
        let mut released = 0;
        while released < most && self.filled >> EMPTY & 1 == 1 {
            let index = match cache.slot_layout {
                None => self.first[EMPTY],
                Some(_) => match self.oldest_intact(cache) {
                    Some(index) => index,
                    None => break,
                },
            };
            self.unlink(cache, EMPTY, index);
            if !self.release(cache, index) {
                self.link(cache, EMPTY, index);
                break;
            }
            released += 1;
        }
        released
    }

    /// Returns the empty slab of a debugged cache that became empty first. Leaves out slabs with a
    /// fault.
    #[cold]
    fn oldest_intact(&self, cache: &Objects) -> Option<u32> {
        let mut index = self.first[EMPTY];
        // SAFETY: all slabs of the list are of this node.
        let slab = |index| unsafe { self.slab(index) };
        while slab(index).next.get() != NIL {
            index = slab(index).next.get();
        }
        while index != NIL && !cache.is_intact(slab(index)) {
            index = slab(index).prev.get();
        }
        (index != NIL).then_some(index)
    }

    /// Makes a slab, and puts it into the list of empty slabs.
    fn add_slab(&mut self, cache: &Objects, request: NodeRequest) -> Option<u32> {
        // Takes a run of this node only. A slab must be in the lists of the node whose memory it
        // is, because frees give an object to the node of its memory.
        let (granules, entry) = (cache.geometry.granules, cache.id.entry());
        let purpose = match cache.is_small() {
            true => Purpose::SmallObjects,
            false => Purpose::Other,
        };
        let run = cache.charged(|| arena::alloc_run_on(granules, request, entry, true, purpose))?;
        let index = arena::index_of_run(run.start);
        let objects = cache.geometry.per_slab;
        let start = run.start.as_ptr();
        let fresh = run.zeroed && objects == 1 && !cache.checks() && !cache.prepares();
        let record = arena::private_at(index).cast::<Slab>();
        // SAFETY: `alloc_run_on` gave the run, with its private part, to this thread alone. The
        // fields that are not written here are words, which have no invalid content.
        let slab = unsafe {
            (&raw mut (*record).guarded).write(Cell::new(false));
            (&raw mut (*record).fresh).write(AtomicBool::new(fresh));
            &*record
        };
        let first = start.wrapping_add(cache.geometry.color_of(index));
        slab.start.store(first, Relaxed);
        slab.cache.set(cache);
        slab.part.store(self.part, Relaxed);
        slab.free.set(objects as u32);
        slab.hint.set(0);
        // Writes only the words that the objects need, and leaves the other cache lines of the
        // private part untouched.
        for (nth, word) in slab.bits[..objects.div_ceil(64)].iter().enumerate() {
            let left = objects - nth * 64;
            word.store(if left < 64 { (1 << left) - 1 } else { u64::MAX }, Relaxed);
        }
        if cache.hardening.is_some() {
            // SAFETY: the run was allocated above, so no other thread uses it. It reads as zeroes
            // when `close_guard` is called. A hardened cache puts no object into the last page.
            unsafe {
                if !run.zeroed {
                    start.write_bytes(0, cache.geometry.granules * GRANULE);
                }
                slab.close_guard(start, cache.geometry.granules);
            }
        }
        if cache.prepares() {
            for nth in 0..objects {
                // SAFETY: the object lies in the new slab, which no other thread knows.
                unsafe { cache.prepare(first.add(nth * cache.geometry.size)) };
            }
        }
        self.count += 1;
        self.free += cache.geometry.per_slab;
        self.events.add(SlabEvent::SlabAlloc, 1);
        self.link(cache, EMPTY, index);
        Some(index)
    }

    /// Returns the slab after slab `index`, which is in `list`. After the last slab of a list comes
    /// the first of the next list of partial slabs that has one. Returns [`NIL`] after the last
    /// partial slab.
    pub(crate) fn after(&self, list: usize, index: u32) -> u32 {
        // SAFETY: the slab is in a list of this node.
        match unsafe { self.slab(index) }.next.get() {
            NIL => self.first_partial(list + 1),
            next => next,
        }
    }

    /// Returns the first partial slab of list `list`, or of the next list that has one. Returns
    /// [`NIL`] if no list has one.
    pub(crate) fn first_partial(&self, list: usize) -> u32 {
        let lists = self.first[..BINS].iter().skip(list);
        lists.copied().find(|&first| first != NIL).unwrap_or(NIL)
    }

    pub(crate) fn first_of(&self, list: usize) -> u32 {
        self.first[list]
    }

    /// Puts a slab at the front of a list.
    fn link(&mut self, cache: &Objects, list: usize, index: u32) {
        if list == NONE {
            return;
        }
        if list == EMPTY {
            self.empty += 1;
            KEPT.fetch_add(cache.geometry.granules, Relaxed);
        }
        let next = core::mem::replace(&mut self.first[list], index);
        debug_assert_eq!(self.filled >> list & 1 == 1, next != NIL);
        self.filled |= 1 << list;
        // SAFETY: both slabs are of this node.
        unsafe {
            self.slab(index).prev.set(NIL);
            self.slab(index).next.set(next);
            if next != NIL {
                debug_assert_eq!(self.slab(next).prev.get(), NIL);
                self.slab(next).prev.set(index);
            }
        }
    }

    fn unlink(&mut self, cache: &Objects, list: usize, index: u32) {
        if list == NONE {
            return;
        }
        if list == EMPTY {
            self.empty -= 1;
            self.idle = self.idle.min(self.empty);
            KEPT.fetch_sub(cache.geometry.granules, Relaxed);
        }
        if self.cursor == index {
            self.cursor = self.after(list, index);
        }
        // SAFETY: the slab and its neighbours are of this node.
        unsafe {
            let (prev, next) = (self.slab(index).prev.get(), self.slab(index).next.get());
            if prev == NIL {
                debug_assert_eq!(self.first[list], index);
                self.first[list] = next;
                self.filled &= !(u32::from(next == NIL) << list);
            } else {
                debug_assert_eq!(self.slab(prev).next.get(), index);
                self.slab(prev).next.set(next);
            }
            if next != NIL {
                self.slab(next).prev.set(prev);
            }
        }
    }
}
