//! Takes idle sheaves from CPUs back to a node's barn.
//!
//! Objects in a CPU's sheaves serve only that CPU. When a program stops using a cache on a CPU,
//! these objects would stay there forever. But a CPU that still uses its sheaves should keep them.
//! So at intervals a thread *looks* at a CPU's unit: it compares the words of the sheaves with
//! those at the previous look. A sheaf is *idle* when its word was the same at [`LOOKS`] looks in a
//! row. A sheaf in use may look idle by chance. Taking it does no harm.
//!
//! There are two ways to take idle sheaves to the barn:
//!
//! | | [`take_idle_here`] | [`take_idle_everywhere`] |
//! |---|---|---|
//! | takes from | the CPU on which the thread runs | all CPUs |
//! | how | critical sections | stops the units, and fences |
//! | disturbs | no other CPU | CPUs that run a thread of this process, but no isolated CPU |
//! | used by | slow paths, the automatic thread | shepherds, the automatic thread |
//!
//! The second way is needed for CPUs on which no thread of the program runs any more. A concurrency
//! id may also belong to a thread that sleeps. The kernel interrupts neither such a CPU nor a
//! sleeping thread for a fence. It does interrupt threads that run meanwhile. So the automatic
//! thread, which nobody asked for, fences less often than a shepherd, and only for more memory
//! ([`Taker`]).
//!
//! A tick of the shepherd also lets barns and arenas give back what they did not need for a while.
//! So a program that no longer allocates shrinks too.

use super::deferred;
use super::sheaf::word_is_empty;
use super::sheaf_units::{drain_deferred, drain_unit, drain_word};
use crate::cache_units::{DEFERRED, HELD, MAIN, SHEAF_UNITS, SPARE, STOPPING, UNIT, word};
use crate::shepherd::Reach;
use crate::slab::cache::descriptor::Descriptor;
use crate::slab::cache::reclaim::{reclaim, shrink_all};
use crate::slab::cache::registry;
use crate::topology::facts;
use crate::{arena, shepherd, sys};
use core::alloc::Layout;
use core::ptr::null_mut;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32};
use pinfold_rseq::{
    Backend, Index, MAX_INDEX, backend, fence, fence_index, fence_is_refused, possible,
};

/// The number of looks after which a sheaf is idle, if its word was the same at each. Also the mask
/// of the low bits that count these looks in a word of [`SEEN`].
const LOOKS: u64 = 0b11;
/// The most steps in which a tick gives back idle memory of each part of a cache.
const STEPS: usize = 1024;
/// The fewest milliseconds between two reads of the files with the limits on memory.
const BETWEEN_READS: u32 = 10_000;
/// The fewest milliseconds between two looks at a unit by threads that run on its CPU.
const BETWEEN_LOOKS: u32 = 450;
/// The fewest milliseconds between two fences of the automatic thread.
const BETWEEN_FENCES: u32 = 950;

/// For each unit, a block of the unit's size that records what the looks saw. The records are
/// hints: if two threads look at once, a count may be lost. A sheaf's record has the same offset as
/// the sheaf's word in the unit:
///
/// | word | content |
/// |---|---|
/// | main | the word, at the last look, of the sheaf that allocations pop from |
/// | spare | how many looks in a row found that word unchanged |
/// | deferred, held | the word at the last look; its low bits count looks with the same word |
static SEEN: [AtomicPtr<u8>; MAX_INDEX] = [const { AtomicPtr::new(null_mut()) }; MAX_INDEX];

/// The set of units that `take_idle_everywhere` stops. Only the holder of [`STOPPING`] uses this
/// set. It is not on the stack, because it would take 8 KiB there.
static CHOSEN: [AtomicBool; MAX_INDEX] = [const { AtomicBool::new(false) }; MAX_INDEX];

/// A thread that takes idle sheaves of other CPUs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Taker {
    Automatic,
    /// A shepherd that the program or its user asked for.
    Shepherd,
}

impl Taker {
    /// Returns the fewest bytes in idle sheaves that are worth an interrupt of their CPUs.
    fn least(self) -> usize {
        match self {
            Taker::Automatic => 256 << 10,
            Taker::Shepherd => 64 << 10,
        }
    }

    /// Returns whether this thread may fence, and so whether a look at other CPUs has a use.
    fn may_fence(self) -> bool {
        // On the atomic backend, a fence makes no system call.
        backend() == Backend::Atomic
            || !fence_is_refused() && (self == Taker::Shepherd || !shepherd::fences_are_forbidden())
    }

    /// Returns whether this thread fenced too short a time ago to fence again.
    fn pauses(self) -> bool {
        /// When the automatic thread last fenced, in milliseconds, wrapping.
        static FENCED: AtomicU32 = AtomicU32::new(0);
        if self == Taker::Shepherd {
            return false;
        }
        let now = sys::coarse_milliseconds() as u32;
        let pauses = now.wrapping_sub(FENCED.load(Relaxed)) < BETWEEN_FENCES;
        if !pauses {
            FENCED.store(now, Relaxed);
        }
        pauses
    }

    /// Ends the operations under way on the chosen units. Returns false if it could not.
    fn fence(self) -> bool {
        let all = || match backend() {
            Backend::Rseq(Index::Cpu) => chosen().all(|index| fence_index(index).is_ok()),
            _ => fence().is_ok(),
        };
        match self {
            Taker::Automatic if backend() != Backend::Atomic => shepherd::fence_by_itself(all),
            _ => all(),
        }
    }
}

/// Does the slab layer's part of a shepherd's tick.
pub(crate) fn drain(reach: Reach) {
    match reach {
        Reach::ThisCpu => {
            take_idle_here();
            if shepherd::is_automatic() {
                take_idle_everywhere(Taker::Automatic);
            }
        }
        Reach::AllCpus => {
            refresh_limits();
            take_idle_everywhere(Taker::Shepherd);
        }
        Reach::Everything => return give_everything(),
    }
    deferred::progress();
    let now = sys::coarse_milliseconds() as u32;
    registry::for_each(|cache| {
        cache.parts().for_each(|node| {
            // Each call does a small step, so that other threads get the node's lock in between.
            let steps = (0..STEPS).take_while(|_| node.release_idle(cache, now));
            steps.for_each(drop);
        });
    });
    arena::purge_all_aged();
    arena::budget::reclaimed();
}

/// Reads the limits on memory and the nodes' free memory again, at most once in [`BETWEEN_READS`]
/// milliseconds.
fn refresh_limits() {
    static READ: AtomicU32 = AtomicU32::new(0);
    let (now, read) = (sys::coarse_milliseconds() as u32, READ.load(Relaxed));
    let due = read == 0 || now.wrapping_sub(read) >= BETWEEN_READS;
    // If several threads find a read due, the exchange succeeds for one of them.
    if due
        && READ
            .compare_exchange(read, now.max(1), Relaxed, Relaxed)
            .is_ok()
    {
        arena::refresh_room();
        arena::budget::refresh();
    }
}

/// Gives everything free back to the system. Interrupts the CPUs that run threads of this process.
/// If some CPUs are isolated, interrupts none: the sheaves of other CPUs then stay where they are.
fn give_everything() {
    if facts::any_quiet() || shrink_all().is_err() {
        reclaim();
    }
    arena::budget::reclaimed();
}

/// Takes the idle sheaves of the CPU on which this thread runs, without stopping a unit. Takes each
/// sheaf by one critical section. The critical section fails if the sheaf was used after this
/// thread loaded its word, or if the thread has moved to another CPU.
///
/// Looks at most once in [`BETWEEN_LOOKS`] milliseconds. A call that does not look costs one read
/// of a clock, without a system call.
pub(crate) fn take_idle_here() {
    /// When a unit was last looked at, in milliseconds, wrapping. On a machine with more than 64
    /// CPUs, several units share an entry, and each is looked at less often.
    static LOOKED: [AtomicU32; 64] = [const { AtomicU32::new(0) }; 64];
    let index = pinfold_rseq::current();
    let unit = SHEAF_UNITS.unit(index);
    let now = sys::coarse_milliseconds() as u32;
    let looked = &LOOKED[index % LOOKED.len()];
    if unit.is_null() || now.wrapping_sub(looked.load(Relaxed)) < BETWEEN_LOOKS {
        return;
    }
    looked.store(now, Relaxed);
    // While this thread has a sheaf of a cache in hand, no other thread may drain or retire that
    // cache: a drain would miss the sheaf, and another cache could get the number of a retired one.
    // `drain` and `retire` take this lock too.
    let Some(_stopping) = STOPPING.try_lock() else {
        return;
    };
    if look(index) == 0 {
        return;
    }
    registry::for_each(|cache| {
        if is_idle(index, cache) {
            for kind in [MAIN, SPARE, HELD] {
                take_here(cache, unit, kind);
            }
            take_here(cache, unit, DEFERRED);
            forget(index, cache, SPARE);
        }
        if is_kind_idle(index, cache, DEFERRED) {
            take_here(cache, unit, DEFERRED);
            forget(index, cache, DEFERRED);
        }
        if is_kind_idle(index, cache, HELD) {
            take_here(cache, unit, HELD);
            forget(index, cache, HELD);
        }
    });
}

/// Takes all sheaves of the CPU on which this thread runs to their barns, idle or not, without
/// stopping a unit. Leaves empty sheaves where they are.
pub(crate) fn take_all_here() {
    // `drain` and `retire` take this lock too, because they would otherwise miss the sheaf that
    // this thread has in hand.
    if let Some(_stopping) = STOPPING.try_lock() {
        take_all();
    }
}

/// Does what [`take_all_here`] does, for a thread that has isolated this CPU. Waits for a thread
/// that stops units, which may not know yet that the CPU is isolated.
pub(crate) fn empty_here() {
    if let Some(_stopping) = STOPPING.lock() {
        take_all();
    }
}

/// Takes all sheaves of the CPU on which this thread runs to their barns. The caller holds
/// [`STOPPING`].
fn take_all() {
    let unit = SHEAF_UNITS.unit(pinfold_rseq::current());
    if unit.is_null() {
        return;
    }
    registry::for_each(|cache| {
        for kind in [MAIN, SPARE, HELD, DEFERRED] {
            if !word_is_empty(word(unit, cache.main() + kind).load(Relaxed)) {
                take_here(cache, unit, kind);
            }
        }
    });
}

/// Takes one of a cache's sheaves out of the current CPU's unit. `kind` is the distance of the word
/// from the main sheaf's: [`MAIN`], [`SPARE`], [`DEFERRED`] or [`HELD`]. `unit` is the unit that
/// the caller found for this CPU. A deferred sheaf is sealed. Any other sheaf goes to the barn.
/// Leaves the sheaf where it is if another operation uses it during the call, or if the thread
/// moves to another CPU.
fn take_here(cache: &Descriptor, unit: *mut u8, kind: usize) {
    let place = cache.place(kind);
    match place.take_seen(word(unit, place.offset()).load(Relaxed)) {
        Some(sheaf) if kind == DEFERRED => cache.seal(sheaf),
        Some(sheaf) => cache.put(cache.here(), sheaf),
        None => {}
    }
}

/// Takes the idle sheaves of all CPUs that may be interrupted.
///
/// 1. Looks at each unit. Goes on only if there may be enough bytes in idle sheaves.
/// 2. Stops the units with idle sheaves.
/// 3. Fences, which ends the operations under way.
/// 4. Takes the idle sheaves out of each unit, and resumes it.
fn take_idle_everywhere(taker: Taker) {
    let Some(allowed) = Allowed::now().filter(|_| taker.may_fence()) else {
        return;
    };
    // The automatic thread has looked at its own unit already.
    let own = (taker == Taker::Automatic).then(pinfold_rseq::current);
    let units = || {
        let others = (0..possible()).filter(|&index| Some(index) != own);
        others.filter(|&index| !SHEAF_UNITS.unit(index).is_null() && allowed.contains(index))
    };
    let idle: usize = units().map(look).sum();
    if idle < taker.least() || taker.pauses() {
        return;
    }
    // Only tries the lock. Another thread may hold it, or a frame that this signal handler
    // interrupted. A slow path in a signal handler must not wait for that frame.
    let Some(_stopping) = STOPPING.try_lock() else {
        return;
    };
    // Records which units are chosen. Whether a sheaf is idle may change later, but exactly the
    // units that this function stops must be resumed.
    (0..possible()).for_each(|index| CHOSEN[index].store(false, Relaxed));
    units().for_each(|index| CHOSEN[index].store(any_idle(index), Relaxed));
    chosen().for_each(|index| SHEAF_UNITS.stop(index));
    let fenced = taker.fence();
    for index in chosen() {
        // On the atomic backend, this may be a signal handler that interrupted an operation on the
        // unit. The wait then fails, and this function takes nothing from the unit.
        match fenced && SHEAF_UNITS.await_stopped(index) {
            true => {
                take_idle(index);
                SHEAF_UNITS.resume(index);
            }
            false => SHEAF_UNITS.resume_untouched(index),
        }
    }
}

/// Returns the indexes in [`CHOSEN`].
fn chosen() -> impl Iterator<Item = usize> {
    (0..possible()).filter(|&index| CHOSEN[index].load(Relaxed))
}

/// The set of CPUs that may be interrupted: those that are not isolated.
struct Allowed;

impl Allowed {
    /// Returns the set, or `None` if no CPU may be interrupted. A unit that belongs to a
    /// concurrency id may be in use on any CPU. So with concurrency ids, no CPU may be interrupted
    /// if some are isolated.
    fn now() -> Option<Allowed> {
        let by_cpu = backend() != Backend::Rseq(Index::Cid);
        (by_cpu || !facts::any_quiet()).then_some(Allowed)
    }

    fn contains(&self, index: usize) -> bool {
        !facts::is_quiet_cpu(index)
    }
}

/// Returns the block of [`SEEN`] for a unit. Returns `None` if there is no memory for the block.
fn seen(index: usize) -> Option<*mut u8> {
    let there = SEEN[index].load(Acquire);
    if !there.is_null() {
        return Some(there);
    }
    let layout = Layout::from_size_align(UNIT, 4096).ok()?;
    let fresh = arena::alloc_metadata(layout)?.as_ptr();
    match SEEN[index].compare_exchange(null_mut(), fresh, AcqRel, Acquire) {
        Ok(_) => Some(fresh),
        // Two threads made a block at once. One of the blocks is lost, at most a few times for each
        // unit.
        Err(theirs) => Some(theirs),
    }
}

/// Looks at the sheaves of unit `index`. Returns how many bytes the idle ones may hold.
fn look(index: usize) -> usize {
    let Some(seen) = seen(index) else {
        return 0;
    };
    let unit = SHEAF_UNITS.unit(index);
    let mut idle = 0;
    registry::for_each(|cache| {
        let at = cache.main();
        let now = word(unit, cache.source()).load(Relaxed);
        let looks = word(seen, at + SPARE);
        if now == 0 || word(seen, at).swap(now, Relaxed) != now {
            looks.store(0, Relaxed);
        } else if looks.fetch_add(1, Relaxed) + 1 >= LOOKS {
            idle += cache.capacity() * cache.geometry.size;
        }
        let others = [DEFERRED, HELD].map(|kind| look_at(cache, kind, unit, seen));
        idle += others.iter().sum::<usize>();
    });
    idle
}

/// Looks at a unit's deferred or held sheaf. Returns how many bytes it may hold, or 0 if it is not
/// idle.
fn look_at(cache: &Descriptor, kind: usize, unit: *mut u8, seen: *mut u8) -> usize {
    let at = cache.main() + kind;
    let (now, before) = (word(unit, at).load(Relaxed), word(seen, at).load(Relaxed));
    let looks = match before & !LOOKS == now && now != 0 {
        true => LOOKS.min((before & LOOKS) + 1),
        false => 0,
    };
    if now | looks != before {
        word(seen, at).store(now | looks, Relaxed);
    }
    if looks == LOOKS {
        cache.capacity() * cache.geometry.size
    } else {
        0
    }
}

fn is_kind_idle(index: usize, cache: &Descriptor, kind: usize) -> bool {
    let seen = SEEN[index].load(Acquire);
    let at = cache.main() + kind;
    !seen.is_null() && word(seen, at).load(Relaxed) & LOOKS == LOOKS
}

fn is_idle(index: usize, cache: &Descriptor) -> bool {
    let seen = SEEN[index].load(Acquire);
    !seen.is_null() && word(seen, cache.main() + SPARE).load(Relaxed) >= LOOKS
}

fn any_idle(index: usize) -> bool {
    let mut any = false;
    let others = |cache: &Descriptor| [DEFERRED, HELD].map(|kind| is_kind_idle(index, cache, kind));
    registry::for_each(|cache| any |= is_idle(index, cache) || others(cache).contains(&true));
    any
}

/// Takes the idle sheaves of a stopped unit to the barn. If the sheaf that a cache's allocations
/// use is idle, takes all sheaves of the cache.
fn take_idle(index: usize) {
    let unit = SHEAF_UNITS.unit(index);
    registry::for_each(|cache| {
        if is_idle(index, cache) {
            drain_unit(cache, unit);
            forget(index, cache, SPARE);
        }
        if is_kind_idle(index, cache, DEFERRED) {
            drain_deferred(cache, unit);
            forget(index, cache, DEFERRED);
        }
        if is_kind_idle(index, cache, HELD) {
            drain_word(cache, unit, cache.main() + HELD);
            forget(index, cache, HELD);
        }
    });
}

/// Resets the record of a unit's sheaf, after the sheaf was taken.
fn forget(index: usize, cache: &Descriptor, kind: usize) {
    let seen = SEEN[index].load(Acquire);
    word(seen, cache.main() + kind).store(0, Relaxed);
}
