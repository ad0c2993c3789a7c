//! The list of a process's mappings, `/proc/PID/maps`.

use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind, Read};

/// More bytes than a line can have: a path has at most 4,096 bytes, each of which may be written as
/// four.
const MAX_LINE: usize = 20_000;

/// The most bytes of a list that are read. 65,530 mappings, the most by default, take 7 MB if the
/// paths are short.
const MAX_BYTES: u64 = 64 << 20;

#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Mapping {
    pub start: u64,
    pub end: u64,
    /// `rwxp`; `-` for what is not permitted, `s` for a shared mapping.
    pub permissions: [u8; 4],
    /// Where in the file the mapping begins.
    pub offset: u64,
    /// The major and minor number of the file's device.
    pub device: (u32, u32),
    /// 0 for memory without a file.
    pub inode: u64,
    /// The file's path, or the kernel's name for the memory, such as `[heap]`, or nothing. A path
    /// of a deleted file ends with ` (deleted)`.
    pub path: Vec<u8>,
}

impl Mapping {
    pub fn parse(line: &[u8]) -> Option<Mapping> {
        let mut words = line.splitn(6, |&byte| byte == b' ');
        let (start, end) = pair(words.next()?, b'-')?;
        let permissions = words.next()?.try_into().ok()?;
        let offset = hex(words.next()?)?;
        let (major, minor) = pair(words.next()?, b':')?;
        let inode = super::process::number(words.next()?)?;
        let path = words.next().unwrap_or_default();
        // Spaces align the paths of a list.
        let blank = path.iter().take_while(|&&byte| byte == b' ').count();
        Some(Mapping {
            start,
            end,
            permissions,
            offset,
            device: (u32::try_from(major).ok()?, u32::try_from(minor).ok()?),
            inode,
            path: path[blank..].to_vec(),
        })
    }

    pub fn is_executable(&self) -> bool {
        self.permissions[2] == b'x'
    }

    pub fn is_shared(&self) -> bool {
        self.permissions[3] == b's'
    }

    /// Returns the name of the link in `map_files` that leads to the mapping's file.
    pub fn map_file(&self) -> String {
        format!("map_files/{:x}-{:x}", self.start, self.end)
    }

    /// Returns whether another mapping is of the same file, as far as the list tells.
    pub fn is_same_file(&self, other: &Mapping) -> bool {
        (self.device, self.inode, &self.path) == (other.device, other.inode, &other.path)
    }
}

fn pair(word: &[u8], between: u8) -> Option<(u64, u64)> {
    let at = word.iter().position(|&byte| byte == between)?;
    Some((hex(&word[..at])?, hex(&word[at + 1..])?))
}

fn hex(bytes: &[u8]) -> Option<u64> {
    u64::from_str_radix(str::from_utf8(bytes).ok()?, 16).ok()
}

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
    fn lines_are_bytes() {
        let line = b"7f00-7f40 rw-s 00001000 fe:0a 77                         /tmp/caf\xe9 a b";
        let mapping = Mapping::parse(line).unwrap();
        assert_eq!(
            (mapping.start, mapping.end, mapping.offset),
            (0x7f00, 0x7f40, 0x1000)
        );
        assert_eq!((mapping.device, mapping.inode), ((0xfe, 0xa), 77));
        assert_eq!(mapping.path, b"/tmp/caf\xe9 a b");
        assert!(mapping.is_shared() && !mapping.is_executable());
        assert_eq!(mapping.map_file(), "map_files/7f00-7f40");
        let none = Mapping::parse(b"0-1000 ---p 00000000 00:00 0 ").unwrap();
        assert_eq!((none.inode, none.path), (0, Vec::new()));
    }

    #[test]
    fn other_lines_are_refused() {
        let whole = b"7f00-7f40 r-xp 00001000 fe:00 77 /x";
        for length in 0..whole.len() {
            let _ = Mapping::parse(&whole[..length]);
        }
        for line in [
            &b""[..],
            b"x",
            b"1-2",
            b"1-2 rwx 0 0:0 0",
            b"1 rwxp 0 0:0 0",
            b"- rwxp 0 : 0",
        ] {
            assert_eq!(Mapping::parse(line), None);
        }
    }

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
