//! Increments of items whose cache lines were displaced: whether the width of an item matters when
//! the program's other data has used the caches in between.
//!
//! A round reads a buffer that is larger than the caches of a core. Then it increments some items,
//! each once, and only these increments are timed. The packed forms are plain code that differs
//! only in the bytes from one item to the next. So their rows show what the width alone costs. The
//! row of a `VmStat` shows what an increment costs in Pinfold, with all the other lines that it
//! reads.

use super::Row;
use super::subject::Op;
use super::zone::{Zone as Totals, step};
use crate::cycles;
use anyhow::{Result, ensure};
use pinfold::vmstat::{Item, VmStat, Zone};
use std::hint::black_box;
use std::sync::atomic::AtomicI8;
use std::sync::atomic::Ordering::Relaxed;

/// The most items, and the numbers of items that are incremented after a displacement.
const MOST: usize = 16;
pub const ITEMS: [usize; 3] = [1, 4, MOST];

/// Bytes that displace the caches: more than the second-level cache of a core has.
const DISPLACING: usize = 8 << 20;
const LINE: usize = 64;

/// The forms that are measured, in the order of the rows.
const FORMS: [&str; 5] = [
    "cold-1-byte",
    "cold-8-bytes",
    "cold-16-bytes",
    "cold-32-bytes",
    "cold-rseq",
];
const WIDTHS: [usize; 4] = [1, 8, 16, 32];

/// The rows of each form, one for each of [`ITEMS`].
pub type Rows = [[Row; ITEMS.len()]; FORMS.len()];

#[derive(Clone, Copy)]
struct Nth(usize);

impl Item for Nth {
    const NAMES: &'static [&'static str] = &["item"; MOST];

    #[inline(always)]
    fn index(self) -> usize {
        self.0
    }
}

static STAT: VmStat<Nth> = VmStat::new();

/// Differences of one byte, a number of bytes apart, changed without protection.
struct Packed {
    width: usize,
    threshold: i8,
    total: Totals,
    /// Begins at a cache line.
    bytes: Box<[Line]>,
}

#[repr(align(64))]
struct Line([AtomicI8; LINE]);

impl Packed {
    fn new(width: usize, threshold: i8) -> Packed {
        let line = || Line([const { AtomicI8::new(0) }; LINE]);
        let lines = (MOST * width).div_ceil(LINE);
        Packed {
            width,
            threshold,
            total: Totals::default(),
            bytes: (0..lines).map(|_| line()).collect(),
        }
    }

    fn difference(&self, item: usize) -> &AtomicI8 {
        let at = item * self.width;
        &self.bytes[at / LINE].0[at % LINE]
    }

    #[inline(always)]
    fn inc(&self, item: usize) {
        let difference = self.difference(item);
        let (after, fold) = step::<1>(difference.load(Relaxed), self.threshold);
        difference.store(after, Relaxed);
        if fold != 0 {
            self.total.add(fold);
        }
    }

    fn total(&self) -> Option<i64> {
        let kept = (0..MOST).map(|item| i64::from(self.difference(item).load(Relaxed)));
        Some(self.total.read()? + kept.sum::<i64>())
    }
}

/// Measures all forms, interleaved. Fails if a total is wrong afterwards.
pub fn measure(rounds: u32) -> Result<Rows> {
    let threshold = STAT.threshold(Zone::normal(0)).min(125);
    let threshold = i8::try_from(threshold).unwrap_or(125);
    let packed = WIDTHS.map(|width| Packed::new(width, threshold));
    let displacing: Vec<u64> = vec![1; DISPLACING / size_of::<u64>()];
    let mut samples: [[Vec<f64>; ITEMS.len()]; FORMS.len()] = Default::default();
    // Round 0 warms up.
    for round in 0..=rounds {
        for (at, items) in ITEMS.into_iter().enumerate() {
            for (form, samples) in samples.iter_mut().enumerate() {
                displace(&displacing);
                let taken = match packed.get(form) {
                    Some(packed) => timed(items, |item| packed.inc(item)),
                    None => timed(items, |item| STAT.inc(Zone::normal(0), Nth(item))),
                };
                if round > 0 {
                    samples[at].push(taken);
                }
            }
        }
    }
    let made = i64::from(rounds + 1) * ITEMS.iter().sum::<usize>() as i64;
    let counted: i64 = (0..MOST).map(|item| STAT.sum(Nth(item))).sum();
    let totals = packed.each_ref().map(Packed::total);
    ensure!(
        counted == made && totals.iter().all(|total| *total == Some(made)),
        "cold items counted {counted} and {totals:?} after {made} increments; please report this",
    );
    Ok(std::array::from_fn(|form| {
        std::array::from_fn(|at| {
            let samples = &samples[form][at];
            Row::new(FORMS[form], Op::Inc, ITEMS[at], false, samples)
        })
    }))
}

/// Reads the buffer line by line.
fn displace(buffer: &[u64]) {
    let lines = buffer.iter().step_by(LINE / size_of::<u64>());
    black_box(lines.fold(0u64, |sum, word| sum.wrapping_add(*word)));
}

/// Returns the cycles of an increment of each of `items` items. They include the reading of the
/// clock.
#[inline(always)]
fn timed(items: usize, inc: impl Fn(usize)) -> f64 {
    let before = cycles::now();
    for item in 0..items {
        inc(item);
    }
    cycles::now().saturating_sub(before) as f64 / items as f64
}
