//! The registry of all caches: from a cache's number to its descriptor.
//!
//! A program may make and destroy a million caches. So a number and its descriptor are used again
//! after the cache was destroyed. But a thread may find a cache in the registry, and still use its
//! descriptor while another thread destroys the cache: a thread that reads slabinfo, a tick that
//! takes idle sheaves, a report that names the cache of an object. If a new cache got the
//! descriptor now, such a thread would take the new cache for the old one, or see fields of both.
//! To prevent that, a thread pins the descriptor while it reads it, and a pinned descriptor is not
//! used again.
//!
//! # States
//!
//! Each number has an entry in [`REGISTRY`] and a word in [`LIVES`]. A word has three parts: the
//! *birth*, which says how many caches have had the number, the bit [`ALIVE`], and the *pins*: how
//! many [`Pinned`] values exist.
//!
//! | state | entry | `ALIVE` | who may read the descriptor | who may write it | next |
//! |---|---|---|---|---|---|
//! | unused | null | no | | | alive |
//! | alive | the descriptor | yes | the cache's owner, threads that pin it | the same threads, atomics and locks only | retired |
//! | retired, pinned | the descriptor | no | threads that pinned it before | the same threads, atomics and locks only | retired |
//! | retired, without pins | the descriptor | no | the holder of the registry's lock | the same thread, all fields | alive |
//!
//! 1. Before a thread reads the descriptor, it calls [`pin`], which adds 1 to the pins by a
//!    compare-exchange, and only while `ALIVE` is set. Dropping the [`Pinned`] value subtracts 1.
//! 2. [`retire`] clears `ALIVE`. The caller owns the cache, has taken its sheaves from all CPUs,
//!    and has seen that each node has no slab. From then on, pins only become fewer.
//! 3. `Descriptor::create` gives a new cache a number that [is free](is_free). It writes all
//!    fields, and then [`publish`] sets `ALIVE` with the next birth.
//!
//! Steps 2 and 3 need the registry's lock. In step 3, no thread can pin the descriptor, and no pin
//! is left. So the maker is the only thread that uses the descriptor, just as the last owner of a
//! reference count is. Both sides meet in one word, so no order of operations on different words
//! matters, and no loom model covers this protocol.
//!
//! # Why no thread takes the old cache for the new one
//!
//! * A thread that reads the descriptor without a lock pins it, so there is no new cache yet.
//! * A view ([`Info`](crate::slab::Info)) may be kept for as long as the program likes. It holds
//!   copies of what never changes, and the birth. [`pin_same`] fails if the birth differs.
//! * A tick with a sheaf in its hand pins the descriptor. If the sheaf has objects, their slabs
//!   keep the cache from being retired. A heap ends although its objects are in use, so it first
//!   takes the lock that such a tick holds (`heaps`).
//! * An object of a deferred free is in use until its grace period is over. So its slab keeps the
//!   cache from being retired.
//! * A word of a CPU's unit, an entry of the page map and a row of the statistics segment go by the
//!   number, and the number is bound to the descriptor. `retire` empties the row, whose state
//!   counts changes for readers in other processes.
//! * A fork holds the registry's lock, so it finds no half-made cache. Pins of threads that do not
//!   exist in the child stay, and the child does not use these descriptors again.
//! * A thread that leaves by a jump, or ends, may leave its pin behind. The descriptor is then not
//!   used again.
//!
//! So there are at most as many descriptors as caches at a time, plus those that are pinned,
//! including those whose pins stay.
//!
//! The caches of the size classes are never retired. They need no pins, so finding them costs no
//! atomic read-modify-write.

use super::descriptor::Descriptor;
use crate::cache_units::{CacheId, MAX_CACHES};
use core::ops::Deref;
use core::ptr::{NonNull, null_mut};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, fence};

static REGISTRY: [AtomicPtr<Descriptor>; MAX_CACHES] =
    [const { AtomicPtr::new(null_mut()) }; MAX_CACHES];

/// The words of all numbers: the birth in the upper half, [`ALIVE`], and the pins below it.
static LIVES: [AtomicU64; MAX_CACHES] = [const { AtomicU64::new(0) }; MAX_CACHES];

const ALIVE: u64 = 1 << 31;
const PINS: u64 = ALIVE - 1;
const BIRTH_SHIFT: u32 = 32;

/// The count of numbers from the smallest one to the largest one that was ever used.
static USED: AtomicUsize = AtomicUsize::new(1);

/// A cache whose descriptor no other cache gets while this value exists. The owner may destroy the
/// cache meanwhile.
pub(crate) struct Pinned {
    cache: NonNull<Descriptor>,
    /// The word that counts this pin. `None` for the cache of a class.
    life: Option<&'static AtomicU64>,
}

impl Deref for Pinned {
    type Target = Descriptor;

    #[inline]
    fn deref(&self) -> &Descriptor {
        // SAFETY: the pin keeps the descriptor from being written anew, and its memory is
        // never freed.
        unsafe { self.cache.as_ref() }
    }
}

impl Drop for Pinned {
    #[inline]
    fn drop(&mut self) {
        if let Some(life) = self.life {
            // Release pairs with the acquire in `is_free`: the thread that gives the descriptor
            // to a new cache comes after all that this thread did with the old one.
            life.fetch_sub(1, Release);
        }
    }
}

fn entry_of(id: CacheId) -> Option<NonNull<Descriptor>> {
    // Acquire pairs with the release in `publish`: a thread that sees the address sees the fields
    // of a class's cache. For other caches, `LIVES` decides.
    NonNull::new(REGISTRY.get(id.index())?.load(Acquire))
}

/// Returns the cache of a class, or of a twin, if it was made. `id` is the number of a class.
#[inline]
pub(crate) fn of_class_id(id: CacheId) -> Option<&'static Descriptor> {
    debug_assert!(id.any_class().is_some());
    // SAFETY: the entry of a class is null or the address of a descriptor that is never retired.
    entry_of(id).map(|cache| unsafe { cache.as_ref() })
}

/// Returns the cache of a class, or of a twin, if it was made.
#[inline]
pub(crate) fn of_class(class: usize) -> Option<&'static Descriptor> {
    of_class_id(CacheId::of_class(class))
}

/// Returns the cache with number `id`, for a caller that keeps the cache alive.
///
/// # Safety
///
/// The caller owns the cache, or an object of it, for as long as it uses the reference.
pub(crate) unsafe fn kept_alive(id: CacheId) -> Option<&'static Descriptor> {
    // SAFETY: the caller promises that the cache is not retired meanwhile.
    entry_of(id).map(|cache| unsafe { cache.as_ref() })
}

/// Pins the cache with number `id`, if there is one. Costs a compare-exchange, except for the cache
/// of a class.
pub(crate) fn pin(id: CacheId) -> Option<Pinned> {
    let cache = entry_of(id)?;
    if id.any_class().is_some() {
        return Some(Pinned { cache, life: None });
    }
    let life = &LIVES[id.index()];
    let mut now = life.load(Relaxed);
    while now & ALIVE != 0 {
        // Acquire pairs with the release in `publish`: this thread sees the fields of the cache
        // that is alive. The entry was read before, but the address in it never changes.
        match life.compare_exchange_weak(now, now + 1, Acquire, Relaxed) {
            Ok(_) => {
                let life = Some(life);
                return Some(Pinned { cache, life });
            }
            Err(other) => now = other,
        }
    }
    None
}

/// Pins the cache with number `id`, if it is the one that was born with `birth`.
pub(crate) fn pin_same(id: CacheId, birth: u32) -> Option<Pinned> {
    pin(id).filter(|_| birth_of(id) == birth)
}

/// Returns the birth of the cache with number `id`. The caller owns or pins the cache, so the
/// number cannot pass to another cache.
pub(crate) fn birth_of(id: CacheId) -> u32 {
    (LIVES[id.index()].load(Relaxed) >> BIRTH_SHIFT) as u32
}

impl Pinned {
    /// Returns whether the cache is still alive. If so, it was alive during all reads that this
    /// thread has made since it pinned the cache.
    pub(crate) fn is_alive(&self) -> bool {
        // Pairs with the fence in `retire`: a thread that has read a word that was cleared after
        // that fence also sees that the cache is gone.
        fence(Acquire);
        self.life.is_none_or(|life| life.load(Relaxed) & ALIVE != 0)
    }
}

/// Pins the cache that `entry`, an entry of the page map, names, if there is one.
pub(crate) fn pin_by_entry(entry: u16) -> Option<Pinned> {
    pin(CacheId::from_entry(entry))
}

/// Returns whether the descriptor of number `id` may become a new cache's: the number is retired or
/// was never used, and has no pins. The caller holds the registry's lock.
pub(crate) fn is_free(id: CacheId) -> bool {
    // Acquire pairs with the release in `Pinned::drop`.
    LIVES[id.index()].load(Acquire) & (ALIVE | PINS) == 0
}

/// Returns the descriptor of a number that [is free](is_free), or `None` if the number never had
/// one. The caller holds the registry's lock.
pub(crate) fn retired(id: CacheId) -> Option<NonNull<Descriptor>> {
    debug_assert!(is_free(id));
    entry_of(id)
}

/// Makes the cache with number `id` visible. The caller holds the registry's lock, and has written
/// all fields of the descriptor.
pub(crate) fn publish(id: CacheId, cache: NonNull<Descriptor>) {
    USED.fetch_max(id.position() + 1, Relaxed);
    // Pairs with the acquire in `entry_of`: a thread that sees the address sees the fields.
    REGISTRY[id.index()].store(cache.as_ptr(), Release);
    if id.any_class().is_none() {
        let life = &LIVES[id.index()];
        let birth = (life.load(Relaxed) >> BIRTH_SHIFT).wrapping_add(1);
        // Pairs with the acquire in `pin`. A plain store, because a free number has no pins, and
        // gets none before this store.
        life.store(birth << BIRTH_SHIFT | ALIVE, Release);
    }
}

/// Ends the life of the cache with number `id`. The caller holds the registry's lock and owns the
/// cache, which is not a class's.
pub(crate) fn retire(id: CacheId) {
    LIVES[id.index()].fetch_and(!ALIVE, Release);
    // Pairs with the fence in `Pinned::is_alive`: a thread that has read a word that the caller
    // clears from now on also sees that the cache is gone.
    fence(Release);
}

/// Pins the cache that `turn` selects, if it exists. Successive turns select all numbers that were
/// ever used, one after the other. Also returns how many rounds the turns before have made.
pub(crate) fn in_turn(turn: u32) -> Option<(Pinned, usize)> {
    let (turn, used) = (turn as usize, used());
    Some((pin(CacheId::nth(turn % used)?)?, turn / used))
}

/// Returns the count of numbers from the smallest one to the largest one that was ever used. At
/// least 1.
pub(crate) fn used() -> usize {
    USED.load(Relaxed)
}

/// Returns all caches, in the order of their numbers. Each is pinned until the caller drops it.
pub(crate) fn all() -> impl Iterator<Item = Pinned> {
    (0..MAX_CACHES).filter_map(CacheId::nth).filter_map(pin)
}

/// Calls `f` with each cache, in the order of their numbers.
pub(crate) fn for_each(mut f: impl FnMut(&Descriptor)) {
    all().for_each(|cache| f(&cache));
}
