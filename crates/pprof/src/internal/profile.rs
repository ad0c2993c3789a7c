//! A heap profile with the names of functions.

use crate::internal::maps;
use crate::internal::names::{Found, Names, Place};
use crate::internal::raw::{Raw, Row, mapping_of};
use std::collections::HashMap;
use std::path::Path;

/// A part of a file that the process has mapped.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Mapping {
    /// The first address.
    pub start: u64,
    /// The address behind the last one.
    pub end: u64,
    /// Where in the file the mapping begins.
    pub offset: u64,
    /// The file's path.
    pub path: String,
    /// The file's build id in hexadecimal digits, or nothing.
    pub build_id: String,
}

/// A function, and the line in it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Line {
    /// The function's name.
    pub function: String,
    /// The source file, or nothing.
    pub file: String,
    /// The line's number, or 0.
    pub line: i64,
}

/// An address in a call stack.
#[derive(Clone, Debug, PartialEq)]
pub struct Location {
    /// The address behind the call.
    pub address: u64,
    /// The index of its mapping in [`Profile::mappings`].
    pub mapping: Option<usize>,
    /// The functions at this address, innermost first: inlined ones come before their callers.
    /// Empty if no name is known.
    pub lines: Vec<Line>,
    /// The function's name in the symbol table, or nothing. Unlike the names in `lines`, it begins
    /// with the function's crate.
    pub symbol: String,
}

/// What a call stack allocated.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Values {
    /// The blocks that were ever allocated.
    pub allocated_objects: f64,
    /// The bytes that were ever allocated.
    pub allocated_bytes: f64,
    /// The blocks in use.
    pub objects: f64,
    /// The bytes in use.
    pub bytes: f64,
    /// The part of `objects` to which no pointer of the process led at its end.
    pub lost_objects: f64,
    /// The part of `bytes` to which none led.
    pub lost_bytes: f64,
    /// The free bytes that the blocks in use keep in slabs.
    pub fragment_bytes: f64,
}

/// What a report counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// What is allocated and not freed.
    InUse,
    /// Everything that was ever allocated.
    Allocated,
    /// What is in use, and no pointer of the process led to at its end.
    Lost,
    /// What is in use, and a pointer led to then.
    Reachable,
    /// What is free in the slabs of what is in use.
    Fragments,
}

impl What {
    /// Returns the bytes that count.
    pub fn bytes(self, values: &Values) -> f64 {
        match self {
            What::InUse => values.bytes,
            What::Allocated => values.allocated_bytes,
            What::Lost => values.lost_bytes,
            What::Reachable => values.bytes - values.lost_bytes,
            What::Fragments => values.fragment_bytes,
        }
    }

    /// Returns the blocks that count: for fragments, those that keep them.
    pub fn objects(self, values: &Values) -> f64 {
        match self {
            What::InUse | What::Fragments => values.objects,
            What::Allocated => values.allocated_objects,
            What::Lost => values.lost_objects,
            What::Reachable => values.objects - values.lost_objects,
        }
    }

    /// Returns the samples that count, also those of reachable blocks for lost ones.
    pub fn samples(self, profile: &Profile) -> u64 {
        match self {
            What::Allocated => profile.all_samples,
            What::InUse | What::Lost | What::Reachable | What::Fragments => profile.samples,
        }
    }

    /// Says what counts, for people.
    pub fn word(self) -> &'static str {
        match self {
            What::InUse => "in use",
            What::Allocated => "allocated",
            What::Lost => "lost",
            What::Reachable => "reachable",
            What::Fragments => "free in slabs",
        }
    }
}

impl Values {
    /// Adds other values, times a factor.
    pub fn add(&mut self, other: &Values, times: f64) {
        self.allocated_objects += times * other.allocated_objects;
        self.allocated_bytes += times * other.allocated_bytes;
        self.objects += times * other.objects;
        self.bytes += times * other.bytes;
        self.lost_objects += times * other.lost_objects;
        self.lost_bytes += times * other.lost_bytes;
        self.fragment_bytes += times * other.fragment_bytes;
    }

    /// Returns whether all values are 0, but for rounding.
    fn are_none(&self) -> bool {
        let values = [
            self.allocated_objects,
            self.allocated_bytes,
            self.objects,
            self.bytes,
        ];
        values.iter().all(|value| value.abs() <= 0.5)
    }
}

/// A call stack of the program.
#[derive(Clone, Debug, PartialEq)]
pub struct Stack {
    /// Indexes in [`Profile::locations`], innermost first.
    pub locations: Vec<usize>,
    /// What was allocated from it.
    pub values: Values,
}

/// A heap profile with names.
#[derive(Clone, Debug, Default)]
pub struct Profile {
    /// Whose profile it is, for people.
    pub title: String,
    /// The mean bytes from one sample to the next.
    pub interval: u64,
    /// How many samples were dropped.
    pub dropped: u64,
    /// Whether the process has looked for lost blocks, at its end.
    pub has_looked: bool,
    /// Whether the process has told who keeps free bytes in slabs.
    pub has_fragments: bool,
    /// How many samples are in use.
    pub samples: u64,
    /// How many samples were taken.
    pub all_samples: u64,
    /// When the profile was read or written, in nanoseconds since the epoch.
    pub time_ns: i64,
    /// The profile that was subtracted: its title, its samples in use, and all its samples.
    pub older: Option<(String, u64, u64)>,
    /// Why functions have no names, for people.
    pub notes: Vec<String>,
    /// The mapped files that hold the program's code.
    pub mappings: Vec<Mapping>,
    /// The addresses in the call stacks.
    pub locations: Vec<Location>,
    /// The call stacks.
    pub stacks: Vec<Stack>,
}

/// Functions of an allocator that a program calls.
const ENTRIES: &str = "malloc calloc realloc reallocarray memalign aligned_alloc posix_memalign \
    valloc pvalloc __libc_malloc __libc_calloc __libc_realloc _Znwm _Znam";

/// How the names of other such functions begin, and of functions between them and the allocator.
const BEGINNINGS: [&str; 9] = [
    "pinfold",
    "<pinfold",
    "operator new",
    "__alloc_token_",
    "__rust_alloc",
    "__rust_realloc",
    "__rustc::__rust",
    "alloc::alloc::",
    "<alloc::alloc::Global",
];

/// Returns whether a location belongs to the allocator, not to the program.
fn is_own(location: &Location, mappings: &[Mapping]) -> bool {
    let path = location
        .mapping
        .map(|mapping| mappings[mapping].path.as_str());
    let file = path.and_then(|path| Path::new(path).file_name()?.to_str());
    let in_library = file.is_some_and(|file| file.starts_with("libpinfold"));
    let is_entry = |name: &str| {
        ENTRIES.split(' ').any(|entry| entry == name)
            || BEGINNINGS.iter().any(|start| name.starts_with(start))
    };
    let mut functions = location.lines.iter().map(|line| line.function.as_str());
    in_library
        || is_entry(&location.symbol)
        || (!location.lines.is_empty() && functions.all(is_entry))
}

/// Returns the functions of an address, innermost first.
fn lines(names: &Names) -> Vec<Line> {
    let line = |function: &str, file: &str, line: u32| Line {
        // The debug information may know the line, and only the symbol table the function.
        function: if function.is_empty() {
            &names.symbol
        } else {
            function
        }
        .to_owned(),
        file: file.to_owned(),
        line: i64::from(line),
    };
    let frames = names.frames.iter();
    let mut lines: Vec<Line> = frames
        .map(|frame| line(&frame.function, &frame.file, frame.line))
        .collect();
    if lines.is_empty() {
        lines.push(line("", "", 0));
    }
    lines.retain(|line| !line.function.is_empty());
    lines
}

impl Profile {
    /// Makes a profile with the names that `find` returns for the places of the addresses. An
    /// address without a name keeps none.
    pub fn of(raw: &Raw, find: impl FnOnce(&[maps::Mapping], &[Place]) -> Found) -> Profile {
        let mut addresses: Vec<u64> = raw
            .rows
            .iter()
            .flat_map(|row| &row.frames)
            .copied()
            .collect();
        addresses.sort_unstable();
        addresses.dedup();
        let mut locations: Vec<Location> = addresses
            .iter()
            .map(|&address| Location {
                address,
                mapping: mapping_of(&raw.mappings, address),
                lines: Vec::new(),
                symbol: String::new(),
            })
            .collect();
        let places = (0..).zip(&locations).map(|(number, location)| {
            let of = location.mapping.map(|nth| &raw.mappings[nth]);
            let position = of.map_or(location.address, |of| {
                (location.address - of.start).wrapping_add(of.offset)
            });
            Place {
                number,
                mapping: location.mapping,
                position,
            }
        });
        let places: Vec<Place> = places.collect();
        let found = find(&raw.mappings, &places);
        for (&number, names) in &found.names {
            let Some(location) = locations.get_mut(number as usize) else {
                continue;
            };
            location.lines = lines(names);
            location.symbol.clone_from(&names.symbol);
        }
        let mappings = raw.mappings.iter().enumerate().map(|(nth, mapping)| {
            let path = String::from_utf8_lossy(&mapping.path);
            Mapping {
                start: mapping.start,
                end: mapping.end,
                offset: mapping.offset,
                path: path.trim_end_matches(" (deleted)").to_owned(),
                build_id: found.build_ids.get(&nth).cloned().unwrap_or_default(),
            }
        });
        let mappings: Vec<Mapping> = mappings.collect();
        let stacks = raw
            .rows
            .iter()
            .map(|row| stack(row, &addresses, &locations, &mappings));
        let stacks = stacks.collect();
        // The process can claim any counts, so sums stop at the largest number.
        let sum = |of: &dyn Fn(&Row) -> u64| raw.rows.iter().map(of).fold(0, u64::saturating_add);
        let program = match raw.program.as_str() {
            "" => String::new(),
            name => format!("{name} "),
        };
        Profile {
            title: format!("{program}(process {})", raw.pid),
            interval: raw.interval,
            dropped: raw.dropped,
            has_looked: raw.has_looked,
            has_fragments: raw.has_fragments,
            samples: sum(&|row| row.samples.saturating_sub(row.freed_samples)),
            all_samples: sum(&|row| row.samples),
            time_ns: raw.time_ns,
            older: None,
            notes: found.notes,
            mappings,
            locations,
            stacks,
        }
    }

    /// Returns the sums over all call stacks.
    pub fn totals(&self) -> Values {
        let mut totals = Values::default();
        for stack in &self.stacks {
            totals.add(&stack.values, 1.0);
        }
        totals
    }

    /// Returns whether an address in a mapping has a name.
    pub fn names_functions_of(&self, mapping: usize) -> bool {
        let is_named =
            |location: &Location| location.mapping == Some(mapping) && !location.lines.is_empty();
        self.locations.iter().any(is_named)
    }

    /// Returns how many addresses have no name.
    pub fn nameless(&self) -> usize {
        let is_nameless = |location: &&Location| location.lines.is_empty();
        self.locations.iter().filter(is_nameless).count()
    }

    /// Returns the functions of a call stack, innermost first, without lines.
    pub fn functions<'p>(&'p self, stack: &'p Stack) -> impl Iterator<Item = String> + 'p {
        self.lines(stack).map(|line| line.function)
    }

    /// Returns the functions and lines of a call stack, innermost first. Where no function is
    /// known, its place is the address in the file. So the lines are the same in every process.
    fn lines<'p>(&'p self, stack: &'p Stack) -> impl Iterator<Item = Line> + 'p {
        stack.locations.iter().flat_map(|&nth| {
            let location = &self.locations[nth];
            match location.lines.is_empty() {
                true => vec![Line {
                    function: self.address(location),
                    file: String::new(),
                    line: 0,
                }],
                false => location.lines.clone(),
            }
        })
    }

    /// Names an address by its file.
    pub fn address(&self, location: &Location) -> String {
        match location.mapping.map(|nth| &self.mappings[nth]) {
            Some(mapping) => {
                let file = mapping.path.rsplit('/').next().unwrap_or_default();
                // A file may hold any numbers, so these may wrap.
                let offset = location.address.wrapping_sub(mapping.start);
                format!("{file}+{:#x}", offset.wrapping_add(mapping.offset))
            }
            None => format!("{:#x}", location.address),
        }
    }

    /// Returns the name of the program's file, or nothing. The kernel maps this file below the
    /// program's libraries.
    pub fn program(&self) -> &str {
        let path = self.mappings.first().map(|mapping| mapping.path.as_str());
        path.and_then(|path| path.rsplit('/').next())
            .unwrap_or_default()
    }

    /// Subtracts an older profile. Call stacks that have not changed are left out.
    pub fn subtract(&mut self, old: &Profile) {
        self.has_fragments &= old.has_fragments;
        let mut places: HashMap<Vec<Line>, usize> = HashMap::new();
        let mut stacks: Vec<Stack> = Vec::new();
        let mut add = |key: Vec<Line>, stack: Stack, times: f64| {
            let nth = *places.entry(key).or_insert_with(|| {
                stacks.push(Stack {
                    locations: stack.locations,
                    values: Values::default(),
                });
                stacks.len() - 1
            });
            stacks[nth].values.add(&stack.values, times);
        };
        for stack in std::mem::take(&mut self.stacks) {
            add(self.lines(&stack).collect(), stack, 1.0);
        }
        let (locations, mappings) = (self.locations.len(), self.mappings.len());
        for stack in &old.stacks {
            let mut moved = stack.clone();
            moved.locations.iter_mut().for_each(|nth| *nth += locations);
            add(old.lines(stack).collect(), moved, -1.0);
        }
        stacks.retain(|stack| !stack.values.are_none());
        self.stacks = stacks;
        self.mappings.extend(old.mappings.iter().cloned());
        let old_locations = old.locations.iter().map(|location| Location {
            mapping: location.mapping.map(|nth| nth + mappings),
            ..location.clone()
        });
        self.locations.extend(old_locations);
        self.keep_used();
        self.notes.extend(old.notes.iter().cloned());
        self.older = Some((old.title.clone(), old.samples, old.all_samples));
    }

    /// Leaves out the locations and mappings that no call stack has.
    fn keep_used(&mut self) {
        let mut fresh = HashMap::new();
        let mut locations = Vec::new();
        for place in self
            .stacks
            .iter_mut()
            .flat_map(|stack| &mut stack.locations)
        {
            *place = *fresh.entry(*place).or_insert_with(|| {
                locations.push(self.locations[*place].clone());
                locations.len() - 1
            });
        }
        let mut mappings: Vec<Mapping> = Vec::new();
        let mut numbers: HashMap<&Mapping, usize> = HashMap::new();
        for location in &mut locations {
            location.mapping = location.mapping.map(|nth| {
                let mapping = &self.mappings[nth];
                *numbers.entry(mapping).or_insert_with(|| {
                    mappings.push(mapping.clone());
                    mappings.len() - 1
                })
            });
        }
        (self.locations, self.mappings) = (locations, mappings);
    }
}

/// Makes a call stack of the program's own frames.
fn stack(row: &Row, addresses: &[u64], locations: &[Location], mappings: &[Mapping]) -> Stack {
    let index = |address: &u64| addresses.binary_search(address).unwrap_or(0);
    let all: Vec<usize> = row.frames.iter().map(index).collect();
    let own = all
        .iter()
        .take_while(|&&nth| is_own(&locations[nth], mappings))
        .count();
    // A call stack of the allocator alone keeps its outermost frame.
    let kept = all[own.min(all.len() - 1)..].to_vec();
    let (objects, bytes) = (
        (row.objects - row.freed_objects).max(0.0),
        (row.bytes - row.freed_bytes).max(0.0),
    );
    Stack {
        locations: kept,
        values: Values {
            allocated_objects: row.objects,
            allocated_bytes: row.bytes,
            objects,
            bytes,
            lost_objects: row.lost_objects.min(objects),
            lost_bytes: row.lost_bytes.min(bytes),
            fragment_bytes: row.fragment_bytes,
        },
    }
}

/// Adds up the values of equal keys.
pub fn by_key<K: std::hash::Hash + Eq>(
    values: impl Iterator<Item = (K, Values)>,
) -> HashMap<K, Values> {
    let mut sums: HashMap<K, Values> = HashMap::new();
    for (key, value) in values {
        sums.entry(key).or_default().add(&value, 1.0);
    }
    sums
}
