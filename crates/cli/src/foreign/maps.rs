//! The list of a process's mappings, `/proc/PID/maps`.

pub use pinfold_pprof::internal::maps::Mapping;
use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind, Read};

/// More bytes than a line can have: a path has at most 4,096 bytes, each of which may be written as
/// four.
const MAX_LINE: usize = 20_000;

/// The most bytes of a list that are read. 65,530 mappings, the most by default, take 7 MB if the
/// paths are short.
const MAX_BYTES: u64 = 64 << 20;

/// Iterates over the mappings of a list. A list that is too long, and a line that is not a mapping,
/// are errors.
pub struct Maps {
    text: BufReader<io::Take<File>>,
    line: Vec<u8>,
}

impl Maps {
    pub(super) fn new(file: File) -> Maps {
        Maps {
            text: BufReader::with_capacity(64 << 10, file.take(MAX_BYTES)),
            line: Vec::new(),
        }
    }

    fn read(&mut self) -> io::Result<Option<Mapping>> {
        super::deadline::check()?;
        self.line.clear();
        let mut line = (&mut self.text).take(MAX_LINE as u64);
        line.read_until(b'\n', &mut self.line)?;
        match self.line.split_last() {
            Some((b'\n', line)) => Mapping::parse(line)
                .map(Some)
                .ok_or(ErrorKind::InvalidData.into()),
            Some(_) => Err(ErrorKind::FileTooLarge.into()),
            None if self.text.get_ref().limit() == 0 => Err(ErrorKind::FileTooLarge.into()),
            None => Ok(None),
        }
    }
}

impl Iterator for Maps {
    type Item = io::Result<Mapping>;

    fn next(&mut self) -> Option<io::Result<Mapping>> {
        self.read().transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_its_program_mapped() {
        let process = crate::foreign::Process::own().unwrap();
        let maps: Vec<Mapping> = process.maps().unwrap().map(Result::unwrap).collect();
        let own = std::env::current_exe().unwrap();
        let own = own.as_os_str().as_encoded_bytes();
        assert!(
            maps.iter()
                .any(|mapping| mapping.path == own && mapping.is_executable())
        );
    }
}
