//! A model of limited adds without a lock, explored by loom: `RUSTFLAGS="--cfg loom" cargo test
//! --release --test model_counter_limited`.
//!
//! The counter is that of [`model_counter`](../model_counter.rs), and its limited adds rely on a
//! stated reach. One thread adds a batch several times on one CPU, and folds. Another thread makes
//! a limited add. `counter/reach.rs` says why the limited add never passes its limit. Each fault
//! that the model can plant breaks one of the reasons.
//!
//! # What is mirrored
//!
//! `model_mirrors.rs` fails when one of these functions changes.
//! `model_counter/` has further tables.
//!
//! | step | mirrors | fingerprint |
//! |---|---|---|
//! | `Value::reach` | `pinfold/src/counter/base.rs` `Base::reach` | `074f6088d2783ba2` |
//! | `Value::state` | `pinfold/src/counter/base.rs` `Base::state` | `6ce796071e3669af` |
//! | `Value::add_if` | `pinfold/src/counter/base.rs` `Base::add_if` | `c0bb52cfc1026fbf` |
//! | `Value::add_if` | `pinfold/src/counter/base.rs` `Base::exchange` | `4e383feab9043596` |
#![cfg(loom)]

#[path = "model_counter/counter.rs"]
#[allow(dead_code, reason = "the model does not use all of the files")]
mod counter;
#[path = "model_counter/counter_units.rs"]
#[allow(dead_code, reason = "the model does not use all of the machine")]
mod counter_units;

use counter::PerCpuCounter;
use counter_units::{BLOCK, Fault, explore, word_at};
use loom::sync::atomic::Ordering::{AcqRel, Relaxed};
use loom::thread;

const BATCH: i64 = 64;
/// How far the shards may be from the centre of the reach: the least that is worth stating.
const WIDTH: i64 = 4 * BATCH;
/// How many batches are added before the threads run. No fold has come near the end of the reach by
/// then.
const BEFORE: i64 = 3;
/// How many batches the CPU adds.
const ADDS: i64 = 5;
/// All adds together reach the limit, so that the limited add must not come after all of them.
/// Without these adds, even the farthest value in the first reach leaves room for the limited add.
const LIMIT: i64 = ADDS * BATCH;
const _: () = assert!(WIDTH + BATCH <= LIMIT);

/// The base and the reach in one word, which loom can exchange.
mod base {
    use super::counter_units::{Fault, fault};
    use loom::sync::atomic::AtomicU64;
    use loom::sync::atomic::Ordering::{self, AcqRel, Acquire};

    /// The base is the lower half, the reach is the upper one.
    #[derive(Default)]
    pub struct Value(AtomicU64);

    fn base(pair: u64) -> i64 {
        i64::from(pair as i32)
    }

    fn reach(pair: u64) -> u64 {
        pair >> 32
    }

    fn pair(base: i64, reach: u64) -> u64 {
        u64::from(base as u32) | reach << 32
    }

    impl Value {
        pub fn load(&self, order: Ordering) -> i64 {
            base(self.0.load(order))
        }

        pub fn fetch_update(
            &self,
            set: Ordering,
            fetch: Ordering,
            mut update: impl FnMut(i64) -> Option<i64>,
        ) -> Result<i64, i64> {
            let update = |old| update(base(old)).map(|new| pair(new, reach(old)));
            let updated = self.0.fetch_update(set, fetch, update);
            updated.map(base).map_err(base)
        }

        pub fn swap(&self, new: i64, order: Ordering) -> i64 {
            self.fetch_update(order, Acquire, |_| Some(new)).unwrap()
        }

        pub fn fetch_add(&self, n: i64, order: Ordering) -> i64 {
            self.fetch_update(order, Acquire, |old| Some(old + n))
                .unwrap()
        }

        pub fn reach(&self) -> u64 {
            reach(self.0.load(Acquire))
        }

        pub fn state(&self, stated: u64) {
            let update = |old| {
                let keeps = fault() == Fault::NotStated && reach(old) != 0;
                Some(pair(base(old), if keeps { reach(old) } else { stated }))
            };
            self.0.fetch_update(AcqRel, Acquire, update).unwrap();
        }

        pub fn add_if(&self, amount: i64, judge: impl Fn(i64, u64) -> bool) -> bool {
            let seen = self.0.load(Acquire);
            let same = |now: u64| match fault() {
                Fault::ReachNotCompared => base(now) == base(seen),
                _ => now == seen,
            };
            let added = |now| same(now).then(|| pair(base(now) + amount, reach(now)));
            judge(base(seen), reach(seen)) && self.0.fetch_update(AcqRel, Acquire, added).is_ok()
        }
    }

    pub fn is_supported() -> bool {
        true
    }
}

/// How a shard gets room for the next add.
#[derive(Clone, Copy)]
enum Room {
    /// The add's slow path folds, and centres the reach if needed.
    SlowPath,
    /// The background folds before each add. It leaves the reach where it is.
    Background,
}

/// Runs the model with a fault. If the CPU has made all its adds, and then finds that the limited
/// add has not happened, the value is at the limit. The limited add must fail from then on.
fn run(fault: Fault, room: Room) {
    explore(3, 1, fault, move || {
        let counter = PerCpuCounter::with_batch(BATCH as u64);
        let add = move |counter: &PerCpuCounter| {
            if let Room::Background = room {
                counter.fold_in_background();
            }
            counter.add_on(0, BATCH);
        };
        counter.rely_on(WIDTH as u64);
        (0..BEFORE).for_each(|_| add(&counter));
        if fault == Fault::FoldBeyond {
            counter.fold_beyond();
        }
        let adder = thread::spawn({
            let counter = counter.clone();
            move || {
                (BEFORE..ADDS).for_each(|_| add(&counter));
                let own = ADDS * BATCH - word_at(0, BLOCK).load(Relaxed) as i64;
                counter.base.value.fetch_add(0, AcqRel) == own
            }
        });
        let added = counter.limited_add(LIMIT, BATCH);
        let came_first = adder.join().unwrap();
        assert!(!(came_first && added), "added beyond the limit");
    });
}

#[test]
fn a_limited_add_without_a_lock_never_passes_its_limit() {
    run(Fault::Nothing, Room::SlowPath);
}

#[test]
fn a_limited_add_beside_folds_in_the_background_never_passes_its_limit() {
    run(Fault::Nothing, Room::Background);
}

#[test]
#[should_panic(expected = "added beyond the limit")]
fn the_limit_is_passed_if_the_reach_is_not_compared() {
    run(Fault::ReachNotCompared, Room::SlowPath);
}

#[test]
#[should_panic(expected = "added beyond the limit")]
fn the_limit_is_passed_if_folds_leave_the_reach() {
    run(Fault::FoldBeyond, Room::SlowPath);
}

#[test]
#[should_panic(expected = "added beyond the limit")]
fn the_limit_is_passed_if_folds_leave_no_slack() {
    run(Fault::NoSlack, Room::Background);
}

#[test]
#[should_panic(expected = "added beyond the limit")]
fn the_limit_is_passed_if_only_folds_know_the_reach() {
    run(Fault::NotStated, Room::SlowPath);
}
