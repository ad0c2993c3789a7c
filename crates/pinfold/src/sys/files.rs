//! Reads files of `/proc` and `/sys`, whole or piece by piece.

use super::Text;
use core::ffi::CStr;
use pinfold_rseq::kernel;

/// Reads as much of a file as fits into `to`. Returns how many bytes, or 0 if the file cannot be
/// read.
pub(super) fn read_file(path: &CStr, to: &mut [u8]) -> usize {
    let mut length = 0;
    let read = read_pieces(path, |fd| {
        let room = &mut to[length..];
        let got = read_some(fd, room)?;
        length += got;
        Some(got > 0 && length < to.len())
    });
    // After an error `to` may hold only the beginning of the file. Returning 0 keeps the caller
    // from taking this beginning for the whole file.
    if read { length } else { 0 }
}

/// Calls `each` with each piece of a file, of at most 256 bytes. Returns false if the file cannot
/// be read to its end.
///
/// A piece of less than 256 bytes is the last, because sysfs fills the buffer as long as there is
/// more to read.
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

/// Calls `each` with each line of a file that fits into `room`. Skips longer lines.
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

/// Opens a file, calls `read` with the file until `read` has finished, and closes the file. `read`
/// returns true to be called again, false at the end, and `None` after an error. Returns false
/// after an error.
///
/// Makes no call of the C library. Such calls are cancellation points: a cancelled thread ends in
/// them. The allocator reads files while it holds locks, and such a thread would never give the
/// locks back.
fn read_pieces(path: &CStr, mut read: impl FnMut(libc::c_int) -> Option<bool>) -> bool {
    let Ok(fd) = kernel::open(path, libc::O_RDONLY | libc::O_CLOEXEC, 0) else {
        return false;
    };
    let whole = loop {
        match read(fd) {
            Some(true) => {}
            Some(false) => break true,
            None => break false,
        }
    };
    let _ = kernel::close(fd);
    whole
}

/// Reads once. Returns how many bytes, 0 at the end of the file, or `None` after an error.
fn read_some(fd: libc::c_int, to: &mut [u8]) -> Option<usize> {
    kernel::read(fd, to).ok()
}

/// Why the content of a file is not available.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileError {
    /// The file does not exist, is empty, or may not be read.
    Unreadable,
    /// The file does not fit into the buffer.
    TooLarge,
}

/// Reads the whole file `path` below the directory `root`.
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

/// Calls `f` with the path of a file below the directory `root`. Returns `None` if the path is too
/// long. Needs 1.5 KiB of stack.
pub(crate) fn with_path_below<R>(
    root: &[u8],
    path: &[u8],
    f: impl FnOnce(&CStr) -> R,
) -> Option<R> {
    let mut name = Text::<1536>::new();
    let fits = name.push(root) && name.push(b"/") && name.push(path);
    fits.then(|| f(name.as_c_str()))
}

/// Returns the number at the start of a text, or 0.
pub(crate) fn number_at_start(text: &[u8]) -> usize {
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit());
    digits.fold(0usize, |sum, digit| {
        sum.saturating_mul(10)
            .saturating_add(usize::from(digit - b'0'))
    })
}

/// Writes `n` in decimal at the beginning of `to`, for a path. Returns the number of digits.
pub fn decimal(n: usize, to: &mut [u8]) -> usize {
    let digits = n.checked_ilog10().unwrap_or(0) as usize + 1;
    let mut rest = n;
    for place in to[..digits].iter_mut().rev() {
        *place = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    digits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_decimal() {
        let mut digits = [0; 20];
        for (n, text) in [(0, "0"), (10, "10"), (usize::MAX, "18446744073709551615")] {
            let length = decimal(n, &mut digits);
            assert_eq!(&digits[..length], text.as_bytes());
        }
    }
}
