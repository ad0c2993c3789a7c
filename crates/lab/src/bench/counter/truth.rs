//! Checks a sum against the values that the counter can have had while the sum ran.
//!
//! Each worker publishes the step of its loop. From the steps before and after a sum follows an
//! interval that contains every value that the counter had while the sum ran.
//!
//! A worker's share of the counter goes up by one amount with each add, and down again by one with
//! each subtraction. Each add and each subtraction takes two steps, numbered consecutively:
//!
//! | step mod 2 | the worker |
//! |---|---|
//! | 0 | rests between two adds |
//! | 1 | is adding or subtracting: its share may be that before or that after |
//!
//! So a worker's step determines its share. If its step was s before a sum and t after the sum, its
//! share took exactly the values of the steps s to t during the sum.

use super::workers::{Wave, Worker};
use crate::Padded;
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
        // A plain increment is enough: only this worker writes its step. The workers of a pair that
        // hands over take turns.
        self.0.store(self.0.load(Relaxed) + 1, Relaxed);
        fence(Release);
    }

    /// Returns the step. A thread that finds an even step sees the adds before it.
    #[inline(always)]
    pub fn number(&self) -> u64 {
        self.0.load(Acquire)
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
    wave: Wave,
    before: Vec<u64>,
}

impl<'a> Witness<'a> {
    pub fn new(workers: &'a [Padded<Worker>], wave: Wave) -> Witness<'a> {
        Witness {
            workers,
            wave,
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
        let interval = steps.fold((0, 0), |(low, high), (&before, worker)| {
            let after = worker.0.step.0.load(Relaxed);
            let (least, most) = self.wave.shares(before, after);
            (low + least, high + most)
        });
        distance(sum, interval)
    }
}

impl Wave {
    /// Returns the least and the most that a worker's share was from step `before` to step `after`.
    fn shares(self, before: u64, after: u64) -> (i64, i64) {
        // In the middle of an add, the share is that before the add or that behind it.
        let (first, last) = (before / 2, after.div_ceil(2));
        let (period, top) = (2 * self.adds, self.adds);
        // The number of adds that the share holds after `made` adds and subtractions.
        let held = |made: u64| top.abs_diff(made % period);
        let (first_held, last_held) = (top - held(first), top - held(last));
        // Whether the wave passes a point of its period on the way.
        let passes =
            |point: u64| (last + period - point) / period > (first + period - 1 - point) / period;
        let least = if passes(0) {
            0
        } else {
            first_held.min(last_held)
        };
        let most = if passes(top) {
            top
        } else {
            first_held.max(last_held)
        };
        (least as i64 * self.amount, most as i64 * self.amount)
    }
}

fn distance(sum: i64, (low, high): (i64, i64)) -> u64 {
    sum.abs_diff(sum.clamp(low, high))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGES: i64 = 32768;
    const ONE: Wave = Wave {
        amount: PAGES,
        adds: 1,
    };

    #[test]
    fn a_workers_share_is_known_only_while_it_rests() {
        assert_eq!(ONE.shares(0, 0), (0, 0));
        assert_eq!(ONE.shares(4, 4), (0, 0));
        assert_eq!(ONE.shares(2, 2), (PAGES, PAGES));
        assert_eq!(ONE.shares(1, 1), (0, PAGES));
        assert_eq!(ONE.shares(3, 3), (0, PAGES));
        assert_eq!(ONE.shares(1, 2), (0, PAGES));
        // The worker made a whole loop during the sum.
        assert_eq!(ONE.shares(2, 6), (0, PAGES));
    }

    #[test]
    fn a_share_was_all_that_the_steps_in_between_say() {
        let wave = Wave { amount: 8, adds: 9 };
        // Walks the steps one by one, as the definition says.
        let held = |made: u64| match made % 18 {
            up @ 0..=9 => up as i64 * 8,
            down => (18 - down) as i64 * 8,
        };
        for before in 0..80 {
            for after in before..before + 50 {
                let shares = (before / 2..=u64::div_ceil(after, 2)).map(held);
                let expected = (shares.clone().min().unwrap(), shares.max().unwrap());
                assert_eq!(wave.shares(before, after), expected, "{before} to {after}");
            }
        }
    }

    #[test]
    fn small_amounts_reach_the_batch() {
        assert_eq!(Wave::new(32768, 32, true).adds, 1);
        assert_eq!(Wave::new(32768, 32, false).adds, 64);
        assert_eq!(Wave::new(32, 32, true).adds, 1);
        let small = Wave::new(31, 32, true);
        assert!(small.adds as i64 * small.amount > 64);
        assert_eq!(Wave::new(1, 32, false).adds, 65);
    }

    #[test]
    fn a_witness_measures_the_error_of_a_sum() {
        let workers = [(); 2].map(|()| Padded::<Worker>::default());
        let mut witness = Witness::new(&workers, ONE);
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
