//! What a sample stands for after `realloc` has resized its block in place.
//!
//! # Blocks of a size class
//!
//! The block's room stays the same, and a block that was not sampled counts nothing. The sample
//! stands for the same number of blocks as before, and each of them has the new size.
//!
//! # Larger blocks
//!
//! A run or a huge block may be sampled as a small one and grow a hundredfold. If such a sample
//! kept its weight, one buffer would be shown as nothing, or with a multiple of its size. So growth
//! takes part in the countdown. For a block without a sample, the size before the growth is not
//! known. So this module counts the *room*: the bytes that the block can hold.
//!
//! Let M be the bytes of room that a block's sample stands for, or 0 without a sample. When the
//! room grows by D bytes:
//!
//! * A block without a sample is sampled with probability p = 1 − e^(−D/R). Then M becomes D/p.
//! * A block with a sample adds D to M.
//!
//! The expected increase is D in both cases, whatever happened before. So the expected M is the
//! room, also if the interval R changes, and M is off by about R only, however far the block grows.
//! A block that shrinks scales M with its room. So does a block that grows while no samples are
//! taken.
//!
//! The sample stands for M × size / room bytes, where size is what the program asked for.
//!
//! The number of blocks follows the probability that the block was sampled by now: 1 − e^(−S/R) for
//! a block of S bytes, whether they were allocated in one step or in many. Growth by D bytes raises
//! a probability q to q + (1 − q)·p. For a block that is sampled as it grows, this module assumes
//! that the profile has counted the whole block with the present interval.

use super::math;
use super::records::Counts;

/// How `realloc` resized a block in place.
#[derive(Clone, Copy, Debug)]
pub struct Resize {
    /// Bytes that the program asked for at the last call.
    pub size: usize,
    /// The room of a block beyond the size classes, before and after. Two equal numbers while
    /// growth is not counted. `None` for a block of a size class.
    pub room: Option<(usize, usize)>,
}

impl Resize {
    /// Returns by how many bytes the block's room grew.
    pub fn growth(&self) -> usize {
        let (before, after) = self.room.unwrap_or((0, 0));
        after.saturating_sub(before)
    }

    /// Returns what a sample caused by this growth stands for. `mean` is the mean of the interval
    /// that the sample ended.
    pub(super) fn sampled(&self, mean: u64) -> Counts {
        let (_, after) = self.room.unwrap_or((0, 0));
        let room = Counts::of(self.growth(), mean).bytes;
        Counts {
            objects: Counts::of(self.size, mean).objects,
            bytes: scaled(room, self.size, after),
        }
    }

    /// Returns what a sample stands for after the resize. Before, while its block had `size` bytes,
    /// the sample stood for `counts`. `mean` is that of the present intervals.
    pub(super) fn of_sample(&self, size: usize, counts: Counts, mean: u64) -> Counts {
        let Some((before, after)) = self.room else {
            return Counts::of_objects(counts.objects, self.size);
        };
        let growth = self.growth();
        if growth == 0 {
            let bytes = scaled(counts.bytes, self.size, size);
            return Counts { bytes, ..counts };
        }
        let room = scaled(counts.bytes, before, size).saturating_add(growth as u64);
        let one = Counts::ONE as f64;
        let missed = 1.0 - one / counts.objects.max(Counts::ONE) as f64;
        let more = math::one_minus_exp(growth as f64 / mean.max(1) as f64);
        let probability = 1.0 - missed * (1.0 - more);
        Counts {
            objects: ((one / probability + 0.5) as u64).min(counts.objects),
            bytes: scaled(room, self.size, after),
        }
    }
}

/// Returns `bytes` × `to` / `from`, rounded to the nearest.
fn scaled(bytes: u64, to: usize, from: usize) -> u64 {
    let from = from.max(1) as u128;
    let scaled = (u128::from(bytes) * to as u128 + from / 2) / from;
    u64::try_from(scaled).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec;

    const GRANULE: usize = 64 << 10;

    fn grows(from: usize, to: usize) -> Resize {
        let room = |size: usize| size.next_multiple_of(GRANULE);
        Resize {
            size: to,
            room: Some((room(from), room(to))),
        }
    }

    #[test]
    fn a_certain_sample_stands_for_its_block_at_each_size() {
        let (mut size, mut counts) = (600_000, Counts::of(600_000, 1));
        for next in [
            600_001,
            700_000,
            5 << 20,
            1 << 30,
            600_000_000,
            999,
            70 << 20,
            1,
        ] {
            counts = grows(size, next).of_sample(size, counts, 1);
            size = next;
            assert_eq!((counts.objects, counts.bytes), (Counts::ONE, size as u64));
        }
    }

    /// The expected counts, over both cases of each step, must be one block of its size.
    #[test]
    fn the_expected_counts_are_one_block_of_its_size() {
        const MEAN: u64 = 8 << 20;
        let p = |bytes: usize| math::one_minus_exp(bytes as f64 / MEAN as f64);
        for step in [1000, 50_000, GRANULE, 300_000, 5 << 20] {
            let mut size = 9 * GRANULE;
            // Each sample that may have been taken by now, with its probability.
            let mut samples = vec![(p(size), Counts::of(size, MEAN))];
            let mut missed = 1.0 - p(size);
            for _ in 0..40 {
                let resize = grows(size, size + step);
                for (_, counts) in &mut samples {
                    *counts = resize.of_sample(size, *counts, MEAN);
                }
                size += step;
                if resize.growth() > 0 {
                    samples.push((missed * p(resize.growth()), resize.sampled(MEAN)));
                    missed *= 1.0 - p(resize.growth());
                }
            }
            let sum = |of: &dyn Fn(&Counts) -> u64| -> f64 {
                samples
                    .iter()
                    .map(|(p, counts)| p * of(counts) as f64)
                    .sum()
            };
            let bytes = sum(&|counts| counts.bytes) / size as f64;
            let objects = sum(&|counts| counts.objects) / Counts::ONE as f64;
            assert!(
                (bytes - 1.0).abs() < 0.001,
                "{bytes} of the bytes, steps of {step}"
            );
            assert!(
                (objects - 1.0).abs() < 0.06,
                "{objects} blocks, steps of {step}"
            );
        }
    }

    #[test]
    fn a_block_that_shrinks_and_a_small_block_keep_their_weight() {
        let counts = Counts::of(600_000, 8 << 20);
        let half = Resize {
            size: 300_000,
            room: Some((10 * GRANULE, 5 * GRANULE)),
        };
        let after = half.of_sample(600_000, counts, 8 << 20);
        assert_eq!(after.objects, counts.objects);
        assert_eq!(after.bytes, counts.bytes.div_ceil(2));
        let small = Resize {
            size: 30,
            room: None,
        };
        let after = small.of_sample(20, Counts::of(20, 8 << 20), 1);
        assert_eq!(after, Counts::of_objects(after.objects, 30));
    }
}
