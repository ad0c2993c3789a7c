//! The tree between the shards of a [`CounterTree`](super::CounterTree) and its total: its shape,
//! and how an amount climbs through it.
//!
//! If each shard were folded into the total, all CPUs would write the total's cache line once for
//! each batch. So an amount that leaves a shard first goes to a *node*, which a few CPUs share.
//! When a node has as much as its own, larger batch, a thread carries it to the node above, and at
//! last to the total.
//!
//! ```text
//! level 0    shards    0  1   2  3   4  5   6  7      each holds up to 2 · batch
//!                       \/     \/     \/     \/
//! level 1    nodes      0      1      2      3        each holds less than 2 · batch
//!                        \    /        \    /
//! level 2    nodes         0             1            each holds less than 4 · batch
//!                           \           /
//!            total                +
//! ```
//!
//! Up to 8 CPUs, a node has two children. With more CPUs, nodes get up to eight children before
//! there is another level, because each level adds to the error, and to the cost of a carry. This
//! is the shape of the kernel's `lib/percpu_counter_tree.c`.
//!
//! # The protocol
//!
//! A node is one word: the amount that it holds, or [`TAKEN`]. A thread begins to climb with a
//! shard that it has claimed, and ends the claim after the climb. On each level:
//!
//! 1. It adds its amount to the node by a compare-exchange, if the sum stays below the node's
//!    batch. The climb is over then.
//! 2. Otherwise it replaces the node's amount by [`TAKEN`], and takes the sum along.
//! 3. If another thread has taken the node, or the node changes all the time, it leaves the node
//!    out, and goes on to the next level. It never waits.
//!
//! After it has raised the total or left its amount in a node, it stores 0 in each node that it has
//! taken.
//!
//! # Invariants
//!
//! 1. An amount that is under way counts as that of the shard and of the nodes that it came from.
//!    They are claimed and taken until the amount has arrived, so nothing is added to them
//!    meanwhile. So at each moment a shard holds at most two batches, and a node less than its
//!    batch, on both sides.
//! 2. The value of all shards together is the total, plus what shards and nodes hold. So the total
//!    is at most [`error_bound`](Shape::error_bound) away from it, even while threads sleep in the
//!    middle of a climb.
//! 3. In the child of a fork, nodes that were taken stay so. Climbs leave them out, and what they
//!    had held stays the same part of the error.

use super::primitive::AtomicU64;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

/// The word of a node whose amount a thread carries up.
pub(super) const TAKEN: u64 = 1 << 63;

/// The largest number of bits in the number of a child: a node has at most eight children.
const WIDEST: u32 = 3;
/// With CPU numbers of up to this many bits, a node has two children. With longer CPU numbers, the
/// tree keeps this many levels for as long as [`WIDEST`] allows.
const NARROW: u32 = 3;

/// How often a climb tries to change a node that other threads change meanwhile.
const TRIES: u32 = 4;

/// The shape of the tree over a number of CPUs.
///
/// | CPUs | children, from the shards up | nodes | the largest error, in batches |
/// |---|---|---|---|
/// | 1 | | 0 | 2 |
/// | 2 | 2 | 0 | 4 |
/// | 4 | 2, 2 | 2 | 12 |
/// | 8 | 2, 2, 2 | 6 | 32 |
/// | 16 | 4, 2, 2 | 6 | 64 |
/// | 64 | 4, 4, 4 | 20 | 256 |
/// | 256 | 8, 8, 4 | 36 | 1024 |
/// | 1024 | 8, 8, 4, 4 | 148 | 5120 |
/// | 4096 | 8, 8, 8, 8 | 584 | 20480 |
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    cpus: usize,
    /// The base-2 logarithm of the number of CPUs, rounded up.
    order: u32,
    /// The number of steps from a shard to the total.
    levels: u32,
}

impl Shape {
    /// Returns the shape for `cpus` CPUs, at least 1.
    pub(super) fn of(cpus: usize) -> Shape {
        let order = usize::BITS - cpus.saturating_sub(1).leading_zeros();
        Shape {
            cpus,
            order,
            levels: order.min(NARROW).max(order.div_ceil(WIDEST)),
        }
    }

    /// Returns the levels that have nodes.
    fn levels(self) -> impl Iterator<Item = u32> {
        1..self.levels
    }

    /// Returns the base-2 logarithm of the number of CPUs below a node of `level`. The bits are
    /// spread evenly over the levels, and the lower levels get those that are left over.
    fn bits(self, level: u32) -> u32 {
        level * (self.order / self.levels) + level.min(self.order % self.levels)
    }

    /// Returns the number of nodes of `level`.
    fn nodes_at(self, level: u32) -> usize {
        (self.cpus.saturating_sub(1) >> self.bits(level)) + 1
    }

    /// Returns the number of nodes. The total is not among them.
    pub(super) fn nodes(self) -> usize {
        self.levels().map(|level| self.nodes_at(level)).sum()
    }

    /// Returns the batch of a node of `level`, if that of a shard is `batch`.
    fn batch_at(self, level: u32, batch: u64) -> u64 {
        batch << self.bits(level)
    }

    /// Returns how far the total may be from the value, if at most `active` CPUs have added.
    pub(super) fn error_bound(self, active: u64, batch: u64) -> u64 {
        let level = |level| active.min(self.nodes_at(level) as u64) * self.batch_at(level, batch);
        2 * batch * active + self.levels().map(level).sum::<u64>()
    }

    /// Carries `amount` up from the shard of `cpu`, which the caller has claimed. Calls
    /// `raise_total` with the amount that arrives at the total, if any does.
    ///
    /// `node` returns the word of the node with a number below [`nodes`](Self::nodes). Costs one or
    /// two atomic operations for each level that the amount reaches.
    pub(super) fn climb<'n>(
        self,
        cpu: usize,
        batch: u64,
        amount: i64,
        node: impl Fn(usize) -> &'n AtomicU64,
        raise_total: impl FnOnce(i64),
    ) {
        let mut rest = Some(amount);
        // A bit for each level whose node this thread has taken.
        let mut taken = 0u32;
        let mut first = 0;
        let word = |first: usize, level: u32| node(first + (cpu >> self.bits(level)));
        for level in self.levels() {
            let Some(amount) = rest else { break };
            let most = self.batch_at(level, batch) as i64;
            match put(word(first, level), amount, most) {
                Put::Kept => rest = None,
                Put::Taken(sum) => {
                    rest = Some(sum);
                    taken |= 1 << level;
                }
                Put::Nothing => {}
            }
            first += self.nodes_at(level);
        }
        if let Some(amount) = rest {
            raise_total(amount);
        }
        let mut first = 0;
        for level in self.levels() {
            if taken & 1 << level != 0 {
                // Release pairs with the acquire in `put`: a thread that adds to the node again
                // sees where the former amount went.
                word(first, level).store(0, Release);
            }
            first += self.nodes_at(level);
        }
    }
}

/// What [`put`] has done.
enum Put {
    /// The node holds the amount.
    Kept,
    /// The thread has taken the node, and carries this sum.
    Taken(i64),
    /// The node is as it was.
    Nothing,
}

/// Adds `amount` to a node if the sum is below `most` on both sides. Takes the node otherwise.
fn put(node: &AtomicU64, amount: i64, most: i64) -> Put {
    // Relaxed, because only the compare-exchange decides.
    let mut now = node.load(Relaxed);
    for _ in 0..TRIES {
        if now == TAKEN {
            break;
        }
        let sum = now as i64 + amount;
        let keeps = sum.abs() < most;
        let next = if keeps { sum as u64 } else { TAKEN };
        // Release: a thread that carries the amount on sees the adds in it. Acquire: this thread
        // sees the adds in what it takes, and the total that the node's former amount went to.
        match node.compare_exchange(now, next, AcqRel, Acquire) {
            Ok(_) if keeps => return Put::Kept,
            Ok(_) => return Put::Taken(sum),
            Err(seen) => now = seen,
        }
    }
    Put::Nothing
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use core::cell::Cell;
    use std::vec::Vec;

    /// A counter on a machine with any number of CPUs.
    struct Machine {
        shape: Shape,
        batch: u64,
        /// What each shard holds.
        shards: Vec<Cell<i64>>,
        nodes: Vec<AtomicU64>,
        total: Cell<i64>,
        value: Cell<i64>,
        /// How often the total was written.
        writes: Cell<u64>,
    }

    impl Machine {
        fn new(cpus: usize, batch: u64) -> Machine {
            let shape = Shape::of(cpus);
            Machine {
                shape,
                batch,
                shards: (0..cpus).map(|_| Cell::new(0)).collect(),
                nodes: (0..shape.nodes()).map(|_| AtomicU64::new(0)).collect(),
                total: Cell::new(0),
                value: Cell::new(0),
                writes: Cell::new(0),
            }
        }

        /// Adds as `CounterTree::add` does: folds a shard that is past its batch, and leaves it
        /// half a batch on the other side.
        fn add(&self, cpu: usize, n: i64) {
            assert!(n.unsigned_abs() <= self.batch);
            self.value.set(self.value.get() + n);
            let held = self.shards[cpu].get() + n;
            let after = match held {
                held if held * n.signum() > self.batch as i64 => {
                    -(self.batch as i64 / 2) * n.signum()
                }
                held => held,
            };
            if after != held {
                let raise = |by| {
                    self.total.set(self.total.get() + by);
                    self.writes.set(self.writes.get() + 1);
                };
                let node = |at: usize| &self.nodes[at];
                (self.shape).climb(cpu, self.batch, held - after, node, raise);
            }
            self.shards[cpu].set(after);
        }

        fn error(&self) -> u64 {
            self.value.get().abs_diff(self.total.get())
        }

        /// What shards, nodes and the total hold is the value, and each within its batch.
        fn check(&self) {
            let most = self.shape.error_bound(self.shards.len() as u64, self.batch);
            assert!(self.error() <= most, "{} of {most}", self.error());
            let mut first = 0;
            let mut held: i64 = self.shards.iter().map(Cell::get).sum();
            for level in self.shape.levels() {
                let most = self.shape.batch_at(level, self.batch);
                for node in &self.nodes[first..][..self.shape.nodes_at(level)] {
                    let amount = node.load(Relaxed) as i64;
                    assert!(amount.unsigned_abs() < most);
                    held += amount;
                }
                first += self.shape.nodes_at(level);
            }
            assert_eq!(first, self.nodes.len());
            assert_eq!(self.total.get() + held, self.value.get());
        }
    }

    /// Numbers of CPUs from 1 to 4096: all small ones, powers of two, and their neighbours.
    fn machines() -> impl Iterator<Item = usize> {
        let large = (5..=12).flat_map(|order| [(1 << order) - 1, 1 << order, (1 << order) + 1]);
        (1..=20).chain(large).filter(|&cpus| cpus <= 4096)
    }

    #[test]
    fn the_shape_is_that_of_the_table() {
        let table = [
            (1, 0, 2),
            (2, 0, 4),
            (4, 2, 12),
            (8, 6, 32),
            (16, 6, 64),
            (64, 20, 256),
            (256, 36, 1024),
            (1024, 148, 5120),
            (4096, 584, 20480),
        ];
        for (cpus, nodes, error) in table {
            let shape = Shape::of(cpus);
            assert_eq!(shape.nodes(), nodes, "{cpus}");
            assert_eq!(shape.error_bound(cpus as u64, 1), error, "{cpus}");
        }
    }

    #[test]
    fn the_error_grows_with_n_log_n() {
        for cpus in 1..=4096 {
            let shape = Shape::of(cpus);
            let steps = u64::from(shape.order) + 2;
            let most = 32 * cpus.next_power_of_two() as u64 * steps;
            assert!(shape.error_bound(cpus as u64, 32) <= most, "{cpus}");
            // One level for at most eight children, and each CPU below the total.
            assert!(shape.levels <= 4 && 1 << shape.order >= cpus);
            let widest = (1..=shape.levels).map(|level| shape.bits(level) - shape.bits(level - 1));
            assert!(widest.max().is_none_or(|bits| bits <= WIDEST), "{cpus}");
            assert!(shape.error_bound(1, 32) <= shape.error_bound(cpus as u64, 32));
        }
    }

    #[test]
    fn the_total_is_within_the_bound_of_the_value() {
        for cpus in machines() {
            for batch in [1, 2, 3, 32, 1000] {
                let machine = Machine::new(cpus, batch);
                let mut random = 88172645463325252u64;
                for step in 0..20_000u64 {
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    let size = (random >> 40) % (batch + 1);
                    // Long stretches in one direction, and then in the other.
                    let n = if step / 5000 % 2 == 0 { 1 } else { -1 } * size as i64;
                    machine.add(random as usize % cpus, n);
                    if step % 1000 == 0 {
                        machine.check();
                    }
                }
                machine.check();
            }
        }
    }

    impl Machine {
        /// Returns whether an add of `n`, which is positive, would reach the total.
        fn would_write_total(&self, cpu: usize, n: i64) -> bool {
            let held = self.shards[cpu].get() + n;
            let (mut amount, mut first) = (held + self.batch as i64 / 2, 0);
            held > self.batch as i64
                && self.shape.levels().all(|level| {
                    let node = &self.nodes[first + (cpu >> self.shape.bits(level))];
                    amount += node.load(Relaxed) as i64;
                    first += self.shape.nodes_at(level);
                    amount >= self.shape.batch_at(level, self.batch) as i64
                })
        }
    }

    /// The bound is not much larger than what can happen: all shards and nodes are nearly full.
    #[test]
    fn the_error_comes_near_the_bound() {
        for cpus in machines() {
            let machine = Machine::new(cpus, 32);
            for step in 0..400 * cpus {
                let (cpu, n) = (step % cpus, 1 + (step / cpus % 7) as i64);
                if !machine.would_write_total(cpu, n) {
                    machine.add(cpu, n);
                }
            }
            assert_eq!((machine.total.get(), machine.writes.get()), (0, 0));
            let bound = machine.shape.error_bound(cpus as u64, 32);
            let error = machine.error();
            assert!(2 * error >= bound, "{cpus} CPUs: {error} of {bound}");
        }
    }

    #[test]
    fn cpus_that_add_in_turn_write_the_total_seldom() {
        for cpus in [64, 256, 1024, 4096] {
            let machine = Machine::new(cpus, 32);
            let adds = 1000 * cpus as u64;
            (0..adds as usize).for_each(|add| machine.add(add % cpus, 1));
            // At least as much as the largest node holds, and not only a batch.
            let apart = adds / machine.writes.get();
            let last = machine.shape.batch_at(machine.shape.levels - 1, 32);
            assert!(apart >= last, "{cpus} CPUs: {apart} of {last}");
        }
    }

    /// Pairs of one more and one less must not climb, at no value.
    #[test]
    fn small_ups_and_downs_write_no_node() {
        for value in -200..200i64 {
            let machine = Machine::new(16, 32);
            (0..value.abs()).for_each(|_| machine.add(5, value.signum()));
            let node = |at: usize| machine.nodes[at].load(Relaxed);
            (0..2).for_each(|_| [1, -1].map(|n| machine.add(5, n)).into_iter().collect());
            let before = (machine.writes.get(), (0..6).map(node).collect::<Vec<_>>());
            (0..100).for_each(|_| [1, -1].map(|n| machine.add(5, n)).into_iter().collect());
            let after = (machine.writes.get(), (0..6).map(node).collect::<Vec<_>>());
            assert_eq!(before, after, "at {value}");
        }
    }

    #[test]
    fn a_node_that_is_taken_is_left_out() {
        let machine = Machine::new(64, 32);
        machine.nodes[0].store(TAKEN, Relaxed);
        (0..1000).for_each(|_| machine.add(0, 1));
        assert_eq!(machine.nodes[0].load(Relaxed), TAKEN);
        assert!(machine.nodes[16].load(Relaxed) != 0 || machine.total.get() != 0);
        let bound = machine.shape.error_bound(1, 32);
        assert!(machine.error() <= bound, "{}", machine.error());
    }
}
