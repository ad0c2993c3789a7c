//! Ranges of pages to a fixed number of words each: what a shared policy is made of.
//!
//! # Vocabulary
//!
//! * A **record** is a range `[start, end)` of pages and its words. Records are sorted, do not overlap, and are not empty; two that touch
//!   have different words.
//! * A **buffer** holds an array of them (`buffer`). A **latch** has two buffers, of which readers see one (`latch`, where
//!   the proof is).
//!
//! # Who may do what
//!
//! Whoever sets holds [`WRITER`], one lock for all maps of the process: it copies the active buffer's records into the spare one, with
//! the change, and publishes that. Lookups take nothing and write nothing. Copies leave, never references: what a lookup returns
//! is its caller's, and what was set may change or go away.
//!
//! `WRITER` is the innermost lock: under it there is nothing but `mmap`. One lock for all, because then a handler that sets while it
//! interrupted a set of another map is refused too, instead of waiting in a circle, and because a fork has to take only this one.
//!
//! # Memory
//!
//! None before the first set. A buffer that has become too small is replaced by one at least twice as large and stays mapped until the map is
//! dropped, as a reader may be in it: so the old ones together take no more than the one in use.

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

/// Who holds it may change maps.
static WRITER: Lock<()> = Lock::new(());

/// Why a range cannot be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RangeError {
    /// The range has no pages: its start is not below its end.
    Empty,
    /// The caller is a signal handler that interrupted a change of a map in this thread: try again once it has returned.
    Busy,
    /// There is no memory for one range more.
    OutOfMemory,
    /// None of the nodes that the policy names has memory that this process may use.
    NoNodes,
    /// None of the nodes that a range's policy would come to could be used when this process
    /// started, and the allocator only knows those that could.
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

/// A map from ranges to words; see the module.
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

    /// What `take` makes of the words of the range that covers `page`, all from one moment; `None` when no range does. `take` may be called
    /// several times, and with words that do not belong together: what it makes of those is dropped.
    ///
    /// O(log n), without a lock and without a write to shared memory; looks again when a set was published meanwhile.
    #[inline(always)]
    fn look<T>(&self, page: u64, take: impl Fn(&[AtomicU64; WORDS]) -> T) -> Option<T> {
        self.latch.read(|buffer| {
            // SAFETY: buffers live as long as the map, which is borrowed.
            let table = unsafe { Table::at(buffer) };
            let words = table.words(table.covering(page)?)?;
            Some(take(words))
        })
    }

    /// The words with these numbers of the range that covers `page`; 0 for one that there is not.
    #[inline(always)]
    pub(crate) fn lookup<const N: usize>(&self, page: u64, wanted: [usize; N]) -> Option<[u64; N]> {
        self.look(page, |words| {
            wanted.map(|n| words.get(n).map_or(0, |word| word.load(Relaxed)))
        })
    }

    /// All words of the range that covers `page`.
    pub(crate) fn lookup_all(&self, page: u64) -> Option<[u64; WORDS]> {
        self.look(page, load_all)
    }

    /// The first range that has pages from `page` on.
    pub(crate) fn next_from(&self, page: u64) -> Option<Record<WORDS>> {
        self.latch.read(|buffer| {
            // SAFETY: as in `look`.
            let table = unsafe { Table::at(buffer) };
            table.record(table.ending_up_to(page))
        })
    }

    /// How many ranges there are.
    pub(crate) fn len(&self) -> usize {
        // SAFETY: as in `look`.
        self.latch.read(|buffer| unsafe { Table::at(buffer) }.len())
    }

    /// Gives the pages from `start` to before `end` these words, or none. What overlaps is trimmed, split or dropped.
    ///
    /// O(n): all records are copied. After an error nothing has changed.
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
        // What overlaps is from `first` on and before `last`.
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

    /// Replaces every range's words, all at once. O(n). After an error, which may be one of
    /// `change`, nothing has changed.
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

    /// All ranges as they were at one moment. O(n). Waits for a set that is under way, unless that is in the frame that the caller
    /// interrupted: then the active buffer stands still too.
    pub(crate) fn snapshot(&self) -> Result<Snapshot<WORDS>, RangeError> {
        let _held = WRITER.lock();
        Snapshot::of(self.active()).ok_or(RangeError::OutOfMemory)
    }

    /// What readers see. The caller holds the lock, or has interrupted its holder.
    fn active(&self) -> Table<'_, WORDS> {
        // SAFETY: as in `look`.
        unsafe { Table::at(self.latch.active()) }
    }

    /// The spare buffer, with room for `records`, to be filled. The caller holds the lock.
    fn draft(&self, records: usize) -> Result<Draft<'_, WORDS>, RangeError> {
        let spare = self.latch.spare();
        // SAFETY: as in `look`.
        if unsafe { Table::at(spare) }.capacity() < records {
            let larger = Buffer::map(records, spare).ok_or(RangeError::OutOfMemory)?;
            self.latch.replace_spare(larger.as_ptr());
        }
        // SAFETY: as above.
        Ok(Draft::new(unsafe { Table::at(self.latch.open_spare()) }))
    }
}

impl<const WORDS: usize> Drop for Ranges<WORDS> {
    fn drop(&mut self) {
        for buffer in [self.latch.active(), self.latch.spare()] {
            // SAFETY: of this map, which nobody borrows any more; no buffer is in both chains.
            unsafe { Buffer::unmap_all(buffer) };
        }
    }
}

/// Whether a thread is in the middle of changing a map.
pub(crate) fn is_lock_held(thread: u64) -> bool {
    WRITER.is_held_by(thread)
}

/// Has a fork wait until no map is being changed.
fn register_fork() {
    static HOOKS: Hooks = Hooks {
        rank: Rank::Policies,
        holds: is_lock_held,
        before: || WRITER.lock_for_fork(),
        child: || {},
        after: || WRITER.unlock_after_fork(),
    };
    fork::register(&HOOKS);
}
