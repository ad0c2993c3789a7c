//! The counter that goes up and down: its handle, adding, and reading without a wait.

use super::shards::{Direction, MAX_BATCH, SIZE, Shards, batch_for};
use super::{fork, stripe, watch};
use crate::counter_units::{CLOSED, LazyBlock};
use core::mem::offset_of;
use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicI64, AtomicU64};

/// Stands for the default batch until the number of CPUs is known.
const DEFAULT: u64 = 0;
/// The bit of [`PerCpuCounter::rule`] that says that the other bits are the maximum drift, not a
/// batch.
const WIDENS: u64 = 1 << 63;
/// The least default batch. The kernel's is 32. With this batch, a CPU that adds 1 at a time folds
/// once in about 1500 adds.
const MIN_DEFAULT: u64 = 1024;

/// Counts up and down in 64 bits, with adds that stay on the CPU's own words.
///
/// The handle takes 152 bytes. Wherever it begins, the words that adds only read are in another
/// cache line than the base, which large adds write. So a large add does not slow down the adds of
/// other CPUs, not even those to its neighbours in an array.
///
/// Each CPU that adds takes 32 bytes more, and so does the total. These words are packed side by
/// side with those of other counters, and allocated by the first add. Without memory for them, the
/// counter is one atomic.
///
/// # Costs
///
/// | operation | cost |
/// |---|---|
/// | an add of at most the batch | one critical section on the CPU's own line |
/// | of these, one for each batch and a half counted | also a fold: a section more, one atomic add to the total, which CPUs share, and a store |
/// | a larger add | one atomic add to the counter's *base*, which the CPUs share |
///
/// An add never waits.
///
/// # Overflow
///
/// The value wraps around at 2^63, as with `i64::wrapping_add`. [`compare`](Self::compare),
/// [`bounds`](Self::bounds) and [`limited_add`](Self::limited_add) give correct results while the
/// value's distance from both -2^63 and 2^63 is at least 2^41 times the number of CPUs.
///
/// ```
/// use pinfold::counter::PerCpuCounter;
///
/// let bytes = PerCpuCounter::new().with_value(1000).with_batch(64);
/// std::thread::scope(|scope| {
///     for _ in 0..4 {
///         scope.spawn(|| (0..1000).for_each(|_| bytes.add(3)));
///     }
/// });
/// assert_eq!(bytes.sum(), 13_000);
/// ```
#[derive(Debug)]
// The C header initialises statics with this layout.
#[repr(C)]
pub struct PerCpuCounter {
    /// Until the counter has a block, adds find the closed block, where they fail.
    block: LazyBlock<CLOSED>,
    /// The first batch. With the bit [`WIDENS`], instead the maximum drift up to which the batch
    /// widens.
    rule: u64,
    /// The size of the largest add that tries the shard: the batch, or all ones until the counter
    /// has a block. Larger adds go to the base at once. Stored as its bitwise complement, so that a
    /// new static of C, which is all zeroes, sends no add to the base. Any value up to
    /// [`MAX_BATCH`] is correct, because any add may go to the base, and the shard refuses an add
    /// that is too large.
    largest_kept_inverted: AtomicU64,
    /// Keeps the base out of the lines that adds read.
    apart: [u64; 7],
    /// The sum of the adds that used no shard.
    pub(super) base: AtomicI64,
    /// The word of `pace`: the last sum, and how many sums have yet to wait.
    pub(super) seen: AtomicU64,
    /// In an array, keeps the base out of the lines that adds read in the next counter.
    apart_from_next: [u64; 7],
}

// A handle need not begin at a cache line. Even so, a word that adds read and a word that adds or
// sums write begin a line or more apart, in arrays too, so no line has both.
const _: () = {
    const SIZE: usize = size_of::<PerCpuCounter>();
    const LINE: usize = 64;
    assert!(SIZE == 152 && align_of::<PerCpuCounter>() == 8);
    assert!(
        offset_of!(PerCpuCounter, base) >= offset_of!(PerCpuCounter, largest_kept_inverted) + LINE
    );
    assert!(SIZE + offset_of!(PerCpuCounter, block) >= offset_of!(PerCpuCounter, seen) + LINE);
};

impl Default for PerCpuCounter {
    fn default() -> Self {
        Self::new()
    }
}

impl PerCpuCounter {
    /// The largest batch, 2^40. With it, adds stay on their CPU: the kernel's
    /// percpu_counter_add_local and percpu_counter_sub_local. [`sum`](Self::sum) finds them always,
    /// and [`read`](Self::read) only after a [`fold`](Self::fold) or a shepherd has looked.
    ///
    /// For a counter that is written all the time and read seldom. [`read`](Self::read) keeps its
    /// bound, which says nothing then: 2^41 for each CPU that has added. In the kernel each call
    /// chooses. Here the counter does, because [`error_bound`](Self::error_bound) must be true for
    /// all adds together.
    ///
    /// ```
    /// use pinfold::counter::PerCpuCounter;
    ///
    /// static BYTES: PerCpuCounter = PerCpuCounter::new().with_batch(PerCpuCounter::LOCAL_BATCH);
    /// (0..1000).for_each(|_| BYTES.add(1 << 20));
    /// assert_eq!(BYTES.sum(), 1000 << 20);
    /// ```
    #[doc(alias = "percpu_counter_add_local")]
    #[doc(alias = "percpu_counter_sub_local")]
    pub const LOCAL_BATCH: u64 = MAX_BATCH;

    /// Returns a counter at 0 with the default batch: 1024, or twice the number of CPUs if that is
    /// more. A static can hold it.
    ///
    /// ```
    /// use pinfold::counter::PerCpuCounter;
    ///
    /// static OPEN: PerCpuCounter = PerCpuCounter::new();
    /// OPEN.inc();
    /// assert_eq!(OPEN.sum(), 1);
    /// ```
    pub const fn new() -> Self {
        PerCpuCounter {
            block: LazyBlock::new(),
            rule: DEFAULT,
            largest_kept_inverted: AtomicU64::new(0),
            apart: [0; 7],
            base: AtomicI64::new(0),
            seen: AtomicU64::new(0),
            apart_from_next: [0; 7],
        }
    }

    /// Makes a new counter start at `value`.
    ///
    /// ```
    /// use pinfold::counter::PerCpuCounter;
    ///
    /// static FREE: PerCpuCounter = PerCpuCounter::new().with_value(100);
    /// FREE.dec();
    /// assert_eq!(FREE.sum(), 99);
    /// ```
    #[must_use]
    pub const fn with_value(mut self, value: i64) -> Self {
        self.start_at(value);
        self
    }

    /// Makes this new counter start at `value`.
    pub(super) const fn start_at(&mut self, value: i64) {
        self.base = AtomicI64::new(value);
    }

    /// Gives a new counter a fixed batch: each CPU may keep up to `batch` to itself. `batch` is
    /// clamped to 1..=2^40.
    ///
    /// A larger batch makes adding cheaper and [`read`](Self::read) less exact.
    /// [`set_batch`](Self::set_batch) changes the batch of a counter that is in use.
    ///
    /// ```
    /// use pinfold::counter::PerCpuCounter;
    ///
    /// static BYTES: PerCpuCounter = PerCpuCounter::new().with_batch(4096);
    /// BYTES.add(128);
    /// assert_eq!((BYTES.sum(), BYTES.batch()), (128, 4096));
    /// ```
    #[must_use]
    pub const fn with_batch(mut self, batch: u64) -> Self {
        self.start_with_batch(batch);
        self
    }

    /// Gives this new counter a fixed batch, as [`with_batch`](Self::with_batch) does.
    pub(super) const fn start_with_batch(&mut self, batch: u64) {
        self.rule = match batch {
            0 => 1,
            batch if batch > MAX_BATCH => MAX_BATCH,
            batch => batch,
        };
        self.largest_kept_inverted = AtomicU64::new(!self.rule);
    }

    /// Makes a new counter widen its batch when adds need a larger one, while its
    /// [`error_bound`](Self::error_bound) stays at most `drift`. With a drift of 0, every add goes
    /// to the base.
    ///
    /// A batch above each CPU's share of `drift` is chosen only where the kernel can fence. When a
    /// CPU adds for the first time and the batches of all CPUs would together exceed `drift`, every
    /// batch is halved. That needs a fence: an interrupt to each CPU that runs a thread of this
    /// process. It happens at most once for each doubling of the number of CPUs that add, in the
    /// counter's whole life.
    ///
    /// ```
    /// use pinfold::counter::PerCpuCounter;
    ///
    /// static BYTES: PerCpuCounter = PerCpuCounter::new().with_max_drift(10_000);
    /// (0..1000).for_each(|_| BYTES.add(3));
    /// assert!(BYTES.read().abs_diff(3000) <= 10_000);
    /// ```
    #[must_use]
    pub const fn with_max_drift(mut self, drift: u64) -> Self {
        // All CPUs' batches together are at most 2^53, so larger drifts make no difference.
        self.rule = if drift < WIDENS {
            drift | WIDENS
        } else {
            u64::MAX
        };
        self.largest_kept_inverted = AtomicU64::new(if drift == 0 { !0 } else { 0 });
        self
    }

    /// Returns how large the drift may become by widening the batch, or `None` if the batch is
    /// fixed.
    pub(super) fn max_drift(&self) -> Option<u64> {
        (self.rule & WIDENS != 0).then_some(self.rule & !WIDENS)
    }

    /// Adds `n`, which may be negative.
    ///
    /// Any thread and any signal handler may add. An add never waits. The documentation of the type
    /// has the costs.
    #[inline(always)]
    pub fn add(&self, n: i64) {
        // The block is loaded before the hint: a thread that sees the block sees its hint, which is
        // at most `MAX_BATCH`.
        let shards = self.shards_or_closed();
        let size = n.unsigned_abs();
        if size > !self.largest_kept_inverted.load(Relaxed) {
            return self.add_large(n);
        }
        // The hint is below 2^63, or the block is the closed one, so `-n` exists.
        let left = shards.add(Direction::of(n), size as i64);
        if left < 0 {
            self.finish_add(shards, n, left);
        }
    }

    /// Returns whether an add of `size` tries the shard. The caller has loaded the block before.
    #[inline(always)]
    pub(super) fn keeps(&self, size: u64) -> bool {
        size <= !self.largest_kept_inverted.load(Relaxed)
    }

    /// Adds `n`, which is above the batch.
    #[inline(always)]
    fn add_large(&self, n: i64) {
        // A batch that widens may take it.
        if self.rule > WIDENS {
            self.add_slow(n);
        } else {
            self.add_to_base(n);
        }
    }

    /// Adds `n` with a batch for this call: after it, the CPU on which it ran keeps less than
    /// `batch` to itself. The kernel's percpu_counter_add_batch.
    ///
    /// A `batch` of 1 makes the add visible to [`read`](Self::read) at once, together with what
    /// this CPU had kept. A `batch` above the counter's [`batch`](Self::batch) acts like the
    /// counter's.
    ///
    /// [`error_bound`](Self::error_bound) stays what it is, and holds. The tighter bound holds for
    /// one CPU if all adds on it have a batch, none of them moves to another CPU meanwhile, and no
    /// other thread folds the shard at that moment. If one does, the call folds nothing,
    /// because an add never waits.
    ///
    /// Costs as much as [`add`](Self::add), and a critical section. An `n` of at least `batch` goes
    /// to the base, by one atomic add. A fold takes one more.
    ///
    /// ```
    /// use pinfold::counter::PerCpuCounter;
    ///
    /// let bytes = PerCpuCounter::new().with_batch(4096);
    /// bytes.add_batch(100, 1000); // may stay on this CPU
    /// bytes.add_batch(5000, 1000); // goes to the base at once
    /// assert_eq!(bytes.sum(), 5100);
    /// assert!(bytes.read().abs_diff(5100) <= bytes.error_bound());
    /// ```
    pub fn add_batch(&self, n: i64, batch: u64) {
        if n.unsigned_abs() >= batch {
            self.add_to_base(n);
        } else {
            self.add(n);
        }
        if let Some(shards) = self.shards()
            && batch < shards.batch()
        {
            shards.fold_from(batch);
            // The last estimate contains what this CPU has folded now.
            if shards.estimated() != 0 {
                shards.estimate(&|_| true, || true);
            }
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

    /// Returns the batch: how much each CPU may keep to itself now.
    pub fn batch(&self) -> u64 {
        self.shards()
            .map_or_else(|| self.first_batch(), Shards::batch)
    }

    /// Returns the batch with which the counter begins.
    pub(crate) fn first_batch(&self) -> u64 {
        let default = (2 * pinfold_rseq::possible() as u64).max(MIN_DEFAULT);
        match self.max_drift() {
            // A batch of this size never needs to be lowered.
            Some(drift) => default.min(batch_for(drift, pinfold_rseq::possible())),
            None if self.rule == DEFAULT => default,
            None => self.rule,
        }
    }

    /// Sends adds that are too large for `batch` past the shards.
    pub(super) fn expect_batch(&self, batch: u64) {
        self.largest_kept_inverted.store(!batch, Relaxed);
    }

    /// Returns the counter's shards, or the closed block's, where every word is 0 and every add
    /// fails.
    #[inline(always)]
    pub(super) fn shards_or_closed(&self) -> Shards {
        // SAFETY: the offset is that of this counter's block, which is freed only when the counter
        // is dropped, or of the closed block, which is never freed.
        unsafe { Shards::at(self.block.load()) }
    }

    /// Returns the counter's shards, if it has a block.
    #[inline]
    pub(super) fn shards(&self) -> Option<Shards> {
        let shards = self.shards_or_closed();
        (shards.offset() != CLOSED).then_some(shards)
    }

    /// Returns the counter's shards. The first call allocates the block of the shards, and returns
    /// `None` if the allocation fails.
    pub(crate) fn shards_or_alloc(&self) -> Option<Shards> {
        let prepare = |offset| {
            // SAFETY: `offset` is that of a block of `SIZE` bytes that no other thread knows yet.
            unsafe { Shards::at(offset) }.open(self.first_batch());
            let hint = !self.first_batch();
            // Another thread may already have changed the batch, so only a missing hint is set.
            let _ = (self.largest_kept_inverted).compare_exchange(0, hint, Relaxed, Relaxed);
            offset
        };
        let offset = self.block.get_or_alloc(SIZE, fork::register, prepare)?;
        // SAFETY: `offset` is that of this counter's block, which is freed only when the counter is
        // dropped.
        Some(unsafe { Shards::at(offset) })
    }

    /// Gives the counter a block that the caller has prepared. Dropping the counter frees the
    /// block. Returns false if the counter has another block.
    pub(crate) fn adopt(&self, offset: usize) -> bool {
        self.block.publish(offset) == offset
    }
}

impl Drop for PerCpuCounter {
    fn drop(&mut self) {
        if let Some(shards) = self.shards() {
            // A thread that folds this counter in the background checks the counter's bit with a
            // lock of the counter held. It does not touch the block once the bit is cleared.
            let held = stripe::hold_all(shards.offset());
            watch::forget(shards.offset(), SIZE);
            // SAFETY: `shards_or_alloc` allocated the block, or `adopt` took it over. `drop` has
            // the only reference, so no thread adds to the block any more. `forget` has stopped the
            // background folds of this counter.
            unsafe { self.block.free(SIZE) };
            drop(held);
        }
    }
}
