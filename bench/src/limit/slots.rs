//! Places objects in slots. A slot never changes its size. A thread reuses the slot that it freed
//! last, because that slot's memory is in the CPU's cache.
//!
//! With several threads, a slot belongs to the thread that it was made for, so that two threads'
//! objects never share a cache line. A slot that another thread has freed is used after all that
//! the thread itself has freed, and only [`MARGIN`] events later: in a replay, threads run ahead of
//! others. The slots of a thread that has ended go to threads that need new slots.

use super::plan::{Place, Placer, Want};
use std::collections::{HashMap, HashSet, VecDeque};

/// Events between a free in another thread and the next use of the slot.
const MARGIN: u32 = 10_000;
/// Up to this many units, each number of units has slots of its own.
const EXACT: u32 = 64;
/// From this many units on, a slot is not part of a thread's chunk.
const LARGE: u32 = 1024;
/// Units of a thread's first chunk: a page. Each chunk is twice as large as the one before.
const FIRST_CHUNK: u32 = 256;
const LAST_CHUNK: u32 = 4096;

/// The units of a slot, and its alignment.
type Shape = (u32, u32);

#[derive(Debug)]
struct Slot {
    shape: Shape,
    home: u16,
}

/// The free slots of one shape.
#[derive(Debug, Default)]
struct Free {
    /// Freed by their own thread.
    own: Vec<u32>,
    /// Freed by other threads, with the number of the event.
    by_others: VecDeque<(u32, u32)>,
}

impl Free {
    fn take(&mut self, now: u32) -> Option<u32> {
        let is_old = |&&(_, freed): &&(u32, u32)| freed + MARGIN <= now;
        (self.own.pop()).or_else(|| {
            self.by_others.front().filter(is_old)?;
            Some(self.by_others.pop_front()?.0)
        })
    }
}

#[derive(Debug, Default)]
struct Thread {
    free: HashMap<Shape, Free>,
    /// The unused rest of its chunk, and the size of the next one.
    chunk: (u32, u32),
    next_chunk: u32,
    ended: bool,
}

#[derive(Debug)]
pub struct Slots {
    slots: HashMap<u32, Slot>,
    /// The slots that have belonged to several threads.
    contested: HashSet<u32>,
    threads: Vec<Thread>,
    /// Free slots of threads that have ended.
    orphans: HashMap<Shape, Free>,
    /// Rests of these threads' chunks.
    rests: Vec<(u32, u32)>,
    /// When each thread makes its last call, the last thread first.
    ends: Vec<(u32, u16)>,
    top: u32,
}

impl Slots {
    /// `last_events` has the number of each thread's last event.
    pub fn new(last_events: &[u32]) -> Slots {
        let mut ends: Vec<_> = last_events.iter().copied().zip(0..).collect();
        ends.sort_unstable_by(|one, other| other.cmp(one));
        Slots {
            slots: HashMap::new(),
            contested: HashSet::new(),
            threads: last_events.iter().map(|_| Thread::default()).collect(),
            orphans: HashMap::new(),
            rests: Vec::new(),
            ends,
            top: 1,
        }
    }

    /// Takes the slots of threads that ended before the event `now`.
    fn end_threads(&mut self, now: u32) {
        while let Some((_, thread)) = self.ends.pop_if(|(last, _)| *last < now) {
            let thread = &mut self.threads[usize::from(thread)];
            thread.ended = true;
            self.rests.push(thread.chunk);
            for (shape, free) in thread.free.drain() {
                let orphans = self.orphans.entry(shape).or_default();
                orphans.own.extend(free.own);
                orphans.by_others.extend(free.by_others);
            }
        }
    }

    /// Returns the place of a slot in memory that nothing has used.
    fn fresh(&mut self, thread: u16, (units, alignment): Shape) -> u32 {
        if units >= LARGE || alignment > 1 {
            let place = self.top.next_multiple_of(alignment);
            self.top = place + units;
            return place;
        }
        let thread = &mut self.threads[usize::from(thread)];
        while thread.chunk.1 - thread.chunk.0 < units {
            thread.chunk = self.rests.pop().unwrap_or_else(|| {
                let length = thread.next_chunk.clamp(FIRST_CHUNK, LAST_CHUNK).max(units);
                thread.next_chunk = length * 2;
                let start = self.top;
                self.top += length;
                (start, start + length)
            });
        }
        let place = thread.chunk.0;
        thread.chunk.0 += units;
        place
    }
}

/// Returns the units of the slots that objects of `units` units get. More than [`EXACT`] units
/// become the next eighth of a power of two.
fn rounded(units: u32) -> u32 {
    match units <= EXACT {
        true => units,
        false => units.next_multiple_of(1 << (units.ilog2() - 3)),
    }
}

impl Placer for Slots {
    fn take(&mut self, want: Want) -> Place {
        let Want { thread, now, .. } = want;
        self.end_threads(now);
        let shape = (rounded(want.units), want.alignment);
        let own = &mut self.threads[usize::from(thread)].free;
        let found = (own.get_mut(&shape).and_then(|free| free.take(now)))
            .or_else(|| self.orphans.get_mut(&shape)?.take(now));
        let place = found.unwrap_or_else(|| self.fresh(thread, shape));
        let home = thread;
        let old = self.slots.insert(place, Slot { shape, home });
        if old.is_some_and(|old| old.home != home) {
            self.contested.insert(place);
        }
        Place {
            place,
            fresh: found.is_none(),
        }
    }

    fn give(&mut self, place: u32, _units: u32, thread: u16, now: u32) {
        let slot = &self.slots[&place];
        let home = &mut self.threads[usize::from(slot.home)];
        let free = match home.ended {
            true => &mut self.orphans,
            false => &mut home.free,
        };
        let free = free.entry(slot.shape).or_default();
        match slot.home == thread {
            true => free.own.push(place),
            false => free.by_others.push_back((place, now)),
        }
    }

    fn shrink(&mut self, _place: u32, from: u32, to: u32) -> bool {
        to * 2 > from
    }

    fn top(&self) -> u32 {
        self.top
    }

    fn is_contested(&self, place: u32) -> bool {
        self.contested.contains(&place)
    }
}
