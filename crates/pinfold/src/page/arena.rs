//! The arenas: runs of granules for each node, and within a node for each size class.
//!
//! An arena has granules that are committed, in use or in its free runs, and takes more from its part of the reservation:
//!
//! * the mixed arena of a node has a part of its own, used from the start: `[first, top)` is committed;
//! * the arena of a class has the stripe of that class in each of its node's chunks, and takes chunk after chunk. Chunks
//!   are committed in their order, whole, whichever class comes first.

use super::aged::purge_aged;
use super::commit::commit;
use super::free_runs::FreeRuns;
use super::numa::{self, Ask};
use super::{
    CHUNK_GRANULES, GRANULE, LARGE, MAX_NODES, STRIPE_GRANULES, STRIPES, State, address_of, frame,
    index_of_run, ready, set_entry,
};
use super::{gave_back, init, took};
use crate::lock::{Guard, Lock};
use crate::sys;
use core::ptr::{NonNull, null_mut};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicPtr, AtomicUsize};

/// Granules that may stay dirty before some are purged at once: 1 % of the physical memory and at least 16 MiB, so that a
/// program that frees and allocates in waves does not fault its pages in again.
pub(super) fn dirty_most() -> usize {
    static MOST: AtomicUsize = AtomicUsize::new(0);
    match MOST.load(Relaxed) {
        0 => {
            let most = (sys::physical_memory() / 100).max(16 << 20) / GRANULE;
            MOST.store(most, Relaxed);
            most
        }
        most => most,
    }
}

/// Calls between two reads of the clock.
const TICK: u32 = 16;
/// Granules that a mixed arena commits at a time: at least 1 MiB, at most 64 MiB, an eighth of what there is.
const STEP_LEAST: u32 = (1 << 20) / GRANULE as u32;
const STEP_MOST: u32 = (64 << 20) / GRANULE as u32;

/// The arena that holds runs of any length and purpose; smaller numbers are classes.
const MIXED: usize = STRIPES;

/// An arena that has taken this many stripes, or as much in its mixed part, gets huge pages for what it takes further: beyond
/// 2 MiB, so that small programs stay small. Measured: allocating 10,000 objects of 512 bytes that other work has driven from
/// the caches takes 17 cycles an object with huge pages and 40 without.
const HUGE_FROM: u32 = 1;

pub(super) struct Arena {
    /// The first granule of the part.
    first: u32,
    /// What has been taken of the part so far: up to this granule, or for a class, this many chunks.
    top: u32,
    /// The end of the part, in the unit of `top`.
    end: u32,
    free: FreeRuns,
    calls: u32,
    now: u32,
}

pub(super) type Place = (usize, usize);

static ARENAS: [[Lock<Arena>; STRIPES + 1]; MAX_NODES] = [const {
    [const {
        Lock::new(Arena {
            first: 0,
            top: 0,
            end: 0,
            free: FreeRuns::new(),
            calls: 0,
            now: 0,
        })
    }; STRIPES + 1]
}; MAX_NODES];

/// How many chunks of each node are committed.
pub(super) static CHUNKS: [Lock<u32>; MAX_NODES] = [const { Lock::new(0) }; MAX_NODES];

/// Granules in dirty runs of all arenas.
static DIRTY: AtomicUsize = AtomicUsize::new(0);

/// Returns whether there are more dirty granules than [`dirty_most`]. A caller that sees true calls
/// [`relieve`].
fn too_much_dirty() -> bool {
    DIRTY.load(Relaxed) > dirty_most()
}

/// Purges free runs, of one arena after the other, until no more is dirty than may be, or no free run is.
fn relieve() {
    for _ in places() {
        let mut excess = DIRTY.load(Relaxed).saturating_sub(dirty_most());
        if excess == 0 {
            return;
        }
        let place = next_in_turn();
        if let Some(arena) = arena_at(place).lock_or_divert(super::is_lock_held) {
            drop(purge(arena, place, |free| {
                let run = (excess > 0).then(|| free.take_oldest(None)).flatten();
                run.inspect(|run| excess = excess.saturating_sub(run.1 as usize))
            }));
        }
    }
}

/// Bytes in runs that are one block each.
static LARGE_IN_USE: AtomicUsize = AtomicUsize::new(0);

/// Bytes in runs whose page map entry is [`LARGE`]: blocks of their own.
pub fn large_in_use() -> usize {
    LARGE_IN_USE.load(Relaxed)
}

/// Runs freed while the arena's lock could not be had: by a signal handler that interrupted the
/// holder, or while another thread forked. Each holds the address of the next in its first word.
static SET_ASIDE: AtomicPtr<u8> = AtomicPtr::new(null_mut());

/// Gives the arenas of every node their parts: `chunks` chunks, then `mixed` granules, for each node.
pub(super) fn divide(nodes: usize, chunks: u32, mixed: u32) {
    let striped = nodes as u32 * chunks * CHUNK_GRANULES;
    for (node, arenas) in ARENAS.iter().enumerate().take(nodes) {
        let node = node as u32;
        for (region, arena) in arenas.iter().enumerate() {
            let Some(mut arena) = arena.lock() else {
                continue;
            };
            if region == MIXED {
                arena.first = striped + node * mixed;
                arena.top = arena.first;
                arena.end = arena.first + mixed;
            } else {
                arena.first = node * chunks * CHUNK_GRANULES + region as u32 * STRIPE_GRANULES;
                arena.end = chunks;
            }
        }
    }
}

pub(super) fn arena_at((node, region): Place) -> &'static Lock<Arena> {
    &ARENAS[node][region]
}

pub(super) fn places() -> impl Iterator<Item = Place> {
    (0..crate::nodes::count()).flat_map(|node| (0..=STRIPES).map(move |region| (node, region)))
}

/// A run from [`alloc_run`].
#[derive(Clone, Copy, Debug)]
pub struct Run {
    /// Where it begins: a multiple of [`GRANULE`].
    pub start: NonNull<u8>,
    /// Whether it reads as zeroes.
    pub zeroed: bool,
}

/// A run of `granules` on `node`, or on another node when that one has no more, the nearest first; its first granule's page map
/// entry is `entry`, and with `whole` every granule's. With a `stripe`, from the class's stripes where they have room.
///
/// Takes the arena's lock; commits memory (a system call) when no free run fits. Returns `None` if
/// the system has no memory, in a signal handler that interrupted the arena, and while another
/// thread forks.
pub fn alloc_run(
    granules: usize,
    node: usize,
    entry: u16,
    whole: bool,
    stripe: Option<usize>,
) -> Option<Run> {
    init();
    let ask = Ask::only(node.min(crate::nodes::count() - 1));
    let run = |node| alloc_run_on(granules, ask.instead(node), entry, whole, stripe);
    if crate::nodes::count() == 1 {
        return run(0);
    }
    crate::nodes::fallback(ask.node).find_map(run)
}

/// As [`alloc_run`], of the asked node's memory or none. After [`init`].
pub(crate) fn alloc_run_on(
    granules: usize,
    ask: Ask,
    entry: u16,
    whole: bool,
    stripe: Option<usize>,
) -> Option<Run> {
    if !ready() {
        return None;
    }
    // No reservation is that large, and the lists of free runs have no place for such a length.
    let granules = u32::try_from(granules)
        .ok()
        .filter(|&granules| granules < 1 << 31)?;
    let node = ask.node;
    let stripe = stripe.filter(|&stripe| stripe < STRIPES && granules <= STRIPE_GRANULES);
    let striped = stripe.and_then(|stripe| alloc_at((node, stripe), granules));
    let run = striped.or_else(|| alloc_at((node, MIXED), granules))?;
    let head = index_of_run(run.start);
    let marked = if whole { granules } else { 1 };
    for index in head..head + marked {
        // SAFETY: the run is committed and ours.
        unsafe { (*frame(index)).head = head };
        set_entry(index, entry);
    }
    if entry == LARGE {
        LARGE_IN_USE.fetch_add(granules as usize * GRANULE, Relaxed);
    }
    numa::count(ask, granules as usize);
    Some(run)
}

fn alloc_at(place: Place, granules: u32) -> Option<Run> {
    let room = numa::has_room(place.0, granules as usize);
    let mut arena = arena_at(place).lock_or_divert(super::is_lock_held)?;
    arena.tick(place);
    let now = arena.now;
    let mut found = arena.free.take(granules, now);
    if found.is_none() && !arena.grow(place, granules) {
        // The addresses are used up, or the system has no more: join what is dirty with what is clean.
        arena = purge(arena, place, |free| free.take_oldest(None))?;
    }
    if found.is_none() {
        found = arena.free.take(granules, now);
    }
    let (head, clean) = found?;
    if clean && !room {
        arena.give(place, head, granules, State::Clean);
        return None;
    }
    // SAFETY: the run is committed, and nobody's but ours now.
    let run = unsafe { &mut *frame(head) };
    (run.head, run.granules) = (head, granules);
    drop(arena);
    if clean {
        numa::took_fresh(place.0, granules as usize);
        took(place.0, granules as usize * GRANULE);
    } else {
        DIRTY.fetch_sub(granules as usize, Relaxed);
    }
    NonNull::new(address_of(head)).map(|start| Run {
        start,
        zeroed: clean,
    })
}

/// Gives a run back; it may be given out again at once, and its memory goes back to the system later.
///
/// Takes the arena's lock; now and then it purges, which is a system call per run.
///
/// # Safety
///
/// `start` begins a run from [`alloc_run`] that nobody uses any more.
pub unsafe fn free_run(start: NonNull<u8>) {
    let head = index_of_run(start);
    // SAFETY: the caller's promise.
    let granules = unsafe { (*frame(head)).granules };
    if super::entry(start.as_ptr() as usize) == LARGE {
        LARGE_IN_USE.fetch_sub(granules as usize * GRANULE, Relaxed);
    }
    for index in head..head + granules {
        set_entry(index, 0);
    }
    let place = super::place_of(start.as_ptr() as usize);
    let Some(mut arena) = arena_at(place).lock_or_divert(super::is_lock_held) else {
        set_aside(start.as_ptr());
        return;
    };
    arena.give(place, head, granules, State::Dirty);
    arena.tick(place);
    let (calls, now) = (arena.calls, arena.now);
    drop(arena);
    if too_much_dirty() {
        relieve();
    } else if calls == 0 {
        purge_aged(place, now);
        purge_aged(next_in_turn(), now);
    }
}

/// Returns the arenas in turn, one at each call, so that active arenas purge those that are not
/// used any more.
fn next_in_turn() -> Place {
    static TURN: AtomicUsize = AtomicUsize::new(0);
    let turn = TURN.fetch_add(1, Relaxed) % ((STRIPES + 1) * crate::nodes::count());
    (turn / (STRIPES + 1), turn % (STRIPES + 1))
}

/// Purges the runs that `next` takes out of the free runs, without holding the lock meanwhile.
/// Returns the lock, or `None` if another thread began to fork and holds it now.
pub(super) fn purge(
    mut arena: Guard<'static, Arena>,
    place: Place,
    mut next: impl FnMut(&mut FreeRuns) -> Option<(u32, u32)>,
) -> Option<Guard<'static, Arena>> {
    while let Some((head, granules)) = next(&mut arena.free) {
        DIRTY.fetch_sub(granules as usize, Relaxed);
        drop(arena);
        let size = granules as usize * GRANULE;
        // SAFETY: the run is out of the lists: committed, and nobody's but ours.
        let clean = unsafe { sys::purge(address_of(head), size) };
        let Some(again) = arena_at(place).lock_or_divert(super::is_lock_held) else {
            set_aside(address_of(head));
            return None;
        };
        arena = again;
        if !clean {
            arena.give(place, head, granules, State::Dirty);
            break;
        }
        gave_back(place.0, size);
        numa::gave_back(place.0, size);
        arena.give(place, head, granules, State::Clean);
    }
    Some(arena)
}

impl Arena {
    fn give(&mut self, (_, region): Place, head: u32, granules: u32, state: State) {
        let bounds = if region == MIXED {
            (self.first, self.top)
        } else {
            // Neighbouring stripes are other arenas'.
            let start = head - head % STRIPE_GRANULES;
            (start, start + STRIPE_GRANULES)
        };
        if state == State::Dirty {
            DIRTY.fetch_add(granules as usize, Relaxed);
        }
        self.free.free(head, granules, state, bounds, self.now);
    }

    /// Looks at the clock every [`TICK`] calls, and takes back what was set aside.
    fn tick(&mut self, place: Place) {
        self.calls = (self.calls + 1) % TICK;
        if self.calls == 0 {
            self.now = sys::coarse_milliseconds() as u32;
        }
        self.take_back(place);
    }

    /// Takes back what was set aside of this arena.
    pub(super) fn take_back(&mut self, place: Place) {
        if SET_ASIDE.load(Relaxed).is_null() {
            return;
        }
        // Acquire pairs with the release in `set_aside`.
        let mut start = SET_ASIDE.swap(null_mut(), Acquire);
        while let Some(run) = NonNull::new(start) {
            // SAFETY: a run set aside holds the next one's address in its first word.
            start = unsafe { run.cast::<*mut u8>().read() };
            if super::place_of(run.as_ptr() as usize) == place {
                let head = index_of_run(run);
                // SAFETY: as above; its frame is as its owner left it.
                let granules = unsafe { (*frame(head)).granules };
                self.give(place, head, granules, State::Dirty);
            } else {
                set_aside(run.as_ptr());
            }
        }
    }

    /// Takes more of the arena's part, enough for a run of `granules`; false when that cannot be.
    fn grow(&mut self, place: Place, granules: u32) -> bool {
        if place.1 != MIXED {
            return self.grow_stripe(place);
        }
        let step = ((self.top - self.first) / 8).clamp(STEP_LEAST, STEP_MOST);
        [granules.max(step), granules]
            .into_iter()
            .any(|more| self.grow_by(place, more))
    }

    /// Takes the class's stripe of the next chunk.
    fn grow_stripe(&mut self, place: Place) -> bool {
        if self.top == self.end || !commit_chunk(place.0, self.top) {
            return false;
        }
        let head = self.first + self.top * CHUNK_GRANULES;
        if self.top >= HUGE_FROM {
            // SAFETY: the stripe is committed, and this arena's.
            unsafe { sys::prefer_huge(address_of(head), STRIPE_GRANULES as usize * GRANULE) };
        }
        self.top += 1;
        self.give(place, head, STRIPE_GRANULES, State::Clean);
        true
    }

    fn grow_by(&mut self, place: Place, more: u32) -> bool {
        if self.end - self.top < more || !commit(place.0, self.top, more) {
            return false;
        }
        let head = self.top;
        if head - self.first >= HUGE_FROM * STRIPE_GRANULES {
            // SAFETY: the granules are committed, and this arena's.
            unsafe { sys::prefer_huge(address_of(head), more as usize * GRANULE) };
        }
        self.top += more;
        self.give(place, head, more, State::Clean);
        true
    }
}

/// Makes sure that chunk `chunk` of `node` is committed; all before it are.
fn commit_chunk(node: usize, chunk: u32) -> bool {
    let Some(mut committed) = CHUNKS[node].lock() else {
        return false;
    };
    let node_first = node as u32 * super::chunks_per_node() * CHUNK_GRANULES;
    if chunk >= *committed {
        if !commit(node, node_first + chunk * CHUNK_GRANULES, CHUNK_GRANULES) {
            return false;
        }
        *committed = chunk + 1;
    }
    true
}

/// Keeps a run for the next caller that gets the lock.
fn set_aside(start: *mut u8) {
    let mut next = SET_ASIDE.load(Relaxed);
    loop {
        // SAFETY: the run is free and nobody else's.
        unsafe { start.cast::<*mut u8>().write(next) };
        // Release pairs with the acquire in `tick`: the link is seen.
        match SET_ASIDE.compare_exchange_weak(next, start, Release, Relaxed) {
            Ok(_) => return,
            Err(other) => next = other,
        }
    }
}

/// Takes the locks of all arenas for a fork.
pub(super) fn lock_for_fork() {
    places().for_each(|place| arena_at(place).lock_for_fork());
    CHUNKS.iter().for_each(Lock::lock_for_fork);
}

/// Gives back what [`lock_for_fork`] took, in the parent or in the child.
pub(super) fn unlock_after_fork() {
    CHUNKS.iter().for_each(Lock::unlock_after_fork);
    places().for_each(|place| arena_at(place).unlock_after_fork());
}
