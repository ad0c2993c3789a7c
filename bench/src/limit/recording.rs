//! What the recorder wrote: the calls of one process, in the order in which they happened.

use anyhow::{Context, Result, bail, ensure};
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

/// The bound of the recorder on threads and on events, as `bench/limit/record.c` has them.
const THREADS: usize = 1 << 15;
const EVENTS: usize = 1 << 27;

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Call {
    /// The alignment is in bytes.
    Allocate {
        alignment: u32,
    },
    /// The numbers are those of the objects' allocations.
    Reallocate {
        object: u32,
    },
    Free {
        object: u32,
    },
}

#[derive(Clone, Copy, Debug)]
pub struct Event {
    /// An index of [`Recording::names`].
    pub thread: u16,
    pub call: Call,
    /// Bytes asked for.
    pub size: u32,
}

#[derive(Clone, Debug, Default)]
pub struct Recording {
    /// The name of the process.
    pub process: u64,
    /// Whether the process asked for the sizes of objects.
    pub uses_size: bool,
    /// The names of the threads.
    pub names: Vec<u64>,
    pub events: Vec<Event>,
}

impl Recording {
    pub fn read(path: &Path) -> Result<Recording> {
        let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
        let mut reader = BufReader::with_capacity(1 << 20, file);
        let mut word = || -> Result<u64> {
            let mut bytes = [0; 8];
            reader.read_exact(&mut bytes)?;
            Ok(u64::from_le_bytes(bytes))
        };
        let (process, uses_size) = (word()?, word()? != 0);
        let mut names = Vec::new();
        for _ in 0..THREADS {
            names.push(word()?);
        }
        let mut events = Vec::new();
        while events.len() < EVENTS {
            let (packed, size) = (word()?, word()?);
            let [kind, log_alignment] = [(packed >> 48) as u8, (packed >> 56) as u8];
            if log_alignment == 0 {
                let used = names.iter().rposition(|&name| name != 0);
                names.truncate(used.map_or(0, |last| last + 1));
                return Ok(Recording {
                    process,
                    uses_size,
                    names,
                    events,
                });
            }
            let object = packed as u32;
            let call = match kind {
                0 => Call::Allocate {
                    alignment: 1 << log_alignment.min(31),
                },
                1 => Call::Reallocate { object },
                2 => Call::Free { object },
                _ => bail!("an event has the kind {kind}; please report this"),
            };
            ensure!(
                size < 1 << 32,
                "it asks for {size} bytes at once, and a plan has room for at most 4 GiB"
            );
            let thread = (packed >> 32) as u16;
            let size = size as u32;
            events.push(Event { thread, call, size });
        }
        bail!("it makes more than {EVENTS} calls, and a recording has no room for more")
    }

    /// Returns the number of allocations and reallocations.
    pub fn allocations(&self) -> u64 {
        let is_free = |event: &&Event| matches!(event.call, Call::Free { .. });
        (self.events.len() - self.events.iter().filter(is_free).count()) as u64
    }

    /// Returns the most bytes that were live at one time.
    pub fn peak_live(&self) -> u64 {
        let mut sizes = vec![0; self.events.len()];
        let (mut live, mut peak) = (0_u64, 0);
        for (at, event) in self.events.iter().enumerate() {
            let object = match event.call {
                Call::Allocate { .. } => at,
                Call::Reallocate { object } | Call::Free { object } => object as usize,
            };
            live = live - u64::from(sizes[object]) + u64::from(event.size);
            sizes[object] = event.size;
            peak = peak.max(live);
        }
        peak
    }

    /// Returns for each allocation and reallocation the largest size that its object has from then
    /// on.
    pub fn extents(&self) -> Vec<u32> {
        let mut extents = vec![0; self.events.len()];
        for (at, event) in self.events.iter().enumerate().rev() {
            match event.call {
                // The later reallocations have stored their maximum at the place of the allocation.
                Call::Allocate { .. } => extents[at] = extents[at].max(event.size),
                Call::Reallocate { object } => {
                    let most = extents[object as usize].max(event.size);
                    (extents[at], extents[object as usize]) = (most, most);
                }
                Call::Free { .. } => {}
            }
        }
        extents
    }

    /// Returns for each thread the number of its last event.
    pub fn last_events(&self) -> Vec<u32> {
        let mut last = vec![0; self.names.len()];
        for (at, event) in self.events.iter().enumerate() {
            last[usize::from(event.thread)] = at as u32;
        }
        last
    }
}
