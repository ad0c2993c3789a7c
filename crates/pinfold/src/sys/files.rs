//! Reading files of `/proc` and `/sys`, whole or piece by piece.

use super::keep_errno;
use core::ffi::CStr;

/// Reads the beginning of a file. Returns how many bytes, or 0 if the file cannot be read.
pub(super) fn read_file(path: &CStr, to: &mut [u8]) -> usize {
    let mut length = 0;
    let read = read_pieces(path, |fd| {
        let room = &mut to[length..];
        let got = read_some(fd, room)?;
        length += got;
        Some(got > 0 && length < to.len())
    });
    // Half a list would be taken for a whole one.
    if read { length } else { 0 }
}

/// Calls `each` for one piece of a file after the other, of at most 256 bytes. Returns false if the
/// file cannot be read, or not to its end.
///
/// The first piece of less than 256 bytes is the last: sysfs gives as much as the buffer takes.
pub(crate) fn read_in_pieces(path: &CStr, mut each: impl FnMut(&[u8])) -> bool {
    let mut piece = [0u8; 256];
    read_pieces(path, |fd| {
        let got = read_some(fd, &mut piece)?;
        each(&piece[..got]);
        Some(got == piece.len())
    })
}

/// Reads a short file by one call. Returns how many bytes, or 0 if the file cannot be read.
pub(crate) fn read_once(path: &CStr, to: &mut [u8]) -> usize {
    let mut length = 0;
    read_pieces(path, |fd| {
        length = read_some(fd, to)?;
        Some(false)
    });
    length
}

/// Calls `each` for each line of a file that fits into `room`. Longer lines are passed over.
pub(crate) fn for_each_line(path: &CStr, room: &mut [u8], mut each: impl FnMut(&[u8])) {
    let mut length = 0;
    read_in_pieces(path, |piece| {
        for &byte in piece {
            if byte == b'\n' {
                room.get(..length).inspect(|line| each(line));
                length = 0;
            } else {
                if let Some(place) = room.get_mut(length) {
                    *place = byte;
                }
                length += 1;
            }
        }
    });
    room.get(..length).inspect(|line| each(line));
}

/// Opens a file, calls `read` until it returns false at the end or `None` for an error, and closes
/// the file. Returns false after an error.
///
/// Makes the system calls itself: the C library's functions are places where it cancels threads,
/// and allocators read files with locks held.
fn read_pieces(path: &CStr, mut read: impl FnMut(libc::c_long) -> Option<bool>) -> bool {
    keep_errno(|| {
        let flags = libc::O_RDONLY | libc::O_CLOEXEC;
        // SAFETY: the path is NUL-terminated.
        let fd = unsafe { libc::syscall(libc::SYS_openat, libc::AT_FDCWD, path.as_ptr(), flags) };
        if fd < 0 {
            return false;
        }
        let whole = loop {
            match read(fd) {
                Some(true) => {}
                Some(false) => break true,
                None => break false,
            }
        };
        // SAFETY: `fd` was opened above and nobody else has it.
        unsafe { libc::syscall(libc::SYS_close, fd) };
        whole
    })
}

/// Reads once. Returns how many bytes, 0 at the file's end, or `None` after an error.
fn read_some(fd: libc::c_long, to: &mut [u8]) -> Option<usize> {
    // SAFETY: `to` is writable for its length.
    let got = unsafe { libc::syscall(libc::SYS_read, fd, to.as_mut_ptr(), to.len()) };
    usize::try_from(got).ok()
}

/// Why a file's content cannot be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileError {
    /// It is not there, or may not be read.
    Unreadable,
    /// It is longer than the buffer.
    TooLarge,
}

/// Reads all of the file `path` below the folder `root`.
pub(crate) fn read_file_below<'t>(
    root: &[u8],
    path: &[u8],
    to: &'t mut [u8],
) -> Result<&'t [u8], FileError> {
    let most = to.len();
    let got = with_path_below(root, path, |path| read_file(path, to)).unwrap_or(0);
    match got {
        0 => Err(FileError::Unreadable),
        got if got == most => Err(FileError::TooLarge),
        got => Ok(&to[..got]),
    }
}

/// Calls `f` with the path of a file below the folder `root`. Returns `None` if the path is too
/// long. Takes 1.5 KiB of stack.
pub(crate) fn with_path_below<R>(
    root: &[u8],
    path: &[u8],
    f: impl FnOnce(&CStr) -> R,
) -> Option<R> {
    let mut name = [0u8; 1536];
    let length = root.len() + 1 + path.len();
    // One byte stays for the NUL.
    let place = name.get_mut(..length).filter(|_| length < 1536)?;
    place[..root.len()].copy_from_slice(root);
    place[root.len()] = b'/';
    place[root.len() + 1..].copy_from_slice(path);
    CStr::from_bytes_until_nul(&name).ok().map(f)
}

/// Returns the number that a text begins with, or 0.
pub(crate) fn number_at_start(text: &[u8]) -> usize {
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit());
    digits.fold(0usize, |sum, digit| {
        sum.saturating_mul(10)
            .saturating_add(usize::from(digit - b'0'))
    })
}
