//! The word of a cache's sheaf in the current CPU's unit, and what a thread can do with it.
//!
//! Every unit has four words for each number of a cache (`cache_units`). A [`Place`] names one of
//! them, so its operations need no promise about offsets. The thread may move to another CPU
//! between two operations. Each operation works on the unit of the CPU on which it runs.

use super::sheaf::Sheaf;
use crate::cache_units::{
    CacheId, DEFERRED, HELD, MAIN, SHEAF_UNITS, SPARE, STOPPING, UNIT, units,
};
use crate::slab::cache::registry;
use crate::topology::facts;
use crate::{arena, sys};
use core::alloc::Layout;
use core::num::NonZeroUsize;
use core::ptr::null_mut;
use pinfold_rseq::possible;

/// This CPU's word of one of a cache's sheaves. Holds the word's offset in every unit.
#[derive(Clone, Copy)]
pub(crate) struct Place(NonZeroUsize);

impl Place {
    /// Returns the word of one of the sheaves of the cache `id`. `kind` is the distance of the word
    /// from the main sheaf's: `MAIN`, `SPARE`, `DEFERRED` or `HELD`.
    #[inline(always)]
    pub(crate) const fn of(id: CacheId, kind: usize) -> Place {
        // SAFETY: the number of a cache is not 0.
        Place(unsafe { NonZeroUsize::new_unchecked(id.main() + kind) })
    }

    /// Returns the word's offset.
    #[inline(always)]
    pub(crate) fn offset(self) -> usize {
        self.0.get()
    }

    /// Takes an object out of the sheaf. Returns null if the sheaf is empty or missing.
    pub(crate) fn pop(self) -> *mut u8 {
        // SAFETY: every unit has a word at this offset, which is 0 or a sheaf, and so a stack.
        unsafe { SHEAF_UNITS.pop(self.offset()) }
    }

    /// Takes an object out of the sheaf as [`pop`](Self::pop) does, but returns null on the atomic
    /// backend, and contains no call.
    #[inline(always)]
    pub(crate) fn pop_fast(self) -> *mut u8 {
        let Some(area) = units().area() else {
            return null_mut();
        };
        // SAFETY: every unit has a word at this offset, which is 0 or a sheaf, and so a stack.
        unsafe { area.pop(self.offset()) }
    }

    /// Fills `objects` from its start with objects of the sheaf. Returns how many it took.
    pub(crate) fn pop_batch(self, objects: &mut [*mut u8]) -> usize {
        // SAFETY: every unit has a word at this offset, which is 0 or a sheaf, and so a stack.
        unsafe { units().pop_batch(self.offset(), objects) }
    }

    /// Puts an object into the sheaf. Returns false and does nothing if the sheaf is full or
    /// missing.
    ///
    /// # Safety
    ///
    /// The caller owns `object`, which is of this cache, and gives it up if the result is true.
    pub(crate) unsafe fn push(self, object: *mut u8) -> bool {
        // SAFETY: every unit has a word at this offset, which is 0 or a sheaf, and so a stack.
        unsafe { SHEAF_UNITS.push(self.offset(), object) }
    }

    /// Puts an object into the sheaf as [`push`](Self::push) does, but returns false on the atomic
    /// backend, and contains no call.
    ///
    /// # Safety
    ///
    /// The same as for [`push`](Self::push).
    #[inline(always)]
    pub(crate) unsafe fn push_fast(self, object: *mut u8) -> bool {
        // SAFETY: every unit has a word at this offset, which is 0 or a sheaf, and so a stack.
        let push = |area: pinfold_rseq::Area| unsafe { area.push(self.offset(), object) };
        units().area().is_some_and(push)
    }

    /// Puts objects into the sheaf, from the start of `objects`. Returns how many it put.
    ///
    /// # Safety
    ///
    /// The same as for [`push`](Self::push), for each object.
    pub(crate) unsafe fn push_batch(self, objects: &[*mut u8]) -> usize {
        // SAFETY: every unit has a word at this offset, which is 0 or a sheaf, and so a stack.
        unsafe { units().push_batch(self.offset(), objects) }
    }

    /// Returns the word. Makes the unit if the CPU has none yet. Returns `None` if the CPU still
    /// has no unit.
    fn load(self) -> Option<u64> {
        // SAFETY: every unit has a word at this offset.
        let load = || unsafe { SHEAF_UNITS.load(self.offset()) };
        load().or_else(|| prepare().then(load)?)
    }

    /// Takes the sheaf out of the unit, if its word is still `seen`.
    pub(crate) fn take_seen(self, seen: u64) -> Option<Sheaf> {
        // SAFETY: every unit has a word at this offset. If the operation replaced `seen` by 0, this
        // thread owns the sheaf.
        unsafe {
            let taken = seen != 0 && SHEAF_UNITS.store_if_equal(self.offset(), seen, 0);
            Sheaf::from_word(if taken { seen } else { 0 })
        }
    }

    /// Takes the sheaf out of the unit, if `may_go` accepts its word.
    pub(crate) fn take_if(self, may_go: impl Fn(u64) -> bool) -> Option<Sheaf> {
        self.take_seen(self.load().filter(|&word| may_go(word))?)
    }

    /// Puts a sheaf into the unit, if `may_go` accepts the word of the present sheaf, which is 0
    /// for none. Returns the sheaf that this thread has then: the old one, or `sheaf` if it was not
    /// put.
    pub(crate) fn exchange(self, sheaf: Sheaf, may_go: impl Fn(u64) -> bool) -> Option<Sheaf> {
        let word = self.load().filter(|&word| may_go(word));
        // SAFETY: every unit has a word at this offset. If the operation replaced `word`, the sheaf
        // of `word` is this thread's, and `sheaf` is the unit's.
        unsafe {
            match word {
                Some(word) if SHEAF_UNITS.store_if_equal(self.offset(), word, sheaf.word()) => {
                    Sheaf::from_word(word)
                }
                _ => Some(sheaf),
            }
        }
    }

    /// Puts `sheaf` into this place if the place is empty. Otherwise, and if there is no unit,
    /// returns `sheaf`.
    pub(crate) fn put(self, sheaf: Sheaf) -> Option<Sheaf> {
        // SAFETY: every unit has a word at this offset. If the operation stored the word, the sheaf
        // is the unit's.
        match unsafe { SHEAF_UNITS.store_if_equal(self.offset(), 0, sheaf.word()) } {
            true => None,
            false => Some(sheaf),
        }
    }
}

/// Gives the current CPU its unit. Chooses the backend first, if no thread has done so. Returns
/// false if the CPU has a unit already, or cannot get one now.
#[cold]
fn prepare() -> bool {
    if !facts::choose_backend() {
        return false;
    }
    let index = pinfold_rseq::current();
    if index >= possible() || !SHEAF_UNITS.unit(index).is_null() {
        // The thread has no index, or the unit is stopped now, or another thread has just installed
        // it.
        return false;
    }
    // Only tries the lock. This may be a signal handler that interrupted the holder of another
    // lock, and `STOPPING`'s holder may wait for that lock.
    let Some(_stopping) = STOPPING.try_lock() else {
        return false;
    };
    let layout = Layout::from_size_align(UNIT, sys::page_size());
    let Some(unit) = layout.ok().and_then(arena::alloc_metadata) else {
        return false;
    };
    // SAFETY: `alloc_metadata` gives a block of this size a mapping of its own, so the range is
    // whole pages that no other data shares.
    unsafe { crate::counter_units::place_near(index, unit.as_ptr(), UNIT) };
    if facts::any_quiet() {
        make_resident(unit.as_ptr());
        sys::make_statics_resident();
    }
    SHEAF_UNITS.install(index, unit.as_ptr()).is_ok()
}

/// Makes the pages of a unit's words resident, so that no later use interrupts an isolated CPU
/// ([`sys::make_resident`]). Covers the caches that exist, and as many more as fit into the pages.
fn make_resident(unit: *mut u8) {
    let words = CacheId::nth(registry::used() - 1).map_or(SPARE, |last| last.main() + 8);
    let page = sys::page_size();
    // SAFETY: a unit is whole pages of a mapping of this library. It has `SPARE` bytes for words of
    // each kind, which are whole pages unless the pages are larger.
    unsafe {
        if page > SPARE {
            return sys::make_resident(unit, UNIT);
        }
        for kind in [MAIN, SPARE, DEFERRED, HELD] {
            sys::make_resident(unit.add(kind), words.next_multiple_of(page));
        }
    }
}

/// Makes the units of all CPUs resident, for a thread that has isolated its CPU, or has made a
/// cache whose words are the first on a page. A unit that is installed meanwhile makes itself
/// resident: the caller has taken [`STOPPING`] since it isolated the CPU (`empty_here`).
pub(crate) fn make_units_resident() {
    let units = (0..possible()).map(|index| SHEAF_UNITS.unit(index));
    units.filter(|unit| !unit.is_null()).for_each(make_resident);
}
