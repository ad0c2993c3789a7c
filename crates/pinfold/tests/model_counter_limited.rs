//! A model of limited adds without a lock, explored by loom: `RUSTFLAGS="--cfg loom" cargo test
//! --release --test model_counter_limited`.
//!
//! One thread adds 1 several times on one CPU, in a shard with a batch of 1, and folds. Another
//! thread makes a limited add. `counter/reach.rs` says why the limited add never passes its limit.
//! Each fault that the model can plant breaks one of the reasons.
#![cfg(loom)]

use loom::sync::Arc;
use loom::sync::atomic::AtomicU64;
use loom::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use loom::thread;

const BATCH: i64 = 1;
/// How far the shards may be from the centre of the reach.
const WIDTH: i64 = 2;
const LIMIT: i64 = 3;
/// How many times the CPU adds 1. Together these adds reach the limit, so that the limited add must
/// not come after all of them.
const ADDS: i64 = 3;

#[derive(Clone, Copy, PartialEq)]
enum Fault {
    None,
    /// The limited add compares the base, but not the reach.
    ReachNotCompared,
    /// A fold ignores the reach.
    FoldBeyond,
    /// A fold leaves no room for what the shard may move until the next fold.
    NoSlack,
    /// Folds use a new reach, while limited adds still rely on the old one.
    NotStated,
}

struct Counter {
    fault: Fault,
    /// The base in the lower half, and the centre of the reach in the upper half. Both are
    /// exchanged at once.
    base_and_centre: AtomicU64,
    word: AtomicU64,
    limit: AtomicU64,
    /// What folds have added. Only a holder of the lock changes this and `centre`, which is the
    /// centre that folds use.
    folded: AtomicU64,
    centre: AtomicU64,
    lock: AtomicU64,
}

/// Returns the base and the centre of a pair.
fn halves(pair: u64) -> (i64, i64) {
    (pair as u32 as i64, (pair >> 32) as i64)
}

/// Returns a base and a centre in one word.
fn pair(base: i64, centre: i64) -> u64 {
    (centre as u64) << 32 | base as u64
}

impl Counter {
    fn new(fault: Fault) -> Arc<Counter> {
        Arc::new(Counter {
            fault,
            base_and_centre: AtomicU64::new(0),
            word: AtomicU64::new(0),
            limit: AtomicU64::new(BATCH as u64),
            folded: AtomicU64::new(0),
            centre: AtomicU64::new(0),
            lock: AtomicU64::new(0),
        })
    }

    fn try_lock(&self) -> bool {
        self.lock.compare_exchange(0, 1, Acquire, Relaxed).is_ok()
    }

    fn unlock(&self) {
        self.lock.store(0, Release);
    }

    /// States a reach around `centre` to limited adds.
    fn state_centre(&self, centre: i64) {
        let same_base = |old| Some(pair(halves(old).0, centre));
        self.base_and_centre
            .fetch_update(AcqRel, Acquire, same_base)
            .unwrap();
    }

    /// Adds 1 for the `nth` time. Only one thread writes the word.
    fn add(&self, nth: i64) {
        if !self.section(nth) {
            self.make_room(nth - 1);
            if !self.section(nth) {
                self.base_and_centre.fetch_add(1, AcqRel);
            }
        }
    }

    /// Runs the critical section of the `nth` add.
    fn section(&self, nth: i64) -> bool {
        // The machine orders this load before the store, which depends on it. The language needs an
        // acquire for that.
        let fits = self.limit.load(Acquire) >= nth as u64;
        if fits {
            self.word.store(nth as u64, Release);
        }
        fits
    }

    /// Folds the word, if that leaves the totals within the reach; states a new reach if it does
    /// not.
    fn make_room(&self, word: i64) {
        if !self.try_lock() {
            return;
        }
        let slack = if self.fault == Fault::NoSlack {
            0
        } else {
            BATCH
        };
        let fits = |centre: i64| word + slack <= centre + WIDTH;
        let mut centre = self.centre.load(Relaxed) as i64;
        let folded = self.folded.load(Relaxed) as i64;
        let leaves = !fits(centre) && self.fault != Fault::FoldBeyond;
        if leaves {
            centre = folded;
            self.centre.store(centre as u64, Relaxed);
            if self.fault != Fault::NotStated {
                self.state_centre(centre);
            }
        }
        if fits(centre) || self.fault == Fault::FoldBeyond {
            // First the total, then the limit.
            self.folded.store(word as u64, Release);
            self.limit.store((word + BATCH) as u64, Release);
        }
        self.unlock();
    }

    /// Adds 1 without a lock, if even the farthest possible value is within the limit.
    fn limited_add_far(&self) -> bool {
        let seen = self.base_and_centre.load(Acquire);
        let (base, centre) = halves(seen);
        if base + centre + WIDTH + 1 > LIMIT {
            return false;
        }
        let compared = |now: u64| match self.fault {
            Fault::ReachNotCompared => halves(now).0 == base,
            _ => now == seen,
        };
        self.base_and_centre
            .fetch_update(AcqRel, Acquire, |now| compared(now).then(|| now + 1))
            .is_ok()
    }

    /// Adds 1 with the lock held, so that the totals do not change meanwhile.
    fn limited_add_near(&self) -> bool {
        if !self.try_lock() {
            return false;
        }
        let farthest = self.folded.load(Relaxed) as i64 + BATCH;
        let within = |now: u64| halves(now).0 + farthest < LIMIT;
        let added = self
            .base_and_centre
            .fetch_update(AcqRel, Acquire, |now| within(now).then(|| now + 1));
        self.unlock();
        added.is_ok()
    }
}

/// Runs the model with a fault. If the CPU has made all its adds, and then finds that the limited
/// add has not happened, the value is at the limit. The limited add must fail from then on.
fn explore(fault: Fault) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let counter = Counter::new(fault);
        let adder = thread::spawn({
            let counter = counter.clone();
            move || {
                let by_way_of_base = |nth: i64| {
                    let before = counter.word.load(Relaxed) as i64;
                    counter.add(nth);
                    i64::from(counter.word.load(Relaxed) as i64 == before)
                };
                // Once an add has gone to the base, the following ones go there too, because the
                // word no longer counts all adds.
                let mut based = 0;
                for nth in 1..=ADDS {
                    if based == 0 {
                        based += by_way_of_base(nth);
                    } else {
                        counter.base_and_centre.fetch_add(1, AcqRel);
                        based += 1;
                    }
                }
                let base = halves(counter.base_and_centre.fetch_add(0, AcqRel)).0;
                base == based
            }
        });
        let added = counter.limited_add_far() || counter.limited_add_near();
        let came_first = adder.join().unwrap();
        assert!(!(came_first && added), "added beyond the limit");
    });
}

#[test]
fn a_limited_add_without_a_lock_never_passes_its_limit() {
    explore(Fault::None);
}

#[test]
#[should_panic(expected = "added beyond the limit")]
fn the_limit_is_passed_if_the_reach_is_not_compared() {
    explore(Fault::ReachNotCompared);
}

#[test]
#[should_panic(expected = "added beyond the limit")]
fn the_limit_is_passed_if_folds_leave_the_reach() {
    explore(Fault::FoldBeyond);
}

#[test]
#[should_panic(expected = "added beyond the limit")]
fn the_limit_is_passed_if_folds_leave_no_slack() {
    explore(Fault::NoSlack);
}

#[test]
#[should_panic(expected = "added beyond the limit")]
fn the_limit_is_passed_if_only_folds_know_the_reach() {
    explore(Fault::NotStated);
}
