//! A model of limited adds without a lock, explored by loom: `RUSTFLAGS="--cfg loom" cargo test
//! --release --test model_counter_limited`.
//!
//! One CPU adds one by one, in a shard with a batch of 1, and folds. Another thread makes a limited
//! add. `counter/reach.rs` says why the limited add never passes its limit; each fault that the
//! model can plant breaks one of its reasons.
#![cfg(loom)]

use loom::sync::Arc;
use loom::sync::atomic::AtomicU64;
use loom::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use loom::thread;

const BATCH: i64 = 1;
/// How far the shards may be from the centre of the reach.
const WIDTH: i64 = 2;
const LIMIT: i64 = 3;
/// How many ones the CPU adds: so many that the limited add must not come after all of them.
const ADDS: i64 = 3;

#[derive(Clone, Copy, PartialEq)]
enum Fault {
    None,
    /// The limited add compares the base, and not the reach.
    ReachNotCompared,
    /// A fold goes on whatever the reach is.
    FoldBeyond,
    /// A fold forgets what the shard may move until the next fold.
    NoSlack,
    /// Folds go on within a new reach, and limited adds still rely on the old one.
    NotStated,
}

struct Counter {
    fault: Fault,
    /// The base in the lower half, the centre of the reach in the upper one: both are exchanged at
    /// once.
    base_and_centre: AtomicU64,
    word: AtomicU64,
    limit: AtomicU64,
    /// What folds have added; only a holder of the lock changes it, as it changes the centre for
    /// folds.
    folded: AtomicU64,
    centre: AtomicU64,
    lock: AtomicU64,
}

fn halves(pair: u64) -> (i64, i64) {
    (pair as u32 as i64, (pair >> 32) as i64)
}

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

    fn state_centre(&self, centre: i64) {
        let same_base = |old| Some(pair(halves(old).0, centre));
        self.base_and_centre
            .fetch_update(AcqRel, Acquire, same_base)
            .unwrap();
    }

    /// The `nth` add of 1, by the only thread that writes the word.
    fn add(&self, nth: i64) {
        if !self.section(nth) {
            self.make_room(nth - 1);
            if !self.section(nth) {
                self.base_and_centre.fetch_add(1, AcqRel);
            }
        }
    }

    fn section(&self, nth: i64) -> bool {
        // The machine orders this load before the store that depends on it; the language needs an
        // acquire for that.
        let fits = self.limit.load(Acquire) >= nth as u64;
        if fits {
            self.word.store(nth as u64, Release);
        }
        fits
    }

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
            // The total first.
            self.folded.store(word as u64, Release);
            self.limit.store((word + BATCH) as u64, Release);
        }
        self.unlock();
    }

    /// Adds 1 without a lock if the farthest value is within the limit.
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

    /// Adds 1 with the lock held, which keeps the totals where they are.
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

/// The CPU makes all its adds and then finds that the limited add has not happened: the value is at
/// the limit, so the limited add must fail from then on.
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
                // A one that went to the base ends the run of the word.
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
fn without_comparing_the_reach_it_does() {
    explore(Fault::ReachNotCompared);
}

#[test]
#[should_panic(expected = "added beyond the limit")]
fn with_folds_beyond_the_reach_it_does() {
    explore(Fault::FoldBeyond);
}

#[test]
#[should_panic(expected = "added beyond the limit")]
fn with_folds_that_leave_no_slack_it_does() {
    explore(Fault::NoSlack);
}

#[test]
#[should_panic(expected = "added beyond the limit")]
fn with_a_reach_that_only_folds_know_it_does() {
    explore(Fault::NotStated);
}
