//! The free runs of one node: by state and length, and the dirty ones by age.
//!
//! All state is in the frames and in [`FreeRuns`]; the node's lock protects both.

use super::bins::{Bins, NIL};
use super::{Frame, State, frame};

/// The free runs of a node.
pub(super) struct FreeRuns {
    /// By state: [`State::Dirty`], [`State::Clean`], [`State::Absent`].
    bins: [Bins; 3],
    /// The ends of the list of dirty runs by age.
    oldest: u32,
    newest: u32,
}

/// The frame of granule `index`, for reading and writing.
///
/// # Safety
///
/// The granule lies in a region, and the caller holds the node's lock or owns the run.
unsafe fn at<'f>(index: u32) -> &'f mut Frame {
    // SAFETY: the caller's promise.
    unsafe { &mut *frame(index) }
}

impl FreeRuns {
    pub(super) const fn new() -> Self {
        FreeRuns {
            bins: [const { Bins::new() }; 3],
            oldest: NIL,
            newest: NIL,
        }
    }

    fn bins(&mut self, state: State) -> &mut Bins {
        &mut self.bins[state as usize - 1]
    }

    /// Writes a run's first and last frame, and puts it into its bin.
    fn insert(&mut self, head: u32, granules: u32, state: State) {
        // SAFETY: here and below: the run lies in a region, no caller has it, and the lock is held.
        unsafe {
            let run = at(head);
            (run.head, run.granules, run.state) = (head, granules as u16, state);
            let last = at(head + granules - 1);
            (last.head, last.state) = (head, state);
            self.bins(state).insert(head);
        }
    }

    /// Takes a run out of its bin, but not out of the list by age; returns its length.
    fn remove(&mut self, head: u32) -> u32 {
        // SAFETY: as in `insert`; a run that is free is in the bins of its state.
        unsafe {
            let (granules, state) = (u32::from(at(head).granules), at(head).state);
            self.bins(state).remove(head);
            at(head).state = State::Busy;
            at(head + granules - 1).state = State::Busy;
            granules
        }
    }

    /// Frees `granules` from `head` on, joined with free neighbours of the same state.
    ///
    /// A dirty run that is joined with a larger one is as old as that one: memory that nobody uses
    /// grows old, although its edges are taken and come back.
    ///
    /// Returns where the run begins now.
    pub(super) fn free(&mut self, head: u32, granules: u32, state: State, now: u32) -> u32 {
        let (mut start, mut end) = (head, head + granules);
        // The largest part, and the free run that it is.
        let (mut largest, mut elder) = (granules, NIL);
        // SAFETY: as in `insert`. A region's first and last granules are never free, so that the
        // neighbours lie in the same region.
        let neighbours = unsafe {
            let (before, after) = (at(start - 1), at(end));
            let before = (before.state == state).then_some(before.head);
            [before, (after.state == state).then_some(end)]
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

    /// Takes a run of exactly `granules`: of a dirty one, which needs no page faults, else of a
    /// clean one. Returns its first granule and whether it is clean.
    pub(super) fn take(&mut self, granules: u32) -> Option<(u32, bool)> {
        let states = [State::Dirty, State::Clean];
        states.into_iter().find_map(|state| {
            let head = self.find(state, granules)?;
            self.take_front(head, granules);
            Some((head, state == State::Clean))
        })
    }

    /// The free run of `state` that serves `granules` best.
    pub(super) fn find(&mut self, state: State, granules: u32) -> Option<u32> {
        // SAFETY: the lock is held.
        unsafe { self.bins(state).find(granules) }
    }

    /// Takes the first `granules` of the free run `head`; what is left stays as free as it was.
    pub(super) fn take_front(&mut self, head: u32, granules: u32) {
        // SAFETY: as in `insert`.
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
        // The frame may still say what it was when a run ended there before.
        // SAFETY: as in `insert`.
        unsafe { at(head + granules - 1).state = State::Busy };
    }

    /// The state and length of the free run that begins at `index`; nothing if none does.
    pub(super) fn run_at(&self, index: u32) -> Option<(State, u32)> {
        // SAFETY: as in `insert`; the frame behind a run is the first of the next one.
        let run = unsafe { at(index) };
        (run.state != State::Busy).then(|| (run.state, u32::from(run.granules)))
    }

    /// Whether an absent run ends before `index`.
    pub(super) fn is_absent_before(&self, index: u32) -> bool {
        // SAFETY: as in `insert`; the frame before a run is the last of the one before.
        unsafe { at(index - 1).state == State::Absent }
    }

    /// How long the clean run is that ends before `index`; 0 if there is none.
    pub(super) fn clean_before(&self, index: u32) -> u32 {
        // SAFETY: as in `insert`; the frame before a run is the last of the one before.
        unsafe {
            let last = at(index - 1);
            if last.state == State::Clean {
                index - last.head
            } else {
                0
            }
        }
    }

    /// Takes the run that has been dirty the longest, if that began at or before `until`
    /// (milliseconds, wrapping).
    pub(super) fn take_oldest(&mut self, until: Option<u32>) -> Option<(u32, u32)> {
        let head = self.oldest;
        if head == NIL {
            return None;
        }
        // SAFETY: as in `insert`.
        let stamp = unsafe { at(head).stamp };
        if until.is_some_and(|until| (until.wrapping_sub(stamp) as i32) < 0) {
            return None;
        }
        let granules = self.remove(head);
        self.unlink_age(head);
        Some((head, granules))
    }

    /// Takes at least `granules` of a dirty run, or what there is: whole units of `unit` granules, so
    /// that no huge page is split, of the end of a run that has some; else the oldest run. What is
    /// left behind these units begins to age anew.
    pub(super) fn take_units(&mut self, granules: u32, unit: u32, now: u32) -> Option<(u32, u32)> {
        // A run of two units less one granule has a whole one, wherever it begins.
        let Some(head) = self.find(State::Dirty, 2 * unit - 1) else {
            return self.take_oldest(None);
        };
        // SAFETY: as in `insert`.
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
        // The frames may still say what they were when runs ended and began there before. Whoever
        // sets the run aside needs its length.
        // SAFETY: as in `insert`.
        unsafe {
            (at(first).head, at(first).granules) = (first, (last - first) as u16);
            at(first).state = State::Busy;
            at(last - 1).state = State::Busy;
        }
        Some((first, last - first))
    }

    /// Takes a clean run of at least `least` granules.
    pub(super) fn take_clean(&mut self, least: u32) -> Option<(u32, u32)> {
        let head = self.find(State::Clean, least)?;
        Some((head, self.remove(head)))
    }

    fn link_newest(&mut self, head: u32, now: u32) {
        let before = core::mem::replace(&mut self.newest, head);
        // SAFETY: as in `insert`.
        let run = unsafe { at(head) };
        (run.older, run.newer, run.stamp) = (before, NIL, now);
        *self.newer_of(before) = head;
    }

    fn unlink_age(&mut self, head: u32) {
        // SAFETY: as in `insert`.
        let (older, newer) = unsafe { (at(head).older, at(head).newer) };
        *self.newer_of(older) = newer;
        *self.older_of(newer) = older;
    }

    /// Puts the run `to` where `from` is in the list by age.
    fn rename(&mut self, from: u32, to: u32) {
        // SAFETY: as in `insert`.
        let (older, newer, stamp) = unsafe { (at(from).older, at(from).newer, at(from).stamp) };
        // SAFETY: as above.
        let run = unsafe { at(to) };
        (run.older, run.newer, run.stamp) = (older, newer, stamp);
        *self.newer_of(older) = to;
        *self.older_of(newer) = to;
    }

    /// The link to what is newer than `head`; of nothing, the oldest.
    fn newer_of(&mut self, head: u32) -> &mut u32 {
        if head == NIL {
            return &mut self.oldest;
        }
        // SAFETY: as in `insert`.
        unsafe { &mut at(head).newer }
    }

    /// The link to what is older than `head`; of nothing, the newest.
    fn older_of(&mut self, head: u32) -> &mut u32 {
        if head == NIL {
            return &mut self.newest;
        }
        // SAFETY: as in `insert`.
        unsafe { &mut at(head).older }
    }
}
