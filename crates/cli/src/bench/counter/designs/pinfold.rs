//! `pinfold` and `pinfold-batch`: Pinfold's counter, once with a large drift and once with the
//! kernel's batch.

use super::Design;
use crate::bench::counter::workers::PAGES;
use anyhow::{Context, Result};
use pinfold::counter::PercpuCounter;

impl Design for PercpuCounter {
    #[inline]
    fn add(&self, n: i64) {
        PercpuCounter::add(self, n);
    }

    fn sum(&self) -> i64 {
        PercpuCounter::sum(self)
    }
}

/// Returns how far `pinfold`'s cheap reads may be off, in pages: 64 mappings of the loop for each
/// possible CPU.
///
/// With this drift nearly all adds stay in the CPUs' shards. Threads that move between CPUs make
/// the shards differ by a few mappings, not by 64.
pub fn max_drift() -> u64 {
    64 * PAGES as u64 * pinfold_rseq::possible() as u64
}

pub fn with_max_drift() -> Result<PercpuCounter> {
    let drift = max_drift();
    PercpuCounter::with_max_drift(0, drift)
        .with_context(|| format!("a counter with a drift of {drift}"))
}

pub fn with_batch(batch: i64) -> Result<PercpuCounter> {
    PercpuCounter::with_batch(0, batch.unsigned_abs())
        .with_context(|| format!("a counter with a batch of {batch}"))
}
