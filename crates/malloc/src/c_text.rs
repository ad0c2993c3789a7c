//! Text into C's room, as `snprintf` gives it.

use crate::c_report::Text;
use core::ffi::c_char;
use core::fmt::{self, Write};

/// Text with a NUL behind it, and how much there would have been.
struct Counted<'b> {
    room: Option<Text<'b>>,
    length: usize,
}

impl Write for Counted<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.length += text.len();
        if let Some(mut room) = self.room.take() {
            // What does not fit is left out, and so is what comes after it.
            self.room = room.write_str(text).is_ok().then_some(room);
        }
        Ok(())
    }
}

/// Writes what fits of `text` into `size` bytes, the NUL among them, and returns how long all of it is.
///
/// # Safety
///
/// `buffer` is writable for `size` bytes; it may be null when there are none.
pub(crate) unsafe fn print_into(
    buffer: *mut c_char,
    size: usize,
    text: impl fmt::Display,
) -> usize {
    let room = (size > 0 && !buffer.is_null()).then(|| {
        // SAFETY: the caller's promise; what is there is written before it is read.
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
