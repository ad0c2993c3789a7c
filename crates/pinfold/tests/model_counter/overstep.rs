//! Adds that fold and go half a batch beyond.

use super::counter::PerCpuCounter;
use super::counter_units::{BLOCK, Fault, NOWHERE, explore, move_to, word_at};
use super::{granted, is_consistent};
use loom::sync::atomic::Ordering::Acquire;
use loom::thread;

/// Additions use up the batch of 2 on a CPU. One thread's next addition folds, and oversteps by 1.
/// Another thread subtracts on the same CPU meanwhile.
fn overstep(fault: Fault) {
    explore(3, 2, fault, || {
        let counter = granted(2);
        counter.add_on(0, 2);
        let subtractor = thread::spawn({
            let counter = counter.clone();
            move || {
                move_to(0);
                let taken = counter.of().add(true, 2);
                move_to(NOWHERE);
                if taken { 2 } else { 0 }
            }
        });
        counter.add_overstepping(0, 1);
        let value = 3 - subtractor.join().unwrap();
        assert_eq!(counter.sum_at_once(), Some(value));
        assert!(counter.read().abs_diff(value) <= counter.error_bound());
        rooms_are_within(2);
        counter.fold();
        assert_eq!(
            counter.read(),
            value,
            "a fold from afar leaves the total exact"
        );
    });
}

/// Checks that each word on CPU 0 is at most its limit, and at most a batch below it.
fn rooms_are_within(batch: i64) {
    for at in [BLOCK, BLOCK + 16] {
        let [word, limit] = [at, at + 8].map(|offset| word_at(0, offset).load(Acquire));
        let room = limit.wrapping_sub(word) as i64;
        assert!(
            (0..=batch).contains(&room),
            "room {room} of a batch of {batch}"
        );
    }
}

#[test]
fn an_overstep_keeps_words_between_mark_and_limit() {
    overstep(Fault::Nothing);
}

#[test]
#[should_panic(expected = "of a batch of 2")]
fn an_overstep_beside_a_section_takes_a_word_past_its_limit() {
    overstep(Fault::OwnNotAwaited);
}

/// The total is half a batch beyond the value, and a subtraction may use all the room that is left.
#[test]
fn reads_are_within_the_drift_while_a_fold_oversteps() {
    explore(3, 2, Fault::Nothing, || {
        let counter = granted(2);
        counter.add_on(0, 2);
        let folder = thread::spawn({
            let counter = counter.clone();
            move || counter.add_overstepping(0, 1)
        });
        let subtractor = thread::spawn({
            let counter = counter.clone();
            move || {
                move_to(0);
                counter.of().add(true, 1);
                move_to(NOWHERE);
            }
        });
        within_drift(&counter);
        folder.join().unwrap();
        subtractor.join().unwrap();
        is_consistent(&counter);
    });
}

/// A read must be within the drift of a value that the counter had meanwhile. The value goes up by
/// 1 once and down by 1 once, so it is at most 1 outside of what this finds before and after.
fn within_drift(counter: &PerCpuCounter) {
    let (least, _) = counter.bounds();
    let (read, drift) = counter.read_with_bound();
    let (_, most) = counter.bounds();
    let within = least - 1 - drift as i64..=most + 1 + drift as i64;
    assert!(within.contains(&read), "read {read}, not in {within:?}");
}
