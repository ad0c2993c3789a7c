//! A map from ranges of pages to a fixed number of words. Shared policies are such maps.
//!
//! # Vocabulary
//!
//! * A **record** is a range `[start, end)` of pages and its words. Records are sorted, are not
//!   empty and do not overlap. Two records that touch have different words.
//! * The **default** is the words of all pages that no record covers, if there are any.
//! * A **tree** holds the records (`tree`). A change makes a new tree, which shares with the old
//!   one all nodes that the change does not concern (`edit`).
//! * A **latch** has two roots (`latch`, which has the proof). Readers see the *active* root, and
//!   the tree below it. The other root is the *spare*.
//!
//! # Who may do what
//!
//! A thread that sets a range holds [`WRITER`], one lock for all maps of the process. It makes a
//! new tree beside the active one, stores its top in the spare root, and publishes that root, so
//! that it becomes the active one. Then the nodes that only the old tree has become free, and the
//! next change may write them. To the latch, those nodes are a part of the spare root: the writer
//! writes both only between `open_spare` and `publish`, and never what the active root reaches.
//!
//! A lookup takes no lock and writes nothing. It returns copies of words, so that another thread
//! may change or remove the record afterwards.
//!
//! `WRITER` is the innermost lock: its holder only calls `mmap`. It is one lock for all maps, for
//! two reasons:
//!
//! 1. A signal handler that sets a range may have interrupted a change of another map. If each map
//!    had a lock, two such handlers could wait for each other: each for a lock that the other
//!    handler's thread holds. With one lock, the handler finds that its own thread holds the lock,
//!    and is refused.
//! 2. A fork has to take only one lock.
//!
//! # Memory
//!
//! A map takes no memory before the first set. From then on, what it has mapped stays mapped until
//! the map is dropped, because a reader may still read it (`chunks`).

#[cfg(test)]
mod speed;
#[cfg(test)]
mod tests;

use super::edit::{Changed, Pools};
use super::latch::Latch;
use super::primitive::{AtomicPtr, AtomicU64};
use super::snapshot::Snapshot;
use super::tree::{Record, Root, Tree, Words, load_all};
use crate::fork;
use crate::lock::{Hooks, Lock, Rank};
use core::cell::UnsafeCell;
use core::fmt;
use core::ptr::null_mut;
use core::sync::atomic::Ordering::Relaxed;

/// The lock that a thread holds while it changes a map.
static WRITER: Lock<()> = Lock::new(Rank::Policies, ());

/// Why a range of a shared policy cannot be set.
///
/// # Examples
///
/// ```
/// use pinfold::mempolicy::{RangeError, SharedPolicy};
///
/// let refused = SharedPolicy::new().set(5..5, None);
/// assert_eq!(refused, Err(RangeError::Empty));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RangeError {
    /// The range has no pages: its start is not below its end.
    Empty,
    /// The caller is a signal handler that interrupted a change of a shared policy in the same
    /// thread. Try again after the handler has returned.
    Busy,
    /// There is no memory for another range.
    OutOfMemory,
    /// None of the policy's nodes has memory that this process may use.
    NoNodes,
    /// None of the nodes from which a range's policy takes memory was usable when this process
    /// started. The allocator knows only nodes that were usable then.
    UnknownNodes,
}

impl fmt::Display for RangeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RangeError::Empty => "the range has no pages: its start must be below its end",
            RangeError::Busy => {
                "this signal handler has interrupted a change of a shared policy: set it after the handler"
            }
            RangeError::NoNodes => {
                "none of the policy's nodes may be used here; see Mems_allowed_list in /proc/self/status"
            }
            RangeError::UnknownNodes => {
                "this process could use none of the policy's new nodes when it started; \
                 start it again to use them"
            }
            RangeError::OutOfMemory => "no memory for another range of a shared policy",
        })
    }
}

impl core::error::Error for RangeError {}

/// A map from ranges of pages to words.
pub(crate) struct Ranges<const WORDS: usize> {
    latch: Latch<Root<WORDS>>,
    /// Used by the holder of [`WRITER`] only.
    pools: UnsafeCell<Pools<WORDS>>,
}

// SAFETY: only the holder of `WRITER` uses the pools. Everything else in them and in the latch is
// atomic.
unsafe impl<const WORDS: usize> Sync for Ranges<WORDS> {}
// SAFETY: the pools own their mappings, which any thread may use and unmap.
unsafe impl<const WORDS: usize> Send for Ranges<WORDS> {}

impl<const WORDS: usize> Ranges<WORDS> {
    pub(crate) const fn new() -> Self {
        let roots = [AtomicPtr::new(null_mut()), AtomicPtr::new(null_mut())];
        Ranges {
            latch: Latch::new(AtomicU64::new(0), roots),
            pools: UnsafeCell::new(Pools::new()),
        }
    }

    /// Calls `look` with the tree at one moment, and returns its result.
    ///
    /// `look` may be called several times. If it found words that do not belong together, its
    /// result is dropped.
    ///
    /// Takes no lock and writes nothing. Starts over if another thread published a change
    /// meanwhile.
    #[inline(always)]
    fn read<T>(&self, look: impl Fn(Tree<'_, WORDS>) -> T) -> T {
        self.latch.read(|root| {
            // SAFETY: the memory of a map stays mapped until the map is dropped, and `self` borrows
            // the map.
            look(unsafe { Tree::at(root) })
        })
    }

    /// Returns the words numbered `wanted` of the range that covers `page`, or else of the default.
    /// A number past the last word gives 0. O(log n).
    #[inline(always)]
    pub(crate) fn lookup<const N: usize>(&self, page: u64, wanted: [usize; N]) -> Option<[u64; N]> {
        self.read(|tree| {
            let words = tree.holding(page)?;
            Some(wanted.map(|n| words.get(n).map_or(0, |word| word.load(Relaxed))))
        })
    }

    /// Returns all words of the range that covers `page`, or else of the default. O(log n).
    pub(crate) fn lookup_all(&self, page: u64) -> Option<[u64; WORDS]> {
        self.read(|tree| tree.holding(page).map(load_all))
    }

    /// Returns the words of pages that no range covers.
    pub(crate) fn default(&self) -> Option<[u64; WORDS]> {
        self.read(|tree| tree.otherwise().map(load_all))
    }

    /// Returns the first range that has pages from `page` on. O(log n).
    pub(crate) fn next_from(&self, page: u64) -> Option<Record<WORDS>> {
        self.read(|tree| tree.next_from(page))
    }

    /// Returns the number of ranges.
    pub(crate) fn len(&self) -> usize {
        self.read(|tree| tree.len())
    }

    /// Gives the pages from `start` to before `end` these words. `None` removes their words. Ranges
    /// that overlap are trimmed, split or removed.
    ///
    /// O(log n), and O(1) for each range that is removed. After an error, nothing has changed.
    pub(crate) fn set(
        &self,
        start: u64,
        end: u64,
        words: Option<&[u64; WORDS]>,
    ) -> Result<(), RangeError> {
        if start >= end {
            return Err(RangeError::Empty);
        }
        register_fork();
        let _held = WRITER.lock().ok_or(RangeError::Busy)?;
        let old = self.active();
        if words.is_none() && old.len() == 0 {
            return Ok(());
        }
        let pools = self.open()?;
        if let Some(changed) = pools.change(old.top(), start, end, words)? {
            self.publish(pools, changed, old.len(), old.default());
        }
        Ok(())
    }

    /// Gives the pages that no range covers these words. `None` removes their words. O(1). After an
    /// error, nothing has changed.
    pub(crate) fn set_default(&self, words: Option<&[u64; WORDS]>) -> Result<(), RangeError> {
        register_fork();
        let _held = WRITER.lock().ok_or(RangeError::Busy)?;
        let old = self.active();
        if words.is_none() && old.default().is_null() {
            return Ok(());
        }
        let pools = self.open()?;
        let default = match words {
            Some(words) => pools.copy(words)?,
            None => null_mut(),
        };
        pools.drop_words(old.default());
        let same = Changed {
            top: old.top(),
            added: 0,
            dropped: 0,
        };
        self.publish(pools, same, old.len(), default);
        Ok(())
    }

    /// Replaces the words of every range and of the default, all at once. O(n log n).
    ///
    /// Until it is done, the map takes memory for all ranges twice. After an error, which may be
    /// one of `change`, nothing has changed.
    pub(crate) fn update(
        &self,
        mut change: impl FnMut(&mut [u64; WORDS]) -> Result<(), RangeError>,
    ) -> Result<(), RangeError> {
        let _held = WRITER.lock().ok_or(RangeError::Busy)?;
        let old = self.active();
        if old.len() == 0 && old.default().is_null() {
            return Ok(());
        }
        let pools = self.open()?;
        let mut default = null_mut();
        if let Some(mut words) = old.otherwise().map(load_all) {
            change(&mut words)?;
            default = pools.copy(&words)?;
        }
        let mut next = Changed {
            top: null_mut(),
            added: 0,
            dropped: 0,
        };
        let mut from = 0;
        while let Some(mut record) = old.next_from(from) {
            from = record.end;
            let changed = change(&mut record.words).and_then(|()| {
                let words = Some(&record.words);
                pools.change(next.top, record.start, record.end, words)
            });
            match changed {
                Ok(Some(changed)) => {
                    next.top = changed.top;
                    next.added += changed.added;
                    next.dropped += changed.dropped;
                }
                Ok(None) => {}
                Err(error) => {
                    pools.drop_words(default);
                    pools.drop_tree(next.top);
                    pools.recycle();
                    return Err(error);
                }
            }
            // Nothing of the unpublished tree's earlier forms was published.
            pools.recycle();
        }
        pools.drop_words(old.default());
        pools.drop_tree(old.top());
        self.publish(pools, next, 0, default);
        Ok(())
    }

    /// Copies all ranges as they are at one moment. O(n log n).
    ///
    /// Waits while another thread changes a map. Does not wait if the caller is a signal handler
    /// that interrupted such a change: the active tree then stays the same until the handler
    /// returns. Fails in a handler that may not wait for another thread's change.
    pub(crate) fn snapshot(&self) -> Result<Snapshot<WORDS>, RangeError> {
        let held = WRITER.lock();
        // Without the lock, only the interrupted holder's thread knows that the map stays the same.
        if held.is_none() && !WRITER.is_held() {
            return Err(RangeError::Busy);
        }
        Snapshot::of(self.active()).ok_or(RangeError::OutOfMemory)
    }

    /// Returns the active tree. The caller holds the lock, or is a signal handler that interrupted
    /// the lock's holder.
    fn active(&self) -> Tree<'_, WORDS> {
        // SAFETY: the memory of a map stays mapped until the map is dropped, and `self` borrows the
        // map.
        unsafe { Tree::at(self.latch.active()) }
    }

    /// Begins a change: makes the spare root, if there is none. The caller holds the lock, has
    /// called this once since it took the lock, and drops the pools before it gives the lock back.
    #[expect(
        clippy::mut_from_ref,
        reason = "the lock makes the reference the only one"
    )]
    fn open(&self) -> Result<&mut Pools<WORDS>, RangeError> {
        // SAFETY: the caller holds the lock, and this is its only reference. A signal handler that
        // interrupts it is refused the lock.
        let pools = unsafe { &mut *self.pools.get() };
        if self.latch.spare().is_null() {
            self.latch.replace_spare(pools.root()?);
        }
        // From here on, the writer may write all that the active root does not reach.
        self.latch.open_spare();
        Ok(pools)
    }

    /// Makes a changed tree the active one. `before` is the number of ranges that it was made from.
    /// The caller holds the lock, and has called [`open`](Self::open).
    fn publish(
        &self,
        pools: &mut Pools<WORDS>,
        changed: Changed,
        before: usize,
        default: *mut Words<WORDS>,
    ) {
        // SAFETY: `open` has made the spare root, which stays mapped until the map is dropped.
        if let Some(spare) = unsafe { self.latch.spare().as_ref() } {
            let len = before + changed.added - changed.dropped;
            spare.set(changed.top, len, default);
        }
        self.latch.publish();
        pools.recycle();
    }
}

/// Makes a fork wait until no thread changes a map.
fn register_fork() {
    static HOOKS: [Hooks; 1] = [Hooks::locks(Rank::Policies, |visit| visit(WRITER.word()))];
    fork::register(&HOOKS);
}
