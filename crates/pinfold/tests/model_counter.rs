//! Models of the counter's protocol, explored by loom: `RUSTFLAGS="--cfg loom" cargo test --release
//! --test model_counter`.
//!
//! The protocol is the real files `exact.rs`, `freeze.rs`, `read.rs`, `shards.rs` and `slow_add.rs`
//! of `counter/`. `model_counter/counter.rs` has the counter's handle, and stands for the other
//! files of the folder. `model_counter/counter_units.rs` has the machine. The tables there say what
//! each of their functions mirrors. Each planted fault breaks a guarantee.
//!
//! The kernel aborts a section when it lets another thread run on the CPU. Here a thread that
//! relies on this waits for the section's end instead.
#![cfg(loom)]

#[macro_use]
#[path = "common/cases.rs"]
mod cases;
#[path = "model_counter/counter.rs"]
#[allow(dead_code, reason = "the model does not use all of the files")]
mod counter;
#[path = "model_counter/counter_units.rs"]
#[allow(dead_code, reason = "the model does not use all of the machine")]
mod counter_units;

use counter::PerCpuCounter;
use counter::shards::Direction::Up;
use counter_units::{BLOCK, Fault, NOWHERE, explore, move_to, word_at};
use loom::sync::Arc;
use loom::sync::atomic::AtomicUsize;
use loom::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use loom::thread;

/// Returns a counter whose shards are active on all CPUs.
fn active(batch: u64) -> Arc<PerCpuCounter> {
    let counter = PerCpuCounter::with_batch(batch);
    counter.activate_all();
    counter
}

/// Starts a thread that makes `adds`, each on a CPU.
fn spawn(counter: &Arc<PerCpuCounter>, adds: &'static [(usize, i64)]) -> thread::JoinHandle<()> {
    let counter = counter.clone();
    thread::spawn(move || adds.iter().for_each(|&(cpu, n)| counter.add_on(cpu, n)))
}

/// Starts a thread that folds the shards, as the background does.
fn spawn_fold(counter: &Arc<PerCpuCounter>) -> thread::JoinHandle<()> {
    let counter = counter.clone();
    thread::spawn(move || counter.fold_in_background())
}

/// What one of the threads of a model does.
type Role = fn(&PerCpuCounter);

/// Explores threads with these roles, and `end` after them.
///
/// loom begins with the order in which the threads are given, and misses some of the orders that
/// are far from the first. So this explores every order of the roles.
fn in_all_orders(batch: u64, begin: Role, roles: [Role; 3], end: Role) {
    for order in [
        [0, 1, 2],
        [0, 2, 1],
        [1, 0, 2],
        [1, 2, 0],
        [2, 0, 1],
        [2, 1, 0],
    ] {
        explore(3, 1, Fault::Nothing, move || {
            let counter = PerCpuCounter::with_batch(batch);
            begin(&counter);
            let [first, others @ ..] = order.map(|role| roles[role]);
            let others = others.map(|role| {
                let counter = counter.clone();
                thread::spawn(move || role(&counter))
            });
            first(&counter);
            others.into_iter().for_each(|other| other.join().unwrap());
            end(&counter);
        });
    }
}

/// Reads a value that only grows. The read must be within the drift of a value that the counter had
/// meanwhile.
fn read(counter: &PerCpuCounter) {
    let least = counter.bounds().0;
    let (read, drift) = counter.read_with_bound();
    let most = counter.bounds().1;
    let within = least - drift as i64..=most + drift as i64;
    assert!(within.contains(&read), "read {read}, not in {within:?}");
}

/// Uses up the headroom of CPU 0.
fn fill(counter: &PerCpuCounter) {
    counter.activate_all();
    counter.add_on(0, 1);
}

/// Adds 1 on the CPU if the shard has headroom.
fn add_with_headroom(counter: &PerCpuCounter) {
    move_to(0);
    counter.of().add(Up, 1);
    move_to(NOWHERE);
}

/// The total and the sum agree, as far as they must, when no thread uses the counter.
fn is_consistent(counter: &PerCpuCounter) {
    let sum = counter.sum_at_once().unwrap();
    assert!(counter.read().abs_diff(sum) <= counter.error_bound());
}

/// One thread adds on a CPU, a second one folds from afar, and a third one reads.
#[test]
fn reads_are_within_the_drift() {
    explore(3, 1, Fault::Nothing, || {
        let counter = active(1);
        let adder = spawn(&counter, &[(0, 1), (0, 1)]);
        let folder = spawn_fold(&counter);
        read(&counter);
        adder.join().unwrap();
        folder.join().unwrap();
        assert_eq!(counter.sum_at_once(), Some(2));
        is_consistent(&counter);
    });
}

/// The add has headroom only once the fold has raised the limit. The total must have the folded
/// part by then.
#[test]
fn a_fold_raises_the_total_before_the_limit() {
    let fold = |counter: &PerCpuCounter| counter.fold_in_background();
    in_all_orders(1, fill, [fold, add_with_headroom, read], is_consistent);
}

/// An add without headroom folds the shard on its own CPU, in the same order.
#[test]
fn an_add_that_folds_raises_the_total_before_the_limit() {
    let fold = |counter: &PerCpuCounter| {
        move_to(0);
        counter.add_slow(1);
        move_to(NOWHERE);
    };
    in_all_orders(1, fill, [fold, add_with_headroom, read], is_consistent);
}

/// One thread's slow path activates the shard, and another thread adds on the same CPU. The drift
/// must count the shard by then.
#[test]
fn an_activation_raises_the_drift_before_the_limits() {
    let activate = |counter: &PerCpuCounter| counter.add_on(0, 1);
    in_all_orders(
        1,
        |_| (),
        [activate, add_with_headroom, read],
        is_consistent,
    );
}

/// The batch is raised while another thread adds on the CPU. The drift must be larger by then.
#[test]
fn a_raised_batch_raises_the_drift_before_the_limits() {
    let raise = |counter: &PerCpuCounter| counter.set_batch(2).unwrap();
    in_all_orders(1, fill, [raise, add_with_headroom, read], is_consistent);
}

/// Adds 1 on one CPU, moves, and subtracts 1 on the other. The value is always 0 or 1.
const TRANSFER: &[(usize, i64)] = &[(0, 1), (1, -1)];

/// Sums while a thread transfers.
fn sum_beside_a_transfer(batch: u64, sum: fn(&PerCpuCounter) -> Option<i64>) {
    explore(3, 2, Fault::Nothing, move || {
        let counter = active(batch);
        let moving = spawn(&counter, TRANSFER);
        if let Some(sum) = sum(&counter) {
            assert!((0..=1).contains(&sum), "{sum} was never the value");
        }
        moving.join().unwrap();
        assert_eq!(counter.sum_at_once(), Some(0));
    });
}

#[test]
fn a_swap_beside_adds_loses_nothing() {
    explore(3, 1, Fault::Nothing, || {
        let counter = active(1);
        let adder = spawn(&counter, &[(0, 1), (0, 1)]);
        let taken = counter.swap(0);
        adder.join().unwrap();
        let left = counter.sum_at_once().unwrap();
        assert_eq!(taken + left, 2);
        assert!(counter.read().abs_diff(left) <= counter.error_bound());
    });
}

/// Swaps while a CPU adds. An add that was over before the exchange must be in the result.
fn swap_beside_an_add(fault: Fault) {
    explore(3, 1, fault, || {
        let counter = active(1);
        let adder = thread::spawn({
            let counter = counter.clone();
            move || {
                counter.add_on(0, 1);
                // Returns whether the exchange has not happened yet. The add itself may have gone
                // to the base, which is then 1.
                [0, 1].contains(&counter.base.fetch_add(0, AcqRel))
            }
        });
        let taken = counter.swap(7);
        let came_first = adder.join().unwrap();
        assert!(!came_first || taken == 1, "missed an add");
        assert_eq!(taken + counter.sum_at_once().unwrap(), 8);
    });
}

/// A thread that has added and then finds the base unchanged has added before the limited add. The
/// limited add must then see that add.
fn limited_add(fault: Fault) {
    explore(3, 1, fault, || {
        let counter = active(2);
        let adder = thread::spawn({
            let counter = counter.clone();
            move || {
                counter.add_on(0, 1);
                counter.base.fetch_add(0, AcqRel) == 0
            }
        });
        let granted = counter.limited_add(1, 1);
        let came_first = adder.join().unwrap();
        assert!(!(came_first && granted), "added beyond the limit");
        assert_eq!(counter.sum_at_once(), Some(1 + i64::from(granted)));
        assert!(!counter.limited_add(1, 1));
    });
}

/// The other thread's add fills the limit. If that add comes second, it goes beyond the limit, as
/// an ordinary add may. If the limited add comes second, it must be refused.
#[test]
fn a_limited_add_sees_what_was_added_before() {
    explore(3, 2, Fault::Nothing, || {
        let counter = active(2);
        let added = Arc::new(AtomicUsize::new(0));
        let adder = thread::spawn({
            let (counter, added) = (counter.clone(), added.clone());
            move || {
                counter.add_on(1, 1);
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

/// Lowers the batch while a thread adds.
fn lower(fault: Fault) {
    explore(3, 1, fault, || {
        let counter = active(3);
        let adder = spawn(&counter, &[(0, 1), (0, 1)]);
        counter.set_batch(1).unwrap();
        adder.join().unwrap();
        for at in [BLOCK, BLOCK + 16] {
            let [word, limit] = [at, at + 8].map(|offset| word_at(0, offset).load(Acquire));
            let headroom = limit.wrapping_sub(word) as i64;
            assert!(
                (0..=1).contains(&headroom),
                "headroom {headroom} of a batch of 1"
            );
        }
        assert_eq!(counter.sum_at_once(), Some(2));
        assert!(counter.read().abs_diff(2) <= counter.error_bound());
    });
}

/// Additions and subtractions that cancel in the shard stay within the drift at every step.
#[test]
fn cancelling_keeps_the_bound() {
    explore(3, 1, Fault::Nothing, || {
        let counter = active(1);
        let adder = spawn(&counter, &[(0, 1), (0, -1), (0, 1)]);
        counter.fold();
        let read = counter.read();
        // The value is always 0 or 1, and the adds are in one shard, whose batch is 1.
        assert!((-1..=2).contains(&read), "read {read}");
        adder.join().unwrap();
        assert_eq!(counter.sum_at_once(), Some(1));
    });
}

/// Two threads freeze the counter at once, and a third folds. After both freezes, nothing has
/// changed.
#[test]
fn two_freezes_at_once_leave_nothing_frozen() {
    explore(3, 1, Fault::Nothing, || {
        let counter = active(2);
        counter.add_on(0, 2);
        let summer = thread::spawn({
            let counter = counter.clone();
            move || counter.sum_frozen_now()
        });
        let folder = spawn_fold(&counter);
        assert_eq!(counter.sum_frozen_now(), 2);
        assert_eq!(summer.join().unwrap(), 2);
        folder.join().unwrap();
        counter.fold();
        assert_eq!(counter.read(), 2);
        move_to(0);
        assert!(counter.of().add(Up, 2), "the shard stayed frozen");
        assert!(!counter.of().add(Up, 1), "a freeze left too much headroom");
    });
}

/// Two threads add, each on its own CPU, and then sum. At least one of them must see both adds.
fn add_and_sum(fault: Fault) {
    explore(3, 2, fault, || {
        let counter = active(2);
        let add_and_sum = |cpu: usize, counter: &PerCpuCounter| {
            counter.add_on(cpu, 1);
            counter.sum_at_once()
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
/// the counter had during the read.
#[test]
fn a_bound_belongs_to_its_read() {
    explore(3, 1, Fault::Nothing, || {
        let counter = active(3);
        counter.add_on(0, 3);
        let changer = thread::spawn({
            let counter = counter.clone();
            move || {
                counter.add_to_base(10);
                counter.add_on(0, -3);
                // The additions and subtractions cancel, so that no total changes by folding.
                counter.set_batch(1).unwrap();
            }
        });
        let (read, bound) = counter.read_with_bound();
        let was = [3, 13, 10].map(|value: i64| value.abs_diff(read) <= bound);
        assert!(was.contains(&true), "{read} off by at most {bound}");
        changer.join().unwrap();
        assert_eq!(counter.sum_at_once(), Some(10));
    });
}

cases! {
    a_sum_was_the_value_at_one_moment: sum_beside_a_transfer(2, PerCpuCounter::sum_at_once);
    // Shows that the model can fail: one walk over the shards, as the kernel does it.
    a_single_collection_may_never_have_been_the_value:
        sum_beside_a_transfer(2, |counter| Some(counter.of().collect().net())),
        panics "was never the value";
    a_frozen_sum_was_the_value_and_loses_nothing:
        sum_beside_a_transfer(1, |counter| Some(counter.sum_frozen_now()));
    a_swap_misses_no_add: swap_beside_an_add(Fault::Nothing);
    // Without a fence, a swap misses an add that had begun.
    a_swap_that_never_fences_misses_an_add:
        swap_beside_an_add(Fault::NoFence), panics "missed an add";
    a_limited_add_never_passes_its_limit: limited_add(Fault::Nothing);
    a_limited_add_that_never_fences_passes_its_limit:
        limited_add(Fault::NoFence), panics "added beyond the limit";
    words_stay_between_mark_and_limit_when_the_batch_is_lowered: lower(Fault::Nothing);
    words_pass_their_limits_when_the_batch_is_lowered_without_a_fence:
        lower(Fault::NoFence), panics "of a batch of 1";
    of_two_threads_that_add_and_sum_one_sees_both: add_and_sum(Fault::Nothing);
    both_sums_miss_an_add_if_they_do_not_order_their_own:
        add_and_sum(Fault::NoOwnFence), panics "both sums miss an add";
}
