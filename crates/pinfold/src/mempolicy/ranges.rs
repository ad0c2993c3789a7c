//! A map from ranges of pages to a fixed number of words. Shared policies are such maps.
//!
//! # Vocabulary
//!
//! * A **record** is a range `[start, end)` of pages and its words. Records are sorted, are not
//!   empty and do not overlap. Two records that touch have different words.
//! * The **default** is the words of all pages that no record covers, if there are any.
//! * A **table** has two sorted arrays of records (`table`).
//! * A **latch** says which of the arrays is *active* (`latch`, which has the proof). Readers see
//!   the active array. The other array is the *spare*.
//!
//! # Who may do what
//!
//! A thread that sets a range holds [`WRITER`], one lock for all maps of the process. It copies the
//! active array with the change into the spare array, and publishes that, so that it becomes the
//! active one. Then the slots that only the old array has become free, and the next change may
//! write them. To the latch, those slots are a part of the spare array: the writer writes both only
//! between `open_spare` and `publish`, and never what the active array has.
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
//! A map takes no memory before the first set. When the arrays are full, the map takes a table with
//! room for twice as many records. The old table stays mapped until the map is dropped, because a
//! reader may still read it. All old tables together are no larger than the newest one.
//!
//! A set that adds a record makes sure that room for two more is left, which a removal may need to
//! split records. So records can still be removed when there is no memory.

#[cfg(test)]
mod tests;

use super::latch::Latch;
use super::primitive::{AtomicPtr, AtomicU64};
use super::table::{Array, Entry, Filling, Record, Table, View, Words, are_equal, load_all};
use crate::lock::{Hooks, Lock, Rank};
use crate::{fork, sys};
use core::iter::once;
use core::ptr::null_mut;
use core::sync::atomic::Ordering::Relaxed;

/// The lock that a thread holds while it changes a map.
static WRITER: Lock<()> = Lock::new(Rank::Policies, ());

/// Why a range of a shared policy cannot be set.
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

pinfold_rseq::error_texts! { RangeError:
    RangeError::Empty => "the range has no pages: its start must be below its end";
    RangeError::Busy =>
        "this signal handler has interrupted a change of a shared policy: set it after the handler";
    RangeError::NoNodes =>
        "none of the policy's nodes may be used here; see Mems_allowed_list in /proc/self/status";
    RangeError::UnknownNodes => "this process could use none of the policy's new nodes when it \
        started; start it again to use them";
    RangeError::OutOfMemory => "no memory for another range of a shared policy";
}

/// A map from ranges of pages to words.
pub(crate) struct Ranges<const WORDS: usize> {
    latch: Latch<Array<WORDS>>,
    /// The table of both arrays, or null. Only the holder of [`WRITER`] uses it.
    table: AtomicPtr<Table<WORDS>>,
}

impl<const WORDS: usize> Ranges<WORDS> {
    pub(crate) const fn new() -> Self {
        let arrays = [AtomicPtr::new(null_mut()), AtomicPtr::new(null_mut())];
        Ranges {
            latch: Latch::new(AtomicU64::new(0), arrays),
            table: AtomicPtr::new(null_mut()),
        }
    }

    /// Calls `look` with the array at one moment, and returns its result. Returns `None` for a map
    /// without memory.
    ///
    /// `look` may be called several times. If it found words that do not belong together, its
    /// result is dropped.
    ///
    /// Takes no lock and writes nothing. Starts over if another thread published a change
    /// meanwhile.
    #[inline(always)]
    fn read<T>(&self, look: impl Fn(View<'_, WORDS>) -> Option<T>) -> Option<T> {
        // Without the attribute, the compiler makes the closure a function of its own.
        self.latch.read(
            #[inline(always)]
            |array| {
                // SAFETY: the latch has null and arrays of this map's tables. They stay mapped
                // until the map is dropped, and `self` borrows the map.
                unsafe { View::at(array) }.and_then(&look)
            },
        )
    }

    /// Returns the words numbered `wanted` of the range that covers `page`, or else of the default.
    /// A number past the last word gives 0. O(log n).
    #[inline(always)]
    pub(crate) fn lookup<const N: usize>(&self, page: u64, wanted: [usize; N]) -> Option<[u64; N]> {
        self.read(
            #[inline(always)]
            |array| {
                let words = array.holding(page)?;
                Some(wanted.map(|n| words.get(n).map_or(0, |word| word.load(Relaxed))))
            },
        )
    }

    /// Returns all words of the range that covers `page`, or else of the default. O(log n).
    pub(crate) fn lookup_all(&self, page: u64) -> Option<[u64; WORDS]> {
        self.read(|array| array.holding(page).map(load_all))
    }

    /// Returns the words of pages that no range covers.
    pub(crate) fn default(&self) -> Option<[u64; WORDS]> {
        self.read(|array| array.otherwise().map(load_all))
    }

    /// Returns the first range that has pages from `page` on. O(log n).
    pub(crate) fn next_from(&self, page: u64) -> Option<Record<WORDS>> {
        self.read(|array| Some(array.next_from(page)?.copied()))
    }

    /// Returns range `at`, in ascending order of pages, or `None` past the last range.
    pub(crate) fn record(&self, at: usize) -> Option<Record<WORDS>> {
        self.read(|array| Some(array.entry(at)?.copied()))
    }

    /// Returns the number of ranges.
    pub(crate) fn len(&self) -> usize {
        self.read(|array| Some(array.len())).unwrap_or(0)
    }

    /// Gives the pages from `start` to before `end` these words. `None` removes their words. Ranges
    /// that overlap are trimmed, split or removed. Ranges that touch and have equal words are
    /// joined.
    ///
    /// O(n). After an error, nothing has changed.
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
        if words.is_none() && self.len() == 0 {
            return Ok(());
        }
        // A set adds at most two ranges: a new one, and the second half of the range that it
        // splits. A removal adds at most one.
        let (old, mut new) = self.open(if words.is_some() { 4 } else { 1 })?;
        let last_of = |count: usize| old.entry(count.checked_sub(1)?);
        let equal =
            |entry: Entry<'_, WORDS>| words.is_some_and(|words| are_equal(entry.words, words));
        // The ranges before `kept_before` and from `kept_from` on stay as they are.
        let mut kept_before = old.count(|other| other < start);
        let mut kept_from = old.count(|other| other <= end);
        let mut new_range = (start, end);
        let (mut left, mut right) = (last_of(kept_before), last_of(kept_from));
        left = left.filter(|left| left.end > start || left.end == start && equal(*left));
        right = right.filter(|right| right.end > end);
        if let Some(entry) = left {
            kept_before -= 1;
            if equal(entry) {
                new_range.0 = entry.start;
                left = None;
            }
        }
        if let Some(entry) = right {
            if equal(entry) {
                new_range.1 = entry.end;
                right = None;
            } else if entry.start == end {
                kept_from -= 1;
                right = None;
            }
        }
        if words.is_none() && kept_before == kept_from {
            return Ok(());
        }
        new.copy(old, 0..kept_before);
        if let Some(left) = left {
            new.push(left.start, start, &load_all(left.words));
        }
        if let Some(words) = words {
            new.push(new_range.0, new_range.1, words);
        }
        if let Some(right) = right {
            new.push(end, right.end, &load_all(right.words));
        }
        new.copy(old, kept_from..old.len());
        self.publish(new, old.default(), old.slots_of(kept_before..kept_from));
        Ok(())
    }

    /// Gives the pages that no range covers these words. `None` removes their words. O(n). After an
    /// error, nothing has changed.
    pub(crate) fn set_default(&self, words: Option<&[u64; WORDS]>) -> Result<(), RangeError> {
        register_fork();
        let _held = WRITER.lock().ok_or(RangeError::Busy)?;
        if words.is_none() && self.default().is_none() {
            return Ok(());
        }
        let (old, mut new) = self.open(0)?;
        new.copy(old, 0..old.len());
        let default = words.map_or(null_mut(), |words| new.fill(words));
        self.publish(new, default, once(old.default()));
        Ok(())
    }

    /// Replaces the words of every range and of the default, all at once. O(n).
    ///
    /// Takes no memory. After an error, which may be one of `change`, nothing has changed.
    pub(crate) fn update(
        &self,
        mut change: impl FnMut(&mut [u64; WORDS]) -> Result<(), RangeError>,
    ) -> Result<(), RangeError> {
        let _held = WRITER.lock().ok_or(RangeError::Busy)?;
        if self.len() == 0 && self.default().is_none() {
            return Ok(());
        }
        let (old, mut new) = self.open(0)?;
        let mut default = null_mut();
        if let Some(mut words) = self.default() {
            change(&mut words)?;
            default = new.fill(&words);
        }
        for mut record in old.records() {
            change(&mut record.words)?;
            new.push_or_join(&record);
        }
        let slots = old.slots_of(0..old.len());
        self.publish(new, default, slots.chain(once(old.default())));
        Ok(())
    }

    /// Copies all ranges as they are at one moment. O(n).
    ///
    /// Waits while another thread changes a map. Does not wait if the caller is a signal handler
    /// that interrupted such a change: the active array then stays the same until the handler
    /// returns. Fails in a handler that may not wait for another thread's change.
    pub(crate) fn snapshot(&self) -> Result<Self, RangeError> {
        let held = WRITER.lock();
        // Without the lock, only the interrupted holder's thread knows that the map stays the same.
        if held.is_none() && !WRITER.is_held() {
            return Err(RangeError::Busy);
        }
        let copy = Ranges::new();
        if let Some(active) = self.active() {
            copy.take_table(Some(active), active.len())?;
        }
        Ok(copy)
    }

    /// Returns the active array. The caller holds the lock, or is a signal handler that interrupted
    /// the lock's holder.
    fn active(&self) -> Option<View<'_, WORDS>> {
        // SAFETY: the latch has null and arrays of this map's tables, which stay mapped until the
        // map is dropped, and `self` borrows the map.
        unsafe { View::at(self.latch.active()) }
    }

    /// Begins a change that adds at most `more` ranges. Returns the active array, and the spare one
    /// to fill. The caller holds the lock.
    fn open(&self, more: usize) -> Result<(View<'_, WORDS>, Filling<'_, WORDS>), RangeError> {
        let active = self.active();
        let needed = active.map_or(0, View::len) + more;
        if active.is_none_or(|active| active.room() < needed) {
            self.take_table(active, needed)?;
        }
        // From here on, the writer may write all that the active array does not have.
        let spare = self.latch.open_spare();
        // SAFETY: `take_table` has stored the address of a table, and of its arrays. They stay
        // mapped until the map is dropped, and `self` borrows the map.
        let (table, spare) = unsafe { (self.table.load(Relaxed).as_ref(), View::at(spare)) };
        match (self.active(), table, spare) {
            (Some(old), Some(table), Some(spare)) => Ok((old, Filling::new(table, spare))),
            _ => Err(RangeError::OutOfMemory),
        }
    }

    /// Takes a table with room for `room` ranges, and gives it the ranges of `from`, which are
    /// those of this map, or of another one if this map is empty. The caller holds the lock, or no
    /// other thread uses the map.
    fn take_table(&self, from: Option<View<'_, WORDS>>, room: usize) -> Result<(), RangeError> {
        let table = Table::map(room, self.table.load(Relaxed)).ok_or(RangeError::OutOfMemory)?;
        self.table.store(table.as_ptr(), Relaxed);
        // SAFETY: `map` has just made the table, which stays mapped until the map is dropped.
        let table = unsafe { table.as_ref() };
        let [first, second] = table.arrays();
        // SAFETY: the table's array stays mapped as long as the table.
        if let Some(array) = unsafe { View::at(first) } {
            let mut new = Filling::new(table, array);
            let records = from.into_iter().flat_map(View::records);
            records.for_each(|record| new.push(record.start, record.end, &record.words));
            let default = from.and_then(View::otherwise).map(load_all);
            let default = default.map_or(null_mut(), |words| new.fill(&words));
            new.finish(default);
        }
        // Readers find the same ranges in the new table. Both arrays of the old one stay readable.
        self.latch.replace_spare(first);
        self.latch.publish();
        self.latch.replace_spare(second);
        Ok(())
    }

    /// Makes a filled array the active one, and frees the slots that only the old one has. The
    /// caller holds the lock.
    fn publish(
        &self,
        new: Filling<'_, WORDS>,
        default: *mut Words<WORDS>,
        dropped: impl Iterator<Item = *mut Words<WORDS>>,
    ) {
        let table = new.finish(default);
        self.latch.publish();
        dropped.for_each(|slot| table.retire(slot));
    }
}

impl<const WORDS: usize> Drop for Ranges<WORDS> {
    fn drop(&mut self) {
        // SAFETY: the map's tables are mapped, and no other thread uses the map. Each table is
        // unmapped as it was mapped.
        unsafe { Table::for_each(self.table.load(Relaxed), |at, bytes| sys::unmap(at, bytes)) };
    }
}

/// Makes a fork wait until no thread changes a map.
fn register_fork() {
    static HOOKS: [Hooks; 1] = [Hooks::locks(Rank::Policies, |visit| visit(WRITER.word()))];
    fork::register(&HOOKS);
}
