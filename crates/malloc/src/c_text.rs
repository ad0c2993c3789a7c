//! Writing text into a C buffer, like `snprintf`.

use crate::c_report::Text;
use core::ffi::c_char;
use core::fmt::{self, Write};

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

/// Writes `text` and a NUL into `size` bytes. Leaves out the end of the text if it does not fit.
/// Returns the length of the whole text.
///
/// # Safety
///
/// `buffer` is null or writable for `size` bytes.
pub(crate) unsafe fn print_into(
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
