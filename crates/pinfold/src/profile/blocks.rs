//! The sampled blocks in use, by address: a hash table of fixed size.
//!
//! An entry's address is 0 (free), [`BUSY`] (its writer is at work), or that of a block. A thread
//! takes a free entry by a compare-exchange, writes the other fields, and then stores the address.
//! Only the owner of a block looks for its entry, and it does so after the address was stored. So
//! no two threads use the same entry at the same time.

use super::records::Counts;
use crate::sys;
use core::num::NonZero;
use core::ptr::null_mut;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize};

/// Entries of the table: enough for 64 GiB at the default interval. A block can use only [`WINDOW`]
/// of them, so some samples are dropped before the table is full.
const ENTRIES: usize = 1 << 17;
/// How many entries, from the one that the hash of the block's address selects, may hold a block.
const WINDOW: usize = 32;
const BUSY: usize = 1;
/// Stands in place of a record's number if the sample has no record.
pub(super) const NO_RECORD: u32 = u32::MAX;

/// The block of the size class that stands in for a sampled one: which slab the sampled block would
/// lie in without the profile.
#[derive(Clone, Copy, Debug)]
pub struct StandIn {
    /// The number of the slab's first granule. (Granule 0 is part of no slab.)
    pub slab: NonZero<u32>,
    /// The block that is freed with the sampled one, or null.
    pub block: *mut u8,
}

impl StandIn {
    /// Stands for no slab.
    pub const NONE: StandIn = StandIn {
        slab: NonZero::<u32>::MAX,
        block: null_mut(),
    };
}

struct Entry {
    address: AtomicUsize,
    record: AtomicU32,
    /// The fields of the block's [`StandIn`].
    slab: AtomicU32,
    stand_in: AtomicPtr<u8>,
    /// Bytes of the block.
    size: AtomicUsize,
    /// How many blocks the sample stands for, in the fixed point of [`Counts`].
    objects: AtomicU64,
    /// How many bytes the sample stands for.
    bytes: AtomicU64,
}

impl Entry {
    fn sample(&self) -> Lifted {
        Lifted {
            record: self.record.load(Relaxed),
            size: self.size.load(Relaxed),
            counts: Counts {
                objects: self.objects.load(Relaxed),
                bytes: self.bytes.load(Relaxed),
            },
            stand_in: StandIn {
                slab: NonZero::new(self.slab.load(Relaxed)).unwrap_or(NonZero::<u32>::MAX),
                block: self.stand_in.load(Relaxed),
            },
        }
    }
}

/// The first entry. Null before the profile was on.
static TABLE: AtomicPtr<Entry> = AtomicPtr::new(null_mut());

/// Makes the table. Returns false if there is no memory.
pub(super) fn prepare() -> bool {
    if TABLE.load(Relaxed).is_null() {
        let Some(memory) = sys::map_sparse(ENTRIES * size_of::<Entry>()) else {
            return false;
        };
        // Release pairs with the acquire in `window`.
        TABLE.store(memory.as_ptr().cast(), Release);
    }
    true
}

/// Returns the entries in which a block may be.
fn window(block: *mut u8) -> impl Iterator<Item = &'static Entry> {
    let table = TABLE.load(Acquire);
    let hash = (block as usize >> 4).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - 17);
    (0..if table.is_null() { 0 } else { WINDOW }).map(move |nth| {
        // SAFETY: the table has `ENTRIES` zeroed entries and stays mapped. All fields are atomics.
        unsafe { &*table.add((hash + nth) % ENTRIES) }
    })
}

/// The sample of a block, out of the table.
#[derive(Clone, Copy, Debug)]
pub struct Lifted {
    pub(super) record: u32,
    /// Bytes of the block.
    pub(super) size: usize,
    /// What the sample stands for.
    pub(super) counts: Counts,
    pub(super) stand_in: StandIn,
}

/// Enters a block that has no entry. Returns false if no entry is free.
pub(super) fn insert(block: *mut u8, sample: Lifted) -> bool {
    for entry in window(block) {
        // Acquire pairs with the release in `remove`: the last owner has read the fields.
        let taken = entry.address.compare_exchange(0, BUSY, Acquire, Relaxed);
        if taken.is_ok() {
            entry.record.store(sample.record, Relaxed);
            entry.size.store(sample.size, Relaxed);
            entry.objects.store(sample.counts.objects, Relaxed);
            entry.bytes.store(sample.counts.bytes, Relaxed);
            entry.slab.store(sample.stand_in.slab.get(), Relaxed);
            entry.stand_in.store(sample.stand_in.block, Relaxed);
            // Release pairs with the acquire in `remove`.
            entry.address.store(block as usize, Release);
            return true;
        }
    }
    false
}

/// Calls `f` with each block in the table, and with its sample. A block that another thread enters
/// or removes meanwhile may be left out, or have the sample of a later block.
pub(super) fn for_each(mut f: impl FnMut(usize, Lifted)) {
    let table = TABLE.load(Acquire);
    for nth in 0..if table.is_null() { 0 } else { ENTRIES } {
        // SAFETY: as in `window`.
        let entry = unsafe { &*table.add(nth) };
        // Acquire pairs with the release in `insert`.
        match entry.address.load(Acquire) {
            0 | BUSY => {}
            block => f(block, entry.sample()),
        }
    }
}

/// Returns whether `address` lies in the table.
pub(super) fn holds(address: usize) -> bool {
    let start = TABLE.load(Relaxed) as usize;
    start != 0 && address.wrapping_sub(start) < ENTRIES * size_of::<Entry>()
}

/// Removes a block, and returns its sample. Returns `None` if the block has no entry.
pub(super) fn remove(block: *mut u8) -> Option<Lifted> {
    // Acquire pairs with the release in `insert`: the owner of the block sees the fields.
    let entry = window(block).find(|entry| entry.address.load(Acquire) == block as usize)?;
    let sample = entry.sample();
    // Release pairs with the acquire in `insert`.
    entry.address.store(0, Release);
    Some(sample)
}
