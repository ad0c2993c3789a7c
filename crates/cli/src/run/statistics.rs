//! Reading the statistics segments that the command's processes have left.

use anyhow::{Context, Result};
use pinfold::segment::{self, CLASSES, ClassRow, MAGIC, Segment, Shard, VERSION, shard_offset};
use serde::Serialize;
use std::fs;
use std::mem::offset_of;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// More than any kernel has CPUs (8192 is its limit); bounds what is read of a file.
const SHARDS_MOST: usize = 1 << 14;

pub const VARIABLE: &str = segment::DIRECTORY_VARIABLE;

/// A directory in which processes leave their segments; removed when dropped.
pub struct Directory {
    path: PathBuf,
}

impl Directory {
    pub fn make() -> Result<Directory> {
        let stamp = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)?
            .as_nanos();
        let name = format!("pinfold-{}-{stamp}", std::process::id());
        // Counting in memory is better than in a file that is written to a disk.
        Directory::make_in(Path::new("/dev/shm"), &name)
            .or_else(|_| Directory::make_in(&std::env::temp_dir(), &name))
    }

    fn make_in(base: &Path, name: &str) -> Result<Directory> {
        let path = base.join(name);
        // Fails if the name is there already, whoever made it.
        fs::DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .with_context(|| {
                format!(
                    "cannot make {} for the statistics; TMPDIR can name another folder",
                    path.display()
                )
            })?;
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
            if let Some(counted) = read_file(&entry).and_then(|bytes| Process::parse(&bytes)) {
                all.push((process, image, counted));
            }
        }
        all.sort_by_key(|(process, image, _)| (*process == pid, *image));
        let main = all
            .pop_if(|(process, ..)| *process == pid)
            .map(|(.., counted)| counted);
        Report {
            process: main,
            others: all.into_iter().map(|(.., counted)| counted).collect(),
        }
    }
}

/// Reads what can be a segment: the programs counted may have put anything here.
fn read_file(entry: &fs::DirEntry) -> Option<Vec<u8>> {
    let metadata = entry.metadata().ok()?;
    let sane = metadata.is_file() && metadata.len() <= segment::segment_size(SHARDS_MOST) as u64;
    sane.then(|| fs::read(entry.path()).ok())?
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// What `--stats-json` writes as it stands.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// The command's own process, its last program image.
    pub process: Option<Process>,
    /// The other processes, and earlier images of the command's own.
    pub others: Vec<Process>,
}

/// What one program image counted.
#[derive(Debug, Default, Serialize)]
pub struct Process {
    pub pid: u32,
    pub backend: &'static str,
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

#[derive(Debug, Default, Serialize)]
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
        if shards > SHARDS_MOST || bytes.len() < segment::segment_size(shards) {
            return None;
        }
        let sum = |field: usize| {
            let words = (0..shards).filter_map(|shard| word(shard_offset(shard) + field));
            words.fold(0u64, u64::wrapping_add)
        };
        let mut process = Process {
            pid: half(offset_of!(Segment, pid))?,
            backend: match half(offset_of!(Segment, backend))? {
                0 => "atomics",
                1 => "restartable sequences, by CPU number",
                2 => "restartable sequences, by concurrency id",
                _ => "a backend that this command does not know",
            },
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
            let size = u64::from(half(row + offset_of!(ClassRow, size))?);
            if size == 0 {
                continue;
            }
            process.classes.push(Class {
                size,
                alloc: sum(offset_of!(Shard, alloc) + 8 * nth),
                free: sum(offset_of!(Shard, free) + 8 * nth),
                slowpath: field(offset_of!(ClassRow, alloc_slowpath))?
                    .saturating_add(field(offset_of!(ClassRow, free_slowpath))?),
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
        let row = offset_of!(Segment, classes) + size_of::<ClassRow>();
        bytes[row + offset_of!(ClassRow, size)] = 16;
        let process = Process::parse(&bytes).unwrap();
        assert_eq!(process.classes.len(), 1);
        assert_eq!(process.classes[0].alloc, 21);
        assert_eq!(process.classes[0].live(), 21);
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

    #[test]
    fn what_is_no_segment_is_passed_over() {
        let directory = Directory::make().unwrap();
        let path = directory.path().to_owned();
        let put = |name: &str, bytes: &[u8]| fs::write(path.join(name), bytes).unwrap();
        // The header's numbers at their largest, and rows of all ones.
        let mut strange = segment(1);
        strange[24..].fill(0xff);
        put("7.0", &strange);
        put("7.1", b"no segment");
        put("8.0", &segment(2));
        put("words.0", &segment(2));
        put("9", &segment(2));
        fs::create_dir(path.join("7.2")).unwrap();
        std::os::unix::fs::symlink("/dev/zero", path.join("7.3")).unwrap();
        let huge = fs::File::create(path.join("7.4")).unwrap();
        huge.set_len(1 << 40).unwrap();
        let report = directory.read(7);
        assert_eq!(report.others.len(), 1);
        let text = report.to_string();
        assert!(
            text.contains("process") && text.contains("1 further"),
            "{text}"
        );
        assert!(directory.read(1).process.is_none());
        drop(directory);
        assert!(!path.exists());
    }

    #[test]
    fn the_last_image_is_the_commands() {
        let directory = Directory::make().unwrap();
        for image in 0..12u8 {
            let mut bytes = segment(1);
            bytes[offset_of!(Segment, held)] = image;
            fs::write(directory.path().join(format!("7.{image}")), bytes).unwrap();
        }
        let report = directory.read(7);
        assert_eq!(report.process.map(|process| process.held), Some(11));
        assert_eq!(report.others.len(), 11);
    }
}
