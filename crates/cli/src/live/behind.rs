//! The mailbox and the segment behind a process's mark, in the process's own memory.
//!
//! A forked child has both in private memory, so no file leads to them. Nor does one where the
//! program has closed all descriptors. The mark is a mapping whose name the kernel lists in
//! `/proc/PID/maps`, also in children. The mailbox lies behind the mark's end, and the segment a
//! page further. A user that may trace the process reads and writes them in `/proc/PID/mem`.
//!
//! The process chooses what it maps and where. A write through `/proc/PID/mem` changes nothing but
//! what that process could change itself, so a false mark leads to no harm but its own.

use super::snapshot::{Refused, Snapshot};
use super::source::Unreadable;
use crate::foreign::{Content, Memory, Process};
use pinfold::internal::kmalloc::MAX_SMALL_SIZE;
use pinfold::internal::profile::BYTES;
use pinfold::internal::segment::{MAGIC, Mailbox, Segment, VERSION};
use std::io::{self, ErrorKind};
use std::mem::offset_of;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// How the kernel names the mark.
const MARK: &[u8] = b"/memfd:pinfold-mark (deleted)";

/// What lies behind a process's mark.
#[derive(Debug)]
pub struct Behind {
    memory: Memory,
    mailbox: u64,
    head: u64,
    /// The process's number as it sees itself.
    inner: u32,
}

/// Returns why an error of a process's memory keeps it from being read.
fn why(error: io::Error) -> Unreadable {
    match error.kind() {
        ErrorKind::PermissionDenied => Unreadable::Untraceable,
        // The process has no such addresses any more.
        ErrorKind::UnexpectedEof => Unreadable::Replaced,
        _ if error.raw_os_error() == Some(libc::EIO) => Unreadable::Replaced,
        _ => error.into(),
    }
}

impl Behind {
    /// Finds a process's mark. Returns `None` if it has none.
    pub fn find(process: &Process) -> Result<Option<Behind>, Unreadable> {
        // Opened before the list is read, so that the addresses in the list are of this memory, or
        // of a later program's, which this descriptor does not lead to.
        let memory = Memory::open(process);
        for mapping in process.maps()? {
            let mapping = mapping?;
            if mapping.path != MARK || mapping.permissions != *b"---p" {
                continue;
            }
            let size = page_size();
            return Ok(Some(Behind {
                memory: memory.map_err(why)?,
                mailbox: mapping.end,
                head: mapping.end.checked_add(size).ok_or(Refused::NotASegment)?,
                inner: process.inner_pid()?,
            }));
        }
        Ok(None)
    }

    pub fn snapshot(&self) -> Result<Snapshot, Unreadable> {
        self.check()?;
        let read = |at: usize, size| self.memory.read(self.head + at as u64, size);
        Ok(Snapshot::read(read).map_err(why)??)
    }

    /// Checks that a segment of this process lies there.
    fn check(&self) -> Result<(), Unreadable> {
        if self.word(offset_of!(Segment, magic))? != MAGIC {
            return Err(Refused::NotASegment.into());
        }
        match self.half(offset_of!(Segment, version))? {
            VERSION => {}
            other => return Err(Refused::Version(other).into()),
        }
        // A child that ran no fork handler is still in its parent's segment.
        match self.half(offset_of!(Segment, pid))? {
            pid if pid == self.inner => Ok(()),
            _ => Err(Unreadable::Shares),
        }
    }

    fn word(&self, at: usize) -> Result<u64, Unreadable> {
        self.memory.word(self.head + at as u64).map_err(why)
    }

    fn half(&self, at: usize) -> Result<u32, Unreadable> {
        // A half of a word, on a machine of either order.
        let bytes = self.memory.read(self.head + at as u64, 4).map_err(why)?;
        let bytes = bytes.try_into().map_err(|_| Refused::Broken)?;
        Ok(u32::from_ne_bytes(bytes))
    }

    /// Returns the records of the heap profile, or `None` if the process has no profile.
    pub fn profile(&self) -> Result<Option<Content>, Unreadable> {
        self.check()?;
        match self.word(offset_of!(Segment, profile))? {
            0 => Ok(None),
            at => Ok(Some(Content::of_opened(&self.memory, at, BYTES as u64)?)),
        }
    }

    /// Closes the fast paths of malloc that are open, so that the next calls of malloc look for
    /// requests. These calls open the paths again.
    pub fn close_gates(&self) -> Result<(), Unreadable> {
        self.check()?;
        let open = [MAX_SMALL_SIZE as u64 + 1, MAX_SMALL_SIZE as u64];
        for (nth, open) in open.into_iter().enumerate() {
            let gate = self.word(offset_of!(Segment, gates) + 8 * nth)?;
            if gate != 0 && self.memory.word(gate).is_ok_and(|word| word == open) {
                self.memory.set_word(gate, 0).map_err(why)?;
            }
        }
        Ok(())
    }

    /// Has `act` work on a copy of the mailbox, and writes back the words that it changed.
    pub fn with_mailbox<R>(&self, act: impl FnOnce(&Mailbox) -> R) -> Result<R, Unreadable> {
        self.check()?;
        let bytes = self.memory.read(self.mailbox, size_of::<Mailbox>());
        let before: Box<Words> = Words::of(&bytes.map_err(why)?);
        let after = before.clone();
        let result = act(after.mailbox());
        let load = |words: &Words, nth: usize| words.0[nth].load(Relaxed);
        // A request's own word is written after the words that belong to it, and the bell last.
        let order = (REQUESTS_END..WORDS).chain((0..REQUESTS_END).rev());
        for nth in order.filter(|&nth| load(&before, nth) != load(&after, nth)) {
            let at = self.mailbox + 8 * nth as u64;
            self.memory.set_word(at, load(&after, nth)).map_err(why)?;
        }
        Ok(result)
    }
}

const WORDS: usize = size_of::<Mailbox>() / 8;
/// The words before this one are the mailbox's head, with the bell, and the requests.
const REQUESTS_END: usize = Mailbox::REQUESTS_END / 8;

/// The words of a mailbox.
#[repr(C, align(4096))]
struct Words([AtomicU64; WORDS]);

impl Words {
    fn of(bytes: &[u8]) -> Box<Words> {
        let words = bytes.as_chunks().0;
        let word = |nth| AtomicU64::new(words.get(nth).map_or(0, |&word| u64::from_ne_bytes(word)));
        Box::new(Words(std::array::from_fn(word)))
    }

    fn mailbox(&self) -> &Mailbox {
        // SAFETY: both types have the same size and alignment, and consist of atomic words, for
        // which any value is valid.
        unsafe { &*std::ptr::from_ref(self).cast() }
    }
}

impl Clone for Words {
    fn clone(&self) -> Words {
        Words(std::array::from_fn(|nth| {
            AtomicU64::new(self.0[nth].load(Relaxed))
        }))
    }
}

fn page_size() -> u64 {
    // SAFETY: `sysconf` has no preconditions.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as u64 }
}
