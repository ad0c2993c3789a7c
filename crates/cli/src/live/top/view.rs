//! What `pinfold top` shows of a process: its memory as a sum, its caches in some order, its CPUs,
//! its nodes, and its shepherd.

use super::super::per_second;
use super::super::snapshot::{Cache, Snapshot};
use super::super::source::Source;
use super::cpus::{self, Cpu};
use super::nodes::{self, Node};
use super::screen::moved;
use super::shepherd::Shepherd;
use super::sum::Sum;
use crate::foreign::Process;
use clap::ValueEnum;
use ratatui::crossterm::event::KeyCode;
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

/// The table below the sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Show {
    /// The object caches
    Caches,
    /// The CPUs
    Cpus,
    /// The memory nodes
    Nodes,
    /// The shepherd, which gives idle memory back
    Shepherd,
}

impl Show {
    pub const ALL: [Show; 4] = [Show::Caches, Show::Cpus, Show::Nodes, Show::Shepherd];

    /// Returns the table that a digit stands for.
    pub fn of_digit(digit: char) -> Option<Show> {
        let nth = digit.to_digit(10)?.checked_sub(1)?;
        Show::ALL.get(nth as usize).copied()
    }

    /// Returns the table behind this one.
    pub fn next(self) -> Show {
        Show::ALL[(self as usize + 1) % Show::ALL.len()]
    }
}

pub struct Row {
    pub cache: Cache,
    /// Objects moved from slabs to sheaves, a second.
    pub refills: f64,
}

impl Row {
    pub fn share(&self) -> f64 {
        match self.cache.total() {
            0 => 0.0,
            objects => self.cache.out().min(objects) as f64 / objects as f64,
        }
    }

    pub fn bytes(&self) -> u64 {
        self.cache.slabs().saturating_mul(self.cache.slab)
    }
}

pub struct View {
    pub pid: u32,
    pub name: String,
    pub backend: &'static str,
    pub sum: Sum,
    pub show: Show,
    /// The first row of the table that is shown.
    pub first: usize,
    /// How many rows of the table the last picture had room for.
    pub page: usize,
    pub rows: Vec<Row>,
    pub key: Key,
    pub cpus: Vec<Cpu>,
    pub nodes: Vec<Node>,
    pub shepherd: Shepherd,
    /// Slow calls a second.
    pub slow: f64,
    /// The last values of the bytes held, and of the slow calls a second.
    pub held: VecDeque<u64>,
    pub slow_calls: VecDeque<u64>,
    /// The refills of each cache at the last reading, and all slow calls.
    before: HashMap<(usize, String), u64>,
    slow_before: u64,
    cpus_before: cpus::Before,
    when: Option<Instant>,
}

impl View {
    pub fn new(source: &Source, show: Show, key: Key) -> View {
        View {
            pid: source.pid,
            name: source.name(),
            backend: "",
            sum: Sum::default(),
            show,
            first: 0,
            page: 0,
            rows: Vec::new(),
            key,
            cpus: Vec::new(),
            nodes: Vec::new(),
            shepherd: Shepherd::default(),
            slow: 0.0,
            held: VecDeque::new(),
            slow_calls: VecDeque::new(),
            before: HashMap::new(),
            slow_before: 0,
            cpus_before: cpus::Before::default(),
            when: None,
        }
    }

    /// Takes the numbers of the process, whose threads are in `process`.
    pub fn update(&mut self, process: Option<&Process>, snapshot: Snapshot) {
        // At the first reading, nothing is known of the time before.
        let seconds = self
            .when
            .map(|when| when.elapsed().as_secs_f64().max(0.001));
        let rate = |before, now| per_second(seconds, before, now);
        let slow = snapshot.of_caches(Cache::slow);
        self.slow = rate(self.slow_before, slow);
        self.sum = Sum::of(&snapshot);
        self.cpus = cpus::read(process, &snapshot, seconds, &mut self.cpus_before);
        self.nodes = nodes::read(&snapshot, seconds, &self.nodes);
        self.shepherd = Shepherd::read(&snapshot, seconds, &self.shepherd);
        self.backend = super::super::backend_name(snapshot.backend);
        let mut refilled = HashMap::new();
        self.rows.clear();
        for cache in snapshot.caches {
            let refills = cache.refilled();
            // Several caches may have the same name, and one after another the same row.
            let key = (cache.nth, cache.name.clone());
            let before = self.before.get(&key).copied().unwrap_or(refills);
            refilled.insert(key, refills);
            let refills = rate(before, refills);
            self.rows.push(Row { cache, refills });
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

    /// Does what a key asks for: a letter sorts the caches, a digit or Tab shows a table, and the
    /// arrows move in it.
    pub fn press(&mut self, code: KeyCode) {
        match code {
            KeyCode::Tab => self.show(self.show.next()),
            KeyCode::Char(letter) => {
                if let Some(show) = Show::of_digit(letter) {
                    self.show(show);
                }
                if let Some(key) = Key::of_letter(letter) {
                    self.first = 0;
                    self.sort(key);
                }
            }
            _ => {
                let last = self.rows_shown().saturating_sub(self.page);
                self.first = moved(self.first, code, self.page, last);
            }
        }
    }

    fn show(&mut self, show: Show) {
        (self.show, self.first) = (show, 0);
    }

    /// Returns how many rows the table on the screen has.
    pub fn rows_shown(&self) -> usize {
        match self.show {
            Show::Caches => self.rows.len(),
            Show::Cpus => self.cpus.len(),
            Show::Nodes => self.nodes.len(),
            Show::Shepherd => 0,
        }
    }

    pub fn sort(&mut self, key: Key) {
        self.key = key;
        self.rows.sort_by(|a, b| {
            let order = match key {
                Key::Name => a.cache.name.cmp(&b.cache.name),
                Key::Objects => b.cache.total().cmp(&a.cache.total()),
                Key::Active => b.cache.out().cmp(&a.cache.out()),
                Key::Use => b.share().total_cmp(&a.share()),
                Key::Size => b.cache.size.cmp(&a.cache.size),
                Key::Slabs => b.cache.slabs().cmp(&a.cache.slabs()),
                Key::Bytes => b.bytes().cmp(&a.bytes()),
                Key::Refills => b.refills.total_cmp(&a.refills),
            };
            order.then_with(|| a.cache.name.cmp(&b.cache.name))
        });
    }
}
