//! Places objects densely: in the smallest hole that is large enough. Holes next to each other
//! become one hole. Only for programs with one thread.

use super::plan::{Place, Placer, Want};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Debug)]
pub struct Packed {
    /// The holes: start and length.
    holes: BTreeMap<u32, u32>,
    /// The holes: length and start.
    by_length: BTreeSet<(u32, u32)>,
    top: u32,
}

/// How many holes are tried for an object with an alignment.
const TRIES: usize = 64;

impl Packed {
    pub fn new() -> Packed {
        Packed {
            holes: BTreeMap::new(),
            by_length: BTreeSet::new(),
            // A tag has room in front of the first object, and no object is at 0.
            top: 1,
        }
    }

    fn remove(&mut self, start: u32, length: u32) {
        self.holes.remove(&start);
        self.by_length.remove(&(length, start));
    }

    /// Makes a hole, together with the holes next to it.
    fn add(&mut self, mut start: u32, mut length: u32) {
        if length == 0 {
            return;
        }
        if let Some((&before, &its)) = self.holes.range(..start).next_back()
            && before + its == start
        {
            self.remove(before, its);
            (start, length) = (before, length + its);
        }
        if let Some(&its) = self.holes.get(&(start + length)) {
            self.remove(start + length, its);
            length += its;
        }
        self.holes.insert(start, length);
        self.by_length.insert((length, start));
    }

    /// Takes `units` units from `place` on out of the hole `start`.
    fn cut(&mut self, start: u32, length: u32, place: u32, units: u32) {
        self.remove(start, length);
        self.add(start, place - start);
        self.add(place + units, start + length - place - units);
    }
}

impl Placer for Packed {
    fn take(&mut self, want: Want) -> Place {
        let (units, alignment) = (want.units, want.alignment);
        let fits = |&&(length, start): &&(u32, u32)| {
            start.next_multiple_of(alignment) - start + units <= length
        };
        let mut holes = self.by_length.range((units, 0)..).take(TRIES);
        if let Some(&(length, start)) = holes.find(fits) {
            let place = start.next_multiple_of(alignment);
            self.cut(start, length, place, units);
            return Place {
                place,
                fresh: false,
            };
        }
        // A hole at the end grows.
        let last = self
            .holes
            .last_key_value()
            .map(|(&start, &its)| (start, its));
        let last = last.filter(|(start, its)| start + its == self.top);
        let start = last.map_or(self.top, |(start, _)| start);
        let place = start.next_multiple_of(alignment);
        if let Some((start, its)) = last {
            self.remove(start, its);
        }
        let old_top = self.top;
        self.top = place + units;
        self.add(start, place - start);
        let fresh = place >= old_top;
        Place { place, fresh }
    }

    fn give(&mut self, place: u32, units: u32, _thread: u16, _now: u32) {
        self.add(place, units);
    }

    fn shrink(&mut self, place: u32, from: u32, to: u32) -> bool {
        self.add(place + to, from - to);
        true
    }

    fn top(&self) -> u32 {
        self.top
    }
}
