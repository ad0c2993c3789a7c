//! temporary
use super::ranges::{RangeError, Ranges};
use super::{Mempolicy, Placement, WORDS};
use crate::topology::NodeSet;
use core::ops::Range;

/// Temporary.
pub struct SharedPolicy(Ranges<{ WORDS + 2 }>);
impl SharedPolicy {
    /// Temporary.
    pub const fn new() -> Self {
        SharedPolicy(Ranges::new())
    }
    /// Temporary.
    pub fn set(&self, range: Range<u64>, policy: Option<&Mempolicy>) -> Result<(), RangeError> {
        let words = policy.map(|policy| {
            let mut all = [0; WORDS + 2];
            all[2..].copy_from_slice(&policy.to_words());
            if let Some(p) = Placement::of(policy) {
                all[..2].copy_from_slice(&p.to_words());
            }
            all
        });
        self.0.set(range.start, range.end, words.as_ref())
    }
    /// Temporary.
    pub fn lookup(&self, page: u64) -> Option<Mempolicy> {
        let mut words = [0; WORDS];
        self.0
            .lookup(page, 2, &mut words)
            .then(|| Mempolicy::from_words(&words))
    }
    #[inline]
    pub(crate) fn placement(&self, page: u64) -> Option<Placement> {
        let mut words = [0; 2];
        if !self.0.lookup(page, 0, &mut words) {
            return None;
        }
        Placement::from_words(words)
    }
    /// Temporary.
    pub fn rebind(&self, _allowed: &NodeSet) -> Result<(), RangeError> {
        Ok(())
    }
}
