//! Counters whose amounts go through a tree. The unit tests of `counter/climb.rs` simulate machines
//! with 1 to 4096 CPUs.

mod common;

use common::{Random, StopAtEnd, in_child, limit, pin};
use pinfold::counter::CounterTree;
use std::cmp::Ordering::{Equal, Greater, Less};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

static IN_STATIC: CounterTree = CounterTree::new().with_value(7).with_batch(64);

fn is_within(tree: &CounterTree, truth: i64) -> bool {
    let (read, bound) = tree.read_with_bound();
    read.abs_diff(truth) <= bound && bound <= tree.error_bound()
}

#[test]
fn adds_of_every_size_and_sign_sum_up() {
    let tree = CounterTree::new().with_value(10).with_batch(8);
    let mut truth = 10i64;
    for n in [0, 1, -1, 7, 8, 9, -8, -9, 1 << 41, i64::MAX, i64::MIN, -5] {
        tree.add(n);
        truth = truth.wrapping_add(n);
        assert_eq!(tree.sum(), truth, "after {n}");
    }
    tree.set(0);
    for n in 1..=5000 {
        tree.inc();
        assert!(is_within(&tree, n));
    }
    assert!(
        tree.read() > 4000,
        "the total stands still at {}",
        tree.read()
    );
    for n in (0..5000).rev() {
        tree.dec();
        assert!(is_within(&tree, n));
    }
    assert_eq!((tree.sum(), tree.sum_positive()), (0, 0));
}

#[test]
fn a_static_counts_and_is_compared() {
    assert_eq!(IN_STATIC.batch(), 64);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..10_000).for_each(|_| IN_STATIC.add(3)));
        }
    });
    assert_eq!(IN_STATIC.sum(), 120_007);
    assert_eq!(IN_STATIC.compare(120_007), Equal);
    assert_eq!(IN_STATIC.compare(120_008), Less);
    assert_eq!(IN_STATIC.compare(-120_007), Greater);
    assert_eq!(IN_STATIC.try_compare(-120_007), Some(Greater));
    assert_eq!(IN_STATIC.try_compare(120_007), None);
    assert_eq!(CounterTree::default().compare_with(&IN_STATIC), Less);
    assert_eq!(IN_STATIC.swap(-1), 120_007);
    assert_eq!((IN_STATIC.sum(), IN_STATIC.sum_positive()), (-1, 0));
}

/// Each thread adds 1 and subtracts 1, so the value is always from 0 to 4. A sum that is not exact
/// returns another value.
#[test]
fn every_sum_was_the_value_at_one_moment() {
    let tree = CounterTree::new().with_batch(2);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        for seed in 0..4 {
            let (tree, stop) = (&tree, &stop);
            scope.spawn(move || {
                let mut random = Random::new(seed);
                while !stop.load(Relaxed) {
                    tree.inc();
                    if random.below(4) == 0 {
                        pin(random.below(64) as usize);
                    }
                    tree.dec();
                }
            });
        }
        for _ in 0..50_000 {
            let sum = tree.sum();
            assert!((0..=4).contains(&sum), "sum {sum} was never the value");
            let (read, bound) = tree.read_with_bound();
            assert!((-(bound as i64)..=4 + bound as i64).contains(&read));
        }
    });
    assert_eq!(tree.sum(), 0);
}

/// Forks while threads add and carry. The child must find counters that work.
#[test]
fn a_child_goes_on() {
    let trees = [2, 9].map(|batch| CounterTree::new().with_batch(batch));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        for seed in 0..3 {
            let (trees, stop) = (&trees, &stop);
            scope.spawn(move || {
                let mut random = Random::new(seed);
                while !stop.load(Relaxed) {
                    let tree = &trees[random.below(2) as usize];
                    let n = 1 + random.below(9) as i64;
                    (0..50).for_each(|_| tree.add(n));
                    (0..49).for_each(|_| tree.sub(n));
                    match random.below(16) {
                        0 => drop(tree.swap(5)),
                        1 => pin(random.below(64) as usize),
                        _ => {}
                    }
                }
            });
        }
        for _ in 0..100 {
            in_child(10, || trees.iter().all(works_alone));
        }
    });
}

/// Returns whether all operations work on a tree that no other thread uses.
fn works_alone(tree: &CounterTree) -> bool {
    let before = tree.sum();
    let mut fine = is_within(tree, before);
    for n in 1..=300 {
        tree.inc();
        fine &= is_within(tree, before + n);
    }
    fine && tree.swap(1) == before + 300 && tree.sum() == 1 && is_within(tree, 1)
}

/// Without address space for per-CPU memory, the counter is an exact atomic.
#[test]
fn no_memory_means_atomics() {
    in_child(30, || {
        limit(libc::RLIMIT_AS, 0);
        let tree = CounterTree::new().with_value(5);
        (0..1000).for_each(|_| tree.inc());
        tree.sum() == 1005 && is_within(&tree, 1005) && tree.swap(0) == 1005
    });
}
