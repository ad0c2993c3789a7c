//! The counter that goes up and down: its handle, adding to it, and reading it without disturbing anyone.

use super::error::CounterError;
use super::exact::order_own_adds;
use super::reach::Base;
use super::shards::{BATCH_MOST, Moved, SIZE, Shards};
use super::{fork, stripe, watch};
use crate::percpu::{self, CLOSED};
use core::cmp::Ordering;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU64, AtomicUsize};

/// Stands for the default batch until the number of CPUs is known.
const DEFAULT: u64 = 0;
/// In [`PercpuCounter::rule`]: the other bits are the largest drift, not a batch.
const WIDENS: u64 = 1 << 63;
/// The kernel's is 32. Measured: with two CPUs at it a fold takes as long as a hundred adds, a twentieth of the time at this
/// batch.
const DEFAULT_LEAST: u64 = 1024;

/// A counter of 64 bits with sign that every CPU adds to on its own.
///
/// The handle is 128 bytes: a line that adds only read, and a line with the base, which large adds
/// write. So a large add does not slow down other CPUs' adds, not even those to its neighbours in
/// an array. Each CPU that adds, and the total, takes 32 bytes more, packed side by side with those
/// of other counters. They are there from the first add on; a counter that finds no memory for them
/// works as one atomic.
///
/// # Costs
///
/// An add within the batch is one critical section on the CPU's own line. One add in a batch folds, which takes one atomic add
/// to the total, whose line the CPUs share. An add beyond the batch is one atomic add to the counter's shared *base*. None of them waits.
///
/// # Overflow
///
/// The value wraps around at 2^63, as `i64::wrapping_add`; [`compare`](Self::compare), [`bounds`](Self::bounds) and
/// [`limited_add`](Self::limited_add) hold for counters that stay 2^41 for each CPU away from it.
///
/// ```
/// use pinfold::counter::PercpuCounter;
///
/// let bytes = PercpuCounter::with_batch(1000, 64)?;
/// std::thread::scope(|scope| {
///     for _ in 0..4 {
///         scope.spawn(|| (0..1000).for_each(|_| bytes.add(3)));
///     }
/// });
/// assert_eq!(bytes.sum(), 13_000);
/// # Ok::<(), pinfold::counter::CounterError>(())
/// ```
#[derive(Debug)]
// The C header initialises statics of this layout.
#[repr(C)]
pub struct PercpuCounter {
    /// The offset of the block, or [`CLOSED`] until there is one.
    place: AtomicUsize,
    /// The batch that the block begins with; or, with [`WIDENS`], how large the drift may become by
    /// widening the batch.
    rule: u64,
    apart: [u64; 6],
    /// What did not go by way of a shard.
    pub(super) base: Base,
    /// What the last sums were.
    pub(super) seen: AtomicU64,
    apart_from_next: [u64; 5],
}

// A handle need not begin at a line: what adds read and what they write is a line's length apart,
// in arrays too.
const _: () = assert!(size_of::<PercpuCounter>() == 128 && align_of::<PercpuCounter>() == 16);
const _: () = assert!(core::mem::offset_of!(PercpuCounter, base) == 64);

impl Default for PercpuCounter {
    fn default() -> Self {
        Self::new()
    }
}

impl PercpuCounter {
    /// A counter at 0 with the default batch: 1024, or twice the number of CPUs if that is more.
    pub const fn new() -> Self {
        Self::make(0, DEFAULT, 0)
    }

    /// A counter at `value` with a batch, or, if `max_drift` is not 0, with a batch that widens.
    pub(crate) const fn make(value: i64, batch: u64, max_drift: u64) -> Self {
        PercpuCounter {
            place: AtomicUsize::new(CLOSED),
            rule: match max_drift {
                0 => batch,
                // The batches of all CPUs together are at most 2^53: larger drifts are all the
                // same.
                drift if drift >= WIDENS => u64::MAX,
                drift => drift | WIDENS,
            },
            apart: [0; 6],
            base: Base::new(value),
            seen: AtomicU64::new(0),
            apart_from_next: [0; 5],
        }
    }

    /// How large the drift may become by widening the batch; 0 if the batch stays.
    fn max_drift(&self) -> u64 {
        match self.rule & WIDENS {
            0 => 0,
            _ => self.rule & !WIDENS,
        }
    }

    /// A counter at `value` of which each CPU may keep up to `batch` to itself. A larger batch makes adding cheaper and
    /// [`read`](Self::read) less exact.
    ///
    /// # Errors
    ///
    /// [`CounterError::Batch`] when `batch` is 0 or above 2^40.
    pub const fn with_batch(value: i64, batch: u64) -> Result<Self, CounterError> {
        if batch == 0 || batch > BATCH_MOST {
            return Err(CounterError::Batch { batch });
        }
        Ok(Self::make(value, batch, 0))
    }

    /// As [`with_batch`](Self::with_batch), for statics: a batch out of range does not compile.
    ///
    /// ```
    /// use pinfold::counter::PercpuCounter;
    ///
    /// static BYTES: PercpuCounter = PercpuCounter::with_batch_of::<4096>(0);
    /// BYTES.add(100);
    /// assert_eq!(BYTES.batch(), 4096);
    /// ```
    pub const fn with_batch_of<const BATCH: u64>(value: i64) -> Self {
        const { assert!(BATCH >= 1 && BATCH <= BATCH_MOST) };
        Self::make(value, BATCH, 0)
    }

    /// As [`with_max_drift`](Self::with_max_drift), for statics: a drift of 0 does not compile.
    pub const fn with_max_drift_of<const DRIFT: u64>(value: i64) -> Self {
        const { assert!(DRIFT >= 1, "a drift is at least 1") };
        Self::make(value, DEFAULT, DRIFT)
    }

    /// A counter at `value` that widens its batch by itself, when adds want it, as long as its
    /// [`error_bound`](Self::error_bound) is at most `drift`.
    ///
    /// A batch beyond each CPU's share of `drift` is chosen only where the kernel can fence. When a
    /// CPU adds for the first time and the batches of all would be too much then, the batches are
    /// halved, with a fence (an interrupt to each CPU that runs this process): at most once for
    /// each doubling of the number of CPUs, in the counter's whole life.
    ///
    /// # Errors
    ///
    /// [`CounterError::Drift`] when `drift` is 0.
    pub const fn with_max_drift(value: i64, drift: u64) -> Result<Self, CounterError> {
        if drift == 0 {
            return Err(CounterError::Drift);
        }
        Ok(Self::make(value, DEFAULT, drift))
    }

    /// Adds `n`, which may be negative. Any thread, any signal handler; never waits. See the type for the costs.
    #[inline(always)]
    pub fn add(&self, n: i64) {
        let shards = self.shards_or_closed();
        let done = if n >= 0 {
            shards.add(false, n)
        } else {
            // There is no room for the negative of the least number, which stays negative, in any shard.
            n != i64::MIN && shards.add(true, -n)
        };
        if !done {
            self.add_slow(n);
        }
    }

    /// Takes `n` away: `add(-n)`.
    #[inline(always)]
    pub fn sub(&self, n: i64) {
        self.add(n.wrapping_neg());
    }

    /// Adds 1.
    #[inline(always)]
    pub fn inc(&self) {
        self.add(1);
    }

    /// Takes 1 away.
    #[inline(always)]
    pub fn dec(&self) {
        self.add(-1);
    }

    #[cold]
    #[inline(never)]
    pub(crate) fn add_slow(&self, n: i64) {
        if !self.add_after_making_room(n) {
            self.add_to_base(n);
        }
    }

    fn add_after_making_room(&self, n: i64) -> bool {
        let size = n.unsigned_abs();
        let shards = (size <= BATCH_MOST).then(|| self.place()).flatten();
        // Beyond a batch that stays as it is nothing makes room.
        let max_drift = self.max_drift();
        let shards = shards.filter(|shards| max_drift != 0 || size <= shards.batch());
        shards.is_some_and(|shards| {
            self.fit_batch(shards, size);
            self.keep_reach_centred(shards);
            shards.add_after_making_room(n < 0, size as i64, max_drift == 0)
        })
    }

    /// Puts the reach around the totals if they have come near its end, where folds would stop. Not
    /// if another thread has one of the counter's locks.
    fn keep_reach_centred(&self, shards: Shards) {
        if shards.is_off_centre()
            && let Some(held) = stripe::try_hold_all(shards.offset())
        {
            self.state_reach(&held, shards, self.base.reach().width());
        }
    }

    /// Widens the batch for an add of `size`, or narrows it for a new shard, if this counter does so.
    fn fit_batch(&self, shards: Shards, size: u64) {
        let max_drift = self.max_drift();
        if max_drift == 0 {
            return;
        }
        if let Some(unit) = percpu::install_here()
            && shards.wants_another_batch(unit, max_drift)
            && let Some(held) = stripe::try_hold_all(shards.offset())
        {
            self.state_reach(&held, shards, 0);
            shards.fit_batch(&held, unit, size, max_drift);
        }
    }

    /// The value, approximately: it was at most [`error_bound`](Self::error_bound) off at a moment during the call.
    ///
    /// Four loads of lines that are written when something is folded, no lock, no system call; it starts again when a fold comes
    /// between.
    #[inline]
    pub fn read(&self) -> i64 {
        self.read_with_bound().0
    }

    /// [`read`](Self::read), and how far it may be off: also while [`set_batch`](Self::set_batch) changes that. One load more.
    ///
    /// ```
    /// use pinfold::counter::PercpuCounter;
    ///
    /// let counter = PercpuCounter::with_batch(0, 16)?;
    /// counter.add(5);
    /// let (value, bound) = counter.read_with_bound();
    /// assert!(value.abs_diff(5) <= bound);
    /// # Ok::<(), pinfold::counter::CounterError>(())
    /// ```
    #[inline]
    pub fn read_with_bound(&self) -> (i64, u64) {
        loop {
            let shards = self.shards();
            let folded = shards.map(Shards::folded);
            let base = self.base.value.load(Acquire);
            // Whoever lowers it moves the totals first.
            let bound = shards.map_or(0, Shards::drift);
            if shards == self.shards() && folded == shards.map(Shards::folded) {
                return (base.wrapping_add(folded.map_or(0, Moved::net)), bound);
            }
        }
    }

    /// How far [`read`](Self::read) may be off: the sum of the batches of all CPUs that have added so far. One load.
    ///
    /// It holds for reads that ended before the call, unless [`set_batch`](Self::set_batch) lowered it in between:
    /// [`read_with_bound`](Self::read_with_bound) gives both together.
    #[inline]
    pub fn error_bound(&self) -> u64 {
        self.shards().map_or(0, Shards::drift)
    }

    /// Two numbers between which, both included, the value was at a moment during the call. They are as far apart as what was
    /// added and taken away meanwhile: equal when nobody did.
    ///
    /// Reads each CPU's words twice; no lock, no system call, nobody is disturbed.
    pub fn bounds(&self) -> (i64, i64) {
        order_own_adds();
        let (first, base, second) = self.collect_around_base();
        let low = base.wrapping_add(first.up.wrapping_sub(second.down) as i64);
        let high = base.wrapping_add(second.up.wrapping_sub(first.down) as i64);
        (low, high)
    }

    /// How the value compares with `with`: decided from [`read`](Self::read) when that is far enough off, else from the
    /// exact [`sum`](Self::sum).
    pub fn compare(&self, with: i64) -> Ordering {
        let (read, bound) = self.read_with_bound();
        if read.abs_diff(with) > bound {
            return read.cmp(&with);
        }
        self.sum().cmp(&with)
    }

    /// Brings what every CPU has added into what [`read`](Self::read) returns. Returns how many shards had moved, without
    /// those in whose slow path another thread is.
    ///
    /// Runs here alone: the CPUs that added notice nothing but that their lines are read.
    pub fn fold(&self) -> usize {
        self.shards().map_or(0, |shards| {
            self.keep_reach_centred(shards);
            shards.fold(|_| true, || true)
        })
    }

    /// How much a CPU may keep to itself, now.
    pub fn batch(&self) -> u64 {
        self.shards()
            .map_or_else(|| self.first_batch(), Shards::batch)
    }

    pub(crate) fn first_batch(&self) -> u64 {
        let default = (2 * pinfold_rseq::possible() as u64).max(DEFAULT_LEAST);
        match (self.max_drift(), self.rule) {
            (0, DEFAULT) => default,
            (0, batch) => batch,
            // Every CPU's share, as a power of two: so large a batch never needs to be lowered.
            (drift, _) => {
                let share = drift / pinfold_rseq::possible() as u64;
                default.min(1 << share.max(1).ilog2())
            }
        }
    }

    /// Collects all shards, the base, and all shards again.
    pub(super) fn collect_around_base(&self) -> (Moved, i64, Moved) {
        let nothing = Moved { up: 0, down: 0 };
        loop {
            let Some(shards) = self.shards() else {
                let base = self.base.value.load(Acquire);
                if self.shards().is_none() {
                    return (nothing, base, nothing);
                }
                continue;
            };
            let first = shards.collect();
            let base = self.base.value.load(Acquire);
            return (first, base, shards.collect());
        }
    }

    #[inline(always)]
    fn shards_or_closed(&self) -> Shards {
        // Acquire pairs with the release in `place`: the block is seen zeroed, whoever had it before.
        let offset = self.place.load(Acquire);
        // SAFETY: the block of a counter that is in use, or the closed one, which stays.
        unsafe { Shards::at(offset) }
    }

    #[inline]
    pub(super) fn shards(&self) -> Option<Shards> {
        let shards = self.shards_or_closed();
        (shards.offset() != CLOSED).then_some(shards)
    }

    /// The counter's block, allocated if need be.
    pub(crate) fn place(&self) -> Option<Shards> {
        if let Some(shards) = self.shards() {
            return Some(shards);
        }
        let offset = fork::register().then(|| percpu::alloc(SIZE)).flatten()?;
        // SAFETY: just allocated.
        let mine = unsafe { Shards::at(offset) };
        mine.open(self.first_batch());
        match self.place.compare_exchange(CLOSED, offset, AcqRel, Acquire) {
            Ok(_) => Some(mine),
            Err(_) => {
                // SAFETY: nobody else knows of it.
                unsafe { percpu::free(offset, SIZE) };
                self.shards()
            }
        }
    }

    /// Gives the counter a block that somebody else allocated; false when it has one already. The counter frees it when it is
    /// dropped.
    pub(crate) fn settle(&self, offset: usize) -> bool {
        // SAFETY: the caller's block.
        unsafe { Shards::at(offset) }.open(self.first_batch());
        self.adopt(offset)
    }

    /// Gives the counter a block that the caller has prepared; false when it has one already.
    pub(crate) fn adopt(&self, offset: usize) -> bool {
        // Release: who sees the place sees the batch.
        self.place
            .compare_exchange(CLOSED, offset, Release, Relaxed)
            .is_ok()
    }

    /// Adds `n` without a shard, by one atomic add.
    pub(crate) fn add_to_base(&self, n: i64) {
        // Release: a thread that sees this sees what this thread did before; pairs with the acquire
        // of the sums.
        self.base.value.fetch_add(n, AcqRel);
    }
}

impl Drop for PercpuCounter {
    fn drop(&mut self) {
        if let Some(shards) = self.shards() {
            // Whoever folds what is watched holds a shard's lock: after this nobody touches the block.
            let held = stripe::hold_all(shards.offset());
            watch::forget(shards.offset(), SIZE);
            // SAFETY: `place` allocated it, and the counter is nobody else's any more.
            unsafe { percpu::free(shards.offset(), SIZE) };
            drop(held);
        }
    }
}
