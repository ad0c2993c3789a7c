//! A map from ranges of pages to a fixed number of words. Shared policies are such maps.
//!
//! # Vocabulary
//!
//! * A **record** is a range `[start, end)` of pages and its words. Records are sorted, are not
//!   empty and do not overlap. Two records that touch have different words.
//! * A **buffer** holds an array of records (`buffer`).
//! * A **latch** has two buffers (`latch`, which has the proof). Readers see the *active* buffer.
//!   The other buffer is the *spare*.
//!
//! # Who may do what
//!
//! A thread that sets a range holds [`WRITER`], one lock for all maps of the process. It copies the
//! active buffer's records into the spare buffer, with the change. Then it publishes the spare
//! buffer, which thereby becomes the active one.
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
//! A map takes no memory before the first set. If a buffer is too small, a buffer at least twice as
//! large replaces it. The old buffer stays mapped until the map is dropped, because a reader may
//! still read it. All old buffers together are at most as large as the one in use.

#[cfg(test)]
mod speed;
#[cfg(test)]
mod tests;

use super::buffer::{Buffer, Draft, Record, Snapshot, Table, load_all};
use super::latch::Latch;
use super::primitive::{AtomicPtr, AtomicU64};
use crate::fork::{self, Hooks, Rank};
use crate::lock::Lock;
use core::fmt;
use core::ptr::null_mut;
use core::sync::atomic::Ordering::Relaxed;

/// The lock that a thread holds while it changes a map.
static WRITER: Lock<()> = Lock::new(());

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
    latch: Latch<Buffer<WORDS>>,
}

impl<const WORDS: usize> Ranges<WORDS> {
    pub(crate) const fn new() -> Self {
        let buffers = [AtomicPtr::new(null_mut()), AtomicPtr::new(null_mut())];
        Ranges {
            latch: Latch::new(AtomicU64::new(0), buffers),
        }
    }

    /// Calls `take` with the words of the range that covers `page`. Returns its result, or `None`
    /// if no range covers the page.
    ///
    /// The words of the returned result are all from one moment. `take` may be called several
    /// times. If it found words that do not belong together, its result is dropped.
    ///
    /// O(log n). Takes no lock and writes nothing. Starts over if another thread published a change
    /// during the look-up.
    #[inline(always)]
    fn look<T>(&self, page: u64, take: impl Fn(&[AtomicU64; WORDS]) -> T) -> Option<T> {
        self.latch.read(|buffer| {
            // SAFETY: a published buffer stays mapped until the map is dropped, and `self` borrows
            // the map.
            let table = unsafe { Table::at(buffer) };
            let words = table.words(table.covering(page)?)?;
            Some(take(words))
        })
    }

    /// Returns the words numbered `wanted` of the range that covers `page`. A number past the last
    /// word gives 0.
    #[inline(always)]
    pub(crate) fn lookup<const N: usize>(&self, page: u64, wanted: [usize; N]) -> Option<[u64; N]> {
        self.look(page, |words| {
            wanted.map(|n| words.get(n).map_or(0, |word| word.load(Relaxed)))
        })
    }

    /// Returns all words of the range that covers `page`.
    pub(crate) fn lookup_all(&self, page: u64) -> Option<[u64; WORDS]> {
        self.look(page, load_all)
    }

    /// Returns the first range that has pages from `page` on.
    pub(crate) fn next_from(&self, page: u64) -> Option<Record<WORDS>> {
        self.latch.read(|buffer| {
            // SAFETY: a published buffer stays mapped until the map is dropped, and `self` borrows
            // the map.
            let table = unsafe { Table::at(buffer) };
            table.record(table.ending_up_to(page))
        })
    }

    /// Returns the number of ranges.
    pub(crate) fn len(&self) -> usize {
        // SAFETY: a published buffer stays mapped until the map is dropped, and `self` borrows the
        // map.
        self.latch.read(|buffer| unsafe { Table::at(buffer) }.len())
    }

    /// Gives the pages from `start` to before `end` these words. `None` removes their words. Ranges
    /// that overlap are trimmed, split or removed.
    ///
    /// O(n), because it copies all records. After an error, nothing has changed.
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
        let new = words.map(|&words| Record { start, end, words });
        // Records `first..last` overlap the range.
        let first = old.ending_up_to(start);
        let last = old.starting_up_to(end - 1);
        let left = old.record(first).filter(|record| record.start < start);
        let right = last.checked_sub(1).and_then(|at| old.record(at));
        let right = right.filter(|record| record.end > end);
        let kept = first + (old.len() - last);
        let pieces = [&left, &new, &right].map(|piece| usize::from(piece.is_some()));
        if new.is_none() && first == last {
            return Ok(());
        }
        let mut draft = self.draft(kept + pieces.iter().sum::<usize>())?;
        draft.copy(old, 0, first);
        let left = left.map(|record| Record {
            end: start,
            ..record
        });
        let right = right.map(|record| Record {
            start: end,
            ..record
        });
        for piece in [left, new, right].iter().flatten() {
            draft.push(piece);
        }
        draft.copy(old, last, old.len());
        draft.finish();
        self.latch.publish();
        Ok(())
    }

    /// Replaces the words of every range, all at once. O(n).
    ///
    /// After an error, which may be one of `change`, nothing has changed.
    pub(crate) fn update(
        &self,
        mut change: impl FnMut(&mut [u64; WORDS]) -> Result<(), RangeError>,
    ) -> Result<(), RangeError> {
        let _held = WRITER.lock().ok_or(RangeError::Busy)?;
        let old = self.active();
        if old.len() == 0 {
            return Ok(());
        }
        let mut draft = self.draft(old.len())?;
        for mut record in (0..old.len()).filter_map(|at| old.record(at)) {
            change(&mut record.words)?;
            draft.push(&record);
        }
        draft.finish();
        self.latch.publish();
        Ok(())
    }

    /// Copies all ranges as they are at one moment. O(n).
    ///
    /// Waits while another thread changes a map. Does not wait if the caller is a signal handler
    /// that interrupted such a change: the active buffer then stays the same until the handler
    /// returns.
    pub(crate) fn snapshot(&self) -> Result<Snapshot<WORDS>, RangeError> {
        let _held = WRITER.lock();
        Snapshot::of(self.active()).ok_or(RangeError::OutOfMemory)
    }

    /// Returns the active buffer. The caller holds the lock, or is a signal handler that
    /// interrupted the lock's holder.
    fn active(&self) -> Table<'_, WORDS> {
        // SAFETY: a published buffer stays mapped until the map is dropped, and `self` borrows the
        // map.
        unsafe { Table::at(self.latch.active()) }
    }

    /// Returns the spare buffer, empty and with room for `records`. The caller holds the lock.
    fn draft(&self, records: usize) -> Result<Draft<'_, WORDS>, RangeError> {
        let spare = self.latch.spare();
        // SAFETY: the spare buffer is null or stays mapped until the map is dropped, and `self`
        // borrows the map.
        if unsafe { Table::at(spare) }.capacity() < records {
            let larger = Buffer::map(records, spare).ok_or(RangeError::OutOfMemory)?;
            self.latch.replace_spare(larger.as_ptr());
        }
        // SAFETY: the spare buffer is null (if `records` is 0) or stays mapped until the map is
        // dropped, and `self` borrows the map.
        Ok(Draft::new(unsafe { Table::at(self.latch.open_spare()) }))
    }
}

impl<const WORDS: usize> Drop for Ranges<WORDS> {
    fn drop(&mut self) {
        for buffer in [self.latch.active(), self.latch.spare()] {
            // SAFETY: `drop` has the only reference to the map, so no reader reads a buffer. Both
            // buffers were made by `Buffer::map`, and no buffer is in both chains.
            unsafe { Buffer::unmap_all(buffer) };
        }
    }
}

/// Returns whether the thread with thread pointer `thread` is changing a map.
pub(crate) fn is_lock_held(thread: u64) -> bool {
    WRITER.is_held_by(thread)
}

/// Makes a fork wait until no thread changes a map.
fn register_fork() {
    static HOOKS: [Hooks; 1] = [Hooks::locks(Rank::Policies, |visit| visit(WRITER.word()))];
    fork::register(&HOOKS);
}
