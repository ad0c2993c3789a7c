//! Loads from the stack that wait for several stores, or for a narrower one.
//!
//! A CPU forwards a value that it has just stored to a load of the same bytes, before the value
//! reaches the cache. It cannot if the load also needs bytes that another store wrote, or that no
//! recent store wrote. The load then waits until the stores have left for the cache, which takes
//! longer than the rest of a fast path. A compiler writes such code where it builds a value in
//! memory, field by field, and loads the value whole.
//!
//! The analysis knows, for each byte of the frame, the stores that may have been the last to write
//! it. A call takes so long that the stores before it have left.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Bytes of the frame, as distances from the stack pointer of the caller. They are negative.
pub type Bytes = Range<i64>;

/// The stores since the last call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stores(BTreeMap<i64, BTreeSet<(i64, i64)>>);

impl Stores {
    /// Notes a store.
    pub fn store(&mut self, bytes: &Bytes) {
        for byte in bytes.clone() {
            self.0
                .insert(byte, BTreeSet::from([(bytes.start, bytes.end)]));
        }
    }

    /// Forgets what was stored to these bytes.
    pub fn forget(&mut self, bytes: &Bytes) {
        bytes.clone().for_each(|byte| _ = self.0.remove(&byte));
    }

    /// Returns whether a load waits: one of the stores that wrote its bytes did not write them all.
    pub fn stalls(&self, load: &Bytes) -> bool {
        let mut writers = load.clone().filter_map(|byte| self.0.get(&byte)).flatten();
        writers.any(|&(start, end)| start > load.start || end < load.end)
    }

    /// Forgets all stores.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Adds the stores of another path to the same instruction.
    pub fn join(&mut self, other: &Stores) {
        for (&byte, writers) in &other.0 {
            self.0.entry(byte).or_default().extend(writers);
        }
    }
}
