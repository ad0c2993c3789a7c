//! Models of the counter's protocol, explored by loom: `RUSTFLAGS="--cfg loom" cargo test --release --test model_counter`.
//!
//! loom's types cannot stand in statics, so this is the protocol of `counter/shards.rs` and `counter/exact.rs` written again, step
//! by step. A critical section says that its CPU is in it: each model has one thread on a CPU, but threads on other CPUs
//! see its loads and its store as the separate steps they are. The fence waits until it has seen each CPU outside of one.
#![cfg(loom)]

#[path = "model_counter/protocol.rs"]
mod protocol;

use loom::sync::Arc;
use loom::sync::atomic::Ordering::{AcqRel, Acquire, Release, SeqCst};
use loom::sync::atomic::{AtomicUsize, fence};
use loom::thread;
use protocol::{CPUS, Counter, Word};

fn explore(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

/// Adds on one CPU, folds from afar, and reads: every read is within the drift of a value that the counter had.
#[test]
fn reads_are_within_the_drift() {
    explore(|| {
        // One shard in use: the drift is 1.
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
        // Before the read at most what it can have missed has been added, after it at least what it has seen.
        let least = counter.try_sum();
        let read = counter.read();
        let most = counter.try_sum();
        let drift = counter.drift.load(Acquire) as i64;
        if let (Some(least), Some(most)) = (least, most) {
            let within = least - drift..=most + drift;
            assert!(within.contains(&read), "{read} {within:?}");
        }
        adder.join().unwrap();
        folder.join().unwrap();
        assert_eq!(counter.at_rest(), 2);
        assert!((counter.read() - 2).abs() <= drift);
    });
}

/// A thread adds 1 on one CPU, moves, and takes 1 away on the other: the value is always 0 or 1.
fn transfer(counter: &Arc<Counter>) -> thread::JoinHandle<()> {
    let counter = counter.clone();
    thread::spawn(move || {
        counter.add(0, false, 1);
        counter.add(1, true, 1);
    })
}

#[test]
fn sums_see_values_that_were() {
    explore(|| {
        let counter = Counter::new(2, true);
        let moving = transfer(&counter);
        if let Some(sum) = counter.try_sum() {
            assert!((0..=1).contains(&sum), "{sum}");
        }
        moving.join().unwrap();
        assert_eq!(counter.at_rest(), 0);
    });
}

/// What the model is worth: walking over the shards once, as the kernel does, it finds the wrong sum.
#[test]
#[should_panic(expected = "was never the value")]
fn a_single_collection_does_not() {
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
fn a_gated_sum_sees_a_value_that_was_and_loses_nothing() {
    explore(|| {
        let counter = Counter::new(1, true);
        let moving = transfer(&counter);
        let sum = counter.sum_gated();
        assert!((0..=1).contains(&sum), "{sum}");
        moving.join().unwrap();
        assert_eq!(counter.at_rest(), 0);
    });
}

#[test]
fn what_a_swap_takes_and_leaves_is_what_was_added() {
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

/// A swap has parked the shards. Another follows while a CPU adds again: an add that was over
/// before the exchange is in the answer.
fn swap_again(second: fn(&Counter) -> i64) {
    explore(move || {
        let counter = Counter::new(1, true);
        assert_eq!(counter.swap(0), 0);
        let adder = thread::spawn({
            let counter = counter.clone();
            move || {
                counter.add(0, false, 1);
                // The add itself may have gone to the base.
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

/// Without a fence for the shards that are not parked, an add that had begun is missed.
#[test]
#[should_panic(expected = "missed an add")]
fn a_swap_that_never_fences_does() {
    swap_again(|counter| counter.swap_fencing(7, |_| ()));
}

/// Whoever has added and finds the base untouched has added before the limited add: that must then see it.
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

/// A limit at which the other's add makes the difference: whoever comes second is refused or goes past by an ordinary add.
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
        // An add that was over when the limited one began fills the limit.
        assert!(!(seen == 1 && granted));
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
                assert!((0..=1).contains(&room), "{room}");
            }
        }
        assert_eq!(counter.at_rest(), 2);
        assert!((counter.read() - 2).unsigned_abs() <= counter.drift.load(Acquire));
    });
}

/// A shard's first add: its batch is in the drift before it can keep anything to itself.
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

/// Ups and downs that cancel in the shard stay within the drift at every step.
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
        // The value is 0 or 1 all the time, and one shard is in use.
        assert!((-1..=2).contains(&read), "{read}");
        adder.join().unwrap();
        assert_eq!(counter.at_rest(), 1);
    });
}

/// Two gates at a time, and a fold below them: all is as it was when both are open.
#[test]
fn gates_add_up() {
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

/// Each of two adds on its own CPU, fences and sums: one of them at least sees both.
#[test]
fn who_adds_and_sums_second_sees_both() {
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
        assert!(!(mine == Some(1) && theirs == Some(1)));
    });
}

/// A read that begins with one batch and ends with another is within the bound that comes with it, of a value that was.
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
                // What was added and taken away cancels: no total changes.
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
