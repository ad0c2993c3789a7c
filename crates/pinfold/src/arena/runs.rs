//! The arena of each node: hands out runs of granules, and takes them back.
//!
//! A free run is dirty, clean or absent ([`State`]). To serve a caller, the arena takes the first
//! of these:
//!
//! 1. a dirty run, which costs no page faults, or else one that a CPU has parked (`parked`);
//! 2. for 1 MiB or more: a shorter dirty run, and the free granules behind it (`take_mixed`);
//! 3. a clean run;
//! 4. the beginning of an absent run, which it maps (`map_front`);
//! 5. the beginning of a new region;
//! 6. if the system has no more memory: a clean run, after all dirty runs were purged.
//!
//! Among the runs of one state, the arena takes a short one that fits. Among runs of that length,
//! it takes the run at the lowest address ([`bins`](super::bins)). So high addresses become free.
//! `FreeRuns::take` decides where in the free run the new run begins. `pageblocks` decides whether
//! the fresh memory of a long block gets huge pages.
//!
//! The lock of the node's arena protects its free runs and their frames. The arena maps and unmaps
//! under the lock. It purges a run without the lock, because a purge takes long. During the purge,
//! the run is not among the free runs. A thread that frees a run, but cannot take the lock, sets
//! the run aside. A later holder of the lock takes the run back.

use super::free_runs::FreeRuns;
use super::numa::{self, NodeRequest};
use super::parked::{self, Parked};
use super::purge::{PIECE, gives_back_at_once, purge_aged, purge_all, relieve};
use super::window;
use super::{
    COLOURED, GRANULE, LARGE, MAX_NODES, MAX_RUN, Purpose, REGION_FIRST, REGION_GRANULES, State,
    address_of, budget, frame, held, huge_pages, index_of, index_of_run, init, kept, pageblocks,
    set_entry, took,
};
use crate::lock::{Llist, Lock, Rank, Word, chain};
use crate::sys::{self, Mapped};
use crate::{sanitizer, spared};
use core::ptr::NonNull;
use core::sync::atomic::AtomicU64;

/// Once in this many freed runs, `give_back` looks whether a period is over, and at parked runs.
const TICK: u32 = 16;
/// At a time, the arena maps at least an eighth of what it has mapped already, within these bounds.
const MIN_STEP: u32 = (256 << 10) / GRANULE as u32;
const MAX_STEP: u32 = huge_pages::HUGE_PAGE;
/// The shortest run that may begin with a shorter dirty run: 1 MiB. The page faults of shorter runs
/// cost little.
const MIN_MIXED: u32 = (1 << 20) / GRANULE as u32;
/// Maximum number of absent runs that `grow` tries. A try fails if other code has mapped memory
/// there.
const TRIES: usize = 16;

pub(super) struct Arena {
    pub(super) free: FreeRuns,
    /// Granules that are mapped.
    pub(super) mapped: u32,
    calls: u32,
    pub(super) now: u32,
}

static ARENAS: [Lock<Arena>; MAX_NODES] = [const {
    Lock::new(
        Rank::Arenas,
        Arena {
            free: FreeRuns::new(),
            mapped: 0,
            calls: 0,
            now: 0,
        },
    )
}; MAX_NODES];

/// Runs freed by threads that could not take the arena's lock, in a signal handler or during a
/// fork. Each run holds the address of the next run in its first word.
static SET_ASIDE: Llist = Llist::new(AtomicU64::new(0));

pub(super) fn arena_of(node: usize) -> &'static Lock<Arena> {
    &ARENAS[node]
}

/// A run from [`alloc_run`].
#[derive(Clone, Copy, Debug)]
pub struct Run {
    /// Where the run begins: a multiple of [`GRANULE`].
    pub start: NonNull<u8>,
    /// Whether the run reads as zeroes.
    pub zeroed: bool,
}

/// Allocates a run of `granules` on `node`, or else on the nearest other node that has memory. Sets
/// the page map's entry of the first granule to `entry`, or of every granule if `whole` is true.
///
/// Takes the arena's lock, and maps memory by a system call if no free run fits. May then give some
/// free memory back too, if much is kept. Returns `None` if the run would be longer than a region,
/// if the system has no memory or a limit is near, in a signal handler that may not wait for the
/// lock, and while another thread forks.
pub fn alloc_run(granules: usize, node: usize, entry: u16, whole: bool) -> Option<Run> {
    alloc_at_multiple(granules, 1, node, (entry, whole), Purpose::Other)
}

/// Allocates a run as [`alloc_run`] does, at a multiple of `align` granules, a power of two.
pub(super) fn alloc_at_multiple(
    granules: usize,
    align: u32,
    node: usize,
    (entry, whole): (u16, bool),
    purpose: Purpose,
) -> Option<Run> {
    init();
    let request = NodeRequest::only(node.min(crate::nodes::count() - 1));
    let run = |node| {
        alloc_marked(
            granules,
            align,
            request.instead(node),
            (entry, whole),
            purpose,
        )
    };
    if crate::nodes::count() == 1 {
        return run(0);
    }
    crate::nodes::fallback(request.node).find_map(run)
}

/// Allocates a run as [`alloc_run`] does, but on the node of `request` only. The caller has called
/// [`init`].
pub(crate) fn alloc_run_on(
    granules: usize,
    request: NodeRequest,
    entry: u16,
    whole: bool,
    purpose: Purpose,
) -> Option<Run> {
    alloc_marked(granules, 1, request, (entry, whole), purpose)
}

/// Allocates a run as [`alloc_run_on`] does, at a multiple of `align` granules.
fn alloc_marked(
    granules: usize,
    align: u32,
    request: NodeRequest,
    (entry, whole): (u16, bool),
    purpose: Purpose,
) -> Option<Run> {
    let granules = u32::try_from(granules)
        .ok()
        .filter(|&granules| granules > 0 && granules.saturating_add(align - 1) <= MAX_RUN)?;
    if !super::is_open() {
        super::register_fork();
    }
    let run = alloc_at(request.node, granules, align, purpose)?;
    if run.zeroed && kept::excess() > 0 {
        // Fresh memory serves what dirty memory could not.
        relieve(granules);
    }
    let head = index_of_run(run.start);
    let purpose = match purpose {
        Purpose::LongBlock if !run.zeroed => Purpose::Other,
        _ => purpose,
    };
    // SAFETY: `alloc_at` gave the run to this thread alone.
    unsafe { (*frame(head)).purpose = purpose };
    if purpose == Purpose::SmallObjects {
        kept::small_more(granules as usize);
    }
    let marked = if whole { granules } else { 1 };
    for index in head..head + marked {
        // SAFETY: `alloc_at` gave the run to this thread alone.
        unsafe { (*frame(index)).head = head };
        set_entry(index, entry);
    }
    if matches!(entry, LARGE | COLOURED) {
        kept::large_more(granules as usize);
    }
    numa::count(request, granules as usize);
    sanitizer::took_memory();
    Some(run)
}

/// Allocates a run on `node`, at a multiple of `align` granules. Takes fresh memory from a dense
/// region if the purpose is small objects that should have huge pages, or else from a plain one. If
/// the system has no more memory, takes what is left of either kind.
fn alloc_at(node: usize, granules: u32, align: u32, purpose: Purpose) -> Option<Run> {
    let dense = purpose == Purpose::SmallObjects && huge_pages::are_wanted_for_slabs();
    let room = numa::has_room(node, granules as usize);
    let mut arena = arena_of(node).lock_or_divert()?;
    arena.take_back(node);
    let dirty = arena.take_dirty(node, granules, align, dense);
    let mut found = dirty.map(|head| (head, 0));
    if found.is_none() {
        if !room || budget::near(held() as usize, granules as usize * GRANULE) {
            return None;
        }
        if align == 1 && granules >= MIN_MIXED {
            let is_long = purpose == Purpose::LongBlock;
            found = arena.take_mixed(node, granules, is_long);
        }
    }
    if found.is_none() {
        let mut head = arena.free.take(State::Clean, granules, align, dense);
        if head.is_none() && !arena.grow(node, granules + align - 1, dense) {
            // The system has no more memory. A purged run may join with clean runs and be long
            // enough.
            arena = purge_all(arena, node)?;
        }
        if head.is_none() {
            let free = &mut arena.free;
            head = free
                .take(State::Clean, granules, align, dense)
                .or_else(|| free.take(State::Clean, granules, align, !dense));
        }
        found = head.map(|head| (head, granules));
    }
    let Some((head, clean)) = found else {
        budget::refused();
        return None;
    };
    if clean == granules && purpose == Purpose::LongBlock {
        pageblocks::prefer(head, granules);
    }
    // SAFETY: the run was taken out of the free runs, so only this thread uses its frame.
    let run = unsafe { &mut *frame(head) };
    (run.head, run.granules) = (head, granules as u16);
    arena.hand_out(node, granules, clean);
    drop(arena);
    NonNull::new(address_of(head)).map(|start| Run {
        start,
        zeroed: clean == granules,
    })
}

/// Frees a run. It may be handed out again at once. Its memory goes back to the system later.
///
/// Takes the arena's lock. Some calls also purge, which takes a system call for each run.
///
/// # Safety
///
/// `start` begins a run from [`alloc_run`], and no thread uses the run any more.
pub unsafe fn free_run(start: NonNull<u8>) {
    let head = index_of_run(start);
    // SAFETY: the caller promises that `start` begins a run. Its first frame has its length.
    let granules = u32::from(unsafe { (*frame(head)).granules });
    let entry = super::entry(start.as_ptr() as usize);
    let marked = if matches!(entry, LARGE | COLOURED) {
        kept::large_less(granules as usize);
        1
    } else {
        // SAFETY: the caller promises that `start` begins a run, which no other thread uses.
        if unsafe { (*frame(head)).purpose } == Purpose::SmallObjects {
            kept::small_less(granules as usize);
        }
        granules
    };
    (head..head + marked).for_each(|index| set_entry(index, 0));
    give_back(head, granules);
}

/// Gives granules that are not part of a block any more back to their arena, as a dirty run.
pub(super) fn give_back(head: u32, granules: u32) {
    let node = window::node_of(address_of(head) as usize);
    let Some(mut arena) = arena_of(node).lock_or_divert() else {
        // SAFETY: the caller passed ownership of the granules, so no other thread uses them.
        // `take_back` reads the length from the first frame.
        unsafe { (*frame(head)).granules = granules as u16 };
        set_aside(address_of(head));
        return;
    };
    arena.tick();
    arena.take_back(node);
    arena.take_in(node, head, granules);
    let now = arena.now;
    if arena.calls == 0 {
        kept::begin_period(now);
        if !spared::any() {
            arena.take_parked(node, |_| true);
        }
    }
    if kept::excess() > 0 {
        drop(arena);
        relieve(granules);
    } else {
        let most = match gives_back_at_once() {
            true => u32::MAX,
            false => PIECE,
        };
        purge_aged(arena, node, now, most);
    }
}

impl Arena {
    /// Counts `granules` as in use. `clean` of them also become held memory. The rest no longer
    /// count as dirty.
    pub(super) fn hand_out(&mut self, node: usize, granules: u32, clean: u32) {
        kept::hand_out(node, granules as usize, clean as usize);
        if clean > 0 {
            numa::took_fresh(node, clean as usize);
            took(node, clean as usize * GRANULE);
        }
    }

    /// Takes back granules that were in use, and makes them a dirty run.
    pub(super) fn take_in(&mut self, node: usize, head: u32, granules: u32) {
        kept::use_less(node, granules as usize);
        kept::more_dirty(node, granules as usize);
        self.free.free(head, granules, State::Dirty, self.now);
    }

    /// Notes that granules of a free run are not mapped any more.
    pub(super) fn unmapped(&mut self, node: usize, granules: u32) {
        self.mapped -= granules;
        super::unmapped(node, granules as usize * GRANULE);
    }

    /// Reads the clock, without a system call, and counts the call.
    fn tick(&mut self) {
        self.calls = (self.calls + 1) % TICK;
        self.now = sys::coarse_milliseconds() as u32;
    }

    /// Takes back the runs of this arena that were set aside.
    pub(super) fn take_back(&mut self, node: usize) {
        if SET_ASIDE.is_empty() {
            return;
        }
        // SAFETY: this thread took the run off the list, so no other thread uses it. `set_aside`
        // has stored the link.
        let next = |run: u64| unsafe { *(run as *const u64) };
        for run in chain(SET_ASIDE.del_all(), next) {
            if window::node_of(run as usize) == node {
                let head = index_of(run as usize);
                // SAFETY: the run came off the list, so only this thread uses its frame.
                let granules = u32::from(unsafe { (*frame(head)).granules });
                self.take_in(node, head, granules);
            } else {
                set_aside(run as *mut u8);
            }
        }
    }

    /// Takes a dirty run, or else one that a CPU has parked. Not inlined, so that the frame of the
    /// caller, which is on the deepest chain of calls, stays small.
    #[inline(never)]
    fn take_dirty(&mut self, node: usize, granules: u32, align: u32, dense: bool) -> Option<u32> {
        let take = |free: &mut FreeRuns| free.take(State::Dirty, granules, align, dense);
        take(&mut self.free).or_else(|| {
            self.take_parked(node, |_| true)
                .then(|| take(&mut self.free))
                .flatten()
        })
    }

    /// Takes the runs of this arena that CPUs have parked and that `is_wanted` accepts. Returns
    /// whether there was one. They count as dirty from now on, because nothing says how long they
    /// were parked.
    pub(super) fn take_parked(&mut self, node: usize, is_wanted: impl Fn(Parked) -> bool) -> bool {
        let mut any = false;
        parked::take_all(node, is_wanted, |run| {
            self.now = sys::coarse_milliseconds() as u32;
            kept::large_less(run.granules as usize);
            self.take_in(node, run.head, run.granules);
            any = true;
        });
        any
    }

    /// Maps memory, so that there is a clean run of `granules` in a region that is `dense` or not.
    /// Returns false if it fails.
    fn grow(&mut self, node: usize, granules: u32, dense: bool) -> bool {
        for _ in 0..TRIES {
            let absent = self.free.find(State::Absent, granules, dense);
            let Some(head) = absent.or_else(|| self.add_region(node, dense)) else {
                return false;
            };
            // The mapped granules join the clean run before them, so only the rest is needed. At
            // least one is mapped, because `take` may have overlooked a clean run that is long
            // enough.
            let before = self.free.clean_before(head);
            let needed = granules.saturating_sub(before).max(1);
            match self.map_front(node, head, needed) {
                Mapped::Done => return true,
                Mapped::NoMemory => return false,
                Mapped::Taken => {}
            }
        }
        false
    }

    /// Maps at least `needed` granules of the absent run `head`, from its beginning on, as a clean
    /// run.
    pub(super) fn map_front(&mut self, node: usize, head: u32, needed: u32) -> Mapped {
        let Some((State::Absent, whole)) = self.free.run_at(head) else {
            return Mapped::Taken;
        };
        let step = match window::is_dense(head) {
            true => MAX_STEP,
            false => (self.mapped / 8).clamp(MIN_STEP, MAX_STEP),
        };
        let mut end = head + needed.max(step);
        if step == MAX_STEP {
            // Ends at a multiple of 2 MiB, so that a huge page can end there.
            end = end / MAX_STEP * MAX_STEP;
        }
        let more = needed.max(end.saturating_sub(head));
        for more in [more.min(whole), needed] {
            let mapped = window::map_granules(node, head, more);
            match mapped {
                Mapped::Done => {
                    self.free.take_front(head, more);
                    self.free.free(head, more, State::Clean, 0);
                    self.mapped += more;
                    super::mapped(node, more as usize * GRANULE);
                    return mapped;
                }
                Mapped::Taken if more == needed => {
                    // Other code of the process has mapped something here. The arena gives up the
                    // run.
                    self.free.take_front(head, whole);
                    return mapped;
                }
                _ => {}
            }
        }
        Mapped::NoMemory
    }

    /// Takes exactly `granules` from `index` on, for a block, which may get huge pages if it is
    /// long. They may lie in several free runs. Maps absent ones. Returns how many were not dirty,
    /// or `None` if the arena cannot take them.
    pub(super) fn take_at(
        &mut self,
        node: usize,
        index: u32,
        granules: u32,
        is_long: bool,
    ) -> Option<u32> {
        while let Some((head, needed)) = self.free.absent_part(index, granules)? {
            // Mapping makes a clean run, or lengthens one, so this loop looks again.
            if !matches!(self.map_front(node, head, needed), Mapped::Done) {
                return None;
            }
        }
        let (mut next, mut clean) = (index, 0);
        while next < index + granules {
            // The granules before this one were taken, so a free run begins here.
            let (state, length) = self.free.run_at(next)?;
            let part = length.min(index + granules - next);
            self.free.take_front(next, part);
            if state == State::Clean {
                if is_long {
                    pageblocks::prefer(next, part);
                }
                clean += part;
            }
            next += part;
        }
        Some(clean)
    }

    /// Takes `granules` that begin with a shorter dirty run, so that only the granules behind this
    /// run cost page faults. Chooses the longest of the runs that became dirty last. Returns the
    /// first granule, and how many were not dirty. Returns `None` if the dirty run has less than
    /// half of the granules, or if the granules behind it cannot be taken.
    pub(super) fn take_mixed(
        &mut self,
        node: usize,
        granules: u32,
        is_long: bool,
    ) -> Option<(u32, u32)> {
        let head = self.free.longest_of_newest()?;
        let (_, length) = self.free.run_at(head)?;
        let clean =
            (length >= granules / 2).then(|| self.take_at(node, head, granules, is_long))??;
        Some((head, clean))
    }

    /// Adds a region, a dense one if `dense` is true, all of it absent. Returns the first granule
    /// of its run.
    pub(super) fn add_region(&mut self, node: usize, dense: bool) -> Option<u32> {
        let head = window::make_region(node, dense)? + REGION_FIRST;
        let granules = REGION_GRANULES as u32 - REGION_FIRST - 1;
        // No neighbour is free: a region's first and last granules never are. They are not looked
        // at, because a page that is read before it is written takes two page faults, and the
        // second one interrupts all CPUs of the process.
        self.free.insert(head, granules, State::Absent);
        Some(head)
    }
}

/// Sets a run aside for a later holder of the arena's lock.
pub(super) fn set_aside(start: *mut u8) {
    // SAFETY: this thread frees the run, or took it off the list, so no other thread uses it.
    let link = |next| unsafe { start.cast::<u64>().write(next) };
    SET_ASIDE.add(start as u64, link);
}

/// Calls `visit` with the words of all arenas' locks, for a fork.
pub(super) fn visit_locks(visit: &mut dyn FnMut(&Word)) {
    ARENAS.iter().for_each(|arena| visit(arena.word()));
}
