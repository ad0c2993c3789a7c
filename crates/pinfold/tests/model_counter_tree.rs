//! A model of the tree of counters, explored by loom:
//! `RUSTFLAGS="--cfg loom" cargo test --release --test model_counter_tree`.
//!
//! The climb is `counter/climb.rs` itself. The model has two shards of a tree for eight CPUs, which
//! share a node on each of the two levels. A shard is a thread's own, as a claim makes it.
//! `model_counter.rs` has the claims.
//!
//! A thread may stop anywhere in its climb. A reader must still find the total within the bound of
//! the value.
#![cfg(loom)]

#[macro_use]
#[path = "common/cases.rs"]
mod cases;
#[path = "../src/counter/climb.rs"]
#[allow(dead_code, reason = "the model does not use all of the file")]
mod climb;

use climb::{Shape, TAKEN};
use loom::sync::Arc;
use loom::sync::atomic::AtomicI64;
use loom::sync::atomic::Ordering::{AcqRel, Acquire};
use loom::thread;
use primitive::AtomicU64;

/// What `climb` takes from its folder.
mod primitive {
    pub use loom::sync::atomic::AtomicU64;
}

/// The number of CPUs of the tree: two levels of nodes.
const CPUS: usize = 8;
/// The numbers of the nodes above CPUs 0 and 1, and the least amounts that they do not hold.
const ABOVE: [(usize, i64); 2] = [(0, 2), (4, 4)];
/// How far the total may be from the value: two shards with two batches each, and the nodes.
const BOUND: i64 = 2 * 2 + 1 + 3;

/// Carries 2 up from a CPU.
type Climb = fn(&Tree, cpu: usize);

struct Tree {
    shape: Shape,
    nodes: Vec<AtomicU64>,
    total: AtomicI64,
    value: AtomicI64,
}

impl Tree {
    /// Returns a tree whose nodes are as full as they may be.
    fn full() -> Tree {
        let shape = Shape::of(CPUS);
        let held = |at| {
            ABOVE
                .iter()
                .find(|node| node.0 == at)
                .map_or(0, |node| node.1 - 1)
        };
        let nodes: Vec<_> = (0..shape.nodes())
            .map(|at| AtomicU64::new(held(at) as u64))
            .collect();
        Tree {
            shape,
            nodes,
            total: AtomicI64::new(0),
            value: AtomicI64::new(1 + 3),
        }
    }

    fn raise_total(&self, by: i64) {
        self.total.fetch_add(by, AcqRel);
    }

    fn climb(&self, cpu: usize) {
        let raise = |by| self.raise_total(by);
        self.shape.climb(cpu, 1, 2, |at| &self.nodes[at], raise);
    }

    /// A fault: empties a node instead of taking it, so that other threads fill it again while the
    /// amount is under way.
    fn climb_and_empty(&self, _cpu: usize) {
        let mut amount = 2;
        for (at, most) in ABOVE {
            amount += self.nodes[at].swap(0, AcqRel) as i64;
            if amount < most {
                self.nodes[at].fetch_add(amount as u64, AcqRel);
                return;
            }
        }
        self.raise_total(amount);
    }

    /// Checks the total against the value, which only grows.
    fn read(&self) {
        let least = self.value.load(Acquire);
        let total = self.total.load(Acquire);
        let most = self.value.load(Acquire);
        let within = least - BOUND..=most + BOUND;
        assert!(
            within.contains(&total),
            "the total is {total}, not in {within:?}"
        );
    }

    /// Checks that nothing is lost and no node is left taken, when no thread climbs.
    fn rests(&self) {
        let words = self.nodes.iter().map(|node| node.load(Acquire));
        let held = words.inspect(|&word| assert!(word != TAKEN, "left taken"));
        let held: i64 = held.map(|word| word as i64).sum();
        assert_eq!(self.total.load(Acquire) + held, self.value.load(Acquire));
    }
}

/// Explores two threads that count, and a reader.
fn explore(climb: Climb) {
    let mut model = loom::model::Builder::new();
    // Enough to find the planted fault, which needs one preemption.
    model.preemption_bound = Some(2);
    model.check(move || {
        let tree = Arc::new(Tree::full());
        let threads = [(0, 1), (1, 2)].map(|(cpu, times)| {
            let tree = tree.clone();
            thread::spawn(move || {
                for _ in 0..times {
                    tree.value.fetch_add(2, AcqRel);
                    climb(&tree, cpu);
                }
            })
        });
        tree.read();
        threads
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
        tree.rests();
    });
}

cases! {
    the_total_is_near_wherever_a_climb_stops: explore(Tree::climb);
    with_emptied_nodes_the_total_is_too_far: explore(Tree::climb_and_empty), panics "the total is";
}
