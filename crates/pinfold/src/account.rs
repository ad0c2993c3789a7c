//! What a heap holds, and how much it may hold (`heaps`).
//!
//! A heap's caches and its large blocks charge their account when they take memory from an arena,
//! and give the charge back with the memory. The common paths of allocations and frees do neither,
//! so counting costs them nothing.

use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::Relaxed;

/// Stands for no limit.
const NONE: usize = usize::MAX;

/// The account of one heap, in bytes. All words are numbers that guard no memory, so all accesses
/// are relaxed.
pub(crate) struct Account {
    held: AtomicUsize,
    peak: AtomicUsize,
    limit: AtomicUsize,
    refusals: AtomicUsize,
}

impl Account {
    pub(crate) const fn new() -> Account {
        Account {
            held: AtomicUsize::new(0),
            peak: AtomicUsize::new(0),
            limit: AtomicUsize::new(NONE),
            refusals: AtomicUsize::new(0),
        }
    }

    /// Calls `alloc`, and charges `bytes` if it succeeds. Returns `None`, and counts the refusal,
    /// if the account would exceed its limit.
    pub(crate) fn charged<R>(&self, bytes: usize, alloc: impl FnOnce() -> Option<R>) -> Option<R> {
        let limit = self.limit.load(Relaxed);
        let more = |held: usize| {
            held.checked_add(bytes)
                .filter(|&sum| bytes == 0 || sum <= limit)
        };
        if self.held.fetch_update(Relaxed, Relaxed, more).is_err() {
            self.refusals.fetch_add(1, Relaxed);
            return None;
        }
        let got = alloc();
        match got {
            Some(_) => self.peak.fetch_max(self.held(), Relaxed),
            None => self.held.fetch_sub(bytes, Relaxed),
        };
        got
    }

    /// Returns whether the account has no room for `bytes`.
    pub(crate) fn is_full_for(&self, bytes: usize) -> bool {
        bytes > self.limit.load(Relaxed).saturating_sub(self.held())
    }

    /// Gives back what [`charged`](Self::charged) charged.
    pub(crate) fn uncharge(&self, bytes: usize) {
        self.held.fetch_sub(bytes, Relaxed);
    }

    pub(crate) fn held(&self) -> usize {
        self.held.load(Relaxed)
    }

    pub(crate) fn peak(&self) -> usize {
        self.peak.load(Relaxed)
    }

    pub(crate) fn limit(&self) -> Option<usize> {
        Some(self.limit.load(Relaxed)).filter(|&limit| limit != NONE)
    }

    pub(crate) fn set_limit(&self, limit: Option<usize>) {
        self.limit.store(limit.unwrap_or(NONE), Relaxed);
    }

    pub(crate) fn refusals(&self) -> usize {
        self.refusals.load(Relaxed)
    }
}
