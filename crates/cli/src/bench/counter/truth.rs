//! Checks a sum against the values that the counter can have had while the sum ran.
//!
//! Each worker publishes the step of its loop. From the steps before and after a sum follows an
//! interval that contains every value that the counter had while the sum ran.
//!
//! A worker's share of the counter is 0 or one mapping. Its steps are numbered consecutively, four
//! to a loop:
//!
//! | step mod 4 | the worker | its share |
//! |---|---|---|
//! | 0 | has subtracted, or has not begun | 0 |
//! | 1 | is adding | 0 or a mapping |
//! | 2 | has added | a mapping |
//! | 3 | is subtracting | a mapping or 0 |
//!
//! If a worker shows the same step before and after the sum, it was in that step all the time. If
//! it shows two different steps, it may have had either share.

use super::workers::{PAGES, Worker};
use pinfold_benchkit::Padded;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::fence;

/// A worker's published step.
#[derive(Default)]
pub struct Step(AtomicU64);

impl Step {
    /// Announces the next add. The release fence keeps the add after this store; it pairs with the
    /// acquire fence in [`Witness::error_of`].
    #[inline(always)]
    pub fn begin(&self) {
        // A plain increment is enough: only this worker writes its step.
        self.0.store(self.0.load(Relaxed) + 1, Relaxed);
        fence(Release);
    }

    /// Publishes that the add is done. A thread that loads this step with acquire ordering sees the
    /// add.
    #[inline(always)]
    pub fn end(&self) {
        self.0.store(self.0.load(Relaxed) + 1, Release);
    }
}

/// Reads all workers' steps before and after a sum.
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

    /// Returns the error of `sum`: its distance from the values that the counter had while it ran.
    pub fn error_of(&mut self, sum: impl FnOnce() -> i64) -> u64 {
        for (before, worker) in self.before.iter_mut().zip(self.workers) {
            *before = worker.0.step.0.load(Acquire);
        }
        let sum = sum();
        // If the sum saw an add, the loads below see the step that the worker stored before the
        // add.
        fence(Acquire);
        let steps = self.before.iter().zip(self.workers);
        let interval = interval(steps.map(|(before, worker)| {
            let after = worker.0.step.0.load(Relaxed);
            (*before, after)
        }));
        distance(sum, interval)
    }
}

/// Returns the least and the most that the workers' shares can add up to.
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
    fn a_workers_share_is_known_only_while_it_rests() {
        assert_eq!(interval([(0, 0), (4, 4)].into_iter()), (0, 0));
        assert_eq!(
            interval([(2, 2), (6, 6), (8, 8)].into_iter()),
            (2 * PAGES, 2 * PAGES)
        );
        assert_eq!(
            interval([(1, 1), (3, 3), (2, 2)].into_iter()),
            (PAGES, 3 * PAGES)
        );
        // The worker made a whole loop during the sum.
        assert_eq!(interval([(2, 6), (0, 4)].into_iter()), (0, 2 * PAGES));
    }

    #[test]
    fn a_witness_measures_the_error_of_a_sum() {
        let workers = [(); 2].map(|()| Padded::<Worker>::default());
        let mut witness = Witness::new(&workers);
        assert_eq!(witness.error_of(|| 0), 0);
        assert_eq!(witness.error_of(|| PAGES), PAGES as u64);
        // Worker 0 has added, and worker 1 is adding.
        workers[0].0.step.begin();
        workers[0].0.step.end();
        workers[1].0.step.begin();
        assert_eq!(witness.error_of(|| PAGES), 0);
        assert_eq!(witness.error_of(|| 2 * PAGES), 0);
        assert_eq!(witness.error_of(|| PAGES - 7), 7);
        // Worker 1 finishes its add and subtracts while the sum runs.
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
