//! The counter that goes up and down: its handle, adding, and reading without a wait.

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
/// The bit of [`PercpuCounter::rule`] that says that the other bits are the maximum drift, not a
/// batch.
const WIDENS: u64 = 1 << 63;
/// The least default batch. The kernel's is 32. Measured with two CPUs that add at once: a fold
/// takes as long as a hundred adds. With this batch, folds take a twentieth of the time.
const DEFAULT_LEAST: u64 = 1024;

/// Counts up and down in 64 bits, with adds that stay on the CPU's own words.
///
/// The handle takes 128 bytes: a cache line that adds only read, and a line with the base, which
/// large adds write. So a large add does not slow down the adds of other CPUs, not even those to
/// its neighbours in an array.
///
/// Each CPU that adds takes 32 bytes more, and so does the total. These words are packed side by
/// side with those of other counters, and allocated by the first add. Without memory for them, the
/// counter is one atomic.
///
/// # Costs
///
/// | operation | cost |
/// |---|---|
/// | an add within the batch | one critical section on the CPU's own line |
/// | about one add in a batch | also a fold: one atomic add to the total, which the CPUs share |
/// | an add above the batch | one atomic add to the counter's *base*, which the CPUs share |
///
/// An add never waits.
///
/// # Overflow
///
/// The value wraps around at 2^63, as with `i64::wrapping_add`. [`compare`](Self::compare),
/// [`bounds`](Self::bounds) and [`limited_add`](Self::limited_add) hold while the value is at least
/// 2^41 times the number of CPUs away from ±2^63.
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
// The C header initialises statics with this layout.
#[repr(C)]
pub struct PercpuCounter {
    /// The offset of the counter's block, or [`CLOSED`] until there is one.
    place: AtomicUsize,
    /// The first batch. With the bit [`WIDENS`], instead the maximum drift up to which the batch
    /// widens.
    rule: u64,
    /// Keeps the base out of the line that adds read.
    apart: [u64; 6],
    /// The sum of the adds that used no shard.
    pub(super) base: Base,
    /// The word of `pace`: the last sum, and how many sums have yet to wait.
    pub(super) seen: AtomicU64,
    /// In an array, keeps the base out of the line that adds read in the next counter.
    apart_from_next: [u64; 5],
}

// A handle need not begin at a cache line. Even so, the words that adds read lie a line apart from
// those that they write, in arrays too.
const _: () = assert!(size_of::<PercpuCounter>() == 128 && align_of::<PercpuCounter>() == 16);
const _: () = assert!(core::mem::offset_of!(PercpuCounter, base) == 64);

impl Default for PercpuCounter {
    fn default() -> Self {
        Self::new()
    }
}

impl PercpuCounter {
    /// Returns a counter at 0 with the default batch: 1024, or twice the number of CPUs if that is
    /// more. A static can hold it.
    ///
    /// ```
    /// use pinfold::counter::PercpuCounter;
    ///
    /// static OPEN: PercpuCounter = PercpuCounter::new();
    /// OPEN.inc();
    /// assert_eq!(OPEN.sum(), 1);
    /// ```
    pub const fn new() -> Self {
        Self::make(0, DEFAULT, 0)
    }

    /// Returns a counter at `value`: with a batch, or, if `max_drift` is not 0, with a batch that
    /// widens.
    pub(crate) const fn make(value: i64, batch: u64, max_drift: u64) -> Self {
        PercpuCounter {
            place: AtomicUsize::new(CLOSED),
            rule: match max_drift {
                0 => batch,
                // All CPUs' batches together are at most 2^53, so larger drifts make no difference.
                drift if drift >= WIDENS => u64::MAX,
                drift => drift | WIDENS,
            },
            apart: [0; 6],
            base: Base::new(value),
            seen: AtomicU64::new(0),
            apart_from_next: [0; 5],
        }
    }

    /// Returns how large the drift may become by widening the batch, or 0 if the batch stays.
    fn max_drift(&self) -> u64 {
        match self.rule & WIDENS {
            0 => 0,
            _ => self.rule & !WIDENS,
        }
    }

    /// Returns a counter at `value` of which each CPU may keep up to `batch` to itself.
    ///
    /// A larger batch makes adding cheaper and [`read`](Self::read) less exact.
    ///
    /// # Errors
    ///
    /// [`CounterError::Batch`] if `batch` is 0 or above 2^40.
    ///
    /// # Examples
    ///
    /// ```
    /// use pinfold::counter::PercpuCounter;
    ///
    /// let bytes = PercpuCounter::with_batch(100, 4096)?;
    /// bytes.add(28);
    /// assert_eq!((bytes.sum(), bytes.batch()), (128, 4096));
    /// # Ok::<(), pinfold::counter::CounterError>(())
    /// ```
    pub const fn with_batch(value: i64, batch: u64) -> Result<Self, CounterError> {
        if batch == 0 || batch > BATCH_MOST {
            return Err(CounterError::Batch { batch });
        }
        Ok(Self::make(value, batch, 0))
    }

    /// Returns a counter as [`with_batch`](Self::with_batch) does, for statics: a batch out of
    /// range does not compile.
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

    /// Returns a counter as [`with_max_drift`](Self::with_max_drift) does, for statics: a drift of
    /// 0 does not compile.
    ///
    /// ```
    /// use pinfold::counter::PercpuCounter;
    ///
    /// static BYTES: PercpuCounter = PercpuCounter::with_max_drift_of::<1_000_000>(0);
    /// BYTES.add(100);
    /// assert!(BYTES.error_bound() <= 1_000_000);
    /// ```
    pub const fn with_max_drift_of<const DRIFT: u64>(value: i64) -> Self {
        const { assert!(DRIFT >= 1, "a drift is at least 1") };
        Self::make(value, DEFAULT, DRIFT)
    }

    /// Returns a counter at `value` that widens its batch when adds need a larger one, while its
    /// [`error_bound`](Self::error_bound) stays at most `drift`.
    ///
    /// A batch above each CPU's share of `drift` is chosen only where the kernel can fence. If a
    /// CPU adds for the first time, and the batches of all CPUs would then be too much, the batches
    /// are halved. That needs a fence: an interrupt to each CPU that runs a thread of this process.
    /// It happens at most once for each doubling of the number of CPUs that add, in the counter's
    /// whole life.
    ///
    /// # Errors
    ///
    /// [`CounterError::Drift`] if `drift` is 0.
    ///
    /// # Examples
    ///
    /// ```
    /// use pinfold::counter::PercpuCounter;
    ///
    /// let bytes = PercpuCounter::with_max_drift(0, 10_000)?;
    /// (0..1000).for_each(|_| bytes.add(3));
    /// assert!(bytes.read().abs_diff(3000) <= 10_000);
    /// # Ok::<(), pinfold::counter::CounterError>(())
    /// ```
    pub const fn with_max_drift(value: i64, drift: u64) -> Result<Self, CounterError> {
        if drift == 0 {
            return Err(CounterError::Drift);
        }
        Ok(Self::make(value, DEFAULT, drift))
    }

    /// Adds `n`, which may be negative.
    ///
    /// Any thread and any signal handler may add. An add never waits. The documentation of the type
    /// has the costs.
    #[inline(always)]
    pub fn add(&self, n: i64) {
        let shards = self.shards_or_closed();
        let done = if n >= 0 {
            shards.add(false, n)
        } else {
            // `-i64::MIN` does not exist, so this number goes to the base.
            n != i64::MIN && shards.add(true, -n)
        };
        if !done {
            self.add_slow(n);
        }
    }

    /// Subtracts `n`, as `add(-n)` does.
    #[inline(always)]
    pub fn sub(&self, n: i64) {
        self.add(n.wrapping_neg());
    }

    /// Adds 1.
    #[inline(always)]
    pub fn inc(&self) {
        self.add(1);
    }

    /// Subtracts 1.
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

    /// Makes room for `n` in this CPU's shard, and adds it there. Returns false if there is no
    /// room.
    fn add_after_making_room(&self, n: i64) -> bool {
        let size = n.unsigned_abs();
        let shards = (size <= BATCH_MOST).then(|| self.place()).flatten();
        // If the batch does not widen, nothing can make room for an add above the batch.
        let max_drift = self.max_drift();
        let shards = shards.filter(|shards| max_drift != 0 || size <= shards.batch());
        shards.is_some_and(|shards| {
            self.fit_batch(shards, size);
            self.keep_reach_centred(shards);
            shards.add_after_making_room(n < 0, size as i64, max_drift == 0)
        })
    }

    /// Centres the reach on the totals if they have come near its end, where folds would stop. Does
    /// nothing if another thread has one of the counter's locks.
    fn keep_reach_centred(&self, shards: Shards) {
        if shards.is_off_centre()
            && let Some(held) = stripe::try_hold_all(shards.offset())
        {
            self.state_reach(&held, shards, self.base.reach().width());
        }
    }

    /// Widens the batch for an add of `size`, or lowers it for a new shard, if this counter's batch
    /// widens.
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

    /// Returns the approximate value: at one moment during the call, it was at most
    /// [`error_bound`](Self::error_bound) off.
    ///
    /// Loads words of two cache lines that folds and large adds write, with no lock and no system
    /// call. The call starts again if a fold happens in between.
    #[inline]
    pub fn read(&self) -> i64 {
        self.read_with_bound().0
    }

    /// Returns what [`read`](Self::read) returns and how far that may be off, even while
    /// [`set_batch`](Self::set_batch) changes the bound. Costs as much as [`read`](Self::read).
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
            // A thread that lowers the drift first moves the totals, so this read starts again.
            let bound = shards.map_or(0, Shards::drift);
            if shards == self.shards() && folded == shards.map(Shards::folded) {
                return (base.wrapping_add(folded.map_or(0, Moved::net)), bound);
            }
        }
    }

    /// Returns how far [`read`](Self::read) may be off: the sum of the batches of all CPUs that
    /// have added so far. One load.
    ///
    /// The bound holds for reads that ended before the call, unless [`set_batch`](Self::set_batch)
    /// lowered it in between. [`read_with_bound`](Self::read_with_bound) returns both together.
    #[inline]
    pub fn error_bound(&self) -> u64 {
        self.shards().map_or(0, Shards::drift)
    }

    /// Returns a lower and an upper bound of the value at one moment during the call. They differ
    /// by what was added and subtracted during the call. If nothing was, both are the value.
    ///
    /// Reads each CPU's words twice. Takes no lock, makes no system call and interrupts no CPU.
    pub fn bounds(&self) -> (i64, i64) {
        order_own_adds();
        let (first, base, second) = self.collect_around_base();
        let low = base.wrapping_add(first.up.wrapping_sub(second.down) as i64);
        let high = base.wrapping_add(second.up.wrapping_sub(first.down) as i64);
        (low, high)
    }

    /// Compares the value with `with`.
    ///
    /// Decides from [`read`](Self::read) if the result is far enough from `with`, and from the
    /// exact [`sum`](Self::sum) otherwise.
    pub fn compare(&self, with: i64) -> Ordering {
        let (read, bound) = self.read_with_bound();
        if read.abs_diff(with) > bound {
            return read.cmp(&with);
        }
        self.sum().cmp(&with)
    }

    /// Folds what every CPU has added into the totals that [`read`](Self::read) returns. Returns
    /// how many shards had moved, without the shards whose lock another thread holds.
    ///
    /// Runs in the calling thread alone. The CPUs that added notice only that their cache lines
    /// were taken for a moment.
    pub fn fold(&self) -> usize {
        self.shards().map_or(0, |shards| {
            self.keep_reach_centred(shards);
            shards.fold(|_| true, || true)
        })
    }

    /// Returns the batch: how much each CPU may keep to itself now.
    pub fn batch(&self) -> u64 {
        self.shards()
            .map_or_else(|| self.first_batch(), Shards::batch)
    }

    /// Returns the batch with which the counter begins.
    pub(crate) fn first_batch(&self) -> u64 {
        let default = (2 * pinfold_rseq::possible() as u64).max(DEFAULT_LEAST);
        match (self.max_drift(), self.rule) {
            (0, DEFAULT) => default,
            (0, batch) => batch,
            // Every CPU's share, as a power of two. A batch of this size never needs to be lowered.
            (drift, _) => {
                let share = drift / pinfold_rseq::possible() as u64;
                default.min(1 << share.max(1).ilog2())
            }
        }
    }

    /// Collects all shards, loads the base, and collects all shards again.
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
        // Acquire pairs with the release in `place` and `adopt`: a thread that sees the offset also
        // sees the block prepared.
        let offset = self.place.load(Acquire);
        // SAFETY: the offset is that of this counter's block, which is freed only when the counter
        // is dropped, or of the closed block, which is never freed.
        unsafe { Shards::at(offset) }
    }

    #[inline]
    /// Returns the counter's shards, if it has a block.
    pub(super) fn shards(&self) -> Option<Shards> {
        let shards = self.shards_or_closed();
        (shards.offset() != CLOSED).then_some(shards)
    }

    /// Returns the counter's shards. The first call allocates their block, and returns `None` if
    /// that fails.
    pub(crate) fn place(&self) -> Option<Shards> {
        if let Some(shards) = self.shards() {
            return Some(shards);
        }
        let offset = fork::register().then(|| percpu::alloc(SIZE)).flatten()?;
        // SAFETY: `percpu::alloc` has just returned the offset of a block of `SIZE` bytes.
        let mine = unsafe { Shards::at(offset) };
        mine.open(self.first_batch());
        // Release: a thread that sees the offset also sees the batch. Acquire: this thread sees the
        // same if another thread was faster.
        match self.place.compare_exchange(CLOSED, offset, AcqRel, Acquire) {
            Ok(_) => Some(mine),
            Err(_) => {
                // SAFETY: the exchange failed, so the offset was never published. Only this thread
                // knows the block.
                unsafe { percpu::free(offset, SIZE) };
                self.shards()
            }
        }
    }

    /// Prepares a block that the caller has allocated, and gives it to the counter. Dropping the
    /// counter frees the block. Returns false if the counter has a block already.
    pub(crate) fn settle(&self, offset: usize) -> bool {
        // SAFETY: the caller has allocated the block at `offset`, and no other thread knows it.
        unsafe { Shards::at(offset) }.open(self.first_batch());
        self.adopt(offset)
    }

    /// Gives the counter a block that the caller has prepared. Returns false if the counter has a
    /// block already.
    pub(crate) fn adopt(&self, offset: usize) -> bool {
        // Release: a thread that sees the offset also sees the batch.
        self.place
            .compare_exchange(CLOSED, offset, Release, Relaxed)
            .is_ok()
    }

    /// Adds `n` to the base, by one atomic add.
    pub(crate) fn add_to_base(&self, n: i64) {
        // Release: a thread that sees this add sees what this thread did before. It pairs with the
        // acquire of the sums.
        self.base.value.fetch_add(n, AcqRel);
    }
}

impl Drop for PercpuCounter {
    fn drop(&mut self) {
        if let Some(shards) = self.shards() {
            // A thread that folds this counter in the background looks at the counter's bit with a
            // shard's lock held. It does not touch the block once the bit is cleared.
            let held = stripe::hold_all(shards.offset());
            watch::forget(shards.offset(), SIZE);
            // SAFETY: `place` allocated the block, or `settle` or `adopt` took it over. `drop` has
            // the only reference, so no thread adds to the block any more. `forget` ended the folds
            // in the background.
            unsafe { percpu::free(shards.offset(), SIZE) };
            drop(held);
        }
    }
}
