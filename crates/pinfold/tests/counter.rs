//! Counters as a program uses them.

mod common;

use common::{Random, StopAtEnd, pin};
use pinfold::counter::{
    CounterError, Counters, EventCounter, EventPair, PerCpuCounter, PerCpuHistogram,
};
use std::cmp::Ordering::{Equal, Greater, Less};
use std::sync::atomic::{AtomicBool, Ordering};

#[test]
fn adds_of_every_size_and_sign_sum_up() {
    let counter = PerCpuCounter::new().with_value(10).with_batch(8);
    let mut truth = 10i64;
    for n in [
        0,
        1,
        -1,
        7,
        8,
        9,
        -8,
        -9,
        1 << 40,
        -(1 << 41),
        i64::MAX,
        i64::MIN,
        -5,
        i64::MIN,
    ] {
        counter.add(n);
        truth = truth.wrapping_add(n);
        assert_eq!(counter.sum(), truth, "after {n}");
        assert_eq!(counter.bounds(), (truth, truth));
    }
}

#[test]
fn a_read_is_within_its_bound_and_a_fold_makes_it_exact() {
    let counter = PerCpuCounter::new().with_batch(100);
    assert_eq!((counter.read(), counter.error_bound()), (0, 0));
    for n in 1..=5000i64 {
        counter.inc();
        assert!(counter.read().abs_diff(n) <= counter.error_bound());
    }
    assert_ne!(counter.read(), 0);
    while counter.read() != 5000 {
        counter.fold();
    }
    assert_eq!(counter.fold(), 0);
}

#[test]
fn the_value_wraps_around_like_wrapping_add() {
    let counter = PerCpuCounter::new();
    counter.set(i64::MAX);
    counter.add(1);
    assert_eq!(counter.sum(), i64::MIN);
    counter.add(-1);
    assert_eq!(counter.sum(), i64::MAX);
}

#[test]
fn the_value_goes_on_when_a_word_wraps_around() {
    // Each add moves a word by 2^40, so that 2^24 adds bring the word back to 0. The value must go
    // on.
    let counter = PerCpuCounter::new().with_max_drift(1 << 60);
    for _ in 0..(1 << 24) + 5 {
        counter.add(1 << 40);
    }
    assert_eq!(counter.sum(), 5 << 40);
    assert_eq!(counter.batch(), 1 << 40, "such adds must fit a shard");
    assert!(counter.read().abs_diff(5 << 40) <= counter.error_bound());
    counter.sub(5 << 40);
    assert_eq!(counter.sum(), 0);
}

#[test]
fn large_adds_and_changed_batches_keep_the_bound() {
    let fixed = PerCpuCounter::new().with_batch(32);
    let default = PerCpuCounter::new();
    for counter in [&fixed, &default] {
        for n in [1, 33, -33, 5000, -5000, i64::MIN, i64::MAX, 1] {
            counter.add(n);
        }
        // An add above the batch goes to the base, which a read sees at once.
        counter.set(0);
        counter.fold();
        counter.add(1 << 30);
        assert_eq!(counter.read(), 1 << 30);
        // With a larger batch, the same size may stay on the CPU.
        counter.set_batch(1 << 33).unwrap();
        counter.add(1 << 30);
        counter.add(1 << 30);
        assert_eq!(counter.sum(), 3 << 30);
        if pinfold_rseq::backend() != pinfold_rseq::Backend::Atomic {
            assert!(
                counter.read() < 3 << 30,
                "no add of this size uses the shard"
            );
        }
        assert!(counter.read().abs_diff(3 << 30) <= counter.error_bound());
    }
}

#[test]
fn an_add_above_the_batch_is_read_at_once() {
    let counter = PerCpuCounter::new().with_batch(100);
    counter.add(100);
    let kept = counter.read();
    counter.add(101);
    counter.add(-101);
    counter.add(101);
    assert_eq!((counter.read() - kept, counter.sum()), (101, 201));
    if pinfold_rseq::backend() != pinfold_rseq::Backend::Atomic {
        assert_eq!(kept, 0, "an add of a whole batch stays on the CPU");
    }
}

/// With the largest batch, adds of any size up to it leave the total alone.
#[test]
fn local_adds_stay_on_their_cpu() {
    common::stay_on_one_cpu();
    let stay = || {
        let counter = PerCpuCounter::new().with_batch(PerCpuCounter::LOCAL_BATCH);
        let largest = PerCpuCounter::LOCAL_BATCH as i64;
        let (mut truth, mut stay) = (0, true);
        for n in [1, 1 << 20, -(1 << 39), largest / 2, -largest] {
            counter.add(n);
            truth += n;
            assert_eq!(counter.sum(), truth);
            stay &= counter.read() == 0;
        }
        assert!(counter.read().abs_diff(truth) <= counter.error_bound());
        stay
    };
    // An add goes elsewhere if another thread has a lock of the CPU's words at that moment.
    assert!((0..1000).any(|_| stay()));
}

#[test]
fn a_batch_for_one_call_folds_what_the_cpu_keeps() {
    let counter = PerCpuCounter::new().with_batch(1 << 20);
    (0..10).for_each(|_| counter.add_batch(3, 1000));
    assert_eq!(counter.sum(), 30);
    for sign in [1, -1] {
        // A thread that moves between CPUs leaves something behind, so the test tries again.
        let visible = (0..1000).any(|_| {
            counter.fold();
            counter.add_batch(4 * sign, 100);
            let kept = counter.read() != counter.sum();
            (0..30).for_each(|_| counter.add_batch(4 * sign, 100));
            kept && counter.read().abs_diff(counter.sum()) < 100
        });
        assert!(visible, "sign {sign}");
        let at_once = (0..1000).any(|_| {
            counter.add(5 * sign);
            counter.add_batch(sign, 1);
            counter.read() == counter.sum()
        });
        assert!(at_once, "sign {sign}");
    }
    let before = counter.sum();
    counter.add_batch(i64::MIN, 0);
    counter.add_batch(7, u64::MAX);
    counter.add_batch(200, 100);
    assert_eq!(
        counter.sum(),
        before.wrapping_add(i64::MIN).wrapping_add(207)
    );
}

#[test]
fn positive_reads_stop_at_zero() {
    let counter = PerCpuCounter::new().with_batch(64);
    counter.add(-3);
    assert_eq!((counter.sum_positive(), counter.sum()), (0, -3));
    counter.fold();
    assert_eq!((counter.read_positive(), counter.read()), (0, -3));
    counter.add_batch(10, 1);
    assert_eq!(
        (counter.sum_positive(), counter.read_positive().min(10)),
        (7, counter.read().min(10))
    );
}

#[test]
fn bad_batches_are_refused() {
    let batch = |batch| Err(CounterError::Batch { batch });
    assert_eq!(Counters::new(&[1], 0).map(|_| ()), batch(0));
    assert_eq!(PerCpuCounter::new().set_batch(0), batch(0));
    let above = (1 << 40) + 1;
    assert_eq!(PerCpuCounter::new().set_batch(above), batch(above));
    let text = CounterError::Batch { batch: 0 }.to_string();
    assert!(text.contains("batch of 0") && text.contains("1 to 2^40"));
}

#[test]
fn a_new_counters_batch_is_the_nearest_that_exists() {
    for (given, taken) in [(0, 1), (1, 1), (1 << 40, 1 << 40), (u64::MAX, 1 << 40)] {
        assert_eq!(PerCpuCounter::new().with_batch(given).batch(), taken);
    }
}

/// With a drift of 0, every add is visible at once.
#[test]
fn a_counter_without_drift_is_never_off() {
    let counter = PerCpuCounter::new().with_max_drift(0);
    for n in [1, -1, 0, 1000, i64::MIN, i64::MAX] {
        counter.add(n);
        assert_eq!((counter.read(), counter.error_bound()), (counter.sum(), 0));
    }
}

#[test]
fn set_and_swap_replace_the_value() {
    let counter = PerCpuCounter::new();
    counter.add(17);
    assert_eq!(counter.swap(5), 17);
    assert_eq!(counter.sum(), 5);
    assert_eq!(counter.read(), 5);
    counter.dec();
    counter.set(-3);
    assert_eq!((counter.sum(), counter.read()), (-3, -3));
}

#[test]
fn compare_is_exact_near_and_quick_far() {
    let counter = PerCpuCounter::new().with_batch(1000);
    (0..10).for_each(|_| counter.inc());
    assert_eq!(counter.compare(9), Greater);
    assert_eq!(counter.compare(10), Equal);
    assert_eq!(counter.compare(11), Less);
    assert_eq!(counter.compare(i64::MAX), Less);
    assert_eq!(counter.compare(i64::MIN), Greater);
}

#[test]
fn limited_add_stops_at_the_limit_on_both_sides() {
    let counter = PerCpuCounter::new().with_batch(64);
    (0..50).for_each(|_| counter.inc());
    assert!(counter.limited_add(60, 10));
    assert!(!counter.limited_add(60, 1));
    assert!(counter.limited_add(60, 0));
    assert!(counter.limited_add(-1, -61));
    assert!(!counter.limited_add(-1, -1));
    assert_eq!(counter.sum(), -1);
    assert!(counter.limited_add(i64::MAX, 1 << 50));
    assert!(!counter.limited_add(0, i64::MAX));
}

#[test]
fn adding_nothing_is_always_within_a_limit() {
    let counter = PerCpuCounter::new().with_batch(8);
    assert!(counter.limited_add(-1, 0), "refused without a block");
    counter.add(6);
    assert!(counter.limited_add(5, 0));
    assert_eq!(counter.sum(), 6);
}

/// Limited adds add to the base, and plain adds subtract as much within their batches. So the base
/// and the totals move far apart.
#[test]
fn limited_adds_follow_a_counter_that_moves_far() {
    const LIMIT: i64 = 100_000;
    for side in [1, -1] {
        let counter = PerCpuCounter::new().with_batch(4);
        for round in 0..200_000i64 {
            assert!(counter.limited_add(side * LIMIT, side * 3));
            (0..3).for_each(|_| counter.sub(side));
            if round % 10_000 == 0 {
                assert_eq!(counter.sum(), 0);
                assert!(counter.read().unsigned_abs() <= counter.error_bound());
            }
        }
        while counter.read() != 0 {
            counter.fold();
        }
        assert!(counter.limited_add(side * LIMIT, side * LIMIT));
        assert!(!counter.limited_add(side * LIMIT, side));
        assert_eq!(counter.sum(), side * LIMIT);
    }
}

#[test]
fn the_batch_changes_at_run_time() {
    let counter = PerCpuCounter::new().with_batch(4);
    for (step, batch) in [4u64, 500, 500, 3, 1, 1 << 40, 2].into_iter().enumerate() {
        match counter.set_batch(batch) {
            Ok(()) => assert_eq!(counter.batch(), batch),
            Err(error) => assert_eq!(error, CounterError::Fence),
        }
        for _ in 0..1000 {
            counter.inc();
        }
        let truth = (step as i64 + 1) * 1000;
        assert_eq!(counter.sum(), truth);
        assert!(counter.read().abs_diff(truth) <= counter.error_bound());
    }
}

#[test]
fn a_widening_batch_stays_within_its_drift() {
    for drift in [1u64, 2, 3, 100, 1 << 20] {
        let counter = PerCpuCounter::new().with_max_drift(drift);
        std::thread::scope(|scope| {
            for seed in 0..4 {
                let counter = &counter;
                scope.spawn(move || {
                    let mut random = Random::new(seed);
                    for n in 0..20_000 {
                        if n % 500 == 0 {
                            pin(random.below(64) as usize);
                        }
                        counter.add(random.below(40) as i64);
                        assert!(counter.error_bound() <= drift);
                    }
                });
            }
        });
        assert!(counter.sum().abs_diff(counter.read()) <= drift);
    }
    let counter = PerCpuCounter::new().with_max_drift(1 << 20);
    (0..100_000).for_each(|_| counter.inc());
    assert!(counter.batch() > 1000, "{}", counter.batch());
}

#[test]
fn counters_made_together_count_apart() {
    let values: Vec<i64> = (0..10_000).collect();
    let counters = Counters::new(&values, 16).unwrap();
    assert_eq!(counters.len(), 10_000);
    for (at, counter) in counters.iter().enumerate() {
        (0..at % 50).for_each(|_| counter.inc());
    }
    for (at, counter) in counters.iter().enumerate() {
        assert_eq!(counter.sum(), (at + at % 50) as i64);
    }
    drop(counters);
    assert!(Counters::new(&[], 16).unwrap().is_empty());
    let again = Counters::new(&values, 16).unwrap();
    assert!(
        again
            .iter()
            .zip(&values)
            .all(|(counter, &value)| counter.sum() == value)
    );
}

#[test]
fn too_many_counters_are_an_error() {
    let values = vec![0; 3 << 20];
    assert_eq!(
        Counters::new(&values, 1).map(|_| ()),
        Err(CounterError::OutOfMemory)
    );
}

#[test]
fn events_of_all_threads_are_counted() {
    static EVENTS: EventCounter = EventCounter::new();
    std::thread::scope(|scope| {
        for seed in 0..8 {
            scope.spawn(move || {
                let mut random = Random::new(seed);
                for n in 0..100_000 {
                    EVENTS.add(1 + n % 2);
                    if n % 5000 == 0 {
                        pin(random.below(64) as usize);
                    }
                }
            });
        }
    });
    assert_eq!(EVENTS.sum(), 8 * 150_000);
}

#[test]
fn a_histogram_counts_values_of_every_size() {
    let histogram = PerCpuHistogram::new();
    assert_eq!(histogram.snapshot().count(), 0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..64).for_each(|bit| histogram.record(1 << bit)));
        }
    });
    histogram.record(0);
    let before = histogram.snapshot();
    assert_eq!((before.count(), before.unrecorded()), (4 * 64 + 1, 0));
    assert_eq!(before.sum(), u64::MAX.wrapping_mul(4));
    assert_eq!(before.min(), 0);
    assert!(before.buckets().skip(1).all(|(_, count)| count == 4));
    histogram.record(1000);
    let new = histogram.snapshot().since(&before);
    assert_eq!((new.count(), new.sum()), (1, 1000));
    assert!((1000..=1031).contains(&new.quantile(1.0)));
}

/// Runs all operations at once on one counter. What was swapped out and what is left must equal
/// what was added.
#[test]
fn nothing_is_lost_between_folds_swaps_and_batches() {
    let counter = PerCpuCounter::new().with_batch(128);
    let stop = AtomicBool::new(false);
    let (added, taken) = std::thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        let (counter, stop) = (&counter, &stop);
        let adders: Vec<_> = (0..4)
            .map(|seed| {
                scope.spawn(move || {
                    let mut random = Random::new(seed);
                    let mut sum = 0;
                    while !stop.load(Ordering::Relaxed) {
                        let n = random.below(40) as i64 - 18;
                        counter.add(n);
                        sum += n;
                        if random.below(200) == 0 {
                            pin(random.below(64) as usize);
                        }
                    }
                    sum
                })
            })
            .collect();
        let resetters: Vec<_> = (0..2)
            .map(|seed| {
                scope.spawn(move || {
                    let mut random = Random::new(seed + 100);
                    let mut taken = 0;
                    while !stop.load(Ordering::Relaxed) {
                        match random.below(4) {
                            0 => taken += counter.swap(0),
                            1 if counter.limited_add(1 << 30, 7) => taken -= 7,
                            1 => drop(counter.fold()),
                            2 => drop(counter.set_batch(1 + random.below(512))),
                            _ => drop(counter.sum()),
                        }
                    }
                    taken
                })
            })
            .collect();
        std::thread::sleep(std::time::Duration::from_secs(2));
        stop.store(true, Ordering::Relaxed);
        let total = |handles: Vec<std::thread::ScopedJoinHandle<'_, i64>>| {
            handles
                .into_iter()
                .map(|handle| handle.join().unwrap())
                .sum::<i64>()
        };
        (total(adders), total(resetters))
    });
    assert_eq!(taken + counter.sum(), added);
    assert!(counter.sum().abs_diff(counter.read()) <= counter.error_bound());
}

#[test]
fn both_counts_of_a_pair_lose_nothing() {
    const ADDS: u64 = 200_000;
    let pair = EventPair::new();
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let pair = &pair;
            scope.spawn(move || {
                let mut random = Random::new(seed);
                for n in 0..ADDS {
                    if n % 1000 == 0 {
                        pin(random.below(64) as usize);
                    }
                    pair.add(1, n);
                }
            });
        }
        let mut before = (0, 0);
        for _ in 0..1000 {
            let now = pair.sum();
            assert!(
                now.0 >= before.0 && now.1 >= before.1,
                "{before:?}, {now:?}"
            );
            before = now;
        }
    });
    assert_eq!(pair.sum(), (4 * ADDS, 4 * ADDS * (ADDS - 1) / 2));
    pair.add(u64::MAX, 1);
    assert_eq!(pair.sum().0, 4 * ADDS - 1, "counts are modulo 2^64");
}
