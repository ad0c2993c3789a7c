//! What `pinfold top` shows of a process: its memory as a sum, and its caches in some order.

use super::super::snapshot::Snapshot;
use super::super::source::Source;
use clap::ValueEnum;
use pinfold::segment::SlabEvent;
use serde::Serialize;
use std::collections::{HashMap, VecDeque};
use std::time::Instant;

/// How many of the last readings the sparklines show.
const HISTORY: usize = 240;

/// By what the caches are sorted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Key {
    /// Objects in all slabs
    Objects,
    /// Objects out of their slabs
    Active,
    /// The share of active objects
    Use,
    /// Bytes of an object
    Size,
    /// Slabs
    Slabs,
    /// Bytes of all slabs
    Bytes,
    /// Objects moved from slabs to sheaves, a second
    Refills,
    /// The name
    Name,
}

impl Key {
    /// Returns the key that a letter stands for.
    pub fn of_letter(letter: char) -> Option<Key> {
        Some(match letter {
            'o' => Key::Objects,
            'a' => Key::Active,
            'u' => Key::Use,
            's' => Key::Size,
            'l' => Key::Slabs,
            'c' => Key::Bytes,
            'r' => Key::Refills,
            'n' => Key::Name,
            _ => return None,
        })
    }
}

/// One cache.
#[derive(Clone, Debug)]
pub struct Row {
    pub name: String,
    pub objects: u64,
    pub active: u64,
    pub size: u64,
    pub slabs: u64,
    pub per_slab: u64,
    pub bytes: u64,
    /// Objects moved from slabs to sheaves, a second.
    pub refills: f64,
}

impl Row {
    /// Returns the share of active objects.
    pub fn share(&self) -> f64 {
        match self.objects {
            0 => 0.0,
            objects => self.active.min(objects) as f64 / objects as f64,
        }
    }
}

/// The memory held from the system, in bytes, as a sum.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Sum {
    /// Objects out of their slabs.
    pub objects: u64,
    /// The rest of the slabs.
    pub free_in_slabs: u64,
    /// Blocks that are runs of their own, and huge blocks.
    pub large: u64,
    pub dirty: u64,
    /// Mapped and never touched.
    pub untouched: u64,
    pub held: u64,
    pub peak: u64,
    pub returned: u64,
}

impl Sum {
    pub fn of(snapshot: &Snapshot) -> Sum {
        let slabs = snapshot.of_caches(|cache| cache.slabs().saturating_mul(cache.slab));
        let objects = snapshot.of_caches(|cache| cache.out().saturating_mul(cache.size));
        let objects = objects.min(slabs);
        let (used, dirty) = (snapshot.used(), snapshot.dirty());
        Sum {
            objects,
            free_in_slabs: slabs - objects,
            // The parts are read one after another, so a difference may be negative for a moment.
            large: used.saturating_sub(slabs),
            dirty,
            untouched: snapshot
                .held
                .saturating_sub(used.max(slabs).saturating_add(dirty)),
            held: snapshot.held,
            peak: snapshot.held_peak,
            returned: snapshot.returned,
        }
    }
}

pub struct View {
    pub pid: u32,
    pub name: String,
    pub backend: &'static str,
    pub sum: Sum,
    pub rows: Vec<Row>,
    pub key: Key,
    /// Slow calls a second.
    pub slow: f64,
    /// The last values of the bytes held, and of the slow calls a second.
    pub held: VecDeque<u64>,
    pub slow_calls: VecDeque<u64>,
    /// The refills of each cache at the last reading, and all slow calls.
    before: HashMap<String, u64>,
    slow_before: u64,
    when: Option<Instant>,
}

impl View {
    pub fn new(source: &Source, key: Key) -> View {
        View {
            pid: source.pid,
            name: source.name(),
            backend: "",
            sum: Sum::default(),
            rows: Vec::new(),
            key,
            slow: 0.0,
            held: VecDeque::new(),
            slow_calls: VecDeque::new(),
            before: HashMap::new(),
            slow_before: 0,
            when: None,
        }
    }

    pub fn update(&mut self, snapshot: Snapshot) {
        // At the first reading, nothing is known of the time before.
        let seconds = self
            .when
            .map(|when| when.elapsed().as_secs_f64().max(0.001));
        let rate = |before: u64, now: u64| {
            seconds.map_or(0.0, |seconds| now.saturating_sub(before) as f64 / seconds)
        };
        let slow = snapshot.caches.iter().map(|cache| cache.slow());
        let slow = slow.fold(0, u64::wrapping_add);
        self.slow = rate(self.slow_before, slow);
        self.sum = Sum::of(&snapshot);
        self.backend = super::super::backend_name(snapshot.backend);
        let mut refilled = HashMap::new();
        self.rows.clear();
        for cache in &snapshot.caches {
            let refills = cache.count(SlabEvent::Refilled);
            let before = self.before.get(&cache.name).copied().unwrap_or(refills);
            self.rows.push(Row {
                name: cache.name.clone(),
                objects: cache.total(),
                active: cache.out(),
                size: cache.size,
                slabs: cache.slabs(),
                per_slab: cache.per_slab,
                bytes: cache.slabs().saturating_mul(cache.slab),
                refills: rate(before, refills),
            });
            refilled.insert(cache.name.clone(), refills);
        }
        for (values, value) in [
            (&mut self.held, self.sum.held),
            (&mut self.slow_calls, self.slow as u64),
        ] {
            values.push_back(value);
            if values.len() > HISTORY {
                values.pop_front();
            }
        }
        (self.before, self.slow_before) = (refilled, slow);
        self.when = Some(Instant::now());
        self.sort(self.key);
    }

    pub fn sort(&mut self, key: Key) {
        self.key = key;
        self.rows.sort_by(|a, b| {
            let order = match key {
                Key::Name => a.name.cmp(&b.name),
                Key::Objects => b.objects.cmp(&a.objects),
                Key::Active => b.active.cmp(&a.active),
                Key::Use => b.share().total_cmp(&a.share()),
                Key::Size => b.size.cmp(&a.size),
                Key::Slabs => b.slabs.cmp(&a.slabs),
                Key::Bytes => b.bytes.cmp(&a.bytes),
                Key::Refills => b.refills.total_cmp(&a.refills),
            };
            order.then_with(|| a.name.cmp(&b.name))
        });
    }
}
