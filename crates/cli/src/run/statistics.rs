//! Reading the statistics segments that the command's processes have left.

use anyhow::{Context, Result};
use pinfold::segment::{self, CLASSES, ClassRow, MAGIC, Segment, Shard, VERSION, shard_offset};
use std::fs;
use std::mem::offset_of;
use std::path::{Path, PathBuf};

pub const VARIABLE: &str = segment::DIRECTORY_VARIABLE;

/// A directory in which processes leave their segments; removed when dropped.
pub struct Directory {
    path: PathBuf,
}

impl Directory {
    pub fn make() -> Result<Directory> {
        use std::os::unix::fs::DirBuilderExt;
        let base = [Path::new("/dev/shm"), &std::env::temp_dir()]
            .into_iter()
            .find(|base| base.is_dir())
            .context("there is no directory for temporary files; set TMPDIR")?
            .to_owned();
        let stamp = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)?
            .as_nanos();
        let path = base.join(format!("pinfold-{}-{stamp}", std::process::id()));
        fs::DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .with_context(|| format!("cannot make {} for the statistics", path.display()))?;
        Ok(Directory { path })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the process `pid` counted, its last program image, and what all others did.
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

/// What one program image counted.
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
    /// Reads a segment, which may be anything: only numbers are taken from it, and only from inside it.
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
        let shards = half(offset_of!(Segment, shards))? as usize;
        if word(offset_of!(Segment, magic))? != MAGIC
            || half(offset_of!(Segment, version))? != VERSION
        {
            return None;
        }
        if shards > 1 << 20 || bytes.len() < segment::segment_size(shards) {
            return None;
        }
        let sum = |field: usize| {
            let words = (0..shards).filter_map(|shard| word(shard_offset(shard) + field));
            words.fold(0u64, u64::wrapping_add)
        };
        let mut process = Process {
            pid: half(offset_of!(Segment, pid))?,
            backend: half(offset_of!(Segment, backend))?,
            held: word(offset_of!(Segment, held))?,
            held_peak: word(offset_of!(Segment, held_peak))?,
            returned: word(offset_of!(Segment, returned))?,
            huge: word(offset_of!(Segment, huge))?,
            requested: sum(offset_of!(Shard, requested)),
            large_alloc: sum(offset_of!(Shard, large_alloc)),
            large_free: sum(offset_of!(Shard, large_free)),
            large_live: sum(offset_of!(Shard, large_bytes))
                .saturating_sub(sum(offset_of!(Shard, large_bytes_freed))),
            realloc: sum(offset_of!(Shard, realloc)),
            failed: sum(offset_of!(Shard, failed)),
            classes: Vec::new(),
        };
        for nth in 0..CLASSES {
            let row = offset_of!(Segment, classes) + nth * size_of::<ClassRow>();
            let field = |at: usize| word(row + at);
            process.classes.push(Class {
                size: u64::from(half(row + offset_of!(ClassRow, size))?),
                alloc: sum(offset_of!(Shard, alloc) + 8 * nth),
                free: sum(offset_of!(Shard, free) + 8 * nth),
                slowpath: field(offset_of!(ClassRow, alloc_slowpath))?
                    .wrapping_add(field(offset_of!(ClassRow, free_slowpath))?),
                refilled: field(offset_of!(ClassRow, refilled))?,
                flushed: field(offset_of!(ClassRow, flushed))?,
                slab_alloc: field(offset_of!(ClassRow, slab_alloc))?,
                slab_free: field(offset_of!(ClassRow, slab_free))?,
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

    /// The share of calls that a sheaf served.
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

    fn segment(shards: usize) -> Vec<u8> {
        let mut bytes = vec![0; segment::segment_size(shards)];
        bytes[..8].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&(shards as u32).to_le_bytes());
        bytes
    }

    #[test]
    fn shards_are_added_up() {
        let mut bytes = segment(3);
        for shard in 0..3 {
            let at = shard_offset(shard) + offset_of!(Shard, alloc) + 8;
            bytes[at] = 7;
        }
        let process = Process::parse(&bytes).unwrap();
        assert_eq!(process.classes[1].alloc, 21);
        assert_eq!(process.classes[1].live(), 21);
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
        for at in [0, 8, 13] {
            let mut broken = whole.clone();
            broken[at] ^= 0x40;
            assert!(Process::parse(&broken).is_none(), "byte {at}");
        }
    }
}
