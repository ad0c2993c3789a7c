//! Reads text from C programs, and writes text for them.

use core::ffi::{CStr, c_char};
use core::fmt::{self, Write};

/// Bytes of a cache's name, including the NUL.
pub(super) const NAME_ROOM: usize = 33;

/// Returns the text of a C string. Returns `None` if `text` is null or is not UTF-8.
///
/// # Safety
///
/// `text` is null, or a C string that does not change while the result is used.
pub(super) unsafe fn str_of<'t>(text: *const c_char) -> Option<&'t str> {
    if text.is_null() {
        return None;
    }
    // SAFETY: `text` is not null, so the caller promises a C string.
    unsafe { CStr::from_ptr(text) }.to_str().ok()
}

/// Text in a buffer, with a NUL behind it. The part that does not fit is left out.
pub(super) struct Text<'b> {
    bytes: &'b mut [u8],
    length: usize,
}

impl<'b> Text<'b> {
    /// Makes an empty text in `bytes`, which has at least one byte.
    pub(super) fn new(bytes: &'b mut [u8]) -> Text<'b> {
        bytes[0] = 0;
        Text { bytes, length: 0 }
    }

    pub(super) fn as_ptr(&self) -> *const c_char {
        self.bytes.as_ptr().cast()
    }
}

impl Write for Text<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = self.bytes.len() - 1 - self.length;
        let mut taken = text.len().min(room);
        while !text.is_char_boundary(taken) {
            taken -= 1;
        }
        self.bytes[self.length..][..taken].copy_from_slice(&text.as_bytes()[..taken]);
        self.length += taken;
        self.bytes[self.length] = 0;
        if taken < text.len() {
            Err(fmt::Error)
        } else {
            Ok(())
        }
    }
}

/// Returns `name` with a NUL behind it. Cuts a name that is too long.
pub(super) fn c_name(name: &str) -> [u8; NAME_ROOM] {
    let mut room = [0; NAME_ROOM];
    let _ = Text::new(&mut room).write_str(name);
    room
}

/// Writes as much text as fits into `room`, and counts the bytes of the whole text.
struct Counted<'b> {
    room: Option<Text<'b>>,
    length: usize,
}

impl Write for Counted<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.length += text.len();
        if let Some(mut room) = self.room.take() {
            // After the first piece that does not fit, nothing more is written.
            self.room = room.write_str(text).is_ok().then_some(room);
        }
        Ok(())
    }
}

/// Writes `text` and a NUL into `size` bytes, like `snprintf`. Leaves out the end of the text if it
/// does not fit. Returns the length of the whole text.
///
/// # Safety
///
/// `buffer` is null or writable for `size` bytes.
pub(super) unsafe fn print_into(
    buffer: *mut c_char,
    size: usize,
    text: impl fmt::Display,
) -> usize {
    let room = (size > 0 && !buffer.is_null()).then(|| {
        // SAFETY: the caller promises that `size` bytes are writable. They are zeroed before the
        // slice is made.
        let bytes = unsafe {
            buffer.write_bytes(0, size);
            core::slice::from_raw_parts_mut(buffer.cast::<u8>(), size)
        };
        Text::new(bytes)
    });
    let mut counted = Counted { room, length: 0 };
    let _ = write!(counted, "{text}");
    counted.length
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_cut_between_characters_and_ends_with_a_nul() {
        let mut room = [0xff; 6];
        let mut text = Text::new(&mut room);
        assert!(text.write_str("pin").is_ok());
        assert!(text.write_str("fö").is_err());
        assert_eq!(&room, b"pinf\0\xff");
        assert_eq!(&c_name("sheaf")[..6], b"sheaf\0");
        assert_eq!(c_name(&"x".repeat(32))[31..], *b"x\0");
    }
}
