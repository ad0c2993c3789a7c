//! Reads the statistics files that the command's processes have left.

use anyhow::{Context, Result, anyhow};
use pinfold::segment::{CLASSES, Call, ClassRow, MAGIC, NodeEvents, Segment, SlabEvent, VERSION};
use pinfold::vmstat::Item;
use std::fs;
use std::mem::offset_of;
use std::path::{Path, PathBuf};

/// A directory for statistics files. Dropping it removes it.
pub struct Directory {
    path: PathBuf,
}

impl Directory {
    pub fn make() -> Result<Directory> {
        use std::os::unix::fs::DirBuilderExt;
        let stamp = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)?
            .as_nanos();
        let name = format!("pinfold-{}-{stamp}", std::process::id());
        let bases = [Path::new("/dev/shm"), &std::env::temp_dir()];
        let mut made = Err(anyhow!(
            "no directory for temporary files exists; set TMPDIR to one"
        ));
        for base in bases.into_iter().filter(|base| base.is_dir()) {
            let path = base.join(&name);
            made = fs::DirBuilder::new()
                .mode(0o700)
                .create(&path)
                .with_context(|| {
                    format!(
                        "cannot make the directory {} for the statistics",
                        path.display()
                    )
                })
                .map(|()| path);
            if made.is_ok() {
                break;
            }
        }
        let path = made?;
        Ok(Directory { path })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns what the last program image of process `pid` counted, and what all other images
    /// counted.
    pub fn read(&self, pid: u32) -> Report {
        let mut all: Vec<(u32, u32, Process)> = Vec::new();
        for entry in fs::read_dir(&self.path).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let Some((process, image)) = name.to_str().and_then(|name| name.split_once('.')) else {
                continue;
            };
            let (Ok(process), Ok(image)) = (process.parse(), image.parse()) else {
                continue;
            };
            if let Some(counted) = fs::read(entry.path())
                .ok()
                .and_then(|bytes| Process::parse(&bytes))
            {
                all.push((process, image, counted));
            }
        }
        all.sort_by_key(|(process, image, _)| (*process == pid, *image));
        let main = all
            .pop_if(|(process, ..)| *process == pid)
            .map(|(.., counted)| counted);
        Report {
            main,
            others: all.into_iter().map(|(.., counted)| counted).collect(),
        }
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

pub struct Report {
    pub main: Option<Process>,
    pub others: Vec<Process>,
}

/// The counts of one program image: a process between two calls of `exec`.
#[derive(Debug, Default)]
pub struct Process {
    pub pid: u32,
    pub backend: u32,
    pub held: u64,
    pub held_peak: u64,
    pub returned: u64,
    pub huge: u64,
    pub requested: u64,
    pub large_alloc: u64,
    pub large_free: u64,
    pub large_live: u64,
    pub realloc: u64,
    pub failed: u64,
    pub classes: Vec<Class>,
}

#[derive(Debug, Default)]
pub struct Class {
    pub size: u64,
    pub alloc: u64,
    pub free: u64,
    pub slowpath: u64,
    pub refilled: u64,
    pub flushed: u64,
    pub slab_alloc: u64,
    pub slab_free: u64,
}

impl Process {
    /// Parses a statistics file. The file may hold anything: only numbers are read, and only from
    /// inside it.
    fn parse(bytes: &[u8]) -> Option<Process> {
        let word = |at: usize| {
            Some(u64::from_le_bytes(
                bytes.get(at..at.checked_add(8)?)?.try_into().ok()?,
            ))
        };
        let half = |at: usize| {
            Some(u32::from_le_bytes(
                bytes.get(at..at.checked_add(4)?)?.try_into().ok()?,
            ))
        };
        if word(offset_of!(Segment, magic))? != MAGIC
            || half(offset_of!(Segment, version))? != VERSION
        {
            return None;
        }
        let field = |at: usize| half(at).map(|value| value as usize);
        let units = field(offset_of!(Segment, units))?;
        let (first, size) = (
            field(offset_of!(Segment, units_at))?,
            field(offset_of!(Segment, unit_bytes))?,
        );
        if bytes.len() < units.checked_mul(size)?.checked_add(first)? {
            return None;
        }
        // Returns the sum over all units of the words at an offset, or `None` if the offset is
        // outside of a unit.
        let sum = |at: usize| {
            let inside = at.checked_add(8).is_some_and(|end| end <= size);
            let words = (0..units).filter_map(|unit| word(first + unit * size + at));
            inside.then(|| words.fold(0u64, u64::wrapping_add))
        };
        let nodes = field(offset_of!(Segment, nodes))?;
        let events_at = field(offset_of!(Segment, events_at))?;
        let events = nodes.checked_mul(CLASSES * size_of::<NodeEvents>())?;
        if bytes.len() < events.checked_add(events_at)? {
            return None;
        }
        let calls = field(offset_of!(Segment, calls))?;
        let call = |call: Call| sum(calls + 8 * call.index());
        let mut process = Process {
            pid: half(offset_of!(Segment, pid))?,
            backend: half(offset_of!(Segment, backend))?,
            held: word(offset_of!(Segment, held))?,
            held_peak: word(offset_of!(Segment, held_peak))?,
            returned: word(offset_of!(Segment, returned))?,
            huge: word(offset_of!(Segment, huge))?,
            requested: call(Call::REQUESTED)?,
            large_alloc: call(Call::LARGE_ALLOC)?,
            large_free: call(Call::LARGE_FREE)?,
            large_live: call(Call::LARGE_BYTES)?.saturating_sub(call(Call::LARGE_BYTES_FREED)?),
            realloc: call(Call::REALLOC)?,
            failed: call(Call::FAILED)?,
            classes: Vec::new(),
        };
        for nth in 0..CLASSES {
            let row = offset_of!(Segment, classes) + nth * size_of::<ClassRow>();
            let event = |event: SlabEvent| {
                let of_node = |node| {
                    let at = events_at + (nth * nodes + node) * size_of::<NodeEvents>();
                    word(at + 8 * event.index())
                };
                (0..nodes).try_fold(0u64, |sum, node| Some(sum.wrapping_add(of_node(node)?)))
            };
            process.classes.push(Class {
                size: u64::from(half(row + offset_of!(ClassRow, size))?),
                alloc: call(Call::alloc(nth))?,
                free: call(Call::free(nth))?,
                slowpath: event(SlabEvent::AllocSlowpath)?
                    .wrapping_add(event(SlabEvent::AllocLockless)?)
                    .wrapping_add(event(SlabEvent::FreeSlowpath)?)
                    .wrapping_add(event(SlabEvent::FreeLockless)?),
                refilled: event(SlabEvent::Refilled)?,
                flushed: event(SlabEvent::Flushed)?,
                slab_alloc: event(SlabEvent::SlabAlloc)?,
                slab_free: event(SlabEvent::SlabFree)?,
            });
        }
        Some(process)
    }
}

impl Class {
    pub fn calls(&self) -> u64 {
        self.alloc.saturating_add(self.free)
    }

    pub fn live(&self) -> u64 {
        self.alloc.saturating_sub(self.free)
    }

    /// Returns the share of calls that a fast path served.
    pub fn hit_rate(&self) -> Option<f64> {
        hit_rate(self.calls(), self.slowpath)
    }
}

pub fn hit_rate(calls: u64, slow: u64) -> Option<f64> {
    (calls > 0).then(|| 1.0 - slow.min(calls) as f64 / calls as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODES: usize = 2;
    const EVENTS_AT: usize = size_of::<Segment>();
    const FIRST: usize = EVENTS_AT + CLASSES * NODES * size_of::<NodeEvents>();
    const SIZE: usize = 2048;
    const CALLS: usize = 128;

    fn segment(units: usize) -> Vec<u8> {
        let mut bytes = vec![0; FIRST + units * SIZE];
        bytes[..8].copy_from_slice(&MAGIC.to_le_bytes());
        let mut set = |at: usize, value: usize| {
            bytes[at..at + 4].copy_from_slice(&(value as u32).to_le_bytes());
        };
        set(offset_of!(Segment, version), VERSION as usize);
        set(offset_of!(Segment, units), units);
        set(offset_of!(Segment, units_at), FIRST);
        set(offset_of!(Segment, unit_bytes), SIZE);
        set(offset_of!(Segment, calls), CALLS);
        set(offset_of!(Segment, events_at), EVENTS_AT);
        set(offset_of!(Segment, nodes), NODES);
        bytes
    }

    #[test]
    fn counts_of_all_units_are_added_up() {
        let mut bytes = segment(3);
        for unit in 0..3 {
            let at = FIRST + unit * SIZE + CALLS + 8 * Call::alloc(1).index();
            bytes[at] = 7;
        }
        let process = Process::parse(&bytes).unwrap();
        assert_eq!(process.classes[1].alloc, 21);
        assert_eq!(process.classes[1].live(), 21);
    }

    #[test]
    fn events_of_all_nodes_are_added_up() {
        let mut bytes = segment(1);
        for node in 0..NODES {
            let events = EVENTS_AT + (3 * NODES + node) * size_of::<NodeEvents>();
            bytes[events + 8 * SlabEvent::Refilled.index()] = 5;
            bytes[events + 8 * SlabEvent::SlabFree.index()] = 1;
        }
        let process = Process::parse(&bytes).unwrap();
        let class = &process.classes[3];
        assert_eq!((class.refilled, class.slab_free, class.flushed), (10, 2, 0));
        assert_eq!(process.classes[2].refilled + process.classes[4].refilled, 0);
    }

    #[test]
    fn broken_segments_are_refused() {
        let whole = segment(2);
        assert!(Process::parse(&whole).is_some());
        assert!(
            (0..whole.len())
                .step_by(61)
                .all(|cut| Process::parse(&whole[..cut]).is_none())
        );
        // The magic number, the version, the number of units, their place and size, the place of
        // the calls in a unit, the place of the events, and the number of nodes.
        let high = |field: usize| field + 2;
        for at in [
            0,
            offset_of!(Segment, version),
            offset_of!(Segment, units),
            high(offset_of!(Segment, units)),
            high(offset_of!(Segment, units_at)),
            high(offset_of!(Segment, unit_bytes)),
            high(offset_of!(Segment, calls)),
            high(offset_of!(Segment, events_at)),
            high(offset_of!(Segment, nodes)),
        ] {
            let mut broken = whole.clone();
            broken[at] ^= 0x40;
            assert!(Process::parse(&broken).is_none(), "byte {at}");
        }
    }
}
