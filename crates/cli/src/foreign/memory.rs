//! The memory of another process.

use super::{Process, deadline};
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;

/// A process's memory, `/proc/PID/mem`.
///
/// The descriptor belongs to the addresses that the process had when it was opened. After the
/// process has ended or has started another program, each read and write fails.
#[derive(Debug)]
pub struct Memory(File);

impl Memory {
    /// Opens a process's memory. The kernel permits this to those that may trace the process.
    pub fn open(process: &Process) -> io::Result<Memory> {
        Ok(Memory(process.file_to_write("mem")?))
    }

    pub(super) fn file(&self) -> io::Result<File> {
        self.0.try_clone()
    }

    /// Reads exactly `size` bytes at an address.
    pub fn read(&self, at: u64, size: usize) -> io::Result<Vec<u8>> {
        deadline::check()?;
        let mut bytes = vec![0; size];
        self.0.read_exact_at(&mut bytes, at)?;
        Ok(bytes)
    }

    /// Reads the word at an address.
    pub fn word(&self, at: u64) -> io::Result<u64> {
        deadline::check()?;
        let mut bytes = [0; 8];
        self.0.read_exact_at(&mut bytes, at)?;
        Ok(u64::from_ne_bytes(bytes))
    }

    /// Writes a word. The kernel writes whole words at multiples of 8.
    pub fn set_word(&self, at: u64, word: u64) -> io::Result<()> {
        if !at.is_multiple_of(8) {
            return Err(ErrorKind::InvalidInput.into());
        }
        self.0.write_all_at(&word.to_ne_bytes(), at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;
    use std::sync::atomic::Ordering::Relaxed;

    #[test]
    fn words_are_read_and_written() {
        let word = AtomicU64::new(7);
        let at = word.as_ptr().addr() as u64;
        let memory = Memory::open(&Process::own().unwrap()).unwrap();
        assert_eq!(memory.word(at).unwrap(), 7);
        memory.set_word(at, 8).unwrap();
        assert_eq!(word.load(Relaxed), 8);
        assert_eq!(memory.read(at, 8).unwrap(), 8_u64.to_ne_bytes());
        for wrong in [1, at + 4, u64::MAX - 7] {
            assert!(memory.set_word(wrong, 0).is_err());
        }
        assert!(memory.read(8, 8).is_err());
    }
}
