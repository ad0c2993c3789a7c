//! A sorted array of ranges in a mapping of its own.
//!
//! ```text
//! | head, 64 bytes | start end | start end | … | WORDS words | WORDS words | … |
//!                  | `capacity` pairs          | `capacity` times WORDS words  |
//! ```
//!
//! The bounds of all ranges stand together, four pairs to a cache line, so that a search touches
//! few cache lines.
//!
//! A reader may read a buffer while the writer writes it. So every word is atomic, except the
//! head's first three fields, which are written once, before any reader sees the buffer. The reader
//! finds out afterwards, from the latch (`latch`), whether the buffer changed during the read.

use crate::sys;
use core::mem::size_of;
use core::ptr::{NonNull, null_mut};
use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicU64, AtomicUsize};

/// The head of a buffer. All fields but `used` are written once, before another thread can see the
/// buffer.
#[repr(C, align(64))]
pub(super) struct Buffer<const WORDS: usize> {
    capacity: usize,
    /// Bytes in the mapping.
    pub(super) bytes: usize,
    /// The smaller buffer that this buffer replaced, or null.
    older: *mut Buffer<WORDS>,
    /// The number of ranges, at most `capacity`.
    used: AtomicUsize,
}

/// The bounds of a range of pages; `end` is excluded.
#[repr(C)]
struct Span {
    start: AtomicU64,
    end: AtomicU64,
}

/// A copy of a range and its words.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Record<const WORDS: usize> {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) words: [u64; WORDS],
}

impl<const WORDS: usize> Buffer<WORDS> {
    /// Bytes in the buffer for each range.
    const RECORD: usize = size_of::<Span>() + size_of::<[AtomicU64; WORDS]>();

    /// Maps a buffer for at least `ranges` ranges, and at least twice as large as `older`.
    ///
    /// The buffer takes `older` into its list of replaced buffers. `older` may be null. Returns
    /// `None` if there is no memory. One system call.
    pub(super) fn map(ranges: usize, older: *mut Self) -> Option<NonNull<Self>> {
        let page = sys::page_size();
        let needed = ranges
            .checked_mul(Self::RECORD)?
            .checked_add(size_of::<Self>())?;
        // SAFETY: `older` is null or a buffer of the same map. `Ranges::draft`, which passes it,
        // borrows the map, and buffers stay mapped until the map is dropped.
        let twice = unsafe { older.as_ref() }.map_or(0, |older| older.bytes.saturating_mul(2));
        let bytes = needed.max(twice).checked_next_multiple_of(page)?;
        let at = sys::map_memory(bytes)?.cast::<Self>();
        let capacity = (bytes - size_of::<Self>()) / Self::RECORD;
        // SAFETY: `bytes` includes the size of the head, a mapping is aligned to a page, and no
        // other thread has its address yet.
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

    /// Unmaps a buffer and all the buffers that it replaced.
    ///
    /// # Safety
    ///
    /// `buffer` is null or was made by [`map`](Self::map). No thread uses it, or a buffer that it
    /// replaced, any more.
    pub(super) unsafe fn unmap_all(mut buffer: *mut Self) {
        // SAFETY: `buffer` is null or was made by `map`, and is still mapped: each turn unmaps one
        // buffer only after it has copied `older`.
        while let Some(head) = unsafe { buffer.as_ref() } {
            let (bytes, older) = (head.bytes, head.older);
            // SAFETY: `map` mapped exactly these bytes, and the caller promises that no thread uses
            // them any more.
            unsafe { sys::unmap(buffer.cast(), bytes) };
            buffer = older;
        }
    }
}

/// The arrays of a buffer. Empty if there is no buffer.
#[derive(Clone, Copy)]
pub(super) struct Table<'b, const WORDS: usize> {
    used: Option<&'b AtomicUsize>,
    spans: &'b [Span],
    words: &'b [[AtomicU64; WORDS]],
}

impl<'b, const WORDS: usize> Table<'b, WORDS> {
    /// Returns the arrays of `buffer`.
    ///
    /// # Safety
    ///
    /// `buffer` is null or was made by [`Buffer::map`], and stays mapped for `'b`.
    #[inline(always)]
    pub(super) unsafe fn at(buffer: *const Buffer<WORDS>) -> Self {
        // SAFETY: the caller promises that `buffer` is null or a buffer that stays mapped for `'b`.
        // The fields that are not atomic are not written any more.
        let Some(head) = (unsafe { buffer.as_ref() }) else {
            return Table {
                used: None,
                spans: &[],
                words: &[],
            };
        };
        // SAFETY: `map` chose `capacity` so that both arrays fit into the mapping behind the head.
        // A fresh mapping holds zeroes, which are valid atomics, and all later writes are atomic.
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

    /// Returns how many ranges start at `page` or before it.
    #[inline(always)]
    pub(super) fn starting_up_to(self, page: u64) -> usize {
        self.spans()
            .partition_point(|span| span.start.load(Relaxed) <= page)
    }

    /// Returns how many ranges end at `page` or before it: the number of the first range that has
    /// pages from `page` on.
    pub(super) fn ending_up_to(self, page: u64) -> usize {
        self.spans()
            .partition_point(|span| span.end.load(Relaxed) <= page)
    }

    /// Returns the number of the range that covers `page`.
    #[inline(always)]
    pub(super) fn covering(self, page: u64) -> Option<usize> {
        let at = self.starting_up_to(page).checked_sub(1)?;
        let span = self.spans.get(at)?;
        (page < span.end.load(Relaxed)).then_some(at)
    }

    /// Returns the words of range `at`.
    #[inline(always)]
    pub(super) fn words(self, at: usize) -> Option<&'b [AtomicU64; WORDS]> {
        self.words.get(at)
    }

    /// Returns a copy of range `at`, or `None` if `at` is not below [`len`](Self::len).
    pub(super) fn record(self, at: usize) -> Option<Record<WORDS>> {
        let (span, words) = (self.spans().get(at)?, self.words(at)?);
        Some(Record {
            start: span.start.load(Relaxed),
            end: span.end.load(Relaxed),
            words: load_all(words),
        })
    }
}

/// Loads all words of a range.
#[inline(always)]
pub(super) fn load_all<const WORDS: usize>(words: &[AtomicU64; WORDS]) -> [u64; WORDS] {
    core::array::from_fn(|n| words.get(n).map_or(0, |word| word.load(Relaxed)))
}

/// A buffer that the writer is filling.
pub(super) struct Draft<'b, const WORDS: usize> {
    table: Table<'b, WORDS>,
    used: usize,
}

impl<'b, const WORDS: usize> Draft<'b, WORDS> {
    /// Starts over in the buffer of `table`. Only the caller writes this buffer.
    pub(super) fn new(table: Table<'b, WORDS>) -> Self {
        Draft { table, used: 0 }
    }

    /// Appends a range. If it begins where the last range ends and has the same words, extends the
    /// last range instead.
    ///
    /// The buffer must have room: without room the process aborts.
    pub(super) fn push(&mut self, record: &Record<WORDS>) {
        // At the first range this wraps to `usize::MAX`, which no array has.
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

    /// Appends the ranges of `other` from number `from` to before `to`.
    ///
    /// The buffer must have room: without room the process aborts.
    pub(super) fn copy(&mut self, other: Table<'_, WORDS>, from: usize, to: usize) {
        if from >= to {
            return;
        }
        // Within `other`, ranges that touch have different words. So only the first one can be
        // joined to the draft's last range.
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

    /// Stores the number of ranges in the buffer.
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

/// A copy of all ranges, in a buffer of its own.
pub(crate) struct Snapshot<const WORDS: usize> {
    buffer: *mut Buffer<WORDS>,
}

// SAFETY: the snapshot owns its buffer, which no thread writes after `of` has returned.
unsafe impl<const WORDS: usize> Send for Snapshot<WORDS> {}
// SAFETY: shared references only read the buffer, which no thread writes after `of` has returned.
unsafe impl<const WORDS: usize> Sync for Snapshot<WORDS> {}

impl<const WORDS: usize> Snapshot<WORDS> {
    /// Copies a table that no thread writes during the copy. Returns `None` if there is no memory.
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
        // SAFETY: `self.buffer` is null or a buffer that `of` mapped, and stays mapped until the
        // snapshot is dropped.
        unsafe { Table::at(self.buffer) }
    }

    /// Returns range `at`, in ascending order of pages, or `None` past the last range.
    pub(crate) fn record(&self, at: usize) -> Option<Record<WORDS>> {
        self.table().record(at)
    }
}

impl<const WORDS: usize> Drop for Snapshot<WORDS> {
    fn drop(&mut self) {
        // SAFETY: `of` mapped the buffer for this snapshot alone, and `drop` has the only reference
        // to the snapshot.
        unsafe { Buffer::unmap_all(self.buffer) };
    }
}
