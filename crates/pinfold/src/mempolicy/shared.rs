//! Policies by range of pages: the kernel's `shared_policy`, which shared memory has.
//!
//! A map holds copies of policies. A set copies the caller's policy into the map, and a lookup
//! copies a policy out. So policies need no reference counts, and no caller can use a freed policy.

use super::policy::WORDS;
use super::ranges::{RangeError, Ranges};
use super::{Mempolicy, Mode, Placement};
use crate::nodes;
use crate::topology::{NodeId, NodeSet};
use core::fmt;
use core::ops::Range;

/// A map from ranges of pages to policies. Pages are numbers, whose meaning is up to the caller.
///
/// Any thread may look up pages while another thread sets ranges.
///
/// * A lookup is O(log n). It takes no lock and writes no shared memory, so lookups on many CPUs do
///   not slow each other down.
/// * A set is O(n): it copies the bounds of all ranges, at about 1 ns a range. Only one thread of
///   the process sets at a time, even if the threads set different maps.
/// * A map takes no memory before the first set. Then it takes 4 KiB, or 500 to 1,400 bytes for
///   each range that it had at once, until the map is dropped. [`rebind`](Self::rebind) takes up
///   to 400 bytes more for each range.
///
/// ```
/// use pinfold::mempolicy::{Mempolicy, SharedPolicy};
///
/// static BUFFERS: SharedPolicy = SharedPolicy::new();
///
/// BUFFERS.set(0..1000, Some(&Mempolicy::parse("interleave:0-3")?))?;
/// BUFFERS.set(200..300, Some(&Mempolicy::parse("bind:1")?))?;
/// BUFFERS.set(900..1100, None)?;
/// assert_eq!(
///     BUFFERS.to_string(),
///     "0-200 interleave:0-3\n200-300 bind:1\n300-900 interleave:0-3\n"
/// );
/// assert_eq!(BUFFERS.lookup(250).map(|policy| policy.to_string()).as_deref(), Some("bind:1"));
/// assert_eq!(BUFFERS.lookup(900), None);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(alias = "shared_policy")]
pub struct SharedPolicy {
    ranges: Ranges<RECORD>,
}

/// Words of a range: its policy, and how the allocator follows the policy.
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
    /// Makes a map without ranges. Takes no memory.
    ///
    /// ```
    /// use pinfold::mempolicy::SharedPolicy;
    ///
    /// static POLICIES: SharedPolicy = SharedPolicy::new();
    /// assert!(POLICIES.is_empty());
    /// ```
    #[doc(alias = "mpol_shared_policy_init")]
    pub const fn new() -> Self {
        SharedPolicy {
            ranges: Ranges::new(),
        }
    }

    /// Sets the policy of a range of pages. `None`, or a policy of mode [`Mode::Default`], removes
    /// the range's policy.
    ///
    /// Ranges that reach into `pages` are trimmed, a range around `pages` is split, and ranges
    /// within `pages` are removed. Ranges that touch and have equal policies are joined.
    /// `pages.end` is excluded, so page `u64::MAX` never has a policy.
    ///
    /// The map keeps a copy of `policy`. All pages change at once, for every reader.
    ///
    /// O(n) in the number of ranges. With a `weighted interleave` policy, reads the weights: a file
    /// for each node. The process's first use of the library reads the machine's nodes from sysfs.
    ///
    /// A signal handler may call this. A fork in another thread waits until the change is done.
    ///
    /// # Errors
    ///
    /// [`RangeError::Empty`], [`RangeError::Busy`] or [`RangeError::OutOfMemory`]. After an error,
    /// nothing has changed.
    ///
    /// # Examples
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

    /// Sets the policy of all pages that no range has a policy for: a default of the map's own,
    /// such as the `mpol=` of a mounted tmpfs. `None`, or a policy of mode [`Mode::Default`],
    /// removes it.
    ///
    /// Ranges stay as they are, also ranges that are set or removed later. The map keeps a copy of
    /// `policy`. O(n) in the number of ranges. With a `weighted interleave` policy, reads the
    /// weights: a file for each node.
    ///
    /// A signal handler may call this. A fork in another thread waits until the change is done.
    ///
    /// # Errors
    ///
    /// [`RangeError::Busy`] or [`RangeError::OutOfMemory`]. After an error, nothing has changed.
    ///
    /// # Examples
    ///
    /// ```
    /// use pinfold::mempolicy::{Mempolicy, SharedPolicy};
    ///
    /// let shared = SharedPolicy::new();
    /// shared.set_default(Some(&Mempolicy::parse("interleave:0-3")?))?;
    /// shared.set(0..10, Some(&Mempolicy::parse("bind:1")?))?;
    /// assert_eq!(shared.to_string(), "0-10 bind:1\notherwise interleave:0-3\n");
    /// let thread = Mempolicy::parse("prefer:2")?;
    /// let policy = |page| shared.effective(page, Some(&thread)).to_string();
    /// assert_eq!((policy(9), policy(10)), ("bind:1".into(), "interleave:0-3".into()));
    /// shared.set_default(None)?;
    /// assert_eq!(shared.effective(10, Some(&thread)), thread);
    /// assert_eq!(shared.effective(10, None).to_string(), "local");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[doc(alias = "mpol_shared_policy_init")]
    pub fn set_default(&self, policy: Option<&Mempolicy>) -> Result<(), RangeError> {
        let policy = policy.filter(|policy| policy.mode() != Mode::Default);
        let words = policy.map(|policy| record_of(policy, Placement::of(policy)));
        self.ranges.set_default(words.as_ref())
    }

    /// Returns a copy of the map's own default, or `None` if it has none. O(1).
    pub fn default_policy(&self) -> Option<Mempolicy> {
        Some(policy_in(&self.ranges.default()?))
    }

    /// Returns the policy that holds for a page: the range's, else the map's default, else the
    /// thread's, else [`SYSTEM_DEFAULT`](super::SYSTEM_DEFAULT). O(log n). Takes no lock.
    ///
    /// `thread` is the policy of the thread that touches the page, from [`thread`](super::thread).
    /// A `default` policy counts as none.
    pub fn effective(&self, page: u64, thread: Option<&Mempolicy>) -> Mempolicy {
        super::effective(self.lookup(page).as_ref(), thread).clone()
    }

    /// Returns a copy of a page's policy: the range's, or else the [map's
    /// default](Self::set_default). Returns `None` if there is neither. O(log n). Takes no lock and
    /// writes no shared memory.
    #[doc(alias = "mpol_shared_policy_lookup")]
    pub fn lookup(&self, page: u64) -> Option<Mempolicy> {
        let words = self.ranges.lookup_all(page)?;
        Some(policy_in(&words))
    }

    /// Returns the node from which a page should come for the calling thread, and the mode that
    /// chose it. Follows the policy that [`lookup`](Self::lookup) finds. Returns `None` if `lookup`
    /// does.
    ///
    /// For programs that place many pages. O(log n), as `lookup`, but copies two words and not the
    /// policy. Under an interleaving mode, the page's number decides whose turn it is. Under
    /// `bind` and `prefer (many)`, the node is the policy's nearest. `prefer` counts as `local` if
    /// its node is not usable.
    ///
    /// ```
    /// use pinfold::mempolicy::{Mempolicy, Mode, SharedPolicy};
    /// use pinfold::topology::NodeId;
    ///
    /// let map = SharedPolicy::new();
    /// map.set(0..100, Some(&Mempolicy::parse("bind:0")?))?;
    /// assert_eq!(map.node_for(7), Some((NodeId(0), Mode::Bind)));
    /// assert_eq!(map.node_for(100), None);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn node_for(&self, page: u64) -> Option<(NodeId, Mode)> {
        let placement = self.placement(page)?;
        let node = placement.target(page, nodes::of_this_cpu());
        Some((NodeId(nodes::id(node)), placement.mode()))
    }

    /// Returns how the allocator follows a page's policy, or `None` if the page has no policy and
    /// the map no default.
    /// O(log n). Copies two words.
    #[inline(always)]
    pub(crate) fn placement(&self, page: u64) -> Option<Placement> {
        Placement::from_words(self.ranges.lookup(page, [WORDS, WORDS + 1])?)
    }

    /// Returns the number of ranges.
    pub fn len(&self) -> usize {
        self.ranges.len()
    }

    /// Returns whether no range has a policy.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Binds every policy again, the default too, after the allowed nodes have changed. All
    /// policies change at once. See [`Mempolicy::rebind`]. O(n).
    ///
    /// # Errors
    ///
    /// [`RangeError::Busy`]. After an error, nothing has changed.
    ///
    /// # Examples
    ///
    /// ```
    /// use pinfold::mempolicy::{Mempolicy, SharedPolicy};
    ///
    /// let shared = SharedPolicy::new();
    /// shared.set(0..10, Some(&Mempolicy::parse("interleave=relative:0-1")?))?;
    /// shared.rebind(&"4-7".parse()?)?;
    /// let nodes = shared.lookup(0).map(|policy| policy.nodes().to_string());
    /// assert_eq!(nodes.as_deref(), Some("4-5"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[doc(alias = "mpol_rebind_policy")]
    pub fn rebind(&self, allowed: &NodeSet) -> Result<(), RangeError> {
        self.rebind_if(allowed, |_| true)
    }

    /// Binds every policy again. Changes nothing if `possible` returns false for a policy with new
    /// nodes.
    ///
    /// # Errors
    ///
    /// [`RangeError::UnknownNodes`] if a policy is not possible; [`RangeError::Busy`]. After an
    /// error, nothing has changed.
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

    /// Copies all ranges and their policies as they are at one moment, in ascending order. O(n)
    /// time and memory.
    ///
    /// # Errors
    ///
    /// [`RangeError::OutOfMemory`].
    ///
    /// # Examples
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

/// Prints a line `start-end policy` for each range; `end` is excluded. Prints the map's default, if
/// it has one, as a last line `otherwise policy`.
///
/// All ranges are from one moment. But if there is no memory for a copy of the map, each line
/// shows a moment of its own.
impl fmt::Display for SharedPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Ok(mut ranges) = self.ranges() {
            ranges.try_for_each(|(pages, policy)| line(f, &pages, &policy))?;
        } else {
            let mut from = 0;
            while let Some(record) = self.ranges.next_from(from) {
                let policy = policy_in(&record.words);
                line(f, &(record.start..record.end), &policy)?;
                from = record.end;
            }
        }
        match self.default_policy() {
            Some(policy) => writeln!(f, "otherwise {policy}"),
            None => Ok(()),
        }
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

/// The ranges of a [`SharedPolicy`] at one moment. [`SharedPolicy::ranges`] returns them.
///
/// ```
/// use pinfold::mempolicy::{Mempolicy, SharedPolicy};
///
/// let shared = SharedPolicy::new();
/// shared.set(3..5, Some(&Mempolicy::local()))?;
/// let mut before = shared.ranges()?;
/// shared.set(0..9, None)?;
/// assert_eq!(before.next(), Some((3..5, Mempolicy::local())));
/// # Ok::<(), pinfold::mempolicy::RangeError>(())
/// ```
pub struct SharedRanges {
    /// A map of its own, which no thread changes.
    records: Ranges<RECORD>,
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
    fn a_range_has_the_placement_of_its_policy() {
        let shared = SharedPolicy::new();
        let policy = Mempolicy::parse("interleave:0").unwrap();
        shared.set(7..9, Some(&policy)).unwrap();
        assert_eq!(shared.placement(8), Placement::of(&policy));
        assert_eq!(shared.placement(9), None);
        assert_eq!(shared.to_string(), "7-9 interleave:0\n");
    }
}
