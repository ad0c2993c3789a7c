//! `atomic`: one atomic that everyone adds to. Always exact, always contended.

use super::{Design, Shared};
use crate::bench::Padded;
use crate::bench::counter::shared::Zeroed;
use std::sync::atomic::AtomicI64;
use std::sync::atomic::Ordering::{AcqRel, Acquire};

pub struct Atomic(Padded<AtomicI64>);

// SAFETY: an integer, whose zero means none.
unsafe impl Zeroed for Atomic {}

impl Shared for Atomic {
    fn set_batch(&mut self, _: i64) {}
}

impl Design for Atomic {
    #[inline]
    fn add(&self, n: i64) {
        self.0.0.fetch_add(n, AcqRel);
    }

    fn sum(&self) -> i64 {
        self.0.0.load(Acquire)
    }
}
