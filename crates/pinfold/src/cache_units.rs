//! The words of all caches in each CPU's unit, and the numbers of the caches.
//!
//! A *unit* is the memory of one CPU: 128 KiB. A cache has four words in each unit. A word is 0 if
//! there is no sheaf. Otherwise it describes a sheaf (`slab/cpu/sheaf.rs`): an address that encodes
//! both the sheaf's block and how many objects are in it. For the cache with number n, the words
//! are at these offsets:
//!
//! | offset | sheaf | use |
//! |---|---|---|
//! | 0 … 63 | | the unit's header |
//! | 64 … 79 | | the heap profile's words ([`COUNTDOWN`]) |
//! | 8·n | main | the fast paths pop from it and push to it |
//! | 8·n + 32 KiB | spare | a second sheaf, for the slow paths |
//! | 8·n + 64 KiB | deferred | deferred frees push to it (`deferred`) |
//! | 8·n + 96 KiB | held | frees to a hardened cache push to it (`harden`) |
//!
//! A hardened cache has no main sheaf, and allocates from the spare. A debugged cache has only the
//! deferred sheaf.
//!
//! # Who may write a word
//!
//! 1. An operation of [`SHEAF_UNITS`] on the unit's CPU. The operation is a critical section. On
//!    the atomic backend, a short lock in the unit replaces the critical section.
//! 2. A thread that holds [`STOPPING`] and has stopped the unit (`drain` in
//!    `slab/cpu/sheaf_units.rs`; `slab/cpu/idle.rs`). While the unit is stopped, operations on it
//!    fail.
//! 3. The words at [`COUNTDOWN`] have rules of their own (`profile/countdown.rs`).

use crate::lock::{Lock, Rank};
use crate::topology::facts;
use core::sync::atomic::AtomicU64;
use pinfold_rseq::{Units, near};

/// One more than the largest number of a cache. The smallest numbers are not used, so slightly
/// fewer caches can exist at once. A cache's number also says where its words are in every CPU's
/// unit.
pub const MAX_CACHES: usize = 4096;
/// The number of size classes of `kmalloc`. Each has a cache, and these caches have the smallest
/// numbers.
pub const CLASSES: usize = 103;
/// The number of classes of blocks that are not sampled. The caches of *data*, blocks without
/// pointers, one for each size class, have the numbers after those of the size classes. `kmalloc`
/// counts them as classes from [`CLASSES`] on.
pub(crate) const UNSAMPLED: usize = 2 * CLASSES;
/// The number of all classes. The caches of *sampled* blocks, one for each class of unsampled ones,
/// have the numbers after those. `kmalloc` counts them as classes from [`UNSAMPLED`] on.
pub(crate) const ALL_CLASSES: usize = 2 * UNSAMPLED;
/// The number of classes whose blocks the fast path of `free` frees: all size classes, and the data
/// classes up to 1536 bytes. One more, and the comparison would take one more instruction on
/// x86-64, where the operands up to 127 are encoded in one byte.
const FREED_FAST: usize = 128;
/// The offset of the two words that count bytes down to a heap profile's next sample (`profile`).
/// They share a cache line with the main sheaves of small classes.
pub(crate) const COUNTDOWN: usize = pinfold_rseq::UNIT_HEADER;
/// The smallest number that a cache can have. The words of a cache with a smaller number would lie
/// in the units' headers, or at [`COUNTDOWN`].
const FIRST: usize = COUNTDOWN / 8 + 2;

// Texts of errors and the documents name this number of caches that a program may have.
const _: () = assert!(MAX_CACHES - FIRST - ALL_CLASSES == 3_674);

/// The largest number of parts of a cache on a node (`slab/node/parts.rs`).
pub(crate) const MAX_PARTS: usize = 256;

/// Returns how many parts a split cache has on each node: one for each CPU up to the last one that
/// was online at the start, and at least 2 if more CPUs are possible. Costs two loads.
pub(crate) fn most_parts() -> usize {
    let possible = pinfold_rseq::possible().clamp(1, MAX_PARTS);
    facts::cpus_at_start().clamp(possible.min(2), possible)
}

/// The distance of the main sheaf's word from itself, for callers that pass one of these distances.
pub(crate) const MAIN: usize = 0;
/// Bytes from the word of a main sheaf to the word of the spare.
pub(crate) const SPARE: usize = MAX_CACHES * 8;
/// Bytes from the word of a main sheaf to the word of the deferred sheaf.
pub(crate) const DEFERRED: usize = 2 * SPARE;
/// Bytes from the word of a main sheaf to the word of the held sheaf.
pub(crate) const HELD: usize = 3 * SPARE;
/// Bytes of a unit.
pub(crate) const UNIT: usize = 4 * SPARE;

/// The units of all caches.
// `near!` requires `#[used]`.
#[used]
pub(crate) static SHEAF_UNITS: Units = Units::new();

/// A thread holds this lock while it installs a unit, stops CPUs, takes idle sheaves, or retires a
/// cache.
pub(crate) static STOPPING: Lock<()> = Lock::new(Rank::Stopping, ());

/// Returns the units. For fast paths: costs no load from the global offset table.
#[inline(always)]
pub(crate) fn units() -> &'static Units {
    near!(SHEAF_UNITS, Units)
}

/// Returns the word at `offset` of `block`, which is a unit, or a block as large as a unit.
pub(crate) fn word<'u>(block: *mut u8, offset: usize) -> &'u AtomicU64 {
    // SAFETY: units, and the blocks that `idle` makes for them, are never unmapped, and the offsets
    // of a cache's words lie in them. All accesses to the words are atomic.
    unsafe { &*block.add(offset).cast() }
}

/// The number of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CacheId(u16);

impl CacheId {
    /// Returns the number of the cache of `class`, which may be a twin.
    #[inline(always)]
    pub(crate) const fn of_class(class: usize) -> CacheId {
        CacheId((FIRST + class) as u16)
    }

    /// Returns the class whose cache has this number, if the fast path of `free` frees its blocks:
    /// a size class, or the data class of a small one.
    #[inline(always)]
    pub(crate) const fn class(self) -> Option<usize> {
        let class = (self.0 as usize).wrapping_sub(FIRST);
        if class < FREED_FAST {
            Some(class)
        } else {
            None
        }
    }

    /// Returns the class whose cache has this number, if there is one: a size class or one of its
    /// twins.
    pub(crate) const fn any_class(self) -> Option<usize> {
        let class = (self.0 as usize).wrapping_sub(FIRST);
        if class < ALL_CLASSES {
            Some(class)
        } else {
            None
        }
    }

    /// Returns the number at position `nth`, counted from 0, or `None` if there are fewer numbers.
    /// The numbers of the size classes come first.
    pub(crate) fn nth(nth: usize) -> Option<CacheId> {
        (nth < MAX_CACHES - FIRST).then(|| CacheId((FIRST + nth) as u16))
    }

    /// Returns the position that [`nth`](Self::nth) takes.
    pub(crate) fn position(self) -> usize {
        self.index() - FIRST
    }

    /// Returns the number that an entry of the page map contains.
    pub(crate) fn from_entry(entry: u16) -> CacheId {
        CacheId(entry)
    }

    /// Returns the value that the page map holds for the slabs of this cache.
    #[inline(always)]
    pub(crate) fn entry(self) -> u16 {
        self.0
    }

    /// Returns the number as an index into tables that have an element for each cache.
    #[inline(always)]
    pub(crate) fn index(self) -> usize {
        usize::from(self.0)
    }

    /// Returns the offset of the main sheaf's word in every unit.
    #[inline(always)]
    pub(crate) const fn main(self) -> usize {
        self.0 as usize * 8
    }

    /// Returns the number of the cache whose main sheaf's word is at `offset`.
    #[inline(always)]
    pub(crate) fn of_main(offset: usize) -> CacheId {
        CacheId((offset / 8) as u16)
    }
}
