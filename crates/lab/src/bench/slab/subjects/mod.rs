//! The subjects: Pinfold, and the peers of its fast path.

mod array;
mod depot;
mod double_word;
mod sheaf;
mod tid;

use super::Test;
use crate::{CMalloc, Measurable, PinfoldCache, PinfoldMalloc, cache, cache_of};
use anyhow::Result;
use array::{Array, Locked, MaskedSignals, Unprotected};

crate::names! {
    /// The subjects, in the order of the tables. A new subject needs a name here, a place in the
    /// lists below, and an arm in [`make`](Self::make).
    pub enum SubjectName {
        PinfoldCache = "pinfold-cache",
        PinfoldMalloc = "pinfold-malloc",
        PinfoldHardened = "pinfold-hardened",
        Unprotected = "unprotected",
        Rseq = "rseq",
        Tid = "tid",
        Locked = "locked",
        MaskedSignals = "masked-signals",
    }
}

impl SubjectName {
    /// The same fast path, unprotected and protected in four ways.
    pub const RIVALS: [SubjectName; 5] = [
        SubjectName::Unprotected,
        SubjectName::Rseq,
        SubjectName::Tid,
        SubjectName::Locked,
        SubjectName::MaskedSignals,
    ];

    /// Describes the subject in one line.
    pub fn describe(self) -> &'static str {
        match self {
            SubjectName::PinfoldCache => "a KmemCache of that size, inlined",
            SubjectName::PinfoldMalloc => "pinfold_malloc and pinfold_free, called as C functions",
            SubjectName::PinfoldHardened => "a KmemCache of that size, hardened",
            SubjectName::Unprotected => {
                "the same path without protection, for one thread: the others' lower bound"
            }
            SubjectName::Rseq => "a restartable sequence pops or pushes: a KmemCache",
            SubjectName::Tid => {
                "a double-word compare-exchange of a list's head and a transaction id, as in SLUB"
            }
            SubjectName::Locked => {
                "arrays with a lock of the CPU: one locked exchange, without contention"
            }
            SubjectName::MaskedSignals => {
                "arrays with two calls of pthread_sigmask and a lock around them"
            }
        }
    }

    /// Returns whether the subject is measured in `test`.
    pub fn takes_part(self, test: Test) -> bool {
        match test {
            Test::Of(scenario) => self != SubjectName::Unprotected || scenario.threads(2) == 1,
            Test::Bulk => self == SubjectName::PinfoldCache,
        }
    }

    /// Returns why this machine cannot run the subject, or `None` if it can.
    pub fn missing(self) -> Option<&'static str> {
        match self {
            SubjectName::Tid => double_word::missing(),
            _ => None,
        }
    }

    /// Makes the subject for objects of `size` bytes. It must not be [`missing`](Self::missing).
    pub fn make(self, size: usize) -> Result<Box<dyn Measurable>> {
        Ok(match self {
            SubjectName::PinfoldCache | SubjectName::Rseq => Box::new(PinfoldCache(cache(size)?)),
            SubjectName::PinfoldHardened => Box::new(PinfoldCache(cache_of(size, true)?)),
            SubjectName::PinfoldMalloc => Box::new(CMalloc::<PinfoldMalloc>::new(size)),
            SubjectName::Tid => Box::new(tid::Tid::new(cache(size)?)?),
            SubjectName::Unprotected => Box::new(Array::<Unprotected>::new(cache(size)?)),
            SubjectName::Locked => Box::new(Array::<Locked>::new(cache(size)?)),
            SubjectName::MaskedSignals => Box::new(Array::<MaskedSignals>::new(cache(size)?)),
        })
    }
}

/// Makes one value for each possible CPU.
fn for_each_cpu<T>(make: impl FnMut(usize) -> T) -> Box<[T]> {
    (0..pinfold_rseq::possible()).map(make).collect()
}

#[cfg(test)]
mod tests;
