//! Environment variables, readable before the C library has set `environ`, without allocating.
#![allow(
    unsafe_code,
    reason = "reads the C library's environ and the process's initial environment"
)]

use core::ffi::{CStr, c_char};

unsafe extern "C" {
    static environ: *const *const c_char;
}

/// Copies the value of `name` into `buffer` and returns it; `None` when it is not set, does not fit, or the process
/// gained privileges by `exec` and must not trust its environment.
///
/// An allocator is called before the C library's own start-up code has run; then the initial environment is read
/// from `/proc/self/environ`. Costs a walk over the environment, and three system calls in that early case.
pub fn read<'a>(name: &str, buffer: &'a mut [u8]) -> Option<&'a [u8]> {
    match find(name, buffer) {
        Some(Some(length)) => Some(&buffer[..length]),
        _ => None,
    }
}

/// Whether `name` is set, to whatever value. Costs as much as [`read`].
pub fn is_set(name: &str) -> bool {
    find(name, &mut []).is_some()
}

/// Copies the value of `name` into `buffer` and returns its length: `None` when it is not set,
/// `Some(None)` when it does not fit.
fn find(name: &str, buffer: &mut [u8]) -> Option<Option<usize>> {
    // SAFETY: getauxval only reads the auxiliary vector.
    if unsafe { libc::getauxval(libc::AT_SECURE) } != 0 {
        return None;
    }
    // SAFETY: `environ` is a word; only concurrent setenv calls race, as they do with any getenv.
    let mut entry = unsafe { environ };
    if entry.is_null() {
        return find_initial(name, buffer);
    }
    loop {
        // SAFETY: the array ends with a null, at which this loop stops.
        let text = unsafe { *entry };
        if text.is_null() {
            return None;
        }
        // SAFETY: every entry of `environ` is a NUL-terminated string.
        let bytes = unsafe { CStr::from_ptr(text) }.to_bytes();
        if let Some(value) = value_of(name, bytes) {
            let room = buffer.get_mut(..value.len());
            return Some(room.map(|room| {
                room.copy_from_slice(value);
                value.len()
            }));
        }
        // SAFETY: not past the final null.
        entry = unsafe { entry.add(1) };
    }
}

fn value_of<'a>(name: &str, entry: &'a [u8]) -> Option<&'a [u8]> {
    entry.strip_prefix(name.as_bytes())?.strip_prefix(b"=")
}

/// Looks for `name` in `/proc/self/environ`, a chunk at a time; `buffer` collects the value.
/// Answers as [`find`] does.
fn find_initial(name: &str, buffer: &mut [u8]) -> Option<Option<usize>> {
    // SAFETY: the path is a NUL-terminated literal.
    let fd = unsafe {
        libc::open(
            c"/proc/self/environ".as_ptr(),
            libc::O_RDONLY | libc::O_CLOEXEC,
        )
    };
    if fd < 0 {
        return None;
    }
    let mut matcher = Matcher::new(name);
    let mut chunk = [0u8; 256];
    let found = 'found: loop {
        // SAFETY: `chunk` is writable for its whole length.
        let got = unsafe { libc::read(fd, chunk.as_mut_ptr().cast(), chunk.len()) };
        if got <= 0 {
            break None;
        }
        for &byte in &chunk[..got as usize] {
            if let Some(done) = matcher.feed(byte, buffer) {
                break 'found Some(done);
            }
        }
    };
    // SAFETY: `fd` was opened above and nobody else has it.
    unsafe { libc::close(fd) };
    found
}

/// Recognises `NAME=value` in a stream of NUL-terminated entries.
struct Matcher<'n> {
    name: &'n [u8],
    /// Bytes of the entry that agreed with `name=`, or `None` when it is another variable.
    matched: Option<usize>,
    /// Bytes of the value copied so far.
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

    /// Takes one byte; `Some(Some(n))` when the value is complete with `n` bytes, `Some(None)` when it does not fit.
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
