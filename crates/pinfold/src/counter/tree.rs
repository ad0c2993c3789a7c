//! The counter whose shards are folded into a tree.
//!
//! The shards, the base and the total are those of a [`PerCpuCounter`], and the value is as exact.
//! Only the way from a shard to the total differs: [`climb`](super::climb) has it.
//!
//! The nodes lie in the shared unit, one to a cache line. Their block has the same offset in every
//! CPU's unit, where it stays untouched and so takes no memory.

use super::climb::Shape;
use super::freeze::Frozen;
use super::primitive::fence_is_refused;
use super::shards::{Direction, Look, REFUSED, Shards};
use super::{PerCpuCounter, fork, stripe};
use crate::counter_units::{self, LazyBlock, shared};
use core::cmp::Ordering;
use core::sync::atomic::Ordering::Release;
use pinfold_rseq::possible;

/// The default batch. The kernel's counters that use a tree have this batch too.
const DEFAULT: u64 = 32;
/// Bytes of a node: a cache line.
const NODE: usize = 64;

/// Counts up and down, with a read whose error grows with N log N on N CPUs: the kernel's
/// hierarchical per-CPU counter, `percpu_counter_tree`.
///
/// A [`PerCpuCounter`] needs a batch that grows with the number of CPUs, or else they write its
/// total too often. So its error grows with the square of that number. Here the batch stays small,
/// 32 by default: what leaves a CPU goes to a node that up to eight CPUs share, and from there up a
/// tree. The total is written once for about each `batch` · CPUs / 8 counted, or less often.
///
/// On a machine with one or two CPUs there are no nodes, and the counter works as a
/// [`PerCpuCounter`] with this batch does. `docs/counters.md` in the repository compares the errors
/// of the two.
///
/// # Costs
///
/// | operation | cost |
/// |---|---|
/// | an add of at most the batch | one critical section on the CPU's own line |
/// | of these, one for each batch and a half counted | also a section, one or two atomic operations for each level that the amount reaches, and a store |
/// | a larger add | one atomic add to a word that the CPUs share |
/// | [`read`](Self::read) | a few loads of lines that the CPUs write seldom |
/// | [`sum`](Self::sum) | two loads or more for each CPU that has added |
///
/// So the batch should be at least as large as the usual add. An add never waits, and nor does the
/// thread that carries an amount up: it leaves out a node that another thread has taken.
///
/// The handle takes 160 bytes. Each CPU that adds takes 32 bytes more, and so does the total. The
/// nodes take 64 bytes each: there are none for two CPUs, 6 for 16, and 36 for 256. The first adds
/// allocate all of these. Without memory for the nodes, amounts go to the total at once, and
/// without any memory, the counter is one atomic.
///
/// # Signals and fork
///
/// Signal handlers may do everything except [`set`](Self::set) and [`swap`](Self::swap). A child
/// goes on with the value and the bound of the moment of the fork. Threads that were carrying
/// amounts up at that moment are not in the child. There, the slow paths on the CPU of
/// such a thread try to fold everything, with a fence. Until one of them succeeds, this CPU's adds
/// are atomic. Where the kernel cannot fence, none succeeds.
///
/// ```
/// use pinfold::counter::CounterTree;
///
/// static PAGES: CounterTree = CounterTree::new();
///
/// std::thread::scope(|scope| {
///     for _ in 0..4 {
///         scope.spawn(|| (0..1000).for_each(|_| PAGES.add(2)));
///     }
/// });
/// assert_eq!(PAGES.sum(), 8000);
/// assert!(PAGES.read().abs_diff(8000) <= PAGES.error_bound());
/// ```
#[doc(alias = "percpu_counter_tree")]
#[derive(Debug)]
// The C header initialises statics with this layout.
#[repr(C)]
pub struct CounterTree {
    leaves: PerCpuCounter,
    /// The block of the nodes, which is used in the shared unit only.
    nodes: LazyBlock,
}

// As for `PerCpuCounter`, in arrays too.
const _: () = assert!(size_of::<CounterTree>() == 160 && size_of::<PerCpuCounter>() == 152);

impl Default for CounterTree {
    fn default() -> Self {
        Self::new()
    }
}

impl CounterTree {
    /// Returns a counter at 0 with a batch of 32. A static can hold it.
    #[doc(alias = "percpu_counter_tree_init")]
    pub const fn new() -> Self {
        CounterTree {
            leaves: PerCpuCounter::new().with_batch(DEFAULT),
            nodes: LazyBlock::new(),
        }
    }

    /// Makes a new counter start at `value`.
    ///
    /// ```
    /// use pinfold::counter::CounterTree;
    ///
    /// static FREE: CounterTree = CounterTree::new().with_value(100);
    /// FREE.dec();
    /// assert_eq!(FREE.sum(), 99);
    /// ```
    #[must_use]
    pub const fn with_value(mut self, value: i64) -> Self {
        self.leaves.start_at(value);
        self
    }

    /// Gives a new counter a batch: what each CPU keeps to itself is at most twice `batch`, which
    /// is clamped to 1..=2^40. Unlike the kernel's, it need not be a power of two.
    ///
    /// ```
    /// use pinfold::counter::CounterTree;
    ///
    /// static BYTES: CounterTree = CounterTree::new().with_batch(4096);
    /// BYTES.add(128);
    /// assert_eq!((BYTES.sum(), BYTES.batch()), (128, 4096));
    /// ```
    #[must_use]
    pub const fn with_batch(mut self, batch: u64) -> Self {
        self.leaves.start_with_batch(batch);
        self
    }

    /// Adds `n`, which may be negative. The documentation of the type has the costs.
    #[doc(alias = "percpu_counter_tree_add")]
    #[inline(always)]
    pub fn add(&self, n: i64) {
        let shards = self.leaves.shards_or_closed();
        let size = n.unsigned_abs();
        if !self.leaves.keeps(size) {
            return self.leaves.add_to_base(n);
        }
        // The largest add that is kept is below 2^63, or the block is the closed one, so `-n`
        // exists.
        let left = shards.add(Direction::of(n), size as i64);
        if left < 0 {
            self.finish_add(shards, n, left);
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

    /// Returns the batch.
    pub fn batch(&self) -> u64 {
        self.leaves.first_batch()
    }

    /// Returns the approximate value: at one moment during the call, it was at most
    /// [`error_bound`](Self::error_bound) off. That holds at every moment, also while threads sleep
    /// in the middle of an add.
    ///
    /// Costs a few loads, with no lock and no system call.
    #[doc(alias = "percpu_counter_tree_approximate_sum")]
    #[inline]
    pub fn read(&self) -> i64 {
        self.leaves.read()
    }

    /// Returns what [`read`](Self::read) returns, or 0 if that is negative.
    #[doc(alias = "percpu_counter_tree_approximate_sum_positive")]
    #[inline]
    pub fn read_positive(&self) -> i64 {
        self.read().max(0)
    }

    /// Returns how far [`read`](Self::read) may be off, upwards or downwards. The kernel's two
    /// numbers, `under` and `over`, are the same here.
    ///
    /// Grows when a CPU adds for the first time. Two loads, and a multiplication for each level.
    #[doc(alias = "percpu_counter_tree_approximate_accuracy_range")]
    pub fn error_bound(&self) -> u64 {
        self.bound_of(self.leaves.error_bound())
    }

    /// Returns what [`read`](Self::read) returns, and how far that may be off.
    ///
    /// ```
    /// use pinfold::counter::CounterTree;
    ///
    /// let pages = CounterTree::new();
    /// pages.add(5);
    /// let (value, bound) = pages.read_with_bound();
    /// assert!(value.abs_diff(5) <= bound);
    /// ```
    #[inline]
    pub fn read_with_bound(&self) -> (i64, u64) {
        let (value, drift) = self.leaves.read_with_bound();
        (value, self.bound_of(drift))
    }

    /// Returns the exact value: the value that the counter had at one moment during the call. The
    /// sum is linearizable, as that of [`PerCpuCounter::sum`], and costs as much. The kernel's
    /// `percpu_counter_tree_precise_sum` walks over the CPUs once, and is not.
    #[doc(alias = "percpu_counter_tree_precise_sum")]
    pub fn sum(&self) -> i64 {
        self.leaves.sum()
    }

    /// Returns the exact [`sum`](Self::sum), or 0 if that is negative.
    #[doc(alias = "percpu_counter_tree_precise_sum_positive")]
    pub fn sum_positive(&self) -> i64 {
        self.sum().max(0)
    }

    /// Compares the value with `with`, from a [`read`](Self::read) alone. Returns `None` if that
    /// is too near to tell.
    ///
    /// ```
    /// use pinfold::counter::CounterTree;
    /// use std::cmp::Ordering;
    ///
    /// let pages = CounterTree::new().with_value(1_000_000);
    /// pages.inc();
    /// assert_eq!(pages.try_compare(1000), Some(Ordering::Greater));
    /// assert_eq!(pages.try_compare(1_000_001), None);
    /// assert_eq!(pages.compare(1_000_001), Ordering::Equal);
    /// ```
    #[doc(alias = "percpu_counter_tree_approximate_compare_value")]
    pub fn try_compare(&self, with: i64) -> Option<Ordering> {
        let (read, bound) = self.read_with_bound();
        decide(read, with, bound)
    }

    /// Compares the value with `with`. Decides from [`read`](Self::read) if the result is far
    /// enough from `with`, and from the exact [`sum`](Self::sum) otherwise.
    #[doc(alias = "percpu_counter_tree_precise_compare_value")]
    pub fn compare(&self, with: i64) -> Ordering {
        self.try_compare(with)
            .unwrap_or_else(|| self.sum().cmp(&with))
    }

    /// Compares the value with that of `other`, from reads alone. Returns `None` if they are too
    /// near to tell.
    #[doc(alias = "percpu_counter_tree_approximate_compare")]
    pub fn try_compare_with(&self, other: &CounterTree) -> Option<Ordering> {
        let ((mine, my_bound), (theirs, bound)) = (self.read_with_bound(), other.read_with_bound());
        decide(mine, theirs, my_bound.saturating_add(bound))
    }

    /// Compares the value with that of `other`. Each is exact at one moment during the call, and
    /// the two moments differ.
    ///
    /// Reads both. If they are too near, sums the one whose read may be farther off, and the other
    /// one only if that does not decide.
    ///
    /// ```
    /// use pinfold::counter::CounterTree;
    /// use std::cmp::Ordering;
    ///
    /// let [here, there] = [1, 2].map(|n| CounterTree::new().with_value(n));
    /// assert_eq!(here.compare_with(&there), Ordering::Less);
    /// ```
    #[doc(alias = "percpu_counter_tree_precise_compare")]
    pub fn compare_with(&self, other: &CounterTree) -> Ordering {
        let ((mine, my_bound), (theirs, bound)) = (self.read_with_bound(), other.read_with_bound());
        if let Some(order) = decide(mine, theirs, my_bound.saturating_add(bound)) {
            return order;
        }
        if bound > my_bound {
            return other.compare_summed(self).reverse();
        }
        self.compare_summed(other)
    }

    /// Compares the sum with a read of `other`, or with its sum if the read is too near.
    fn compare_summed(&self, other: &CounterTree) -> Ordering {
        let mine = self.sum();
        other.compare(mine).reverse()
    }

    /// Sets the value. Costs as much as [`swap`](Self::swap). Not for signal handlers.
    #[doc(alias = "percpu_counter_tree_set")]
    pub fn set(&self, value: i64) {
        self.swap(value);
    }

    /// Sets the value and returns the previous one, at one moment, with the costs and promises of
    /// [`PerCpuCounter::swap`]. The kernel's `percpu_counter_tree_set` may lose adds that happen
    /// meanwhile. Not for signal handlers.
    ///
    /// ```
    /// use pinfold::counter::CounterTree;
    ///
    /// let pages = CounterTree::new().with_value(7);
    /// pages.inc();
    /// assert_eq!((pages.swap(100), pages.sum()), (8, 100));
    /// ```
    pub fn swap(&self, value: i64) -> i64 {
        self.leaves.swap_after(value, || self.clear_nodes())
    }

    /// Returns the bound of a read, if that of the leaves alone is `drift`: two batches for each
    /// CPU that has added.
    fn bound_of(&self, drift: u64) -> u64 {
        let batch = self.batch();
        shape().error_bound(drift / (2 * batch), batch)
    }

    /// Finishes an add of `n` after which [`Shards::add`] returned `left`, a negative number.
    #[cold]
    #[inline(never)]
    fn finish_add(&self, shards: Shards, n: i64, left: i64) {
        if left != REFUSED {
            self.carry(shards, Direction::of(n));
        } else if !self.add_to_leaf(n) {
            self.leaves.add_to_base(n);
        }
    }

    /// Adds `n` to this CPU's shard, after it has activated or folded the shard. Returns false if
    /// `n` does not fit, the counter is frozen, or there is no memory.
    fn add_to_leaf(&self, n: i64) -> bool {
        let (direction, size) = (Direction::of(n), n.unsigned_abs() as i64);
        self.leaves.shards_or_alloc().is_some_and(|shards| {
            let fold = || self.carry(shards, direction);
            shards.add_slow_after(direction, size, true, fold)
        })
    }

    /// Folds this CPU's shard into the tree, if its distance in `direction` is more than the batch.
    fn carry(&self, shards: Shards, direction: Direction) {
        // Before the claim: a thread that has claimed a shard waits for no lock.
        let nodes = self.nodes_or_alloc();
        let Some(claim) = shards.claim() else {
            return self.repair(shards);
        };
        let (cpu, batch) = (counter_units::unit_of(claim.address()), claim.batch);
        shards.fold(claim, direction, batch, batch / 2, |by| {
            let by = match direction {
                Direction::Up => by as i64,
                Direction::Down => -(by as i64),
            };
            let raise = |by: i64| shards.raise_total(Direction::of(by), by.unsigned_abs());
            match nodes {
                Some((shape, nodes)) => {
                    shape.climb(cpu, batch, by, |at| shared(nodes + at * NODE), raise);
                }
                None => raise(by),
            }
        });
    }

    /// Returns the shape and the nodes. Returns `None` if there are none, or no memory for them.
    fn nodes_or_alloc(&self) -> Option<(Shape, usize)> {
        let shape = shape();
        let size = shape.nodes() * NODE;
        let block = || {
            self.nodes
                .get_or_alloc(size, fork::register, |offset| offset)
        };
        Some((shape, (size != 0).then(block).flatten()?))
    }

    /// Ends all claims that a fork has left behind, if this CPU's shard has one.
    #[cold]
    fn repair(&self, shards: Shards) {
        let left_behind = |unit| shards.look_at(unit).is_stale();
        if fork::has_happened()
            && !fence_is_refused()
            && counter_units::install_here().is_some_and(left_behind)
        {
            self.fold_all(shards);
        }
    }

    /// Brings the total to the value, so that shards and nodes hold nothing. Does nothing if a
    /// claim is under way, another thread holds one of the locks, or the kernel cannot fence.
    #[inline(never)]
    fn fold_all(&self, shards: Shards) {
        let Some(held) = stripe::try_hold_all(shards.offset()) else {
            return;
        };
        // The shards cannot be folded then, and a freeze disturbs all CPUs.
        let is_live = |claim: &Look| !claim.is_stale();
        if (shards.active()).any(|unit| shards.claim_on(unit).as_ref().is_some_and(is_live)) {
            return;
        }
        let mut frozen = Frozen::none();
        let _freeze = shards.freeze(&mut frozen);
        if shards.quiesce() && shards.fold_all(&held, false) {
            self.clear_nodes();
        }
    }

    /// Empties all nodes, and gives back those that a fork has left taken. All shards are folded,
    /// and no thread can claim one, so no thread climbs.
    fn clear_nodes(&self) {
        if let Some(nodes) = self.nodes.get() {
            for at in 0..shape().nodes() {
                // Release pairs with the acquire in `put`: a thread that adds to the node sees the
                // total that its former amount is in.
                shared(nodes + at * NODE).store(0, Release);
            }
        }
    }
}

impl Drop for CounterTree {
    fn drop(&mut self) {
        // SAFETY: `nodes_or_alloc` allocated the block with this size. `drop` has the only
        // reference, so no thread climbs any more.
        unsafe { self.nodes.free(shape().nodes() * NODE) };
    }
}

/// Returns the shape of the tree on this machine. Unit tests have nodes on every machine.
fn shape() -> Shape {
    Shape::of(if cfg!(test) {
        possible().max(64)
    } else {
        possible()
    })
}

/// Returns how `a` and `b` compare, or `None` if they are at most `bound` apart.
fn decide(a: i64, b: i64, bound: u64) -> Option<Ordering> {
    (a.abs_diff(b) > bound).then(|| a.cmp(&b))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::climb::TAKEN;
    use super::super::fork::{in_child, token};
    use super::*;
    use core::sync::atomic::AtomicBool;
    use core::sync::atomic::Ordering::Relaxed;

    /// Returns a tree in which two CPUs have added, if there are two, and nodes hold something.
    fn used() -> CounterTree {
        let tree = CounterTree::new().with_batch(2);
        let is_used = || {
            counter_units::used().count() >= possible().min(2)
                && tree.nodes.get().is_some()
                && holds_something(&tree)
        };
        let begin = std::time::Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !is_used() {
                        tree.inc();
                        assert!(begin.elapsed().as_secs() < 30);
                    }
                });
            }
        });
        // One of the threads may have carried an amount on after the other one had seen it.
        while !holds_something(&tree) {
            tree.inc();
        }
        tree
    }

    fn node_words(tree: &CounterTree) -> impl Iterator<Item = u64> {
        let nodes = tree.nodes.get().unwrap();
        (0..shape().nodes()).map(move |at| shared(nodes + at * NODE).load(Relaxed))
    }

    fn holds_something(tree: &CounterTree) -> bool {
        node_words(tree).any(|word| word != 0)
    }

    #[test]
    fn reads_are_within_the_bound_while_all_threads_carry() {
        let tree = CounterTree::new().with_batch(2);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for by in [1, 2, -1, -2] {
                let (tree, stop) = (&tree, &stop);
                scope.spawn(move || {
                    while !stop.load(Relaxed) {
                        (0..50).for_each(|_| tree.add(by));
                        (0..50).for_each(|_| tree.add(-by));
                    }
                });
            }
            while tree.nodes.get().is_none() {
                std::thread::yield_now();
            }
            for _ in 0..100_000 {
                // At most 50 · (1 + 2) are added or taken away at once.
                let (read, bound) = tree.read_with_bound();
                assert!(read.unsigned_abs() <= 150 + bound, "{read}, {bound}");
                assert!(bound <= shape().error_bound(64, 2));
            }
            stop.store(true, Relaxed);
        });
        assert_eq!(tree.sum(), 0);
        assert!(tree.read().unsigned_abs() <= tree.error_bound());
        let total = tree.read() + node_words(&tree).map(|word| word as i64).sum::<i64>();
        let leaves = 2 * tree.batch() * counter_units::used().count() as u64;
        assert!(
            total.unsigned_abs() <= leaves,
            "an amount was lost: {total}"
        );
    }

    #[test]
    fn setting_the_value_empties_the_nodes() {
        let tree = used();
        let sum = tree.sum();
        assert_eq!(tree.swap(7), sum);
        if pinfold_rseq::can_fence() {
            assert!(!holds_something(&tree));
            assert_eq!(tree.read(), 7);
        }
        for _ in 0..1000 {
            tree.set(0);
            (0..9).for_each(|_| tree.inc());
            assert!(tree.read().abs_diff(9) <= tree.error_bound());
        }
        assert_eq!(tree.sum(), 9);
    }

    /// A thread stops in the middle of a climb, and the process forks.
    #[test]
    fn a_child_goes_on_after_a_climb_that_it_has_lost() {
        let tree = used();
        let shards = tree.leaves.shards_or_alloc().unwrap();
        let held = stripe::hold_all(shards.offset());
        for unit in counter_units::used().filter(|&unit| !shards.is_active(unit)) {
            shards.activate(&held, unit, shards.batch());
        }
        drop(held);
        let before: std::vec::Vec<_> = (shards.active())
            .map(|unit| (unit, shards.look_at(unit)))
            .collect();
        for (unit, look) in &before {
            // The token of another thread of this process.
            shards.set_folded(*unit, look.net.wrapping_add(token() ^ 1));
        }
        let nodes = tree.nodes.get().unwrap();
        let held = shared(nodes).swap(TAKEN, Relaxed);
        let sum = tree.sum();
        let goes_on = || {
            let mut fine = tree.sum() == sum && tree.read().abs_diff(sum) <= tree.error_bound();
            for n in 1..=1000 {
                tree.inc();
                fine &= tree.read().abs_diff(sum + n) <= tree.error_bound();
            }
            fine && tree.sum() == sum + 1000
        };
        let repaired = || {
            let free = |unit| !shards.look_at(unit).is_claimed();
            goes_on()
                && (!pinfold_rseq::can_fence()
                    || shards.active().all(free) && node_words(&tree).all(|word| word != TAKEN))
        };
        assert!(in_child(goes_on));
        // The repair needs an add on a CPU with such a claim.
        assert!((0..100).any(|_| in_child(repaired)));
        // In this process, the threads are still there.
        tree.inc();
        assert_eq!(node_words(&tree).next(), Some(TAKEN));
        shared(nodes).store(held, Relaxed);
        for (unit, look) in before {
            shards.set_folded(unit, look.folded);
        }
        assert!(tree.read().abs_diff(tree.sum()) <= tree.error_bound());
    }

    #[test]
    fn comparisons_are_exact_however_near() {
        let tree = used();
        let sum = tree.sum();
        let bound = tree.error_bound() as i64;
        for apart in [-3 * bound, -bound, -1, 0, 1, bound, 3 * bound] {
            let other = CounterTree::new().with_value(sum + apart);
            (0..10).for_each(|_| [1, -1].map(|n| other.add(n)).into_iter().collect());
            let order = sum.cmp(&(sum + apart));
            assert_eq!(tree.compare(sum + apart), order);
            assert_eq!(tree.compare_with(&other), order);
            assert_eq!(other.compare_with(&tree), order.reverse());
            assert!(tree.try_compare(sum + apart).is_none_or(|it| it == order));
            let quick = tree.try_compare_with(&other);
            assert!(quick.is_none_or(|it| it == order));
        }
        let far = 10 * bound;
        assert_eq!(tree.try_compare(sum + far), Some(Ordering::Less));
        assert_eq!(tree.try_compare(sum - far), Some(Ordering::Greater));
        assert_eq!(tree.try_compare_with(&tree), None);
    }
}
