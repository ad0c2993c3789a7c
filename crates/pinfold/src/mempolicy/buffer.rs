//! A sorted array of ranges in a mapping: a head, the ranges' ends, then the words of each.
//!
//! ```text
//! | head, 64 bytes | start end | start end | ... capacity of them | WORDS words | WORDS words | ... |
//! ```
//!
//! The ends stand together, four to a line, so that a search passes few lines. All but the head's first three fields is atomic: a
//! reader may look while a writer writes, and finds out afterwards.

use crate::sys;
use core::mem::size_of;
use core::ptr::{NonNull, null_mut};
use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicU64, AtomicUsize};

/// The beginning of a mapping. All but `used` is written once, before anybody else sees it.
#[repr(C, align(64))]
pub(super) struct Buffer<const WORDS: usize> {
    capacity: usize,
    /// Of the mapping.
    pub(super) bytes: usize,
    /// The smaller one that this one replaced; null if none.
    older: *mut Buffer<WORDS>,
    /// How many ranges there are; never more than `capacity`.
    used: AtomicUsize,
}

/// A range of pages, the last excluded.
#[repr(C)]
struct Span {
    start: AtomicU64,
    end: AtomicU64,
}

/// A range and its words, taken out.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Record<const WORDS: usize> {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) words: [u64; WORDS],
}

impl<const WORDS: usize> Buffer<WORDS> {
    /// Bytes that one range takes.
    const RECORD: usize = size_of::<Span>() + size_of::<[AtomicU64; WORDS]>();

    /// Maps a buffer for `ranges` ranges or more, at least twice as large as `older`, which it keeps a note of. `None` when there is
    /// no memory.
    pub(super) fn map(ranges: usize, older: *mut Self) -> Option<NonNull<Self>> {
        let page = sys::page_size();
        let needed = ranges
            .checked_mul(Self::RECORD)?
            .checked_add(size_of::<Self>())?;
        // SAFETY: null, or a buffer of ours, which lives.
        let twice = unsafe { older.as_ref() }.map_or(0, |older| older.bytes.saturating_mul(2));
        let bytes = needed.max(twice).checked_next_multiple_of(page)?;
        let at = sys::map_memory(bytes)?.cast::<Self>();
        let capacity = (bytes - size_of::<Self>()) / Self::RECORD;
        // SAFETY: the mapping is large enough, aligned to a page, and nobody else's yet.
        unsafe {
            at.write(Buffer {
                capacity,
                bytes,
                older,
                used: AtomicUsize::new(0),
            });
        }
        Some(at)
    }

    /// Gives back a buffer and all those that it replaced.
    ///
    /// # Safety
    ///
    /// `buffer` is null or was made by [`map`](Self::map), and nobody uses any of them any more.
    pub(super) unsafe fn unmap_all(mut buffer: *mut Self) {
        // SAFETY: the caller's promise.
        while let Some(head) = unsafe { buffer.as_ref() } {
            let (bytes, older) = (head.bytes, head.older);
            // SAFETY: as above; a whole mapping.
            unsafe { sys::unmap(buffer.cast(), bytes) };
            buffer = older;
        }
    }
}

/// What is in a buffer, or nothing where there is no buffer.
#[derive(Clone, Copy)]
pub(super) struct Table<'b, const WORDS: usize> {
    used: Option<&'b AtomicUsize>,
    spans: &'b [Span],
    words: &'b [[AtomicU64; WORDS]],
}

impl<'b, const WORDS: usize> Table<'b, WORDS> {
    /// # Safety
    ///
    /// `buffer` is null or was made by [`Buffer::map`], and stays mapped for `'b`.
    #[inline(always)]
    pub(super) unsafe fn at(buffer: *const Buffer<WORDS>) -> Self {
        // SAFETY: the caller's promise.
        let Some(head) = (unsafe { buffer.as_ref() }) else {
            return Table {
                used: None,
                spans: &[],
                words: &[],
            };
        };
        // SAFETY: the arrays lie behind the head, both with the capacity that the mapping was made for; zeroes are atomics.
        let (spans, words) = unsafe {
            let spans = buffer.add(1).cast::<Span>();
            let words = spans.add(head.capacity).cast::<[AtomicU64; WORDS]>();
            (
                core::slice::from_raw_parts(spans, head.capacity),
                core::slice::from_raw_parts(words, head.capacity),
            )
        };
        Table {
            used: Some(&head.used),
            spans,
            words,
        }
    }

    pub(super) fn capacity(self) -> usize {
        self.spans.len()
    }

    #[inline(always)]
    pub(super) fn len(self) -> usize {
        self.used.map_or(0, |used| used.load(Relaxed))
    }

    #[inline(always)]
    fn spans(self) -> &'b [Span] {
        self.spans.get(..self.len()).unwrap_or_default()
    }

    /// How many ranges start before `page`, or at it.
    #[inline(always)]
    pub(super) fn starting_up_to(self, page: u64) -> usize {
        self.spans()
            .partition_point(|span| span.start.load(Relaxed) <= page)
    }

    /// How many ranges end before `page`, or at it: that is the first which has pages from there on.
    pub(super) fn ending_up_to(self, page: u64) -> usize {
        self.spans()
            .partition_point(|span| span.end.load(Relaxed) <= page)
    }

    /// The range that covers `page`: where it is.
    #[inline(always)]
    pub(super) fn covering(self, page: u64) -> Option<usize> {
        let at = self.starting_up_to(page).checked_sub(1)?;
        let span = self.spans.get(at)?;
        (page < span.end.load(Relaxed)).then_some(at)
    }

    /// The words of range `at`.
    #[inline(always)]
    pub(super) fn words(self, at: usize) -> Option<&'b [AtomicU64; WORDS]> {
        self.words.get(at)
    }

    /// The range with number `at`, below [`len`](Self::len).
    pub(super) fn record(self, at: usize) -> Option<Record<WORDS>> {
        let (span, words) = (self.spans().get(at)?, self.words(at)?);
        Some(Record {
            start: span.start.load(Relaxed),
            end: span.end.load(Relaxed),
            words: load_all(words),
        })
    }
}

/// A copy of all words of a range.
#[inline(always)]
pub(super) fn load_all<const WORDS: usize>(words: &[AtomicU64; WORDS]) -> [u64; WORDS] {
    core::array::from_fn(|n| words.get(n).map_or(0, |word| word.load(Relaxed)))
}

/// A buffer that is being filled.
pub(super) struct Draft<'b, const WORDS: usize> {
    table: Table<'b, WORDS>,
    used: usize,
}

impl<'b, const WORDS: usize> Draft<'b, WORDS> {
    /// Begins anew in the buffer of `table`, which only the caller writes.
    pub(super) fn new(table: Table<'b, WORDS>) -> Self {
        Draft { table, used: 0 }
    }

    /// Adds a range behind all others; one that goes on where the last one ended, with the same words, makes that longer. There must
    /// be room.
    pub(super) fn push(&mut self, record: &Record<WORDS>) {
        // There is none before the first.
        let last = self.used.wrapping_sub(1);
        if let (Some(span), Some(words)) = (self.table.spans.get(last), self.table.words.get(last))
        {
            let mut both = words.iter().zip(&record.words);
            if span.end.load(Relaxed) == record.start
                && both.all(|(word, new)| word.load(Relaxed) == *new)
            {
                span.end.store(record.end, Relaxed);
                return;
            }
        }
        let (Some(span), Some(words)) = (
            self.table.spans.get(self.used),
            self.table.words.get(self.used),
        ) else {
            outgrown();
        };
        span.start.store(record.start, Relaxed);
        span.end.store(record.end, Relaxed);
        for (word, new) in words.iter().zip(record.words) {
            word.store(new, Relaxed);
        }
        self.used += 1;
    }

    /// Adds the ranges of another table from `from` on and before `to`. There must be room.
    pub(super) fn copy(&mut self, other: Table<'_, WORDS>, from: usize, to: usize) {
        if from >= to {
            return;
        }
        // Only the first can touch the one before it and be equal.
        if let Some(first) = other.record(from) {
            self.push(&first);
        }
        let count = to - from - 1;
        let spans = (
            self.table.spans.get(self.used..),
            other.spans.get(from + 1..to),
        );
        let words = (
            self.table.words.get(self.used..),
            other.words.get(from + 1..to),
        );
        let ((Some(to_spans), Some(spans)), (Some(to_words), Some(words))) = (spans, words) else {
            outgrown();
        };
        if count > to_spans.len() {
            outgrown();
        }
        for (to, span) in to_spans.iter().zip(spans) {
            to.start.store(span.start.load(Relaxed), Relaxed);
            to.end.store(span.end.load(Relaxed), Relaxed);
        }
        for (to, word) in to_words.as_flattened().iter().zip(words.as_flattened()) {
            to.store(word.load(Relaxed), Relaxed);
        }
        self.used += count;
    }

    /// Says how many there are.
    pub(super) fn finish(self) {
        if let Some(used) = self.table.used {
            used.store(self.used, Relaxed);
        }
    }
}

#[cold]
fn outgrown() -> ! {
    crate::abort(format_args!("a map of ranges outgrew its buffer"))
}

/// A buffer of its own with copies of ranges.
pub(crate) struct Snapshot<const WORDS: usize> {
    buffer: *mut Buffer<WORDS>,
}

// SAFETY: the mapping is the snapshot's own, and is not written once it is made.
unsafe impl<const WORDS: usize> Send for Snapshot<WORDS> {}
// SAFETY: as above.
unsafe impl<const WORDS: usize> Sync for Snapshot<WORDS> {}

impl<const WORDS: usize> Snapshot<WORDS> {
    /// Copies a table that nobody writes meanwhile; `None` when there is no memory.
    pub(super) fn of(table: Table<'_, WORDS>) -> Option<Self> {
        let mut snapshot = Snapshot { buffer: null_mut() };
        if table.len() > 0 {
            snapshot.buffer = Buffer::map(table.len(), null_mut())?.as_ptr();
            let mut draft = Draft::new(snapshot.table());
            draft.copy(table, 0, table.len());
            draft.finish();
        }
        Some(snapshot)
    }

    fn table(&self) -> Table<'_, WORDS> {
        // SAFETY: null, or a buffer that the snapshot owns.
        unsafe { Table::at(self.buffer) }
    }

    /// The range with number `at`, in order; `None` behind the last.
    pub(crate) fn record(&self, at: usize) -> Option<Record<WORDS>> {
        self.table().record(at)
    }
}

impl<const WORDS: usize> Drop for Snapshot<WORDS> {
    fn drop(&mut self) {
        // SAFETY: its own, and nobody borrows it any more.
        unsafe { Buffer::unmap_all(self.buffer) };
    }
}
