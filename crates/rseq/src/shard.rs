//! Shards: what a counter keeps on one CPU, and the operations on the current unit's shard.
//!
//! A shard is four words, which all count modulo 2^64:
//!
//! | word | content |
//! |---|---|
//! | `up` | all that was added on this CPU |
//! | `down` | all that was taken away |
//! | `folded` | how much of `up - down` has been folded; while a fold is under way, a token |
//! | `batch` | how far the shard may be from `folded` before it should be folded |
//!
//! The *distance* is `up - down - folded`, a signed number. The operations keep it within twice the
//! batch on both sides. A shard is *claimed* while `folded` holds a token, which takes the distance
//! far beyond that. Neither `up` nor `down` of a claimed shard moves.
#![allow(
    unsafe_code,
    reason = "hands addresses of shards to the critical sections"
)]

use crate::Units;
use crate::atomic;
use crate::units::either;
use core::ptr::NonNull;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Release;

/// Bytes of a shard.
pub const SHARD_SIZE: usize = 32;
/// The largest batch.
pub const MAX_BATCH: u64 = 1 << 40;
/// Twice the largest distance that an unclaimed shard can have is below 2 to this power.
pub(crate) const DISTANCE_BITS: u32 = 43;
/// All tokens are larger than this and below twice as much. So a claimed shard's distance is far
/// from those of the others, and twice the distance overflows.
pub const TOKEN: u64 = 1 << 62;
/// What [`Units::count_up`] and [`Units::count_down`] return if they have added nothing.
pub const REFUSED: i64 = i64::MIN;

const _: () = assert!(4 * MAX_BATCH < 1 << DISTANCE_BITS);

/// Returns the offsets of the words of the shard at `offset`.
pub(crate) fn words_at(offset: usize) -> [usize; 4] {
    [offset, offset + 8, offset + 16, offset + 24]
}

/// Returns whether a shard whose `up - down` is `net` is claimed.
pub fn is_claimed(net: u64, folded: u64) -> bool {
    (net.wrapping_sub(folded) as i64).checked_mul(2).is_none()
}

/// A shard that the caller has claimed, to fold it.
///
/// The claim ends with [`release`](Self::release). A claim that is dropped instead stays.
#[derive(Debug)]
pub struct Claim {
    shard: NonNull<u8>,
    /// `up - down`, which does not move while the shard is claimed.
    pub net: u64,
    /// `folded` as it was.
    pub folded: u64,
    /// The shard's batch.
    pub batch: u64,
}

impl Claim {
    /// Returns the claim of the shard at `shard`, or `None` if that is null.
    #[inline(always)]
    pub(crate) fn new(shard: *mut u8, [net, folded, batch]: [u64; 3]) -> Option<Claim> {
        NonNull::new(shard).map(|shard| Claim {
            shard,
            net,
            folded,
            batch,
        })
    }

    /// Returns the address of the shard, which is in the unit of the CPU that claimed it.
    pub fn address(&self) -> usize {
        self.shard.as_ptr() as usize
    }

    /// Stores a new `folded`, and so ends the claim. Any thread on any CPU may do that. One store.
    #[inline]
    pub fn release(self, folded: u64) {
        // SAFETY: `claim` returned the address of a shard in an installed unit. Units stay valid
        // until the process ends.
        let word = unsafe { &*self.shard.as_ptr().add(16).cast::<AtomicU64>() };
        // Release: a thread that sees this value sees the total that it was added to.
        word.store(folded, Release);
    }
}

impl Units {
    /// Adds `n`, which is from 0 to [`MAX_BATCH`], to `up` of the current unit's shard at `offset`.
    ///
    /// Returns the batch less the distance, which is negative if the shard should be folded.
    /// Returns [`REFUSED`] and adds nothing if the distance would exceed twice the batch, if the
    /// shard is claimed, if `batch` is negative, if there is no unit, or (on the atomic backend) if
    /// the unit is locked. Costs one critical section, or a lock on the atomic backend.
    ///
    /// The add is a release: a thread that reads `up` by an acquire load sees everything that this
    /// thread did before.
    ///
    /// # Safety
    ///
    /// `offset` is a multiple of 8, is at least [`UNIT_HEADER`](crate::UNIT_HEADER), and leaves
    /// [`SHARD_SIZE`] bytes in every installed unit.
    #[inline(always)]
    pub unsafe fn count_up(&self, offset: usize, n: i64) -> i64 {
        either!(self, count_up(offset, n))
    }

    /// Adds `n`, which is from 0 to [`MAX_BATCH`], to `down` of the current unit's shard at
    /// `offset`.
    ///
    /// Returns the batch and the distance together. Otherwise the same as
    /// [`count_up`](Self::count_up).
    ///
    /// # Safety
    ///
    /// The same as for [`count_up`](Self::count_up).
    #[inline(always)]
    pub unsafe fn count_down(&self, offset: usize, n: i64) -> i64 {
        either!(self, count_down(offset, n))
    }

    /// Claims the current unit's shard at `offset`: stores `up - down + token` in `folded`.
    ///
    /// Returns `None` and stores nothing if the shard is claimed, if `batch` is 0 or negative, if
    /// there is no unit, or (on the atomic backend) if the unit is locked. Costs one critical
    /// section, or a lock on the atomic backend.
    ///
    /// # Safety
    ///
    /// The same as for [`count_up`](Self::count_up). `token` is above [`TOKEN`] and below 2^63.
    #[inline]
    pub unsafe fn claim(&self, offset: usize, token: u64) -> Option<Claim> {
        either!(self, claim(offset, token))
    }
}
