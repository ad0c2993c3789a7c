//! The free runs of one node: by state and length, and the dirty ones by age.
//!
//! All state is in [`FreeRuns`] and in the runs' frames. The lock of the node's arena protects
//! both, and the caller of each method holds it.
//!
//! A free run's first frame has its length and state, and its last frame has its state and where
//! the run begins. So [`FreeRuns::free`] finds a free neighbour on each side by reading one frame.

use super::bins::{Bins, NIL};
use super::window;
use super::{Frame, State, frame};

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
    // The holder of a run in use does not write the state.
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

    /// Returns the bins of the runs of `state`: for clean and absent runs, of those in dense
    /// regions if `dense` is true, or else of those in plain regions.
    fn bins(&mut self, state: State, dense: bool) -> &mut Bins {
        match state {
            State::Dirty => &mut self.dirty,
            _ => &mut self.fresh[usize::from(dense)][usize::from(state == State::Absent)],
        }
    }

    /// Writes a run's first and last frame, and puts it into its bin.
    fn insert(&mut self, head: u32, granules: u32, state: State) {
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

    /// Takes a run of exactly `granules`: from a dirty run, which needs no page faults, else from a
    /// clean one in a region that is `dense` or not. Returns its first granule and whether it is
    /// clean.
    pub(super) fn take(&mut self, granules: u32, dense: bool) -> Option<(u32, bool)> {
        let states = [State::Dirty, State::Clean];
        states.into_iter().find_map(|state| {
            let head = self.find(state, granules, dense)?;
            self.take_front(head, granules);
            Some((head, state == State::Clean))
        })
    }

    /// Returns the free run of `state` from which the arena should take `granules`. A clean or
    /// absent run is in a dense region if `dense` is true, or else in a plain one.
    pub(super) fn find(&mut self, state: State, granules: u32, dense: bool) -> Option<u32> {
        // SAFETY: the caller holds the lock of the node's arena.
        unsafe { self.bins(state, dense).find(granules) }
    }

    /// Takes the first `granules` of the free run `head`. The rest stays a free run.
    pub(super) fn take_front(&mut self, head: u32, granules: u32) {
        // SAFETY: the run is free, and the lock is held.
        let state = unsafe { at(head).state };
        let whole = self.remove(head);
        if whole > granules {
            let rest = head + granules;
            self.insert(rest, whole - granules, state);
            if state == State::Dirty {
                self.rename(head, rest);
            }
        } else if state == State::Dirty {
            self.unlink_age(head);
        }
        // The frame may still have the state of a free run that once ended there.
        // SAFETY: the granule was taken from a free run above, and the lock is held.
        unsafe { at(head + granules - 1).state = State::Busy };
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

    /// Takes the run that has been dirty the longest, if it became dirty at or before `until`
    /// (milliseconds, wrapping). With `None`, takes the run whatever its age. Returns its first
    /// granule and its length.
    pub(super) fn take_oldest(&mut self, until: Option<u32>) -> Option<(u32, u32)> {
        let head = self.oldest;
        if head == NIL {
            return None;
        }
        // SAFETY: the list by age has free runs only, and the lock is held.
        let stamp = unsafe { at(head).stamp };
        if until.is_some_and(|until| (until.wrapping_sub(stamp) as i32) < 0) {
            return None;
        }
        let granules = self.remove(head);
        self.unlink_age(head);
        Some((head, granules))
    }

    /// Takes at least `granules` of a dirty run, or all of a shorter one.
    ///
    /// * If a run has whole units of `unit` granules, takes units from its end, so that no huge
    ///   page is split. The granules behind these units begin to age anew.
    /// * Otherwise takes the oldest run.
    pub(super) fn take_units(&mut self, granules: u32, unit: u32, now: u32) -> Option<(u32, u32)> {
        // A run of two units less one granule has a whole unit, wherever the run begins.
        let Some(head) = self.find(State::Dirty, 2 * unit - 1, false) else {
            return self.take_oldest(None);
        };
        // SAFETY: `find` returned a free run, and the lock is held.
        let end = head + u32::from(unsafe { at(head) }.granules);
        let last = end / unit * unit;
        let first =
            (last - granules.next_multiple_of(unit).min(last)).max(head.next_multiple_of(unit));
        self.remove(head);
        if first > head {
            self.insert(head, first - head, State::Dirty);
        } else {
            self.unlink_age(head);
        }
        if end > last {
            self.insert(last, end - last, State::Dirty);
            self.link_newest(last, now);
        }
        // The frames may still have the states of free runs that once ended and began there. A
        // thread that sets the run aside needs its length.
        // SAFETY: the granules were taken from a free run above, and the lock is held.
        unsafe {
            (at(first).head, at(first).granules) = (first, (last - first) as u16);
            at(first).state = State::Busy;
            at(last - 1).state = State::Busy;
        }
        Some((first, last - first))
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

    fn unlink_age(&mut self, head: u32) {
        // SAFETY: the run is in the list by age, and the lock is held.
        let (older, newer) = unsafe { (at(head).older, at(head).newer) };
        *self.newer_of(older) = newer;
        *self.older_of(newer) = older;
    }

    /// Puts the run `to` in the place of `from` in the list by age.
    fn rename(&mut self, from: u32, to: u32) {
        // SAFETY: `from` is in the list by age, and the lock is held.
        let (older, newer, stamp) = unsafe { (at(from).older, at(from).newer, at(from).stamp) };
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
