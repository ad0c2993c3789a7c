//! Sheaves that stood idle on their CPU go back to their node.
//!
//! A *look* at a unit compares the words of its sheaves with what the look before saw. A sheaf
//! whose word is the same at [`LOOKS`] looks in a row has not been used, or stands by chance where
//! it stood; taking it does no harm then. There are two ways to take idle sheaves to the barn,
//! which gives their objects back later:
//!
//! * [`take_idle_here`] takes those of the CPU on which the thread runs, by critical sections. Slow
//!   paths, ticks in passing and the automatic thread do that. No other CPU is disturbed.
//! * [`take_idle_everywhere`] stops the units concerned for a moment. That interrupts a CPU if it
//!   runs a thread of this process just then; isolated CPUs are left alone. Only a shepherd that
//!   the program or its user asked for does that.
//!
//! Barns give back what was not needed for a while, and arenas what has been free for a while, also
//! in a program that allocates no more.

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

/// Looks at which a sheaf must stand still.
const LOOKS: u64 = 0b11;
/// How many more times a tick purges each node of a cache, at most.
const MORE: usize = 64;
/// Milliseconds between looks at a unit by threads that run on its CPU.
const BETWEEN_LOOKS: u32 = 450;
/// Less than this in idle sheaves is not worth an interrupt.
const WORTH: usize = 64 << 10;

/// For each unit, a block of the unit's size, which says what the looks saw. Its words stand at the
/// same offsets as the unit's:
///
/// * at a main sheaf's word, the word that allocations used at the last look;
/// * at the spare's word, the number of looks at which that word was the same;
/// * at the words of the deferred and the held sheaf, the word at the last look, with the number of
///   looks in its low bits.
static SEEN: [AtomicPtr<u8>; MAX_INDEX] = [const { AtomicPtr::new(null_mut()) }; MAX_INDEX];

/// The units that are stopped while idle sheaves are taken. Only the thread that holds [`STOPPING`]
/// uses this set. On the stack, the set would take 1 KiB.
static CHOSEN: [AtomicBool; MAX_INDEX] = [const { AtomicBool::new(false) }; MAX_INDEX];

/// What every tick calls.
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
            // Bit by bit: the node's lock is free in between.
            let more = (0..MORE).take_while(|_| node.purge_more(cache, PERIODS));
            more.for_each(drop);
        });
    });
    page::purge_all_aged();
    page::budget::reclaimed();
}

/// Gives everything free back to the system. Interrupts the CPUs that run threads of this process,
/// unless some CPUs are isolated: then what other CPUs have cached stays.
fn give_everything() {
    if facts::any_quiet() || super::shrink_all().is_err() {
        reclaim();
    }
    page::budget::reclaimed();
}

/// Takes the idle sheaves of the CPU on which this thread runs, without stopping anything: each
/// word is emptied by one critical section, which fails if the thread has moved to another CPU, or
/// the sheaf has been used.
///
/// Looks at most once in [`BETWEEN_LOOKS`]; until then it costs one read of a clock that needs no
/// system call.
pub(super) fn take_idle_here() {
    /// When a unit was looked at last, in milliseconds, wrapping. Units that share a place are
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
    // While this thread has a sheaf of a cache in hand, that cache must neither be drained, nor
    // destroyed and its number be given to another cache: `drain` and `retire` take this lock too.
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
/// stopping anything. Empty sheaves stay.
pub(super) fn take_all_here() {
    let unit = UNITS.unit(pinfold_rseq::current());
    if unit.is_null() {
        return;
    }
    // For the same reason as in `take_idle_here`.
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

/// Takes the sheaf at `place` of a cache's words in the current CPU's unit, which is expected to be
/// `unit`: to the barn, or if it holds deferred frees, to the sheaves that wait for readers. Leaves
/// the sheaf where it is if the thread has moved, or the sheaf has been used.
fn take_here(cache: &'static Cache, unit: *mut u8, place: usize) {
    let offset = cache.main() + place;
    let seen = word(unit, offset).load(Relaxed);
    // SAFETY: the offset lies in the unit.
    if seen == 0 || !unsafe { UNITS.store_if_equal(offset, seen, 0) } {
        return;
    }
    // SAFETY: the critical section took the word out, so the sheaf is this thread's.
    match unsafe { Sheaf::from_word(seen) } {
        Some(sheaf) if place == DEFERRED => cache.seal(sheaf),
        Some(sheaf) => cache.put(cache.here(), sheaf),
        None => {}
    }
}

/// Takes the idle sheaves of all CPUs that may be interrupted.
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
    // Another thread, or the frame that this handler interrupted, may be stopping units. This
    // thread then leaves without waiting, because it may be in a signal handler's slow path.
    let Some(_stopping) = STOPPING.try_lock() else {
        return;
    };
    // Made once and kept: each unit that is stopped has to be resumed, whatever changes meanwhile.
    (0..possible()).for_each(|index| CHOSEN[index].store(false, Relaxed));
    units().for_each(|index| CHOSEN[index].store(any_idle(index), Relaxed));
    let chosen = || (0..possible()).filter(|&index| CHOSEN[index].load(Relaxed));
    chosen().for_each(|index| UNITS.stop(index));
    let fenced = match backend() {
        Backend::Rseq(Index::Cpu) => chosen().all(|index| fence_index(index).is_ok()),
        _ => fence().is_ok(),
    };
    for index in chosen() {
        // On atomics this may be a handler that has interrupted an operation: then nothing is taken.
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
    /// `None` when none may be: concurrency ids name no CPU, so where some are isolated all are spared.
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
        // Two ticks at once: one block is lost, once for each unit.
        Err(theirs) => Some(theirs),
    }
}

/// A word of a unit, or of what was seen of it.
pub(super) fn word<'u>(block: *mut u8, offset: usize) -> &'u AtomicU64 {
    // SAFETY: units and their blocks live for ever, and offsets of caches lie in them.
    unsafe { &*block.add(offset).cast() }
}

/// Looks at a unit's sheaves; returns how many bytes may lie in those that stand idle.
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

/// As [`look`], at a unit's sheaf for deferred frees, or for what was freed to a hardened cache.
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

/// Takes the idle sheaves of a stopped unit, and the spares behind them, to the barn.
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
