//! The time until which a thread reads other processes.
//!
//! A process can have a million descriptors and 65,530 mappings, so a few reads of it take seconds.
//! A command that reads many processes gives each a share of its time, and each read in this folder
//! checks the clock.

use std::cell::Cell;
use std::io::{self, ErrorKind};
use std::time::{Duration, Instant};

thread_local! {
    static END: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// While this lives, the thread's reads of other processes fail after a certain time.
#[derive(Debug)]
pub struct Deadline {
    outer: Option<Instant>,
}

impl Deadline {
    /// Limits this thread's reads. A deadline that the thread has already stays, if it is earlier.
    pub fn after(time: Duration) -> Deadline {
        let end = Instant::now() + time;
        let outer = END.get();
        END.set(Some(outer.map_or(end, |outer| outer.min(end))));
        Deadline { outer }
    }
}

impl Drop for Deadline {
    fn drop(&mut self) {
        END.set(self.outer);
    }
}

/// Returns an error if this thread may read no more.
pub(super) fn check() -> io::Result<()> {
    match END.get() {
        Some(end) if Instant::now() >= end => Err(io::Error::new(
            ErrorKind::TimedOut,
            "reading it takes too long",
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::foreign::{Content, Memory, Process};
    use std::io::Write;

    #[test]
    fn no_read_begins_after_the_deadline() {
        let process = Process::own().unwrap();
        let memory = Memory::open(&process).unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"x").unwrap();
        let content = Content::of_file(file).unwrap();
        let word = Box::new(0_u64);
        let at = std::ptr::from_ref(&*word).addr() as u64;
        let reads: [(&str, &dyn Fn() -> io::Result<()>); 8] = [
            ("a file", &|| process.stat().map(|_| ())),
            ("a link", &|| process.link("exe").map(|_| ())),
            ("descriptors", &|| process.descriptors(100).map(|_| ())),
            ("threads", &|| process.tasks().map(|_| ())),
            ("bytes", &|| content.read(0, 1).map(|_| ())),
            ("memory", &|| memory.read(at, 8).map(|_| ())),
            ("a word", &|| memory.word(at).map(|_| ())),
            ("a mapped file", &|| {
                let mut maps = process.maps()?;
                let mapping = maps.find_map(|mapping| mapping.ok().filter(|one| one.inode > 0));
                match crate::foreign::open_mapped(&process, &mapping.unwrap()) {
                    Err(crate::foreign::Unopened::System(error)) => Err(error),
                    _ => Ok(()),
                }
            }),
        ];
        let mut maps = process.maps().unwrap();
        maps.next().unwrap().unwrap();
        let late = Deadline::after(Duration::ZERO);
        for (what, read) in &reads {
            assert_eq!(read().unwrap_err().kind(), ErrorKind::TimedOut, "{what}");
        }
        let next = maps.next().unwrap();
        assert_eq!(next.unwrap_err().kind(), ErrorKind::TimedOut, "mappings");
        let _later = Deadline::after(Duration::from_secs(1000));
        assert!(check().is_err(), "an inner deadline is no longer one");
        drop(_later);
        drop(late);
        for (what, read) in &reads {
            assert!(read().is_ok(), "{what}");
        }
    }
}
