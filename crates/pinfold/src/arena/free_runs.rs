//! The free runs of one node: by state and length, and the dirty ones by age.
//!
//! All state is in [`FreeRuns`] and in the runs' frames. The lock of the node's arena protects
//! both, and the caller of each method holds it.
//!
//! A free run's first frame has its length and state, and its last frame has its state and where
//! the run begins. So [`FreeRuns::free`] finds a free neighbour on each side by reading one frame.

use super::bins::{Bins, LOOK_AT, NIL};
use super::huge_pages::{self, HUGE_PAGE};
use super::{Frame, State, frame, pageblocks, window};

/// The longest run that begins at a multiple of its own length, in granules: 512 KiB.
const NATURAL_MOST: u32 = 8;

/// Returns the alignment, in granules, that a run of `granules` gets if the free run has room for
/// it. Many programs touch only the first page of each block. If blocks of one size began at
/// changing granules, more pages would become resident each time the blocks are replaced.
fn natural(granules: u32) -> u32 {
    match granules {
        1..=NATURAL_MOST if granules.is_power_of_two() => granules,
        _ => 1,
    }
}

/// The free runs of a node.
pub(super) struct FreeRuns {
    /// The dirty runs. Their memory is resident, so they serve any caller.
    dirty: Bins,
    /// The clean and the absent runs in plain regions, and those in dense regions (`huge_pages`).
    fresh: [[Bins; 2]; 2],
    /// The ends of the list of dirty runs by age.
    oldest: u32,
    newest: u32,
}

/// Returns the frame of granule `index`, for reading and writing.
unsafe fn at<'f>(index: u32) -> &'f mut Frame {
    // SAFETY: the caller promises that the granule lies in a region, so the granule has a frame.
    // The caller holds the lock that protects the frame, or owns the run.
    unsafe { &mut *frame(index) }
}

/// Returns the state of granule `index`. Makes no reference to the frame, because the granule may
/// lie in a run in use, whose holder may have a reference to the same frame.
unsafe fn state_of(index: u32) -> State {
    // SAFETY: the caller promises that the granule lies in a region, so the granule has a frame.
    // The holder of a run in use does not change the state of its first and last frame.
    unsafe { (*frame(index)).state }
}

impl FreeRuns {
    pub(super) const fn new() -> Self {
        FreeRuns {
            dirty: Bins::new(),
            fresh: [const { [const { Bins::new() }; 2] }; 2],
            oldest: NIL,
            newest: NIL,
        }
    }

    /// Returns the bins for runs of `state`. Dirty runs have one set of bins. Clean and absent runs
    /// have one set for dense regions and one for plain regions; `dense` chooses.
    fn bins(&mut self, state: State, dense: bool) -> &mut Bins {
        match state {
            State::Dirty => &mut self.dirty,
            _ => &mut self.fresh[usize::from(dense)][usize::from(state == State::Absent)],
        }
    }

    /// Writes a run's first and last frame, and puts it into its bin. The caller knows that no
    /// neighbour is free in the same state, and links a dirty run into the list by age.
    pub(super) fn insert(&mut self, head: u32, granules: u32, state: State) {
        debug_assert!(granules > 0 && granules <= u32::from(u16::MAX));
        // SAFETY: the run lies in a region, no caller of the arena has it, and the lock is held.
        unsafe {
            let run = at(head);
            (run.head, run.granules, run.state) = (head, granules as u16, state);
            let last = at(head + granules - 1);
            (last.head, last.state) = (head, state);
            self.bins(state, window::is_dense(head)).insert(head);
        }
    }

    /// Takes a run out of its bin, but not out of the list by age. Returns its length.
    fn remove(&mut self, head: u32) -> u32 {
        // SAFETY: the lock is held. A free run is in the bins of its state, and its frames are the
        // arena's.
        unsafe {
            let (granules, state) = (u32::from(at(head).granules), at(head).state);
            debug_assert!(state != State::Busy && state == at(head + granules - 1).state);
            debug_assert_eq!(head, at(head + granules - 1).head);
            self.bins(state, window::is_dense(head)).remove(head);
            at(head).state = State::Busy;
            at(head + granules - 1).state = State::Busy;
            granules
        }
    }

    /// Frees `granules` from `head` on, joined with free neighbours of the same state. Returns
    /// where the run now begins.
    ///
    /// A dirty run that is joined with a larger one gets the larger one's age. So memory that stays
    /// unused ages, even if pieces at its edges are taken and come back.
    pub(super) fn free(&mut self, head: u32, granules: u32, state: State, now: u32) -> u32 {
        let (mut start, mut end) = (head, head + granules);
        debug_assert!(granules > 0 && state != State::Busy);
        // SAFETY: the granules lie in a region, because the caller had this run.
        debug_assert!(unsafe { state_of(head) == State::Busy && state_of(end - 1) == State::Busy });
        // The length of the largest part, and the neighbour that is this part. `NIL` stands for the
        // run that is freed.
        let (mut largest, mut elder) = (granules, NIL);
        // SAFETY: the lock is held. A region's first and last granules are never free, so the
        // frames before and behind the run are in the same region.
        let neighbours = unsafe {
            let before = (state_of(start - 1) == state).then(|| at(start - 1).head);
            [before, (state_of(end) == state).then_some(end)]
        };
        for neighbour in neighbours.into_iter().flatten() {
            let length = self.remove(neighbour);
            start = start.min(neighbour);
            end = end.max(neighbour + length);
            if state == State::Dirty {
                let younger = if length > largest {
                    largest = length;
                    core::mem::replace(&mut elder, neighbour)
                } else {
                    neighbour
                };
                if younger != NIL {
                    self.unlink_age(younger);
                }
            }
        }
        self.insert(start, end - start, state);
        if state == State::Dirty {
            if elder == NIL {
                self.link_newest(start, now);
            } else {
                self.rename(elder, start);
            }
        }
        start
    }

    /// Takes exactly `granules` of a free run of `state`, from a multiple of `align` on. A clean
    /// run is in a dense region if `dense` is true, or else in a plain one. Returns the first
    /// granule.
    ///
    /// Takes a single granule from the end of a dirty run, because most single granules are slabs
    /// of small objects, which use all their pages. So the beginning of the run stays for larger
    /// blocks. If a larger block uses only some of its pages, the next block at the same place
    /// finds these pages resident.
    pub(super) fn take(
        &mut self,
        state: State,
        granules: u32,
        align: u32,
        dense: bool,
    ) -> Option<u32> {
        let mut head = self.find(state, granules, dense)?;
        let mut first = match (state, granules, align) {
            (State::Dirty, 1, 1) => self.end_of(head) - 1,
            _ => head.next_multiple_of(align.max(natural(granules))),
        };
        if first + granules > self.end_of(head) {
            head = self.find(state, granules + align - 1, dense)?;
            first = head.next_multiple_of(align);
        }
        self.take_part(head, first, granules);
        Some(first)
    }

    /// Returns the free run of `state` from which the arena should take `granules`. A clean or
    /// absent run is in a dense region if `dense` is true, or else in a plain one.
    pub(super) fn find(&mut self, state: State, granules: u32, dense: bool) -> Option<u32> {
        // SAFETY: the caller holds the lock of the node's arena.
        unsafe { self.bins(state, dense).find(granules) }
    }

    /// Takes the first `granules` of the free run `head`. The rest stays a free run.
    pub(super) fn take_front(&mut self, head: u32, granules: u32) {
        self.take_part(head, head, granules);
    }

    /// Takes `granules` of the free run `head`, from granule `first` on. The rest stays free,
    /// before and behind them, and keeps its age.
    fn take_part(&mut self, head: u32, first: u32, granules: u32) {
        // SAFETY: the run is free, and the lock is held.
        let state = unsafe { at(head).state };
        let (end, rest) = (head + self.remove(head), first + granules);
        debug_assert!(granules > 0 && first >= head && rest <= end);
        if first > head {
            self.insert(head, first - head, state);
        }
        if end > rest {
            self.insert(rest, end - rest, state);
        }
        if state == State::Dirty {
            match (first > head, end > rest) {
                (true, true) => self.link_behind(head, rest),
                (true, false) => {}
                (false, true) => self.rename(head, rest),
                (false, false) => self.unlink_age(head),
            }
        }
        // These frames may still have the states of free runs that once began or ended there, so
        // they are set.
        // SAFETY: the granules were taken from a free run above, and the lock is held.
        unsafe {
            at(first).state = State::Busy;
            at(rest - 1).state = State::Busy;
        }
    }

    /// Returns the granule behind the free run `head`.
    fn end_of(&self, head: u32) -> u32 {
        // SAFETY: the run is free, and the lock is held.
        head + u32::from(unsafe { at(head) }.granules)
    }

    /// Returns the longest of the [`LOOK_AT`] runs that became dirty last.
    pub(super) fn longest_of_newest(&self) -> Option<u32> {
        let mut next = self.newest;
        let newest = core::iter::from_fn(|| {
            let head = (next != NIL).then_some(next)?;
            // SAFETY: the run is in the list by age, and the lock is held.
            next = unsafe { at(head).older };
            Some(head)
        });
        let length = |&head: &u32| self.end_of(head) - head;
        newest.take(LOOK_AT).max_by_key(length)
    }

    /// Looks for the first absent part among the `granules` from `index` on. A run, free or in use,
    /// begins at `index`. Returns where the part begins and its length, or `Some(None)` if all
    /// granules are mapped. Returns `None` if the granules cannot serve a block: some are in use,
    /// or are fresh memory of a dense region.
    pub(super) fn absent_part(&self, index: u32, granules: u32) -> Option<Option<(u32, u32)>> {
        let (mut next, end) = (index, index + granules);
        let mut absent = None;
        while next < end {
            let (state, length) = self.run_at(next)?;
            if state != State::Dirty && window::is_dense(next) {
                return None;
            }
            if state == State::Absent && absent.is_none() {
                absent = Some((next, length.min(end - next)));
            }
            next += length;
        }
        Some(absent)
    }

    /// Returns the state and length of the free run that begins at `index`, or `None` if none does.
    pub(super) fn run_at(&self, index: u32) -> Option<(State, u32)> {
        // SAFETY: the frame behind a run is the first of the next run. The lock is held, which
        // protects the frames of a free run.
        unsafe {
            let state = state_of(index);
            (state != State::Busy).then(|| (state, u32::from(at(index).granules)))
        }
    }

    /// Returns the length of the clean run that ends directly before `index`, or 0 if there is
    /// none.
    pub(super) fn clean_before(&self, index: u32) -> u32 {
        // SAFETY: the frame before a run's first is the last of the run before it. The lock is
        // held.
        unsafe {
            match state_of(index - 1) {
                State::Clean => index - at(index - 1).head,
                _ => 0,
            }
        }
    }

    /// Returns the run that has been dirty the longest, if it became dirty at or before `until`
    /// (milliseconds, wrapping). With `None`, returns the run whatever its age.
    pub(super) fn oldest(&self, until: Option<u32>) -> Option<u32> {
        let head = (self.oldest != NIL).then_some(self.oldest)?;
        debug_assert!(matches!(self.run_at(head), Some((State::Dirty, _))));
        // SAFETY: the list by age has free runs only, and the lock is held.
        let stamp = unsafe { at(head).stamp };
        let is_old = until.is_none_or(|until| until.wrapping_sub(stamp).cast_signed() >= 0);
        is_old.then_some(head)
    }

    /// Returns a dirty run of at least `least` granules, or else the oldest one.
    pub(super) fn long_or_oldest(&mut self, least: u32) -> Option<u32> {
        let long = self.find(State::Dirty, least, false);
        long.or_else(|| self.oldest(None))
    }

    /// Takes about `granules` off the end of a dirty run, or the whole run if it is shorter. Splits
    /// no huge page that lies whole in the run. Returns the first granule and the number of
    /// granules.
    pub(super) fn take_end(&mut self, head: u32, granules: u32) -> (u32, u32) {
        let end = self.end_of(head);
        let all_huge = huge_pages::are_wanted(window::is_dense(head));
        let is_huge = |index| all_huge || pageblocks::is_preferred(index);
        let last = match is_huge(end - 1) {
            true => end / HUGE_PAGE * HUGE_PAGE,
            false => end,
        };
        let mut first = last - granules.min(last.saturating_sub(head));
        if is_huge(first) {
            first = (first / HUGE_PAGE * HUGE_PAGE).max(head.next_multiple_of(HUGE_PAGE));
        }
        let (first, last) = match first < last {
            true => (first, last),
            false => (head, end),
        };
        self.take_part(head, first, last - first);
        // If the run is set aside, `take_back` reads its length here.
        // SAFETY: the granules were taken from a free run above, and the lock is held.
        unsafe { (at(first).head, at(first).granules) = (first, (last - first) as u16) };
        (first, last - first)
    }

    /// Takes a clean run of at least `least` granules.
    pub(super) fn take_clean(&mut self, least: u32) -> Option<(u32, u32)> {
        let plain = self.find(State::Clean, least, false);
        let head = plain.or_else(|| self.find(State::Clean, least, true))?;
        Some((head, self.remove(head)))
    }

    fn link_newest(&mut self, head: u32, now: u32) {
        let before = core::mem::replace(&mut self.newest, head);
        // SAFETY: the caller has put the run into a bin of dirty runs, and the lock is held.
        let run = unsafe { at(head) };
        (run.older, run.newer, run.stamp) = (before, NIL, now);
        *self.newer_of(before) = head;
    }

    /// Puts the run `head` into the list by age, next to the run `elder` and with its age.
    fn link_behind(&mut self, elder: u32, head: u32) {
        // SAFETY: the caller has put both runs into a bin of dirty runs, and the lock is held.
        let (elder_run, run) = unsafe { (at(elder), at(head)) };
        (run.older, run.newer, run.stamp) = (elder, elder_run.newer, elder_run.stamp);
        *self.older_of(run.newer) = head;
        elder_run.newer = head;
    }

    fn unlink_age(&mut self, head: u32) {
        // SAFETY: the run is in the list by age, and the lock is held.
        let (older, newer) = unsafe { (at(head).older, at(head).newer) };
        debug_assert_eq!(*self.newer_of(older), head);
        debug_assert_eq!(*self.older_of(newer), head);
        *self.newer_of(older) = newer;
        *self.older_of(newer) = older;
    }

    /// Puts the run `to` in the place of `from` in the list by age.
    fn rename(&mut self, from: u32, to: u32) {
        // SAFETY: `from` is in the list by age, and the lock is held.
        let (older, newer, stamp) = unsafe { (at(from).older, at(from).newer, at(from).stamp) };
        debug_assert_eq!(*self.newer_of(older), from);
        debug_assert_eq!(*self.older_of(newer), from);
        // SAFETY: `to` is a free run, and the lock is held.
        let run = unsafe { at(to) };
        (run.older, run.newer, run.stamp) = (older, newer, stamp);
        *self.newer_of(older) = to;
        *self.older_of(newer) = to;
    }

    /// Returns the link from `head` to the next newer run. For [`NIL`], returns the link to the
    /// oldest run.
    fn newer_of(&mut self, head: u32) -> &mut u32 {
        if head == NIL {
            return &mut self.oldest;
        }
        // SAFETY: `head` is in the list by age, and the lock is held.
        unsafe { &mut at(head).newer }
    }

    /// Returns the link from `head` to the next older run. For [`NIL`], returns the link to the
    /// newest run.
    fn older_of(&mut self, head: u32) -> &mut u32 {
        if head == NIL {
            return &mut self.newest;
        }
        // SAFETY: `head` is in the list by age, and the lock is held.
        unsafe { &mut at(head).older }
    }
}
