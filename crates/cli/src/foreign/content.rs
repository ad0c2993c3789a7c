//! The bytes of a file, or of another process's memory.

use super::Process;
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
    /// Returns the bytes of a regular file, as it is long now.
    pub fn of_file(file: File) -> io::Result<Content> {
        let size = file.metadata()?.len();
        Ok(Content {
            file,
            start: 0,
            size,
        })
    }

    /// Returns `size` bytes of a process's memory. The process has no part in it, and needs none of
    /// its descriptors. The kernel permits it to those that may trace the process.
    pub fn of_memory(process: &Process, start: u64, size: u64) -> io::Result<Content> {
        let file = process.file("mem")?;
        Ok(Content { file, start, size })
    }

    pub fn size(&self) -> u64 {
        self.size
    }

    /// Reads `size` bytes from `at` on. Returns fewer if the bytes end before.
    pub fn read(&self, at: u64, size: usize) -> io::Result<Vec<u8>> {
        let rest = self.size.saturating_sub(at);
        let size = size.min(usize::try_from(rest).unwrap_or(usize::MAX));
        let from = self.start.checked_add(at).ok_or(ErrorKind::InvalidInput)?;
        let mut bytes = vec![0; size];
        let mut done = 0;
        while done < size {
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

    #[test]
    fn memory_is_read_within_its_bounds() {
        let process = Process::own().unwrap();
        let words: Vec<u64> = (0..1000).collect();
        let start = words.as_ptr().addr() as u64;
        let content = Content::of_memory(&process, start, 8000).unwrap();
        assert_eq!(content.read(16, 8).unwrap(), 2_u64.to_le_bytes());
        assert_eq!(content.read(7996, 100).unwrap().len(), 4);
        assert_eq!(content.read(9000, 100).unwrap().len(), 0);
        let beyond = Content::of_memory(&process, u64::MAX - 10, 8000).unwrap();
        assert!(beyond.read(100, 8).is_err());
    }

    #[test]
    fn a_hole_is_read_as_zeros() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 40).unwrap();
        let content = Content::of_file(file).unwrap();
        assert_eq!(content.read(1 << 39, 100).unwrap(), [0; 100]);
    }
}
