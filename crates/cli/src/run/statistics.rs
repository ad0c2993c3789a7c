//! Reads the statistics files that the command's processes have left.

use crate::foreign::{Content, open_own};
use crate::live::{Cache, Calls, Snapshot};
use anyhow::{Context, Result, anyhow};
use std::fs;
use std::path::{Path, PathBuf};

/// A directory for statistics files. Dropping this value removes the directory.
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
            if let Some(counted) = snapshot(&entry.path()).and_then(Process::of) {
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
pub struct Process {
    pub snapshot: Snapshot,
    pub calls: Calls,
}

/// A cache, and the calls that its size class served.
pub struct Class<'s> {
    pub cache: &'s Cache,
    pub alloc: u64,
    pub free: u64,
}

impl Process {
    /// Returns `None` if the process counted no calls.
    fn of(mut snapshot: Snapshot) -> Option<Process> {
        let calls = snapshot.calls.take()?;
        Some(Process { snapshot, calls })
    }

    pub fn classes(&self) -> impl Iterator<Item = Class<'_>> {
        self.snapshot.caches.iter().map(|cache| {
            let class = self.snapshot.class_of(cache);
            let (alloc, free) = class.map_or((0, 0), |class| self.calls.of_class(class));
            Class { cache, alloc, free }
        })
    }
}

impl Class<'_> {
    pub fn calls(&self) -> u64 {
        self.alloc.saturating_add(self.free)
    }

    pub fn live(&self) -> u64 {
        self.alloc.saturating_sub(self.free)
    }

    /// Returns the share of calls that a fast path served.
    pub fn hit_rate(&self) -> Option<f64> {
        hit_rate(self.calls(), self.cache.slow())
    }
}

pub fn hit_rate(calls: u64, slow: u64) -> Option<f64> {
    (calls > 0).then(|| 1.0 - slow.min(calls) as f64 / calls as f64)
}
