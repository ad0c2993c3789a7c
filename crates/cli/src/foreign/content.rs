//! The bytes of a file that another process can write to, or of its memory.

use super::{Memory, deadline};
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;

/// Bytes that another process can change at any time.
///
/// A copy of a word of 8 bytes at a multiple of 8 is a value that the process stored, because the
/// kernel copies whole words from one aligned place to another.
#[derive(Debug)]
pub struct Content {
    file: File,
    /// Where in `file` the bytes begin: 0 in a file, an address in a process's memory.
    start: u64,
    size: u64,
}

impl Content {
    /// Returns the bytes of a regular file, up to its present length.
    pub fn of_file(file: File) -> io::Result<Content> {
        let size = file.metadata()?.len();
        Ok(Content {
            file,
            start: 0,
            size,
        })
    }

    /// Returns `size` bytes of a process's memory, from address `start` on.
    pub fn of_opened(memory: &Memory, start: u64, size: u64) -> io::Result<Content> {
        let file = memory.file()?;
        Ok(Content { file, start, size })
    }

    /// Reads `size` bytes from `at` on. Returns fewer if the bytes end before.
    pub fn read(&self, at: u64, size: usize) -> io::Result<Vec<u8>> {
        let rest = self.size.saturating_sub(at);
        let size = size.min(usize::try_from(rest).unwrap_or(usize::MAX));
        let from = self.start.checked_add(at).ok_or(ErrorKind::InvalidInput)?;
        let mut bytes = vec![0; size];
        let mut done = 0;
        while done < size {
            deadline::check()?;
            match self.file.read_at(&mut bytes[done..], from + done as u64) {
                Ok(0) => break,
                Ok(got) => done += got,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        bytes.truncate(done);
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn a_file_is_read_within_its_bounds() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"0123456789").unwrap();
        let content = Content::of_file(file).unwrap();
        assert_eq!(content.read(2, 3).unwrap(), b"234");
        assert_eq!(content.read(8, usize::MAX).unwrap(), b"89");
        assert_eq!(content.read(u64::MAX, 8).unwrap(), b"");
    }

    #[test]
    fn a_hole_is_read_as_zeros() {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file: File = rustix::fs::memfd_create("hole", flags).unwrap().into();
        file.set_len(1 << 40).unwrap();
        let content = Content::of_file(file.try_clone().unwrap()).unwrap();
        assert_eq!(content.read(1 << 39, 100).unwrap(), [0; 100]);
        // A read in a mapping would take memory, which this command's cgroup would pay.
        assert_eq!(file.metadata().unwrap().blocks(), 0);
    }
}
