//! Environment variables, readable without allocating and before the C library has set `environ`.
#![allow(
    unsafe_code,
    reason = "reads the C library's environ and the process's initial environment"
)]

use crate::kernel;
use core::ffi::{CStr, c_char};

unsafe extern "C" {
    static environ: *const *const c_char;
}

/// Copies the value of `name` into `buffer` and returns it.
///
/// Returns `None` if the variable is not set, if its value does not fit into `buffer`, or if the
/// process gained privileges by `exec` and so must not trust its environment.
///
/// The first allocation of a process may come before the C library's start-up code has set
/// `environ`. In that case this function reads the initial environment from `/proc/self/environ`.
/// Costs a walk over the environment, and in the early case three or more system calls.
pub fn read<'a>(name: &str, buffer: &'a mut [u8]) -> Option<&'a [u8]> {
    match find(name, buffer) {
        Some(Some(length)) => Some(&buffer[..length]),
        _ => None,
    }
}

/// The length in bytes of the longest word or number that Pinfold reads.
pub const MAX_WORD: usize = 32;
/// The length in bytes of the longest text that Pinfold reads: a policy, or a list of caches.
pub const MAX_TEXT: usize = 64 << 10;

/// Reads the value of `name`, a word or a number, and returns what `parse` makes of the value.
///
/// Returns `None` if [`read`] or `parse` does, or if the value is longer than [`MAX_WORD`]. Costs
/// as much as [`read`].
pub fn parsed<T>(name: &str, parse: impl FnOnce(&[u8]) -> Option<T>) -> Option<T> {
    parse(read(name, &mut [0; MAX_WORD])?)
}

/// Returns whether `name` is set, to any value. Returns false if the process gained privileges by
/// `exec`. Costs as much as [`read`].
pub fn is_set(name: &str) -> bool {
    find(name, &mut []).is_some()
}

/// Returns the value of `name` without copying it. The value stays valid until the program changes
/// its environment.
///
/// Returns `None` if the variable is not set, if the process gained privileges by `exec`, or if the
/// C library has not set `environ` yet.
pub fn lookup(name: &str) -> Option<&'static [u8]> {
    if is_privileged() {
        return None;
    }
    // SAFETY: reads one word that the C library keeps valid. A concurrent `setenv` races with this
    // read, as it does with any `getenv`.
    let mut entry = unsafe { environ };
    while !entry.is_null() {
        // SAFETY: `entry` points into the array, which ends with a null. The loop stops at that
        // null.
        let text = unsafe { *entry };
        if text.is_null() {
            return None;
        }
        // SAFETY: every entry of `environ` is a NUL-terminated string.
        if let Some(value) = unsafe { value_of(name, text) } {
            return Some(value);
        }
        // SAFETY: the entry was not the final null, so another entry follows it.
        entry = unsafe { entry.add(1) };
    }
    None
}

/// Returns whether the process gained privileges by `exec`.
fn is_privileged() -> bool {
    // SAFETY: getauxval only reads the auxiliary vector.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

/// Copies the value of `name` into `buffer` and returns its length. Returns `None` if the variable
/// is not set or the process gained privileges by `exec`, and `Some(None)` if the value does not
/// fit.
fn find(name: &str, buffer: &mut [u8]) -> Option<Option<usize>> {
    // SAFETY: reads one word that the C library keeps valid.
    if unsafe { environ }.is_null() && !is_privileged() {
        return find_initial(name, buffer);
    }
    let value = lookup(name)?;
    let room = buffer.get_mut(..value.len());
    Some(room.map(|room| {
        room.copy_from_slice(value);
        value.len()
    }))
}

/// Returns the value in `entry` if the entry is that of `name`. Reads another variable's entry only
/// up to the first byte that differs from `name=`.
///
/// # Safety
///
/// The entry is a NUL-terminated string that stays valid and unchanged for `'a`.
unsafe fn value_of<'a>(name: &str, entry: *const c_char) -> Option<&'a [u8]> {
    let mut rest = entry.cast::<u8>();
    for byte in name.bytes().chain(*b"=") {
        // SAFETY: the bytes before this one were equal to those of `name`, so the string's NUL is
        // not among them.
        if unsafe { *rest } != byte {
            return None;
        }
        // SAFETY: the byte is equal to a byte of `name` or to `=`, so it is not the final NUL.
        rest = unsafe { rest.add(1) };
    }
    // SAFETY: `rest` points into the caller's NUL-terminated string, which stays for `'a`.
    Some(unsafe { CStr::from_ptr(rest.cast()) }.to_bytes())
}

/// Looks for `name` in `/proc/self/environ`, chunk by chunk, and collects the value in `buffer`.
/// Returns what [`find`] returns.
fn find_initial(name: &str, buffer: &mut [u8]) -> Option<Option<usize>> {
    let flags = libc::O_RDONLY | libc::O_CLOEXEC;
    let file = kernel::open(c"/proc/self/environ", flags, 0).ok()?;
    let mut matcher = Matcher::new(name);
    let mut chunk = [0u8; 256];
    let found = 'found: loop {
        let Ok(got @ 1..) = kernel::read(file, &mut chunk) else {
            break None;
        };
        for &byte in &chunk[..got] {
            if let Some(done) = matcher.feed(byte, buffer) {
                break 'found Some(done);
            }
        }
    };
    let _ = kernel::close(file);
    found
}

/// Finds the entry `NAME=value` in a stream of NUL-terminated entries.
struct Matcher<'n> {
    name: &'n [u8],
    /// How many bytes of the current entry agree with `name=`, or `None` if the entry is another
    /// variable's.
    matched: Option<usize>,
    /// How many bytes of the value are in the buffer.
    copied: usize,
}

impl<'n> Matcher<'n> {
    fn new(name: &'n str) -> Self {
        Matcher {
            name: name.as_bytes(),
            matched: Some(0),
            copied: 0,
        }
    }

    /// Takes one byte. Returns `Some(Some(n))` when the value is complete with `n` bytes, and
    /// `Some(None)` when it does not fit.
    fn feed(&mut self, byte: u8, buffer: &mut [u8]) -> Option<Option<usize>> {
        if let Some(at) = self.matched {
            if at == self.name.len() + 1 {
                if byte == 0 {
                    return Some(Some(self.copied));
                }
                let Some(place) = buffer.get_mut(self.copied) else {
                    return Some(None);
                };
                *place = byte;
                self.copied += 1;
                return None;
            }
            let expected = self.name.get(at).copied().unwrap_or(b'=');
            self.matched = (byte == expected).then_some(at + 1);
        }
        if byte == 0 {
            self.matched = Some(0);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scan(name: &str, environment: &[u8], room: usize) -> Option<std::vec::Vec<u8>> {
        let mut buffer = std::vec![0u8; room];
        let mut matcher = Matcher::new(name);
        for &byte in environment {
            if let Some(done) = matcher.feed(byte, &mut buffer) {
                return done.map(|n| buffer[..n].to_vec());
            }
        }
        None
    }

    #[test]
    fn finds_whole_names_only() {
        let environment = b"APINFOLD=1\0PINFOLDX=2\0PINFOLD\0PINFOLD=off\0PINFOLD=late\0";
        assert_eq!(
            scan("PINFOLD", environment, 8).as_deref(),
            Some(&b"off"[..])
        );
        assert_eq!(scan("PINFOL", environment, 8), None);
        assert_eq!(scan("PINFOLD", environment, 2), None);
        assert_eq!(scan("LATE", b"", 8), None);
    }

    #[test]
    fn both_ways_of_reading_agree() {
        let mut one = [0u8; 4096];
        let mut two = [0u8; 4096];
        let path = read("PATH", &mut one).unwrap();
        let length = find_initial("PATH", &mut two).unwrap().unwrap();
        assert_eq!(path, &two[..length]);
        assert_eq!(find_initial("PATH", &mut []), Some(None));
        assert!(is_set("PATH") && !is_set("NO_SUCH_VARIABLE_HERE"));
        assert_eq!(read("NO_SUCH_VARIABLE_HERE", &mut one), None);
    }
}
