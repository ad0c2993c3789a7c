//! Memory pressure without a risk for other programs.
//!
//! A thread reads a sparse file as large as the machine's memory, again and again. The kernel keeps
//! what was read, until all free memory holds pages of this file. From then on the kernel must drop
//! such pages before it can give out others. The thread has the lowest priority, so that it mostly
//! takes time that the load leaves.
//!
//! Only pages that the kernel can drop at once are in the way. So no program runs out of memory,
//! and this needs neither privileges nor a cgroup. The end of the pressure deletes the file, and
//! with it the pages.

use anyhow::{Context, Result, ensure};
use std::fs::{self, File};
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};

/// The thread that reads, and what the kernel had reclaimed before.
pub struct Pressure {
    path: PathBuf,
    ends: Arc<AtomicBool>,
    reader: Option<JoinHandle<Result<()>>>,
    before: Reclaimed,
}

/// What the kernel has reclaimed since it started, from `/proc/vmstat`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Reclaimed {
    pages: u64,
    /// Times that an allocating thread had to reclaim memory itself.
    stalls: u64,
}

impl Pressure {
    /// Starts the reader, and returns once it has read the whole file. The file is in `folder`.
    pub fn start(folder: &Path) -> Result<Pressure> {
        let path = folder.join("pressure");
        let file = File::create(&path).and_then(|file| file.set_len(memory()?));
        file.with_context(|| format!("cannot make a sparse file {}", path.display()))?;
        let ends = Arc::new(AtomicBool::new(false));
        let (filled, is_filled) = mpsc::channel();
        let (from, until) = (path.clone(), Arc::clone(&ends));
        eprintln!("filling the free memory with pages of a file");
        let reader = thread::spawn(move || read(&from, &until, &filled));
        let mut pressure = Pressure {
            path,
            ends,
            reader: Some(reader),
            before: Reclaimed::default(),
        };
        if is_filled.recv().is_err() {
            pressure.end()?;
        }
        pressure.before = Reclaimed::now();
        Ok(pressure)
    }

    /// Ends the pressure. Returns a line that tells what the kernel reclaimed meanwhile.
    pub fn stop(mut self) -> Result<String> {
        let now = Reclaimed::now();
        self.end()?;
        let (pages, stalls) = (
            now.pages.saturating_sub(self.before.pages),
            now.stalls.saturating_sub(self.before.stalls),
        );
        ensure!(
            pages > 0,
            "the kernel reclaimed nothing: the folder's file system does not cache what is read; \
             give a --cache on a disk"
        );
        Ok(format!(
            "\nUnder pressure the kernel reclaimed {pages} pages, and an allocating thread had to \
             do so itself {stalls} times.\n"
        ))
    }

    fn end(&mut self) -> Result<()> {
        self.ends.store(true, Ordering::Relaxed);
        let reader = self.reader.take().map(JoinHandle::join);
        let removed = fs::remove_file(&self.path);
        if let Some(read) = reader {
            read.ok().context("the reading thread panicked")??;
        }
        removed.with_context(|| format!("cannot delete {}", self.path.display()))
    }
}

impl Drop for Pressure {
    fn drop(&mut self) {
        if self.reader.is_some() {
            let _ = self.end();
        }
    }
}

/// Reads the file until `ends`. Sends a message after the first time.
fn read(path: &Path, ends: &AtomicBool, filled: &mpsc::Sender<()>) -> Result<()> {
    let mut file = File::open(path)?;
    let mut buffer = vec![0; 1 << 20];
    let mut times = 0;
    while !ends.load(Ordering::Relaxed) {
        if file.read(&mut buffer)? > 0 {
            continue;
        }
        file.rewind()?;
        times += 1;
        if times == 1 {
            // Only this thread, and only now, so that filling takes no longer than it must.
            // SAFETY: the calls touch no memory. A thread may lower its own priority.
            unsafe { libc::setpriority(libc::PRIO_PROCESS, libc::gettid() as u32, 19) };
            let _ = filled.send(());
        }
    }
    Ok(())
}

/// Returns the bytes of the machine's memory.
fn memory() -> std::io::Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find(|line| line.starts_with("MemTotal:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    kib.map(|kib| kib << 10)
        .ok_or_else(|| std::io::Error::other("no MemTotal in /proc/meminfo"))
}

impl Reclaimed {
    fn now() -> Reclaimed {
        Reclaimed::parse(&fs::read_to_string("/proc/vmstat").unwrap_or_default())
    }

    fn parse(text: &str) -> Reclaimed {
        let sum = |names: &[&str]| {
            let values = text.lines().filter_map(|line| line.split_once(' '));
            let wanted = values.filter(|(name, _)| names.iter().any(|of| name.starts_with(of)));
            wanted
                .filter_map(|(_, value)| value.parse::<u64>().ok())
                .sum()
        };
        Reclaimed {
            pages: sum(&["pgsteal_kswapd", "pgsteal_direct"]),
            stalls: sum(&["allocstall_"]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The line about the pressure must count both kinds of reclaim, and no other line.
    #[test]
    fn reclaimed_pages_are_summed() {
        let text = "allocstall_normal 3\nallocstall_movable 4\npgsteal_kswapd 10\n\
                    pgsteal_direct 5\npgsteal_anon 100\npgscan_kswapd 7\n";
        let expected = Reclaimed {
            pages: 15,
            stalls: 7,
        };
        assert_eq!(Reclaimed::parse(text), expected);
    }

    #[test]
    fn this_machine_has_memory() {
        assert!(memory().unwrap() > 1 << 20);
    }
}
