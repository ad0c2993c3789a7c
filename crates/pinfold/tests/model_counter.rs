//! Models of the counter's protocol, explored by loom: `RUSTFLAGS="--cfg loom" cargo test --release
//! --test model_counter`.
//!
//! The protocol is the real files `estimate.rs`, `exact.rs`, `freeze.rs`, `read.rs`, `shards.rs`
//! and `slow_add.rs` of `counter/`. `model_counter/counter.rs` has the counter's handle, and stands
//! for the other files of the folder. `model_counter/counter_units.rs` has the machine. The tables
//! there say what each of their functions mirrors. Each planted fault breaks a guarantee.
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

/// Stands for `spared/`: no CPU is isolated.
mod spared {
    pub enum Kind {
        Fold,
    }

    pub fn note(_kind: Kind) {}
}

use counter::PerCpuCounter;
use counter::shards::Direction::Up;
use counter_units::{BLOCK, Fault, NOWHERE, explore, move_to, used, word_at};
use loom::sync::Arc;
use loom::sync::atomic::AtomicUsize;
use loom::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use loom::thread;
use pinfold_rseq::shard::REFUSED;

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

/// Starts a thread that estimates what the shards hold, as the background does.
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

/// Takes the shard of CPU 0 as far as it may go.
fn fill(counter: &PerCpuCounter) {
    counter.activate_all();
    add_on_shard(counter, 2);
}

/// Adds `n` to the shard of CPU 0, if it takes that. Does not fold.
fn add_on_shard(counter: &PerCpuCounter, n: i64) {
    move_to(0);
    counter.of().add(Up, n);
    move_to(NOWHERE);
}

/// Adds 1 to the shard of CPU 0, if it takes that.
fn add_one_on_shard(counter: &PerCpuCounter) {
    add_on_shard(counter, 1);
}

/// Folds the shard of CPU 0.
fn fold_here(counter: &PerCpuCounter) {
    move_to(0);
    counter.of().fold_past_batch(Up);
    move_to(NOWHERE);
}

/// The total, the shards and the sum agree, as far as they must, when no thread uses the counter.
fn is_consistent(counter: &PerCpuCounter) {
    let sum = counter.sum_at_once().unwrap();
    assert!(counter.read().abs_diff(sum) <= counter.error_bound());
    let shards = counter.of();
    let most = 2 * shards.batch() as i64;
    let mut folded = 0u64;
    for unit in used() {
        let [up, down, part] = [0, 8, 16].map(|at| word_at(unit, BLOCK + at).load(Acquire));
        let distance = up.wrapping_sub(down).wrapping_sub(part) as i64;
        assert!(distance.abs() <= most, "a distance of {distance}");
        folded = folded.wrapping_add(part);
    }
    let total = shards.folded().net();
    assert_eq!(folded as i64, total, "the shards and the total differ");
}

/// One thread adds on a CPU, a second one estimates from afar, and a third one reads.
#[test]
fn reads_are_within_the_bound() {
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

/// The shard takes the add only once the fold is over. The total must have the folded part by then.
#[test]
fn a_fold_raises_the_total_before_it_ends() {
    in_all_orders(1, fill, [fold_here, add_one_on_shard, read], is_consistent);
}

/// While a shard is claimed, its CPU adds to the base.
#[test]
fn adds_beside_a_fold_are_within_the_bound() {
    let add = |counter: &PerCpuCounter| counter.add_on(0, 1);
    in_all_orders(1, fill, [fold_here, add, read], is_consistent);
}

/// Two threads fold one shard.
fn two_folds(fault: Fault) {
    explore(3, 1, fault, || {
        let counter = PerCpuCounter::with_batch(1);
        fill(&counter);
        let other = thread::spawn({
            let counter = counter.clone();
            move || fold_here(&counter)
        });
        fold_here(&counter);
        other.join().unwrap();
        is_consistent(&counter);
    });
}

/// An estimate may be stale: the CPU folds what it contains.
#[test]
fn an_estimate_beside_a_fold_keeps_the_bound() {
    let estimate = |counter: &PerCpuCounter| counter.fold_in_background();
    in_all_orders(1, fill, [fold_here, estimate, read], is_consistent);
}

/// One thread's slow path activates the shard, and another thread adds on the same CPU. The drift
/// must count the shard by then.
#[test]
fn an_activation_raises_the_drift_first() {
    let activate = |counter: &PerCpuCounter| counter.add_on(0, 1);
    in_all_orders(1, |_| (), [activate, add_one_on_shard, read], is_consistent);
}

/// The batch is raised while another thread adds on the CPU. The drift must be larger by then.
#[test]
fn a_raised_batch_raises_the_drift_first() {
    let raise = |counter: &PerCpuCounter| counter.set_batch(2).unwrap();
    in_all_orders(1, fill, [raise, add_one_on_shard, read], is_consistent);
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
        is_consistent(&counter);
        assert_eq!(counter.sum_at_once(), Some(2));
    });
}

/// Folds in both directions stay within the bound at every step.
#[test]
fn folds_in_both_directions_keep_the_bound() {
    explore(3, 1, Fault::Nothing, || {
        let counter = active(1);
        let adder = spawn(&counter, &[(0, 1), (0, 1), (0, -1), (0, -1), (0, -1)]);
        counter.fold();
        let (read, bound) = counter.read_with_bound();
        // The value is always from -1 to 2.
        let within = -1 - bound as i64..=2 + bound as i64;
        assert!(
            within.contains(&read) && bound <= 4,
            "{read}, off by {bound}"
        );
        adder.join().unwrap();
        assert_eq!(counter.sum_at_once(), Some(-1));
        is_consistent(&counter);
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
        assert_eq!(counter.of().add(Up, 2), -2, "the shard stayed frozen");
        assert_eq!(
            counter.of().add(Up, 1),
            REFUSED,
            "a freeze left a larger batch"
        );
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
    distances_stay_within_a_lowered_batch: lower(Fault::Nothing);
    a_batch_that_is_lowered_without_a_fence_loses_adds_of_the_total:
        lower(Fault::NoFence), panics "differ";
    two_folds_of_a_shard_add_up: two_folds(Fault::Nothing);
    two_folds_without_claims_fold_the_same_twice:
        two_folds(Fault::NoClaim), panics "differ";
    of_two_threads_that_add_and_sum_one_sees_both: add_and_sum(Fault::Nothing);
    both_sums_miss_an_add_if_they_do_not_order_their_own:
        add_and_sum(Fault::NoOwnFence), panics "both sums miss an add";
}
