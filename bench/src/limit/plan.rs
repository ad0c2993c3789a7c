//! Plans the address of each object of a recording, and writes the plan for `bench/limit/oracle.c`,
//! which says why a plan of each kind is sound.

use super::packed::Packed;
use super::recording::{Call, Recording};
use super::slots::Slots;
use anyhow::{Context, Result, ensure};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// The unit of places and lengths, in bytes: the alignment of malloc.
pub const UNIT: u32 = 16;
/// Objects of a page and more begin at a cache line.
const PAGE: u32 = 4096;
const LINE: u32 = 64;
/// The tag in front of an object, in bytes.
const TAG: u32 = 8;
/// A process counts as one of a single thread if all other threads together make at most this share
/// of the calls. glibc serves these threads.
const OTHERS: f64 = 0.002;

/// The bits of an entry.
const FRESH: u64 = 1 << 32;
const CONTESTED: u64 = 1 << 33;
const REALLOCATE: u64 = 2 << 62;
const FREE: u64 = 3 << 62;
const PLACES: u32 = 1 << 28;

/// How objects are placed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Style {
    /// See [`Packed`].
    Packed,
    /// See [`Slots`].
    Recent,
}

/// What a new object needs.
#[derive(Clone, Copy, Debug)]
pub struct Want {
    pub thread: u16,
    /// The number of the event.
    pub now: u32,
    pub units: u32,
    /// In units.
    pub alignment: u32,
}

/// What a new object gets.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Place {
    /// In units from the arena's start.
    pub place: u32,
    /// Whether nothing has used this memory before.
    pub fresh: bool,
}

pub trait Placer {
    fn take(&mut self, want: Want) -> Place;
    fn give(&mut self, place: u32, units: u32, thread: u16, now: u32);
    /// Returns whether an object that shrinks stays where it is. If so, takes what it leaves.
    fn shrink(&mut self, place: u32, from: u32, to: u32) -> bool;
    /// Returns the end of what was ever used.
    fn top(&self) -> u32;
    /// Returns whether several threads take the slot at `place`.
    fn is_contested(&self, _place: u32) -> bool {
        false
    }
}

/// The entries of one thread.
#[derive(Clone, Debug, Default)]
pub struct Lane {
    pub name: u64,
    pub entries: Vec<u64>,
}

#[derive(Clone, Debug)]
pub struct Plan {
    pub process: u64,
    /// The length of the arena.
    pub bytes: u64,
    /// Whether the plan is of several threads.
    pub shared: bool,
    /// Whether objects have tags.
    pub tagged: bool,
    pub lanes: Vec<Lane>,
}

/// Returns the only thread that counts, if there is one.
pub fn single(recording: &Recording) -> Option<u16> {
    let mut calls = vec![0_u64; recording.names.len()];
    for event in &recording.events {
        calls[usize::from(event.thread)] += 1;
    }
    let (thread, most) = (0..).zip(&calls).max_by_key(|(_, calls)| **calls)?;
    let others = recording.events.len() as u64 - most;
    (others as f64 <= OTHERS * *most as f64).then_some(thread)
}

/// Returns the place in an entry.
pub fn place_in(entry: u64) -> u32 {
    (entry >> 34) as u32 & (PLACES - 1)
}

fn entry(size: u32, place: u32) -> u64 {
    u64::from(size) | u64::from(place) << 34
}

/// Plans the addresses of a recording's objects.
pub fn plan(recording: &Recording, style: Style) -> Result<Plan> {
    let single = single(recording);
    let mut placer: Box<dyn Placer> = match style {
        Style::Packed => {
            ensure!(single.is_some(), "only programs with one thread are packed");
            Box::new(Packed::new())
        }
        Style::Recent => Box::new(Slots::new(&recording.last_events())),
    };
    let mut planner = Planner {
        recording,
        single,
        tagged: single.is_none() || recording.uses_size,
        extents: recording.extents(),
        live: vec![(0, 0); recording.events.len()],
        lanes: (recording.names.iter())
            .map(|&name| Lane {
                name,
                ..Lane::default()
            })
            .collect(),
    };
    for now in 0..recording.events.len() {
        planner.add(placer.as_mut(), now);
        ensure!(
            placer.top() < PLACES,
            "its plan needs more than {} GiB",
            (u64::from(PLACES) * u64::from(UNIT)) >> 30
        );
    }
    for entry in planner.lanes.iter_mut().flat_map(|lane| &mut lane.entries) {
        let stays = *entry & REALLOCATE != 0 && *entry & FRESH != 0;
        // Another thread may use the slot first, so its memory is not known to be fresh.
        if !stays && placer.is_contested(place_in(*entry)) {
            *entry = *entry & !FRESH | CONTESTED;
        }
    }
    let bytes = u64::from(placer.top()) * u64::from(UNIT);
    Ok(Plan {
        process: recording.process,
        bytes: bytes.next_multiple_of(u64::from(PAGE)),
        shared: single.is_none(),
        tagged: planner.tagged,
        lanes: planner.lanes,
    })
}

struct Planner<'a> {
    recording: &'a Recording,
    single: Option<u16>,
    tagged: bool,
    extents: Vec<u32>,
    /// The place and the units of each live object that has a place, by its number.
    live: Vec<(u32, u32)>,
    lanes: Vec<Lane>,
}

impl Planner<'_> {
    /// Returns the units of an object that grows up to `bytes` bytes.
    fn units(&self, bytes: u32) -> u32 {
        let tag = if self.tagged { TAG } else { 0 };
        bytes.max(1).saturating_add(tag).div_ceil(UNIT)
    }

    /// Adds the event `now`.
    fn add(&mut self, placer: &mut dyn Placer, now: usize) {
        let event = self.recording.events[now];
        let is_left_out = self.single.is_some_and(|thread| thread != event.thread);
        let (object, alignment) = match event.call {
            Call::Allocate { alignment } => (now, alignment),
            Call::Reallocate { object } | Call::Free { object } => (object as usize, UNIT),
        };
        if is_left_out {
            // This thread's free happens at no known time, so the memory is not used again.
            self.live[object] = (0, 0);
            return;
        }
        let extent = self.extents[now];
        let alignment = if extent >= PAGE {
            alignment.max(LINE)
        } else {
            alignment
        };
        let want = Want {
            thread: event.thread,
            now: now as u32,
            units: self.units(extent),
            alignment: (alignment / UNIT).max(1),
        };
        let lane = &mut self.lanes[usize::from(event.thread)];
        let (place, units) = self.live[object];
        match event.call {
            Call::Allocate { .. } => {
                let taken = placer.take(want);
                let fresh = if taken.fresh { FRESH } else { 0 };
                lane.entries.push(entry(event.size, taken.place) | fresh);
                self.live[object] = (taken.place, want.units);
            }
            _ if units == 0 => {}
            Call::Free { .. } => {
                if self.single.is_some() {
                    lane.entries.push(FREE | entry(0, place));
                }
                placer.give(place, units, event.thread, want.now);
                self.live[object] = (0, 0);
            }
            Call::Reallocate { .. } if placer.shrink(place, units, want.units) => {
                lane.entries
                    .push(REALLOCATE | FRESH | entry(event.size, place));
                self.live[object] = (place, want.units);
            }
            Call::Reallocate { .. } => {
                let taken = placer.take(want);
                lane.entries
                    .push(REALLOCATE | entry(event.size, taken.place));
                if self.single.is_some() {
                    lane.entries.push(FREE | entry(0, place));
                }
                placer.give(place, units, event.thread, want.now);
                self.live[object] = (taken.place, want.units);
            }
        }
    }
}

impl Plan {
    /// Writes the plan into `folder`. `huge` asks for huge pages.
    pub fn write(&self, folder: &Path, huge: bool) -> Result<()> {
        let path = folder.join(format!("{:016x}.plan", self.process));
        let file = File::create(&path).with_context(|| format!("cannot write {path:?}"))?;
        let mut out = BufWriter::with_capacity(1 << 20, file);
        let mut lanes: Vec<_> = self.lanes.iter().collect();
        lanes.sort_unstable_by_key(|lane| lane.name);
        // An entry that matches no call ends each thread's list.
        let entries: usize = lanes.iter().map(|lane| lane.entries.len() + 1).sum();
        let flags = [self.shared, self.tagged, huge, false].map(u32::from);
        for word in [self.bytes, lanes.len() as u64, entries as u64] {
            out.write_all(&word.to_le_bytes())?;
        }
        for flag in flags {
            out.write_all(&flag.to_le_bytes())?;
        }
        let mut first = 0_u64;
        for lane in &lanes {
            out.write_all(&lane.name.to_le_bytes())?;
            out.write_all(&first.to_le_bytes())?;
            first += lane.entries.len() as u64 + 1;
        }
        for entry in lanes
            .iter()
            .flat_map(|lane| lane.entries.iter().chain(&[FREE]))
        {
            out.write_all(&entry.to_le_bytes())?;
        }
        // So that writing does not go on while programs are measured.
        out.into_inner()?.sync_all()?;
        Ok(())
    }
}
