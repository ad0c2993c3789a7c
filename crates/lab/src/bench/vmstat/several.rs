//! Increments of several items in turn: what it costs that an item takes 32 bytes of each CPU in
//! Pinfold, and one byte in the kernel.

use super::Row;
use super::subject::{Op, for_each_cpu};
use super::zone::{Zone as Totals, step};
use crate::{Padded, cycles};
use anyhow::{Result, ensure};
use pinfold::vmstat::{Item, VmStat, Zone};
use std::sync::atomic::AtomicI8;
use std::sync::atomic::Ordering::Relaxed;

/// The most items, and the numbers of items that take turns.
const MOST: usize = 16;
const TURNS: [usize; 3] = [1, 4, MOST];

/// One of the items.
#[derive(Clone, Copy)]
struct Nth(usize);

impl Item for Nth {
    const NAMES: &'static [&'static str] = &["item"; MOST];

    #[inline(always)]
    fn index(self) -> usize {
        self.0
    }
}

static ITEMS: VmStat<Nth> = VmStat::new();

/// Differences of one byte, changed without protection. All of a CPU's share one cache line.
struct Bytes {
    threshold: i8,
    totals: [Totals; MOST],
    locals: Box<[Padded<[AtomicI8; MOST]>]>,
}

impl Bytes {
    #[inline(always)]
    fn inc(&self, item: usize) {
        let difference = &self.locals[pinfold_rseq::current()].0[item];
        let (after, fold) = step::<1>(difference.load(Relaxed), self.threshold);
        difference.store(after, Relaxed);
        if fold != 0 {
            self.totals[item].add(fold);
        }
    }

    fn total(&self) -> Option<i64> {
        let local = |one: &Padded<[AtomicI8; MOST]>| {
            let differences = one.0.iter().map(|byte| i64::from(byte.load(Relaxed)));
            differences.sum::<i64>()
        };
        let mut total: i64 = self.locals.iter().map(local).sum();
        for item in &self.totals {
            total += item.read()?;
        }
        Some(total)
    }
}

/// Measures both forms, interleaved. Returns the rows of each, one for each of [`TURNS`]. Fails if
/// a total is wrong afterwards.
pub fn measure(rounds: u32, calls: u32) -> Result<[[Row; TURNS.len()]; 2]> {
    let threshold = ITEMS.threshold(Zone::normal(0)).min(125);
    let bytes = Bytes {
        threshold: i8::try_from(threshold).unwrap_or(125),
        totals: Default::default(),
        locals: for_each_cpu(),
    };
    let mut samples: [[Vec<f64>; TURNS.len()]; 2] = Default::default();
    // Round 0 warms up.
    for round in 0..=rounds {
        for (at, turns) in TURNS.into_iter().enumerate() {
            let taken = [
                timed(turns, calls, |item| bytes.inc(item)),
                timed(turns, calls, |item| ITEMS.inc(Zone::normal(0), Nth(item))),
            ];
            for (samples, taken) in samples.iter_mut().zip(taken) {
                if round > 0 {
                    samples[at].push(taken);
                }
            }
        }
    }
    let made = i64::from(rounds + 1) * i64::from(calls) * TURNS.len() as i64;
    let counted: i64 = (0..MOST).map(|item| ITEMS.sum(Nth(item))).sum();
    ensure!(
        counted == made && bytes.total() == Some(made),
        "several items counted {counted} and {:?} after {made} increments; please report this",
        bytes.total()
    );
    let [bytes, words] = samples;
    Ok([rows("unprotected-byte", &bytes), rows("rseq", &words)])
}

fn rows(subject: &'static str, samples: &[Vec<f64>; TURNS.len()]) -> [Row; TURNS.len()] {
    std::array::from_fn(|at| Row::new(subject, Op::Inc, TURNS[at], false, &samples[at]))
}

/// Returns the cycles of an increment in a loop over `turns` items, a power of two.
#[inline(always)]
fn timed(turns: usize, calls: u32, inc: impl Fn(usize)) -> f64 {
    let before = cycles::now();
    for call in 0..calls as usize {
        inc(call & (turns - 1));
    }
    cycles::now().saturating_sub(before) as f64 / f64::from(calls)
}
