//! The counts of calls in a segment, of a process that counts every call.

use super::snapshot::Refused;
use pinfold::internal::segment::{CLASSES, Call};
use pinfold::vmstat::Item;
use std::io;

/// The counts of calls.
#[derive(Debug)]
pub struct Calls {
    /// The sum over all units of each event's words.
    sums: Vec<u64>,
    /// The calls counted in each unit: one for each CPU or concurrency id, then one that all share.
    pub units: Vec<Served>,
}

/// The blocks that one unit's CPU gave out and took back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Served {
    pub allocated: u64,
    pub freed: u64,
}

impl Calls {
    /// The bytes of a unit's counts.
    pub(super) const BYTES: usize = 8 * Call::NAMES.len();

    /// Reads the counts of the units. `read` returns the bytes of one unit's counts.
    pub(super) fn read(
        units: usize,
        mut read: impl FnMut(usize) -> io::Result<Vec<u8>>,
    ) -> io::Result<Result<Calls, Refused>> {
        let events = Call::NAMES.len();
        let mut all = Calls {
            sums: vec![0; events],
            units: Vec::with_capacity(units),
        };
        for unit in 0..units {
            let bytes = read(unit)?;
            if bytes.len() != Calls::BYTES {
                return Ok(Err(Refused::Broken));
            }
            let words = bytes.as_chunks().0.iter().copied();
            let words: Vec<u64> = words.map(u64::from_le_bytes).collect();
            all.units.push(served(&words));
            for (sum, word) in all.sums.iter_mut().zip(words) {
                *sum = sum.wrapping_add(word);
            }
        }
        Ok(Ok(all))
    }

    pub fn count(&self, call: Call) -> u64 {
        self.sums[call.index()]
    }

    /// Returns how many blocks of class `class` were allocated, and how many were freed.
    pub fn of_class(&self, class: usize) -> (u64, u64) {
        if class >= CLASSES {
            return (0, 0);
        }
        (
            self.count(Call::alloc(class)),
            self.count(Call::free(class)),
        )
    }

    /// Returns how many blocks of class `class` are in use.
    pub fn in_use(&self, class: usize) -> u64 {
        let (allocated, freed) = self.of_class(class);
        allocated.saturating_sub(freed)
    }

    /// Returns how many bytes callers asked for in a block of class `class`, on average over all
    /// blocks so far.
    pub fn mean_request(&self, class: usize) -> Option<f64> {
        let (allocated, _) = self.of_class(class);
        let requested = (class < CLASSES).then(|| self.count(Call::requested(class)))?;
        (allocated > 0).then(|| requested as f64 / allocated as f64)
    }
}

/// Returns the sums of a unit's allocations and frees.
fn served(words: &[u64]) -> Served {
    let sum = |of_class: fn(usize) -> Call, large: Call| {
        let classes = (0..CLASSES).map(|class| words[of_class(class).index()]);
        classes.fold(words[large.index()], u64::wrapping_add)
    };
    Served {
        allocated: sum(Call::alloc, Call::LARGE_ALLOC),
        freed: sum(Call::free, Call::LARGE_FREE),
    }
}
