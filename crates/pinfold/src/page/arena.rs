//! The arena: runs of granules for each node's part of the reservation.
//!
//! A node's part is used from its start: `[first, top)` is committed, `[top, end)` untouched. Committed granules are in
//! use or in the free runs.

use super::free_runs::FreeRuns;
use super::{
    Frame, GRANULE, HELD, LARGE, MAX_NODES, PRIVATE, State, address_of, frame, index_of_run, ready,
    set_entry,
};
use crate::lock::{Guard, Lock};
use crate::sys;
use core::ptr::{NonNull, null_mut};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicPtr, AtomicUsize};

/// Granules that may stay dirty at a node before the oldest are purged at once: 64 MiB, a few times what a second-level
/// cache holds, so that a program that frees and allocates in waves does not fault its pages in again.
const DIRTY_MOST: u32 = (64 << 20) / GRANULE as u32;
/// How long a free run stays dirty, in milliseconds. Peers: mimalloc 1 s, jemalloc 10 s.
const DIRTY_FOR: u32 = 1000;
/// Every how many calls the clock is looked at.
const TICK: u32 = 16;
/// Granules committed at a time: at least 1 MiB, at most 64 MiB, an eighth of what there is.
const STEP_LEAST: u32 = (1 << 20) / GRANULE as u32;
const STEP_MOST: u32 = (64 << 20) / GRANULE as u32;

struct Arena {
    first: u32,
    top: u32,
    end: u32,
    free: FreeRuns,
    calls: u32,
    now: u32,
}

/// Bytes in runs that are one block each.
static LARGE_IN_USE: AtomicUsize = AtomicUsize::new(0);

/// Bytes in runs whose page map entry is [`LARGE`]: blocks of their own.
pub fn large_in_use() -> usize {
    LARGE_IN_USE.load(Relaxed)
}

static ARENAS: [Lock<Arena>; MAX_NODES] = [const {
    Lock::new(Arena {
        first: 0,
        top: 0,
        end: 0,
        free: FreeRuns::new(),
        calls: 0,
        now: 0,
    })
}; MAX_NODES];

/// Runs freed by signal handlers that interrupted an arena's holder, linked through their first word.
static SET_ASIDE: AtomicPtr<u8> = AtomicPtr::new(null_mut());

/// Gives each node its part of `count` granules.
pub(super) fn divide(count: usize, nodes: usize) {
    let span = count / nodes;
    for (node, arena) in ARENAS.iter().enumerate().take(nodes) {
        if let Some(mut arena) = arena.lock() {
            arena.first = (node * span) as u32;
            arena.top = arena.first;
            arena.end = arena.first + span as u32;
        }
    }
}

/// A run from [`alloc_run`].
#[derive(Clone, Copy, Debug)]
pub struct Run {
    /// Where it begins: a multiple of [`GRANULE`].
    pub start: NonNull<u8>,
    /// Whether it reads as zeroes.
    pub zeroed: bool,
}

/// A run of `granules` on `node`, or on another node when that one has no more; its first granule's page map entry is
/// `entry`, and with `whole` every granule's.
///
/// Takes the node's lock; commits memory (a system call) when no free run fits. `None` when the system has no memory, or
/// in a signal handler that interrupted the arena.
pub fn alloc_run(granules: usize, node: usize, entry: u16, whole: bool) -> Option<Run> {
    if !ready() {
        return None;
    }
    let granules = u32::try_from(granules).ok()?;
    let nodes = crate::nodes::count();
    let run = (0..nodes).find_map(|step| alloc_on((node + step) % nodes, granules))?;
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
    Some(run)
}

fn alloc_on(node: usize, granules: u32) -> Option<Run> {
    let mut arena = ARENAS[node].lock()?;
    arena.tick(node);
    let now = arena.now;
    let mut found = arena.free.take(granules, now);
    if found.is_none() && !arena.grow(node, granules) {
        // The addresses are used up, or the system has no more: join what is dirty with what is clean.
        arena = purge(arena, node, |free| free.take_oldest(None));
    }
    if found.is_none() {
        found = arena.free.take(granules, now);
    }
    let (head, clean) = found?;
    // SAFETY: the run is committed, and nobody's but ours now.
    let run = unsafe { &mut *frame(head) };
    (run.head, run.granules) = (head, granules);
    drop(arena);
    if clean {
        HELD.take(granules as usize * GRANULE);
    }
    NonNull::new(address_of(head)).map(|start| Run {
        start,
        zeroed: clean,
    })
}

/// Gives a run back; it may be given out again at once, and its memory goes back to the system later.
///
/// Takes the node's lock; now and then it purges, which is a system call per run.
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
    let node = super::node_of(start.as_ptr() as usize);
    let Some(mut arena) = ARENAS[node].lock() else {
        set_aside(start.as_ptr());
        return;
    };
    arena.give(head, granules, State::Dirty);
    arena.tick(node);
    if arena.free.dirty_granules > DIRTY_MOST {
        let mut excess = arena.free.dirty_granules - DIRTY_MOST;
        drop(purge(arena, node, |free| {
            (excess > 0)
                .then(|| free.take_oldest(None))
                .flatten()
                .inspect(|run| {
                    excess = excess.saturating_sub(run.1);
                })
        }));
    } else if arena.calls == 0 {
        let until = arena.now.wrapping_sub(DIRTY_FOR);
        drop(purge(arena, node, |free| free.take_oldest(Some(until))));
    }
}

/// Gives all free memory of every node back to the system; returns how many bytes. A system call per free run.
pub fn trim() -> usize {
    let before = HELD.returned();
    for (node, arena) in ARENAS.iter().enumerate().take(crate::nodes::count()) {
        if let Some(arena) = arena.lock() {
            drop(purge(arena, node, |free| free.take_oldest(None)));
        }
    }
    (HELD.returned() - before) as usize
}

/// Bytes of the reservation committed so far.
pub fn committed() -> usize {
    let arenas = ARENAS.iter().take(crate::nodes::count());
    arenas
        .filter_map(Lock::lock)
        .map(|arena| (arena.top - arena.first) as usize * GRANULE)
        .sum()
}

/// Purges the runs that `next` takes out of the free runs, without holding the lock meanwhile, and returns the lock.
fn purge(
    mut arena: Guard<'static, Arena>,
    node: usize,
    mut next: impl FnMut(&mut FreeRuns) -> Option<(u32, u32)>,
) -> Guard<'static, Arena> {
    while let Some((head, granules)) = next(&mut arena.free) {
        drop(arena);
        let size = granules as usize * GRANULE;
        // SAFETY: the run is out of the lists: committed, and nobody's but ours.
        let clean = unsafe { sys::purge(address_of(head), size) };
        arena = loop {
            // The lock was held by this thread above, so it is not held by an interrupted frame of this thread.
            if let Some(arena) = ARENAS[node].lock() {
                break arena;
            }
        };
        if !clean {
            arena.give(head, granules, State::Dirty);
            break;
        }
        HELD.give_back(size);
        arena.give(head, granules, State::Clean);
    }
    arena
}

impl Arena {
    fn give(&mut self, head: u32, granules: u32, state: State) {
        let bounds = (self.first, self.top);
        self.free.free(head, granules, state, bounds, self.now);
    }

    /// Looks at the clock every [`TICK`] calls, and takes back what signal handlers have set aside.
    fn tick(&mut self, node: usize) {
        self.calls = (self.calls + 1) % TICK;
        if self.calls == 0 {
            self.now = sys::coarse_milliseconds() as u32;
        }
        if SET_ASIDE.load(Relaxed).is_null() {
            return;
        }
        // Acquire pairs with the release in `set_aside`.
        let mut start = SET_ASIDE.swap(null_mut(), Acquire);
        while let Some(run) = NonNull::new(start) {
            // SAFETY: a run set aside holds the next one's address in its first word.
            start = unsafe { run.cast::<*mut u8>().read() };
            if super::node_of(run.as_ptr() as usize) == node {
                let head = index_of_run(run);
                // SAFETY: as above; its frame is as its owner left it.
                let granules = unsafe { (*frame(head)).granules };
                self.give(head, granules, State::Dirty);
            } else {
                set_aside(run.as_ptr());
            }
        }
    }

    /// Commits more of the node's part, enough for a run of `granules`; false when that cannot be.
    fn grow(&mut self, node: usize, granules: u32) -> bool {
        let step = ((self.top - self.first) / 8).clamp(STEP_LEAST, STEP_MOST);
        [granules.max(step), granules]
            .into_iter()
            .any(|more| self.grow_by(node, more))
    }

    fn grow_by(&mut self, node: usize, more: u32) -> bool {
        if self.end - self.top < more {
            return false;
        }
        let size = more as usize * GRANULE;
        let start = address_of(self.top);
        // SAFETY: the granules lie in the node's part of the reservation, above what is committed.
        unsafe {
            if !commit_records(self.top, more) || !sys::commit(start, size) {
                return false;
            }
            if crate::nodes::count() > 1 {
                sys::prefer_node(start, size, crate::nodes::id(node));
            }
        }
        let head = self.top;
        self.top += more;
        self.give(head, more, State::Clean);
        true
    }
}

/// Commits the frames, private parts and map entries of granules; those that share a page with others are committed already or early.
///
/// # Safety
///
/// The granules lie in the reservation.
unsafe fn commit_records(first: u32, count: u32) -> bool {
    let page = sys::page_size();
    let commit = |start: usize, end: usize| {
        let start = start & !(page - 1);
        // SAFETY: whole pages of the reservation of frames or of the map.
        unsafe { sys::commit(start as *mut u8, end.next_multiple_of(page) - start) }
    };
    let entries = super::MAP.biased.load(Relaxed) + 2 * super::MAP.first.load(Relaxed);
    let (first, end) = (first as usize, (first + count) as usize);
    let frames = super::MAP.frames.load(Relaxed) as usize;
    let private = super::MAP.private.load(Relaxed) as usize;
    let frame = size_of::<Frame>();
    commit(frames + first * frame, frames + end * frame)
        && commit(private + first * PRIVATE, private + end * PRIVATE)
        && commit(entries + 2 * first, entries + 2 * end)
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

/// Locks every arena for `fork`; bit n says that node n's lock was taken.
pub(crate) fn fork_prepare() -> u64 {
    (0..crate::nodes::count())
        .filter(|&node| ARENAS[node].lock_for_fork())
        .fold(0, |taken, node| taken | 1 << node)
}

/// Unlocks what [`fork_prepare`] locked, in the parent or in the child.
///
/// # Safety
///
/// `taken` is what `fork_prepare` returned for this fork.
pub(crate) unsafe fn fork_child_or_parent(taken: u64) {
    for (node, arena) in ARENAS.iter().enumerate() {
        if taken >> node & 1 == 1 {
            // SAFETY: the caller's promise.
            unsafe { arena.unlock_after_fork() };
        }
    }
}
