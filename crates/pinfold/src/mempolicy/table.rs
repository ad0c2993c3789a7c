//! The memory of a map of ranges: two sorted arrays, and the words of the ranges.
//!
//! A table is one mapping. A [`Table`] is at its beginning, and behind it are:
//!
//! | part | content |
//! |---|---|
//! | starts, once for each array | the starts of the ranges, in ascending order |
//! | places, once for each array | for each range its end, and the address of its slot |
//! | free | the slots that were in use and are free |
//! | slots | the words of the ranges and of the default |
//!
//! A range keeps its slot while other ranges change, so a change copies only starts and places from
//! the active array to the spare one. A slot that a change frees may be written by the next change
//! (`latch`), while a reader may still read it.
//!
//! A reader may therefore find any mixture of words in an array, which the latch then refuses. But
//! the address of a slot is always null or that of a slot in the same mapping. All words that
//! change are atomic. The rest of a table is written before another thread can know its address.

use crate::sys;
use core::mem::size_of;
use core::ops::Range;
use core::ptr::{NonNull, null_mut, slice_from_raw_parts};
use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize};

/// A table with at most this many ranges, but more than three, is searched in steps that the
/// compiler unrolls. Every table has room for this many ranges.
const FEW: usize = 16;
/// The steps of that search: the halves of [`FEW`].
const HALVES: [usize; 4] = [8, 4, 2, 1];
const _: () = assert!(HALVES[0] * 2 == FEW);
/// At most this many ranges are compared one by one.
const FEWEST: usize = 3;
/// What the first [`FEW`] starts hold behind the last range. A search finds no range there.
const UNUSED: u64 = u64::MAX;
/// The ranges that a set writes with words of their own: the new one, and what is left of the
/// ranges that it cuts.
const PIECES: usize = 3;

/// The words of one range.
pub(super) type Words<const WORDS: usize> = [AtomicU64; WORDS];

/// What an array has for a range besides its start.
struct Place<const WORDS: usize> {
    /// Excluded.
    end: AtomicU64,
    slot: AtomicPtr<Words<WORDS>>,
}

/// A mapping with two arrays and their slots.
#[repr(C, align(64))]
pub(super) struct Table<const WORDS: usize> {
    arrays: [Array<WORDS>; 2],
    /// The smaller table that this one has replaced, or null. Readers may still read it.
    older: *mut Table<WORDS>,
    bytes: usize,
    /// Slots from this one on were never in use.
    fresh: AtomicUsize,
    /// The number of slots in `free`.
    freed: AtomicUsize,
    free: *const [AtomicPtr<Words<WORDS>>],
    slots: *const [Words<WORDS>],
}

/// One of a table's two arrays.
pub(super) struct Array<const WORDS: usize> {
    /// The number of ranges.
    len: AtomicUsize,
    /// The slot of the pages that no range covers, or null.
    default: AtomicPtr<Words<WORDS>>,
    starts: *const [AtomicU64],
    places: *const [Place<WORDS>],
}

/// A copy of a range and its words.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Record<const WORDS: usize> {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) words: [u64; WORDS],
}

/// A range of an array.
#[derive(Clone, Copy)]
pub(super) struct Entry<'t, const WORDS: usize> {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) words: &'t Words<WORDS>,
}

impl<const WORDS: usize> Table<WORDS> {
    /// Maps a table without ranges that has room for at least `ranges` ranges. Returns `None` if
    /// there is no memory.
    ///
    /// There are more than twice as many slots as ranges, because [`Ranges::update`] gives each
    /// range another slot.
    ///
    /// [`Ranges::update`]: super::ranges::Ranges::update
    pub(super) fn map(ranges: usize, older: *mut Table<WORDS>) -> Option<NonNull<Self>> {
        let room = ranges.checked_next_power_of_two()?.max(FEW);
        // Each array has a default besides its ranges.
        let slots = 2 * (room + 1) + PIECES;
        let words = slots.checked_mul(1 + WORDS)?.checked_add(6 * room)?;
        let bytes = words.checked_mul(size_of::<u64>())?;
        let bytes = bytes.checked_add(size_of::<Self>())?;
        let bytes = bytes.checked_next_multiple_of(sys::page_size())?;
        let at = sys::map_memory(bytes)?.cast::<Self>();
        let words = at.as_ptr().wrapping_add(1).cast::<u64>();
        let array = |starts, places| Array {
            len: AtomicUsize::new(0),
            default: AtomicPtr::new(null_mut()),
            starts: slice_from_raw_parts(words.wrapping_add(starts).cast(), room),
            places: slice_from_raw_parts(words.wrapping_add(places).cast(), room),
        };
        let free = words.wrapping_add(6 * room);
        let table = Table {
            arrays: [array(0, 2 * room), array(room, 4 * room)],
            older,
            bytes,
            fresh: AtomicUsize::new(0),
            freed: AtomicUsize::new(0),
            free: slice_from_raw_parts(free.cast(), slots),
            slots: slice_from_raw_parts(free.wrapping_add(slots).cast(), slots),
        };
        // SAFETY: the mapping is fresh, page-aligned and larger than a `Self`.
        unsafe { at.write(table) };
        Some(at)
    }

    /// Returns the addresses of the two arrays.
    pub(super) fn arrays(&self) -> [*mut Array<WORDS>; 2] {
        self.arrays
            .each_ref()
            .map(|array| (&raw const *array).cast_mut())
    }

    /// Calls `visit` with the address and the bytes of the table at `newest`, and of those that it
    /// has replaced. `visit` may unmap them.
    ///
    /// # Safety
    ///
    /// `newest` is null or came from [`map`](Self::map), and its table is mapped. No other thread
    /// unmaps a table of the list meanwhile.
    pub(super) unsafe fn for_each(newest: *mut Self, mut visit: impl FnMut(*mut u8, usize)) {
        let mut next = newest;
        // SAFETY: the caller promises that the first table is mapped. A table that was replaced
        // stays mapped until `visit` unmaps it, after both fields were copied.
        while let Some(table) = unsafe { next.as_ref() } {
            let (at, bytes) = (next.cast(), table.bytes);
            next = table.older;
            visit(at, bytes);
        }
    }

    fn free(&self) -> &[AtomicPtr<Words<WORDS>>] {
        // SAFETY: `map` stored the address of words in the same mapping. They are atomic, and hold
        // null or pointers of this type.
        unsafe { &*self.free }
    }

    /// Frees a slot that the array just published does not use. Does nothing if `slot` is null.
    pub(super) fn retire(&self, slot: *mut Words<WORDS>) {
        let freed = self.freed.load(Relaxed);
        if let Some(place) = self.free().get(freed).filter(|_| !slot.is_null()) {
            place.store(slot, Relaxed);
            self.freed.store(freed + 1, Relaxed);
        }
    }
}

/// An array for reading.
#[derive(Clone, Copy)]
pub(super) struct View<'t, const WORDS: usize> {
    array: &'t Array<WORDS>,
    starts: &'t [AtomicU64],
    /// The first of `starts`.
    few: &'t [AtomicU64; FEW],
    places: &'t [Place<WORDS>],
}

impl<'t, const WORDS: usize> View<'t, WORDS> {
    /// Returns the array at this address, or `None` if it is null.
    ///
    /// # Safety
    ///
    /// The address is null or of an array of a table that stays mapped for `'t`.
    #[inline(always)]
    pub(super) unsafe fn at(array: *const Array<WORDS>) -> Option<Self> {
        // SAFETY: the caller promises that the table stays mapped. The pointers in the array lead
        // to parts of the same mapping, of which all words are atomic. Each array has at least
        // `FEW` starts.
        unsafe {
            let array = array.as_ref()?;
            Some(View {
                array,
                starts: &*array.starts,
                few: &*array.starts.cast(),
                places: &*array.places,
            })
        }
    }

    /// Returns the number of ranges.
    #[inline(always)]
    pub(super) fn len(self) -> usize {
        self.array.len.load(Relaxed)
    }

    /// Returns the number of ranges that the array has room for.
    pub(super) fn room(self) -> usize {
        self.starts.len()
    }

    /// Returns how many ranges, from the first on, have a start for which `is_before` holds.
    #[inline(always)]
    pub(super) fn count(self, is_before: impl Fn(u64) -> bool) -> usize {
        let len = self.len();
        let holds = |at: usize| {
            let start = self.few.get(at);
            usize::from(start.is_some_and(|start| is_before(start.load(Relaxed))))
        };
        let mut count = 0;
        if len <= FEWEST {
            count = (0..FEWEST).map(holds).sum();
        } else if len <= FEW {
            for half in HALVES {
                // The bits of `half - 1` are not in `count`, so `|` adds.
                count |= half * holds(count | (half - 1));
            }
            // The steps reach all counts but `FEW`.
            count += holds(count);
        } else {
            let starts = self.starts.get(..len).unwrap_or_default();
            return starts.partition_point(|start| is_before(start.load(Relaxed)));
        }
        // `is_before` may hold for unused starts too, if the page is the last one.
        count.min(len)
    }

    /// Returns the words of the range that covers `page`, or else those of the default.
    #[inline(always)]
    pub(super) fn holding(self, page: u64) -> Option<&'t Words<WORDS>> {
        self.covering(page).or_else(|| self.otherwise())
    }

    #[inline(always)]
    fn covering(self, page: u64) -> Option<&'t Words<WORDS>> {
        let at = self.count(|start| start <= page).checked_sub(1)?;
        let place = self.places.get(at)?;
        match page < place.end.load(Relaxed) {
            true => self.words(&place.slot),
            false => None,
        }
    }

    /// Returns the words of the default.
    pub(super) fn otherwise(self) -> Option<&'t Words<WORDS>> {
        self.words(&self.array.default)
    }

    /// Returns the address of the default's slot, or null.
    pub(super) fn default(self) -> *mut Words<WORDS> {
        self.array.default.load(Relaxed)
    }

    #[inline(always)]
    fn words(self, slot: &AtomicPtr<Words<WORDS>>) -> Option<&'t Words<WORDS>> {
        // SAFETY: the places and defaults of a table hold null or addresses of slots of the same
        // mapping, which stays mapped for `'t`. The words are atomic.
        unsafe { slot.load(Relaxed).as_ref() }
    }

    /// Returns range `at`, in ascending order, or `None` past the last range.
    pub(super) fn entry(self, at: usize) -> Option<Entry<'t, WORDS>> {
        let start = self.starts.get(..self.len())?.get(at)?;
        let place = self.places.get(at)?;
        Some(Entry {
            start: start.load(Relaxed),
            end: place.end.load(Relaxed),
            words: self.words(&place.slot)?,
        })
    }

    /// Returns copies of all ranges, in ascending order.
    pub(super) fn records(self) -> impl Iterator<Item = Record<WORDS>> {
        (0..self.len()).map_while(move |at| Some(self.entry(at)?.copied()))
    }

    /// Returns the slots of a part of the ranges.
    pub(super) fn slots_of(self, part: Range<usize>) -> impl Iterator<Item = *mut Words<WORDS>> {
        let places = self.places.get(part).unwrap_or_default();
        places.iter().map(|place| place.slot.load(Relaxed))
    }

    /// Returns the first range that has pages from `page` on.
    pub(super) fn next_from(self, page: u64) -> Option<Entry<'t, WORDS>> {
        let next = self.count(|start| start <= page);
        let before = next.checked_sub(1).and_then(|at| self.entry(at));
        before
            .filter(|entry| page < entry.end)
            .or_else(|| self.entry(next))
    }
}

impl<const WORDS: usize> Entry<'_, WORDS> {
    pub(super) fn copied(self) -> Record<WORDS> {
        Record {
            start: self.start,
            end: self.end,
            words: load_all(self.words),
        }
    }
}

/// Returns whether a range has these words.
pub(super) fn are_equal<const WORDS: usize>(slot: &Words<WORDS>, words: &[u64; WORDS]) -> bool {
    slot.iter()
        .zip(words)
        .all(|(mine, word)| mine.load(Relaxed) == *word)
}

/// Loads all words of a range.
#[inline(always)]
pub(super) fn load_all<const WORDS: usize>(words: &Words<WORDS>) -> [u64; WORDS] {
    words.each_ref().map(|word| word.load(Relaxed))
}

/// A spare array that the writer fills, in ascending order. If it is dropped, the table stays as it
/// was.
pub(super) struct Filling<'t, const WORDS: usize> {
    table: &'t Table<WORDS>,
    array: View<'t, WORDS>,
    len: usize,
    /// What the fields of this name in the table become.
    fresh: usize,
    freed: usize,
}

impl<'t, const WORDS: usize> Filling<'t, WORDS> {
    pub(super) fn new(table: &'t Table<WORDS>, array: View<'t, WORDS>) -> Self {
        Filling {
            table,
            array,
            len: 0,
            fresh: table.fresh.load(Relaxed),
            freed: table.freed.load(Relaxed),
        }
    }

    /// Stores words in a free slot, and returns its address.
    pub(super) fn fill(&mut self, words: &[u64; WORDS]) -> *mut Words<WORDS> {
        let slot = match self.freed.checked_sub(1) {
            Some(last) => {
                self.freed = last;
                self.table.free().get(last).map(|slot| slot.load(Relaxed))
            }
            None => {
                self.fresh += 1;
                // SAFETY: `map` stored the address of words in the same mapping. They are atomic.
                let slots = unsafe { &*self.table.slots };
                slots
                    .get(self.fresh - 1)
                    .map(|slot| (&raw const *slot).cast_mut())
            }
        };
        let Some(slot) = slot else {
            sys::die(format_args!("a map of ranges used more slots than it has"));
        };
        // SAFETY: the slot is one of the table's. Its words are atomic.
        for (place, word) in unsafe { slot.as_ref() }.into_iter().flatten().zip(words) {
            place.store(*word, Relaxed);
        }
        slot
    }

    /// Adds a range behind the others.
    pub(super) fn push(&mut self, start: u64, end: u64, words: &[u64; WORDS]) {
        let slot = AtomicPtr::new(self.fill(words));
        let end = AtomicU64::new(end);
        self.add(&[AtomicU64::new(start)], &[Place { end, slot }]);
    }

    /// Adds a range behind the others, or extends the last one if they touch and have equal words.
    pub(super) fn push_or_join(&mut self, record: &Record<WORDS>) {
        let last = self
            .len
            .checked_sub(1)
            .and_then(|at| self.array.places.get(at));
        if let Some(last) = last
            && last.end.load(Relaxed) == record.start
            && self
                .array
                .words(&last.slot)
                .is_some_and(|words| are_equal(words, &record.words))
        {
            return last.end.store(record.end, Relaxed);
        }
        self.push(record.start, record.end, &record.words);
    }

    /// Adds ranges of another array of the same table.
    pub(super) fn copy(&mut self, from: View<'_, WORDS>, part: Range<usize>) {
        let starts = from.starts.get(part.clone()).unwrap_or_default();
        self.add(starts, from.places.get(part).unwrap_or_default());
    }

    #[inline(always)]
    fn add(&mut self, starts: &[AtomicU64], places: &[Place<WORDS>]) {
        let to = self.len..self.len + starts.len();
        self.len = to.end;
        let new = (self.array.starts.get(to.clone()), self.array.places.get(to));
        let (Some(new_starts), Some(new_places)) = new else {
            sys::die(format_args!(
                "a map of ranges has more ranges than its array"
            ));
        };
        for (new, start) in new_starts.iter().zip(starts) {
            new.store(start.load(Relaxed), Relaxed);
        }
        for (new, place) in new_places.iter().zip(places) {
            new.end.store(place.end.load(Relaxed), Relaxed);
            new.slot.store(place.slot.load(Relaxed), Relaxed);
        }
    }

    /// Completes the array, which the caller publishes. Returns its table.
    pub(super) fn finish(self, default: *mut Words<WORDS>) -> &'t Table<WORDS> {
        for start in self.array.starts.get(self.len..FEW).unwrap_or_default() {
            start.store(UNUSED, Relaxed);
        }
        self.array.array.default.store(default, Relaxed);
        self.array.array.len.store(self.len, Relaxed);
        self.table.fresh.store(self.fresh, Relaxed);
        self.table.freed.store(self.freed, Relaxed);
        self.table
    }
}
