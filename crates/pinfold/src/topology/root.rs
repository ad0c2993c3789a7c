//! The folder that a machine's files were read from.

use core::fmt;

/// The longest path that is kept. The paths of the files need the rest of 1.5 KiB.
const MAX: usize = 1024;

/// The path of a folder. A path longer than [`MAX`] becomes the path of a folder that does not
/// exist, so that reads below it find no files.
#[derive(Clone)]
pub(super) struct Root {
    bytes: [u8; MAX],
    length: usize,
}

impl Root {
    pub(super) fn new(path: &[u8]) -> Root {
        // The system finds no file by an empty path, and this path ends at its NUL.
        let path = if path.len() <= MAX { path } else { b"\0" };
        let mut bytes = [0; MAX];
        bytes[..path.len()].copy_from_slice(path);
        Root {
            bytes,
            length: path.len(),
        }
    }

    pub(super) fn path(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

impl fmt::Debug for Root {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.path().escape_ascii())
    }
}
