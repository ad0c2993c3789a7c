//! Policies by range of pages, shared by all who use them: the kernel's `shared_policy`, which shared memory has.
//!
//! Policies are kept by value. Who sets one leaves a duplicate behind, and who looks one up gets a duplicate: no count of references, and
//! nothing that could be used after it was freed.

use super::policy::WORDS;
use super::ranges::{RangeError, Ranges};
use super::{Mempolicy, Mode, Placement};
use crate::topology::NodeSet;
use core::fmt;
use core::ops::Range;

/// A policy for each of some ranges of pages. What a page is, and where page 0 lies, is up to the user: pages are numbers.
///
/// Any thread may look pages up while another sets ranges. A lookup is O(log n), takes no lock and writes nothing that another
/// thread reads, so that any number of threads look up at the speed of one. Setting costs O(n): some ten
/// microseconds where there are a thousand ranges. Only one thread of the process sets at a time, whichever the map.
///
/// Memory: none before the first range is set, then 848 bytes and up to four times as much for each range, until the map is dropped.
///
/// ```
/// use pinfold::mempolicy::{Mempolicy, SharedPolicy};
///
/// static BUFFERS: SharedPolicy = SharedPolicy::new();
///
/// BUFFERS.set(0..1000, Some(&Mempolicy::parse("interleave:0-3")?))?;
/// BUFFERS.set(200..300, Some(&Mempolicy::parse("bind:1")?))?;
/// BUFFERS.set(900..1100, None)?;
/// assert_eq!(BUFFERS.to_string(), "0-200 interleave:0-3\n200-300 bind:1\n300-900 interleave:0-3\n");
/// assert_eq!(BUFFERS.lookup(250).map(|policy| policy.to_string()).as_deref(), Some("bind:1"));
/// assert_eq!(BUFFERS.lookup(900), None);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(alias = "shared_policy")]
pub struct SharedPolicy {
    ranges: Ranges<RECORD>,
}

/// A range's words: its policy, and what the allocator makes of it.
const RECORD: usize = WORDS + Placement::WORDS;

fn record_of(policy: &Mempolicy, placement: Option<Placement>) -> [u64; RECORD] {
    let mut words = [0; RECORD];
    words[..WORDS].copy_from_slice(&policy.to_words());
    if let Some(placement) = placement {
        words[WORDS..].copy_from_slice(&placement.to_words());
    }
    words
}

fn policy_in(record: &[u64; RECORD]) -> Mempolicy {
    let words = record.first_chunk().copied();
    Mempolicy::from_words(&words.unwrap_or([0; WORDS]))
}

impl Default for SharedPolicy {
    fn default() -> Self {
        Self::new()
    }
}

impl SharedPolicy {
    /// A map without ranges. Costs nothing.
    #[doc(alias = "mpol_shared_policy_init")]
    pub const fn new() -> Self {
        SharedPolicy {
            ranges: Ranges::new(),
        }
    }

    /// Gives pages a policy, or takes it from them: `None`, and a policy of mode [`Mode::Default`], leave them without. Ranges that reach
    /// into `pages` are trimmed, one around it is split, those within it go. Ranges with equal policies that touch become one.
    ///
    /// The policy is copied: what becomes of the caller's afterwards changes nothing here. All pages change at once, for
    /// every reader. O(n) in the number of ranges. The end is excluded, so that page `u64::MAX` has no policy ever.
    ///
    /// Safe in signal handlers; where it is the process's first use of the library, and the machine has several nodes, it reads the
    /// machine's description, with some ten KiB of stack. A fork in another thread waits until the change is done.
    ///
    /// # Errors
    ///
    /// [`RangeError`]; nothing has changed then.
    ///
    /// ```
    /// use pinfold::mempolicy::{Mempolicy, RangeError, SharedPolicy};
    ///
    /// let shared = SharedPolicy::new();
    /// assert_eq!(shared.set(0..10, Some(&Mempolicy::local())), Ok(()));
    /// assert_eq!(shared.set(10..10, None), Err(RangeError::Empty));
    /// assert_eq!(shared.len(), 1);
    /// ```
    #[doc(alias = "mpol_set_shared_policy")]
    pub fn set(&self, pages: Range<u64>, policy: Option<&Mempolicy>) -> Result<(), RangeError> {
        let policy = policy.filter(|policy| policy.mode() != Mode::Default);
        let words = policy.map(|policy| record_of(policy, Placement::of(policy)));
        self.ranges.set(pages.start, pages.end, words.as_ref())
    }

    /// The policy of a page, as a copy that is the caller's; `None` where none was set. O(log n); takes no lock and writes nothing.
    #[doc(alias = "mpol_shared_policy_lookup")]
    pub fn lookup(&self, page: u64) -> Option<Mempolicy> {
        let words = self.ranges.lookup_all(page)?;
        Some(policy_in(&words))
    }

    /// Where the policy of a page places it; `None` where none was set. As [`lookup`](Self::lookup), but copies two words.
    #[inline(always)]
    pub(crate) fn placement(&self, page: u64) -> Option<Placement> {
        Placement::from_words(self.ranges.lookup(page, [WORDS, WORDS + 1])?)
    }

    /// How many ranges there are.
    pub fn len(&self) -> usize {
        self.ranges.len()
    }

    /// Whether no page has a policy.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Has every policy follow a change of the nodes that may be used, all at once: [`Mempolicy::rebind`]. O(n).
    ///
    /// # Errors
    ///
    /// [`RangeError::Busy`] and [`RangeError::OutOfMemory`]; nothing has changed then.
    ///
    /// ```
    /// use pinfold::mempolicy::{Mempolicy, SharedPolicy};
    /// use pinfold::topology::NodeSet;
    ///
    /// let shared = SharedPolicy::new();
    /// shared.set(0..10, Some(&Mempolicy::parse("interleave=relative:0-1")?))?;
    /// shared.rebind(&NodeSet::parse(b"4-7")?)?;
    /// assert_eq!(shared.lookup(0).map(|policy| policy.nodes().to_string()).as_deref(), Some("4-5"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[doc(alias = "mpol_rebind_policy")]
    pub fn rebind(&self, allowed: &NodeSet) -> Result<(), RangeError> {
        self.rebind_if(allowed, |_| true)
    }

    /// As [`rebind`](Self::rebind), unless a policy's nodes change to what is not `possible`:
    /// [`RangeError::UnknownNodes`], and nothing has changed.
    pub(crate) fn rebind_if(
        &self,
        allowed: &NodeSet,
        possible: impl Fn(&Mempolicy) -> bool,
    ) -> Result<(), RangeError> {
        self.ranges.update(|words| {
            let before = policy_in(words);
            let mut policy = before.clone();
            policy.rebind(allowed);
            if policy.nodes() != before.nodes() && !possible(&policy) {
                return Err(RangeError::UnknownNodes);
            }
            *words = record_of(&policy, Placement::again(&policy));
            Ok(())
        })
    }

    /// All ranges and copies of their policies, in order, as they were at one moment. O(n), and as much memory as they take.
    ///
    /// # Errors
    ///
    /// [`RangeError::OutOfMemory`].
    ///
    /// ```
    /// use pinfold::mempolicy::{Mempolicy, SharedPolicy};
    ///
    /// let shared = SharedPolicy::new();
    /// shared.set(3..5, Some(&Mempolicy::local()))?;
    /// assert_eq!(shared.ranges()?.collect::<Vec<_>>(), [(3..5, Mempolicy::local())]);
    /// # Ok::<(), pinfold::mempolicy::RangeError>(())
    /// ```
    pub fn ranges(&self) -> Result<SharedRanges, RangeError> {
        let records = self.ranges.snapshot()?;
        Ok(SharedRanges { records, next: 0 })
    }
}

/// A line `start-end policy` for each range, the end excluded. The lines are from one moment; where there is no memory for that, each is
/// from a moment of its own.
impl fmt::Display for SharedPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Ok(mut ranges) = self.ranges() {
            return ranges.try_for_each(|(pages, policy)| line(f, &pages, &policy));
        }
        let mut from = 0;
        while let Some(record) = self.ranges.next_from(from) {
            let policy = policy_in(&record.words);
            line(f, &(record.start..record.end), &policy)?;
            from = record.end;
        }
        Ok(())
    }
}

fn line(f: &mut fmt::Formatter<'_>, pages: &Range<u64>, policy: &Mempolicy) -> fmt::Result {
    writeln!(f, "{}-{} {policy}", pages.start, pages.end)
}

impl fmt::Debug for SharedPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedPolicy")
            .field("ranges", &self.len())
            .finish_non_exhaustive()
    }
}

/// The ranges of a [`SharedPolicy`] as they were at one moment: [`SharedPolicy::ranges`].
pub struct SharedRanges {
    records: super::buffer::Snapshot<RECORD>,
    next: usize,
}

impl Iterator for SharedRanges {
    type Item = (Range<u64>, Mempolicy);

    fn next(&mut self) -> Option<Self::Item> {
        let record = self.records.record(self.next)?;
        self.next += 1;
        let policy = policy_in(&record.words);
        Some((record.start..record.end, policy))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::ToString;

    #[test]
    fn a_range_s_placement_is_its_policy_s() {
        let shared = SharedPolicy::new();
        let policy = Mempolicy::parse("interleave:0").unwrap();
        shared.set(7..9, Some(&policy)).unwrap();
        assert_eq!(shared.placement(8), Placement::of(&policy));
        assert_eq!(shared.placement(9), None);
        assert_eq!(shared.to_string(), "7-9 interleave:0\n");
    }
}
