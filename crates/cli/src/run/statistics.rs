//! Reads the statistics files that the command's processes have left.

use crate::foreign::{Content, open_own};
use crate::live::{Cache, Snapshot};
use anyhow::{Context, Result, anyhow};
use pinfold::internal::segment::{Call, SlabEvent};
use std::fs;
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
            if let Some(counted) = snapshot(&entry.path()).as_ref().and_then(Process::of) {
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

/// Reads the statistics of a process that has ended. The process chose what the file holds.
fn snapshot(path: &Path) -> Option<Snapshot> {
    let content = Content::of_file(open_own(path).ok()?).ok()?;
    let read = Snapshot::read(|at, size| content.read(at as u64, size));
    read.ok()?.ok()
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
    /// Takes the report's numbers from what a process has shown.
    fn of(snapshot: &Snapshot) -> Option<Process> {
        let calls = snapshot.calls.as_ref()?;
        let large = calls.count(Call::LARGE_BYTES);
        Some(Process {
            pid: snapshot.pid,
            backend: snapshot.backend,
            held: snapshot.held,
            held_peak: snapshot.held_peak,
            returned: snapshot.returned,
            huge: snapshot.huge,
            requested: calls.count(Call::REQUESTED),
            large_alloc: calls.count(Call::LARGE_ALLOC),
            large_free: calls.count(Call::LARGE_FREE),
            large_live: large.saturating_sub(calls.count(Call::LARGE_BYTES_FREED)),
            realloc: calls.count(Call::REALLOC),
            failed: calls.count(Call::FAILED),
            classes: snapshot
                .caches
                .iter()
                .map(|cache| {
                    let class = snapshot.class_of(cache);
                    Class::of(cache, class.map_or((0, 0), |class| calls.of_class(class)))
                })
                .collect(),
        })
    }
}

impl Class {
    fn of(cache: &Cache, (alloc, free): (u64, u64)) -> Class {
        Class {
            size: cache.size,
            alloc,
            free,
            slowpath: cache.slow(),
            refilled: cache.count(SlabEvent::Refilled),
            flushed: cache.count(SlabEvent::Flushed),
            slab_alloc: cache.count(SlabEvent::SlabAlloc),
            slab_free: cache.count(SlabEvent::SlabFree),
        }
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
