//! Models of the counter's protocol, explored by loom: `RUSTFLAGS="--cfg loom" cargo test --release
//! --test model_counter`.
//!
//! loom's types cannot be in statics. So `protocol.rs` is the protocol of `counter/shards.rs` and
//! `counter/exact.rs` written again, step by step.
//!
//! A critical section marks its CPU as running it. In each model, one thread adds on a CPU, but the
//! threads on other CPUs see the section's loads and its store as separate steps. The fence waits
//! until it has seen each CPU outside of a section.
#![cfg(loom)]

#[path = "model_counter/protocol.rs"]
mod protocol;

use loom::sync::Arc;
use loom::sync::atomic::Ordering::{AcqRel, Acquire, Release, SeqCst};
use loom::sync::atomic::{AtomicUsize, fence};
use loom::thread;
use protocol::{CPUS, Counter, Word};

/// Runs `model` with all interleavings that have at most three preemptions.
fn explore(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

/// One thread adds on a CPU, a second one folds from afar, and a third one reads. The read must be
/// within the drift of a value that the counter had.
#[test]
fn reads_are_within_the_drift() {
    explore(|| {
        // One shard is granted, so that the drift is 1.
        let counter = Counter::new(1, false);
        counter.grant(0);
        let adder = thread::spawn({
            let counter = counter.clone();
            move || (0..2).for_each(|_| counter.add(0, false, 1))
        });
        let folder = thread::spawn({
            let counter = counter.clone();
            move || {
                if let Some(_held) = counter.shards[0].lock.try_lock() {
                    counter.fold(0);
                }
            }
        });
        // The value at the read is between the two sums, because it only grows.
        let least = counter.try_sum();
        let read = counter.read();
        let most = counter.try_sum();
        let drift = counter.drift.load(Acquire) as i64;
        if let (Some(least), Some(most)) = (least, most) {
            let within = least - drift..=most + drift;
            assert!(within.contains(&read), "read {read}, not in {within:?}");
        }
        adder.join().unwrap();
        folder.join().unwrap();
        assert_eq!(counter.at_rest(), 2);
        assert!((counter.read() - 2).abs() <= drift);
    });
}

/// Starts a thread that adds 1 on one CPU, moves, and subtracts 1 on the other. The value is always
/// 0 or 1.
fn transfer(counter: &Arc<Counter>) -> thread::JoinHandle<()> {
    let counter = counter.clone();
    thread::spawn(move || {
        counter.add(0, false, 1);
        counter.add(1, true, 1);
    })
}

#[test]
fn a_sum_was_the_value_at_one_moment() {
    explore(|| {
        let counter = Counter::new(2, true);
        let moving = transfer(&counter);
        if let Some(sum) = counter.try_sum() {
            assert!((0..=1).contains(&sum), "{sum} was never the value");
        }
        moving.join().unwrap();
        assert_eq!(counter.at_rest(), 0);
    });
}

/// Shows that the model can fail: one walk over the shards, as the kernel does it, finds a wrong
/// sum.
#[test]
#[should_panic(expected = "was never the value")]
fn a_single_collection_may_never_have_been_the_value() {
    explore(|| {
        let counter = Counter::new(2, true);
        let moving = transfer(&counter);
        let once = counter.collect();
        let sum = once.0 as i64 - once.1 as i64;
        assert!((0..=1).contains(&sum), "{sum} was never the value");
        moving.join().unwrap();
    });
}

#[test]
fn a_gated_sum_was_the_value_and_loses_nothing() {
    explore(|| {
        let counter = Counter::new(1, true);
        let moving = transfer(&counter);
        let sum = counter.sum_gated();
        assert!((0..=1).contains(&sum), "{sum} was never the value");
        moving.join().unwrap();
        assert_eq!(counter.at_rest(), 0);
    });
}

#[test]
fn a_swap_beside_adds_loses_nothing() {
    explore(|| {
        let counter = Counter::new(1, true);
        let adder = thread::spawn({
            let counter = counter.clone();
            move || (0..2).for_each(|_| counter.add(0, false, 1))
        });
        let taken = counter.swap(0);
        adder.join().unwrap();
        assert_eq!(taken + counter.at_rest(), 2);
        assert!((counter.read() - counter.at_rest()).abs() <= 2);
    });
}

/// Swaps while a CPU adds to a shard that an earlier swap has parked. An add that was over before
/// the exchange must be in the result.
fn swap_again(second: fn(&Counter) -> i64) {
    explore(move || {
        let counter = Counter::new(1, true);
        assert_eq!(counter.swap(0), 0);
        let adder = thread::spawn({
            let counter = counter.clone();
            move || {
                counter.add(0, false, 1);
                // Returns whether the exchange has not happened yet. The add itself may have gone
                // to the base, which is then 1.
                [0, 1].contains(&counter.base.fetch_add(0, AcqRel))
            }
        });
        let taken = second(&counter);
        let came_first = adder.join().unwrap();
        assert!(!came_first || taken == 1, "missed an add");
        assert_eq!(taken + counter.at_rest(), 8);
    });
}

#[test]
fn a_swap_of_parked_shards_misses_no_add() {
    swap_again(|counter| counter.swap(7));
}

/// Without a fence for shards that are not parked, a swap misses an add that had begun.
#[test]
#[should_panic(expected = "missed an add")]
fn a_swap_that_never_fences_misses_an_add() {
    swap_again(|counter| counter.swap_fencing(7, |_| ()));
}

/// A thread that has added and then finds the base unchanged has added before the limited add. The
/// limited add must then see that add.
#[test]
fn a_limited_add_never_passes_its_limit() {
    explore(|| {
        let counter = Counter::new(2, true);
        let adder = thread::spawn({
            let counter = counter.clone();
            move || {
                counter.add(0, false, 1);
                counter.base.fetch_add(0, AcqRel) == 0
            }
        });
        let granted = counter.limited_add(1, 1);
        let came_first = adder.join().unwrap();
        assert!(!(came_first && granted), "added beyond the limit");
        assert_eq!(counter.at_rest(), 1 + i64::from(granted));
        assert!(!counter.limited_add(1, 1));
    });
}

/// The other thread's add fills the limit. If that add comes second, it goes beyond the limit, as
/// an ordinary add may. If the limited add comes second, it must be refused.
#[test]
fn a_limited_add_sees_what_was_added_before() {
    explore(|| {
        let counter = Counter::new(2, true);
        let added = Arc::new(AtomicUsize::new(0));
        let adder = thread::spawn({
            let (counter, added) = (counter.clone(), added.clone());
            move || {
                counter.add(1, false, 1);
                added.store(1, Release);
            }
        });
        let seen = added.load(Acquire);
        let granted = counter.limited_add(1, 1);
        // An add that was over when the limited add began fills the limit.
        assert!(!(seen == 1 && granted), "added beyond the limit");
        adder.join().unwrap();
    });
}

#[test]
fn words_stay_between_mark_and_limit_when_the_batch_is_lowered() {
    explore(|| {
        let counter = Counter::new(3, true);
        let adder = thread::spawn({
            let counter = counter.clone();
            move || (0..2).for_each(|_| counter.add(0, false, 1))
        });
        counter.lower(1);
        adder.join().unwrap();
        for cpu in 0..CPUS {
            for down in [false, true] {
                let Word { word, limit, .. } = counter.word(cpu, down);
                let (word, limit) = (word.load(Acquire), limit.load(Acquire));
                let room = limit.wrapping_sub(word) as i64;
                assert!((0..=1).contains(&room), "room {room} of a batch of 1");
            }
        }
        assert_eq!(counter.at_rest(), 2);
        assert!((counter.read() - 2).unsigned_abs() <= counter.drift.load(Acquire));
    });
}

/// At a shard's first add, its batch is in the drift before the shard can keep anything to itself.
#[test]
fn a_new_shard_counts_its_drift_first() {
    explore(|| {
        let counter = Counter::new(1, false);
        let adder = thread::spawn({
            let counter = counter.clone();
            move || counter.add(0, false, 1)
        });
        let sum = counter.try_sum();
        let read = counter.read();
        let drift = counter.drift.load(Acquire) as i64;
        if let Some(sum) = sum {
            assert!(read >= sum - drift, "read {read} of {sum}, drift {drift}");
        }
        adder.join().unwrap();
        assert_eq!(counter.at_rest(), 1);
    });
}

/// Additions and subtractions that cancel in the shard stay within the drift at every step.
#[test]
fn cancelling_keeps_the_bound() {
    explore(|| {
        let counter = Counter::new(1, true);
        let adder = thread::spawn({
            let counter = counter.clone();
            move || {
                counter.add(0, false, 1);
                counter.add(0, true, 1);
                counter.add(0, false, 1);
            }
        });
        if let Some(_held) = counter.shards[0].lock.try_lock() {
            counter.fold(0);
        }
        let read = counter.read();
        // The value is always 0 or 1, and the adds are in one shard, whose batch is 1.
        assert!((-1..=2).contains(&read), "read {read}");
        adder.join().unwrap();
        assert_eq!(counter.at_rest(), 1);
    });
}

/// Two threads close gates at once, and a third folds. When both gates are open again, nothing has
/// changed.
#[test]
fn two_gates_at_once_leave_nothing_closed() {
    explore(|| {
        let counter = Counter::new(2, true);
        counter.add(0, false, 2);
        let summer = thread::spawn({
            let counter = counter.clone();
            move || counter.sum_gated()
        });
        let folder = thread::spawn({
            let counter = counter.clone();
            move || {
                if let Some(_held) = counter.shards[0].lock.try_lock() {
                    counter.fold(0);
                }
            }
        });
        assert_eq!(counter.sum_gated(), 2);
        assert_eq!(summer.join().unwrap(), 2);
        folder.join().unwrap();
        assert_eq!(counter.read(), 2);
        assert_eq!(counter.word(0, false).room(), 2);
        assert!(counter.section(0, false, 1), "a gate stayed closed");
    });
}

/// Two threads add, each on its own CPU, then fence and sum. At least one of them must see both
/// adds.
#[test]
fn of_two_threads_that_add_and_sum_one_sees_both() {
    explore(|| {
        let counter = Counter::new(2, true);
        let add_and_sum = |cpu: usize, counter: &Counter| {
            counter.section(cpu, false, 1);
            fence(SeqCst);
            counter.try_sum()
        };
        let other = thread::spawn({
            let counter = counter.clone();
            move || add_and_sum(1, &counter)
        });
        let mine = add_and_sum(0, &counter);
        let theirs = other.join().unwrap();
        let both_miss = mine == Some(1) && theirs == Some(1);
        assert!(!both_miss, "both sums miss an add");
    });
}

/// A read begins with one batch and ends with another. It must be within its bound of a value that
/// the counter had meanwhile.
#[test]
fn a_bound_belongs_to_its_read() {
    explore(|| {
        let counter = Counter::new(3, true);
        counter.add(0, false, 3);
        let changer = thread::spawn({
            let counter = counter.clone();
            move || {
                counter.base.fetch_add(10, AcqRel);
                counter.section(0, true, 3);
                // The additions and subtractions cancel, so that no total changes by folding.
                counter.lower(1);
            }
        });
        let (read, bound) = counter.read_with_bound();
        let was = [3, 13, 10].map(|value: i64| value.abs_diff(read) <= bound);
        assert!(was.contains(&true), "{read} off by at most {bound}");
        changer.join().unwrap();
        assert_eq!(counter.at_rest(), 10);
    });
}
