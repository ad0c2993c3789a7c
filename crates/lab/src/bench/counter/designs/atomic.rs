//! `atomic`: one atomic that every thread adds to. Its sums are always exact. All CPUs contend for
//! its cache line.

use super::{Design, Shared};
use crate::Padded;
use crate::bench::counter::shared::Zeroed;
use std::sync::atomic::AtomicI64;
use std::sync::atomic::Ordering::{AcqRel, Acquire};

pub struct Atomic(Padded<AtomicI64>);

// SAFETY: the type holds one atomic integer and padding, for which zero bytes are valid.
unsafe impl Zeroed for Atomic {}

impl Shared for Atomic {
    fn set_batch(&mut self, _: i64) {}
}

impl Design for Atomic {
    #[inline(always)]
    fn add(&self, n: i64) {
        self.0.0.fetch_add(n, AcqRel);
    }

    fn sum(&self) -> i64 {
        self.0.0.load(Acquire)
    }

    fn error_bound(&self) -> Option<u64> {
        Some(0)
    }
}
