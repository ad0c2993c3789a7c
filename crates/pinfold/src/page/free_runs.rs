//! The free runs of one node: two sets of lists by size, dirty and clean, and the dirty ones by age.
//!
//! All state is in the frames and in [`FreeRuns`]; the node's lock protects both.

use super::{Frame, State, frame};

/// No granule.
const NIL: u32 = u32::MAX;
/// Runs of fewer granules than this have a list for each length; longer ones share a list per power of two.
const EXACT: u32 = 32;
/// Lists: 32 for the short lengths, 26 powers of two from 2^5 on.
const LISTS: usize = 58;
/// How many runs of a shared list are looked at before a longer list is asked.
const LOOK_AT: usize = 32;

/// Lists of runs by length, and which of them have any.
struct Set {
    lists: [u32; LISTS],
    filled: u64,
}

impl Set {
    const fn new() -> Self {
        Set {
            lists: [NIL; LISTS],
            filled: 0,
        }
    }
}

/// The free runs of a node.
pub(super) struct FreeRuns {
    dirty: Set,
    clean: Set,
    oldest: u32,
    newest: u32,
    /// Granules in dirty runs.
    pub(super) dirty_granules: u32,
}

/// The frame of granule `index`, for reading and writing.
///
/// # Safety
///
/// The frame is committed, and the caller holds the node's lock or owns the run.
unsafe fn at<'f>(index: u32) -> &'f mut Frame {
    // SAFETY: the caller's promise.
    unsafe { &mut *frame(index) }
}

fn list_of(granules: u32) -> usize {
    if granules < EXACT {
        granules as usize
    } else {
        (EXACT + (granules / EXACT).ilog2()) as usize
    }
}

impl FreeRuns {
    pub(super) const fn new() -> Self {
        FreeRuns {
            dirty: Set::new(),
            clean: Set::new(),
            oldest: NIL,
            newest: NIL,
            dirty_granules: 0,
        }
    }

    fn set(&mut self, state: State) -> &mut Set {
        if state == State::Dirty {
            &mut self.dirty
        } else {
            &mut self.clean
        }
    }

    /// Puts a run into its list. The run is nobody's and its neighbours are not free in the same state.
    fn insert(&mut self, head: u32, granules: u32, state: State, now: u32) {
        let newest = self.newest;
        let set = self.set(state);
        let list = list_of(granules);
        let next = core::mem::replace(&mut set.lists[list], head);
        set.filled |= 1 << list;
        // SAFETY: here and below, frames of runs in the lists are committed, and the node's lock is held.
        unsafe {
            let run = at(head);
            (run.head, run.granules, run.state) = (head, granules, state);
            (run.prev, run.next) = (NIL, next);
            if next != NIL {
                at(next).prev = head;
            }
            let last = at(head + granules - 1);
            (last.head, last.state) = (head, state);
        }
        if state == State::Dirty {
            // SAFETY: as above.
            unsafe {
                let run = at(head);
                (run.older, run.newer, run.stamp) = (newest, NIL, now);
                if newest == NIL {
                    self.oldest = head;
                } else {
                    at(newest).newer = head;
                }
            }
            self.newest = head;
            self.dirty_granules += granules;
        }
    }

    /// Takes a run out of its list; it is nobody's then.
    fn remove(&mut self, head: u32) -> u32 {
        // SAFETY: as in `insert`.
        let run = unsafe { at(head) };
        let (granules, state) = (run.granules, run.state);
        let (prev, next, older, newer) = (run.prev, run.next, run.older, run.newer);
        run.state = State::Busy;
        // SAFETY: as in `insert`.
        unsafe { at(head + granules - 1).state = State::Busy };
        let set = self.set(state);
        if next != NIL {
            // SAFETY: as in `insert`.
            unsafe { at(next).prev = prev };
        }
        if prev == NIL {
            let list = list_of(granules);
            set.lists[list] = next;
            if next == NIL {
                set.filled &= !(1 << list);
            }
        } else {
            // SAFETY: as in `insert`.
            unsafe { at(prev).next = next };
        }
        if state == State::Dirty {
            self.unlink_age(older, newer);
            self.dirty_granules -= granules;
        }
        granules
    }

    fn unlink_age(&mut self, older: u32, newer: u32) {
        // SAFETY: as in `insert`.
        unsafe {
            if older == NIL {
                self.oldest = newer;
            } else {
                at(older).newer = newer;
            }
            if newer == NIL {
                self.newest = older;
            } else {
                at(newer).older = older;
            }
        }
    }

    /// Frees `[head, head + granules)`, joined with free neighbours of the same state within `[first, top)`.
    pub(super) fn free(
        &mut self,
        head: u32,
        granules: u32,
        state: State,
        bounds: (u32, u32),
        now: u32,
    ) {
        let (mut start, mut end) = (head, head + granules);
        // SAFETY: frames below `top` are committed; a neighbour's state is valid in its last or first frame.
        unsafe {
            if start > bounds.0 && at(start - 1).state == state {
                let before = at(start - 1).head;
                self.remove(before);
                start = before;
            }
            if end < bounds.1 && at(end).state == state {
                end += self.remove(end);
            }
        }
        self.insert(start, end - start, state, now);
    }

    /// Takes a free run of exactly `granules`, preferring dirty ones, which need no page faults. Returns its first
    /// granule and whether it is clean.
    pub(super) fn take(&mut self, granules: u32, now: u32) -> Option<(u32, bool)> {
        let (head, state) = self
            .find(State::Dirty, granules)
            .map(|head| (head, State::Dirty))
            .or_else(|| Some((self.find(State::Clean, granules)?, State::Clean)))?;
        let whole = self.remove(head);
        if whole > granules {
            self.insert(head + granules, whole - granules, state, now);
        }
        // The new last frame may still say what it was when a run ended there before.
        // SAFETY: as in `insert`.
        unsafe { at(head + granules - 1).state = State::Busy };
        Some((head, state == State::Clean))
    }

    fn find(&mut self, state: State, granules: u32) -> Option<u32> {
        let set = self.set(state);
        let list = list_of(granules);
        let mut head = set.lists[list];
        for _ in 0..LOOK_AT {
            if head == NIL {
                break;
            }
            // SAFETY: as in `insert`.
            let run = unsafe { at(head) };
            if run.granules >= granules {
                return Some(head);
            }
            head = run.next;
        }
        let longer = set.filled & !((2u64 << list) - 1);
        (longer != 0).then(|| set.lists[longer.trailing_zeros() as usize])
    }

    /// Takes the run that has been dirty the longest, if that began at or before `until` (milliseconds, wrapping).
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
        Some((head, granules))
    }
}
