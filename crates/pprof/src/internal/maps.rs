//! The lines of `/proc/PID/maps`.

/// A mapping of a process.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Mapping {
    /// The first address.
    pub start: u64,
    /// The address behind the last one.
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
    /// Reads a line of the list. Returns `None` if it is not a mapping.
    pub fn parse(line: &[u8]) -> Option<Mapping> {
        let mut words = line.splitn(6, |&byte| byte == b' ');
        let (start, end) = pair(words.next()?, b'-')?;
        let permissions = words.next()?.try_into().ok()?;
        let offset = hex(words.next()?)?;
        let (major, minor) = pair(words.next()?, b':')?;
        let inode = str::from_utf8(words.next()?).ok()?.parse().ok()?;
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

    /// Returns whether the process may execute what the mapping holds.
    pub fn is_executable(&self) -> bool {
        self.permissions[2] == b'x'
    }

    /// Returns whether other processes see what is written to it.
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
}
