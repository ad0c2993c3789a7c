//! Takes sheaves that are idle on their CPU back to their node.
//!
//! Objects in a CPU's sheaves serve only that CPU. When a program stops using a cache on a CPU,
//! they would stay there. But to take them at once would disturb a CPU that uses them. So a *look*
//! at a unit compares the words of its sheaves with those at the look before. A sheaf is idle when
//! its word was the same at [`LOOKS`] looks in a row. By chance a sheaf in use may look idle;
//! taking it does no harm.
//!
//! There are two ways to take idle sheaves to the barn, which gives their objects back later:
//!
//! | | [`take_idle_here`] | [`take_idle_everywhere`] |
//! |---|---|---|
//! | takes from | the CPU on which the thread runs | all CPUs |
//! | how | critical sections | stops the units, and fences |
//! | disturbs | no other CPU | CPUs that run a thread of this process, but no isolated CPU |
//! | used by | slow paths, ticks in passing, the automatic thread | a shepherd that was asked for |
//!
//! A tick of the shepherd also has barns and arenas give back what has been unused for a while, so
//! that a program that no longer allocates shrinks too.

use super::cache::{self, Cache};
use super::deferred;
use super::percpu::{
    DEFERRED, HELD, SPARE, STOPPING, UNIT, UNITS, drain_deferred, drain_unit, drain_word,
};
use super::purge::PERIODS;
use super::reclaim::reclaim;
use super::sheaf::{Sheaf, word_is_empty};
use crate::shepherd::Reach;
use crate::topology::facts;
use crate::{page, sys};
use core::alloc::Layout;
use core::ptr::null_mut;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64};
use pinfold_rseq::{Backend, Index, MAX_INDEX, backend, fence, fence_index, possible};

/// Looks at which an idle sheaf's word was the same. Also the mask of the bits that count looks.
const LOOKS: u64 = 0b11;
/// The most additional times that a tick purges each node of a cache.
const MORE: usize = 64;
/// Milliseconds between two looks at a unit by threads that run on its CPU.
const BETWEEN_LOOKS: u32 = 450;
/// Bytes in idle sheaves that are worth an interrupt.
const WORTH: usize = 64 << 10;

/// For each unit, a block of the unit's size that says what the looks saw. Only hints are in it:
/// two looks at once may lose a count. Its words stand at the same offsets as the unit's:
///
/// | word | content |
/// |---|---|
/// | main | the word of the sheaf that allocations used at the last look |
/// | spare | the number of looks at which that word was the same |
/// | deferred, held | the word at the last look, with the number of looks in its low bits |
static SEEN: [AtomicPtr<u8>; MAX_INDEX] = [const { AtomicPtr::new(null_mut()) }; MAX_INDEX];

/// The units that are stopped while idle sheaves are taken. Only the thread that holds [`STOPPING`]
/// uses this set. On the stack it would take 1 KiB.
static CHOSEN: [AtomicBool; MAX_INDEX] = [const { AtomicBool::new(false) }; MAX_INDEX];

/// Does the slab layer's part of a shepherd's tick.
pub(super) fn drain(reach: Reach) {
    match reach {
        Reach::ThisCpu => take_idle_here(),
        Reach::AllCpus => {
            page::refresh_room();
            page::budget::refresh();
            take_idle_everywhere();
        }
        Reach::Everything => return give_everything(),
    }
    deferred::progress();
    let now = sys::coarse_milliseconds() as u32;
    cache::for_each(|cache| {
        let nodes = cache.nodes().iter();
        nodes.for_each(|node| {
            node.release_idle(cache, now);
            // In small steps, so that other threads get the node's lock in between.
            let more = (0..MORE).take_while(|_| node.purge_more(cache, PERIODS));
            more.for_each(drop);
        });
    });
    page::purge_all_aged();
    page::budget::reclaimed();
}

/// Gives everything free back to the system. Interrupts the CPUs that run threads of this process.
/// If some CPUs are isolated it interrupts none, and what other CPUs have cached stays.
fn give_everything() {
    if facts::any_quiet() || super::shrink_all().is_err() {
        reclaim();
    }
    page::budget::reclaimed();
}

/// Takes the idle sheaves of the CPU on which this thread runs, without stopping a unit. Each word
/// is emptied by one critical section, which fails if the thread has moved to another CPU, or the
/// sheaf has been used.
///
/// Looks at most once in [`BETWEEN_LOOKS`]. In between it costs one read of a clock, without a
/// system call.
pub(super) fn take_idle_here() {
    /// When a unit was last looked at, in milliseconds, wrapping. Units that share an entry are
    /// looked at less often.
    static LOOKED: [AtomicU32; 64] = [const { AtomicU32::new(0) }; 64];
    let index = pinfold_rseq::current();
    let unit = UNITS.unit(index);
    let now = sys::coarse_milliseconds() as u32;
    let looked = &LOOKED[index % LOOKED.len()];
    if unit.is_null() || now.wrapping_sub(looked.load(Relaxed)) < BETWEEN_LOOKS {
        return;
    }
    looked.store(now, Relaxed);
    // While this thread has a sheaf of a cache in hand, that cache must not be drained, and must
    // not be destroyed and its number reused. `drain` and `retire` take this lock too.
    let Some(_stopping) = STOPPING.try_lock() else {
        return;
    };
    if look(index) == 0 {
        return;
    }
    cache::for_each(|cache| {
        if is_idle(index, cache) {
            for place in [0, SPARE, HELD] {
                take_here(cache, unit, place);
            }
            take_here(cache, unit, DEFERRED);
            forget(index, cache, SPARE);
        }
        if is_place_idle(index, cache, DEFERRED) {
            take_here(cache, unit, DEFERRED);
            forget(index, cache, DEFERRED);
        }
        if is_place_idle(index, cache, HELD) {
            take_here(cache, unit, HELD);
            forget(index, cache, HELD);
        }
    });
}

/// Takes all sheaves of the CPU on which this thread runs to their barns, idle or not, without
/// stopping a unit. Empty sheaves stay.
pub(super) fn take_all_here() {
    let unit = UNITS.unit(pinfold_rseq::current());
    if unit.is_null() {
        return;
    }
    // While this thread has a sheaf of a cache in hand, that cache must be neither drained nor
    // retired.
    let Some(_stopping) = STOPPING.try_lock() else {
        return;
    };
    cache::for_each(|cache| {
        for place in [0, SPARE, HELD, DEFERRED] {
            if !word_is_empty(word(unit, cache.main() + place).load(Relaxed)) {
                take_here(cache, unit, place);
            }
        }
    });
}

/// Takes the sheaf at `place` of a cache's words in the current CPU's unit, which should be `unit`:
/// to the barn, or a deferred sheaf to those that wait for readers. Leaves the sheaf where it is if
/// the thread has moved, or the sheaf has been used.
fn take_here(cache: &'static Cache, unit: *mut u8, place: usize) {
    let offset = cache.main() + place;
    let seen = word(unit, offset).load(Relaxed);
    // SAFETY: `place` is one of the cache's four words, so the offset lies in the unit.
    if seen == 0 || !unsafe { UNITS.store_if_equal(offset, seen, 0) } {
        return;
    }
    // SAFETY: `store_if_equal` above replaced the word by 0, so this thread owns the sheaf.
    match unsafe { Sheaf::from_word(seen) } {
        Some(sheaf) if place == DEFERRED => cache.seal(sheaf),
        Some(sheaf) => cache.put(cache.here(), sheaf),
        None => {}
    }
}

/// Takes the idle sheaves of all CPUs that may be interrupted.
///
/// 1. Looks at each unit. Goes on only if there are [`WORTH`] bytes in idle sheaves.
/// 2. Stops the units with idle sheaves.
/// 3. Fences, which ends the operations under way.
/// 4. Takes the idle sheaves out of each unit, and resumes it.
fn take_idle_everywhere() {
    let Some(allowed) = Allowed::now() else {
        return;
    };
    let units =
        || (0..possible()).filter(|&index| !UNITS.unit(index).is_null() && allowed.contains(index));
    let idle: usize = units().map(look).sum();
    if idle < WORTH {
        return;
    }
    // Another thread, or a frame that this signal handler interrupted, may be stopping units. Does
    // not wait, because this may be a slow path in a signal handler.
    let Some(_stopping) = STOPPING.try_lock() else {
        return;
    };
    // Chosen once, because each unit that is stopped has to be resumed, whatever changes meanwhile.
    (0..possible()).for_each(|index| CHOSEN[index].store(false, Relaxed));
    units().for_each(|index| CHOSEN[index].store(any_idle(index), Relaxed));
    let chosen = || (0..possible()).filter(|&index| CHOSEN[index].load(Relaxed));
    chosen().for_each(|index| UNITS.stop(index));
    let fenced = match backend() {
        Backend::Rseq(Index::Cpu) => chosen().all(|index| fence_index(index).is_ok()),
        _ => fence().is_ok(),
    };
    for index in chosen() {
        // On atomics, this may be a signal handler that interrupted an operation on the unit. Then
        // nothing is taken from it.
        match fenced && UNITS.try_await_stopped(index) {
            true => {
                take_idle(index);
                UNITS.resume(index);
            }
            false => UNITS.resume_untouched(index),
        }
    }
}

/// The CPUs that may be interrupted.
struct Allowed;

impl Allowed {
    /// Returns `None` if no CPU may be interrupted. A concurrency id does not name a CPU, so if
    /// some CPUs are isolated, none is interrupted.
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
    let fresh = page::alloc_meta(layout)?.as_ptr();
    match SEEN[index].compare_exchange(null_mut(), fresh, AcqRel, Acquire) {
        Ok(_) => Some(fresh),
        // Two ticks made a block at once. One block is lost, at most a few times for each unit.
        Err(theirs) => Some(theirs),
    }
}

/// Returns the word at `offset` of a unit, or of a unit's block in [`SEEN`].
pub(super) fn word<'u>(block: *mut u8, offset: usize) -> &'u AtomicU64 {
    // SAFETY: units and their blocks are never unmapped, and a cache's offsets lie in them. All
    // accesses to the words are atomic, or made while the unit is stopped.
    unsafe { &*block.add(offset).cast() }
}

/// Looks at a unit's sheaves. Returns how many bytes may lie in idle ones.
fn look(index: usize) -> usize {
    let Some(seen) = seen(index) else {
        return 0;
    };
    let unit = UNITS.unit(index);
    let mut idle = 0;
    cache::for_each(|cache| {
        let at = cache.main();
        let now = word(unit, cache.source()).load(Relaxed);
        let looks = word(seen, at + SPARE);
        if now == 0 || word(seen, at).swap(now, Relaxed) != now {
            looks.store(0, Relaxed);
        } else if looks.fetch_add(1, Relaxed) + 1 >= LOOKS {
            idle += cache.capacity() * cache.size;
        }
        let others = [DEFERRED, HELD].map(|place| look_at(cache, place, unit, seen));
        idle += others.iter().sum::<usize>();
    });
    idle
}

/// Looks as [`look`] does at a unit's deferred or held sheaf.
fn look_at(cache: &Cache, place: usize, unit: *mut u8, seen: *mut u8) -> usize {
    let at = cache.main() + place;
    let (now, before) = (word(unit, at).load(Relaxed), word(seen, at).load(Relaxed));
    let looks = match before & !LOOKS == now && now != 0 {
        true => LOOKS.min((before & LOOKS) + 1),
        false => 0,
    };
    if now | looks != before {
        word(seen, at).store(now | looks, Relaxed);
    }
    if looks == LOOKS {
        cache.capacity() * cache.size
    } else {
        0
    }
}

fn is_place_idle(index: usize, cache: &Cache, place: usize) -> bool {
    let seen = SEEN[index].load(Acquire);
    let at = cache.main() + place;
    !seen.is_null() && word(seen, at).load(Relaxed) & LOOKS == LOOKS
}

fn is_idle(index: usize, cache: &Cache) -> bool {
    let seen = SEEN[index].load(Acquire);
    !seen.is_null() && word(seen, cache.main() + SPARE).load(Relaxed) >= LOOKS
}

fn any_idle(index: usize) -> bool {
    let mut any = false;
    let others = |cache: &Cache| [DEFERRED, HELD].map(|place| is_place_idle(index, cache, place));
    cache::for_each(|cache| any |= is_idle(index, cache) || others(cache).contains(&true));
    any
}

/// Takes the idle sheaves of a stopped unit, and the spares beside them, to the barn.
fn take_idle(index: usize) {
    let unit = UNITS.unit(index);
    cache::for_each(|cache| {
        if is_idle(index, cache) {
            drain_unit(cache, unit);
            forget(index, cache, SPARE);
        }
        if is_place_idle(index, cache, DEFERRED) {
            drain_deferred(cache, unit);
            forget(index, cache, DEFERRED);
        }
        if is_place_idle(index, cache, HELD) {
            drain_word(cache, unit, cache.main() + HELD);
            forget(index, cache, HELD);
        }
    });
}

/// Resets the number of looks at one of a unit's sheaves.
fn forget(index: usize, cache: &Cache, place: usize) {
    let seen = SEEN[index].load(Acquire);
    word(seen, cache.main() + place).store(0, Relaxed);
}
