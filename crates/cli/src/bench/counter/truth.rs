//! What a sum may have been: each worker publishes the step of its loop that it has reached, so that the values which the
//! counter took while a sum ran lie in a known interval.
//!
//! A worker's share is 0 or one mapping. Its steps are numbered on and on, four to a loop:
//!
//! | step mod 4 | the worker | its share |
//! |---|---|---|
//! | 0 | has subtracted (or not begun) | 0 |
//! | 1 | is adding | 0 or a mapping |
//! | 2 | has added | a mapping |
//! | 3 | is subtracting | a mapping or 0 |
//!
//! A worker that shows the same step before and after a sum was in that step all the time; one that shows two steps may
//! have had either share.

use super::workers::{PAGES, Worker};
use crate::bench::Padded;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::fence;

/// A worker's published step.
#[derive(Default)]
pub struct Step(AtomicU64);

impl Step {
    /// The next add begins: nobody sees it before this.
    #[inline(always)]
    pub fn begin(&self) {
        // Only the worker writes it.
        self.0.store(self.0.load(Relaxed) + 1, Relaxed);
        fence(Release);
    }

    /// The add is done: whoever sees this sees the add too.
    #[inline(always)]
    pub fn end(&self) {
        self.0.store(self.0.load(Relaxed) + 1, Release);
    }
}

/// Looks at all workers before and after a sum.
pub struct Witness<'a> {
    workers: &'a [Padded<Worker>],
    before: Vec<u64>,
}

impl<'a> Witness<'a> {
    pub fn new(workers: &'a [Padded<Worker>]) -> Witness<'a> {
        Witness {
            workers,
            before: vec![0; workers.len()],
        }
    }

    /// The error of `sum`: how far it lies outside of what the counter was while it ran.
    pub fn error_of(&mut self, sum: impl FnOnce() -> i64) -> u64 {
        for (before, worker) in self.before.iter_mut().zip(self.workers) {
            *before = worker.0.step.0.load(Acquire);
        }
        let sum = sum();
        // What the sum has seen of an add, the steps read below have seen too.
        fence(Acquire);
        let steps = self.before.iter().zip(self.workers);
        let interval = interval(steps.map(|(before, worker)| {
            let after = worker.0.step.0.load(Relaxed);
            (*before, after)
        }));
        distance(sum, interval)
    }
}

/// The least and the most that workers can have added up to, by their steps before and after.
fn interval(steps: impl Iterator<Item = (u64, u64)>) -> (i64, i64) {
    steps.fold((0, 0), |(low, high), (before, after)| {
        let (least, most) = match before % 4 {
            0 if before == after => (0, 0),
            2 if before == after => (PAGES, PAGES),
            _ => (0, PAGES),
        };
        (low + least, high + most)
    })
}

fn distance(sum: i64, (low, high): (i64, i64)) -> u64 {
    sum.abs_diff(sum.clamp(low, high))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resting_workers_are_known_and_moving_ones_are_not() {
        assert_eq!(interval([(0, 0), (4, 4)].into_iter()), (0, 0));
        assert_eq!(
            interval([(2, 2), (6, 6), (8, 8)].into_iter()),
            (2 * PAGES, 2 * PAGES)
        );
        assert_eq!(
            interval([(1, 1), (3, 3), (2, 2)].into_iter()),
            (PAGES, 3 * PAGES)
        );
        // A whole loop went by, and the worker is back where it was.
        assert_eq!(interval([(2, 6), (0, 4)].into_iter()), (0, 2 * PAGES));
    }

    #[test]
    fn a_witness_knows_the_shares_and_tells_wrong_sums() {
        let workers = [(); 2].map(|()| Padded::<Worker>::default());
        let mut witness = Witness::new(&workers);
        assert_eq!(witness.error_of(|| 0), 0);
        assert_eq!(witness.error_of(|| PAGES), PAGES as u64);
        // One has added, the other is at it.
        workers[0].0.step.begin();
        workers[0].0.step.end();
        workers[1].0.step.begin();
        assert_eq!(witness.error_of(|| PAGES), 0);
        assert_eq!(witness.error_of(|| 2 * PAGES), 0);
        assert_eq!(witness.error_of(|| PAGES - 7), 7);
        // It ends and subtracts while the sum runs.
        let moving = || {
            (0..3).for_each(|_| workers[1].0.step.end());
            2 * PAGES + 1
        };
        assert_eq!(witness.error_of(moving), 1);
    }

    #[test]
    fn errors_are_distances_from_the_interval() {
        assert_eq!(distance(5, (0, 10)), 0);
        assert_eq!(distance(-3, (0, 10)), 3);
        assert_eq!(distance(12, (0, 10)), 2);
    }
}
