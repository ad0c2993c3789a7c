//! A text in a buffer of its own, because nothing here allocates.

use core::ffi::CStr;
use core::fmt;

/// A text of fewer than `N` bytes. A NUL is behind it.
#[derive(Clone)]
pub struct Text<const N: usize> {
    bytes: [u8; N],
    length: usize,
}

impl<const N: usize> Default for Text<N> {
    fn default() -> Self {
        Self::new()
    }
}

impl<const N: usize> Text<N> {
    /// Makes an empty text.
    pub const fn new() -> Self {
        Text {
            bytes: [0; N],
            length: 0,
        }
    }

    /// Returns the text.
    pub fn get(&self) -> &[u8] {
        &self.bytes[..self.length]
    }

    /// Returns the text, or nothing if it is not UTF-8.
    pub(crate) fn as_str(&self) -> &str {
        str::from_utf8(self.get()).unwrap_or_default()
    }

    /// Returns the text up to its first NUL.
    pub(crate) fn as_c_str(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.bytes).unwrap_or_default()
    }

    /// Replaces the content by `text`. Returns false if there is no room.
    pub(crate) fn set(&mut self, text: &[u8]) -> bool {
        self.length = 0;
        self.push(text)
    }

    /// Appends `more`. Returns false and appends nothing if there is no room.
    pub(crate) fn push(&mut self, more: &[u8]) -> bool {
        let end = self.length + more.len();
        if end >= N {
            return false;
        }
        self.bytes[self.length..end].copy_from_slice(more);
        self.truncate(end);
        true
    }

    /// Ends the text after `length` bytes.
    pub(crate) fn truncate(&mut self, length: usize) {
        self.length = length;
        self.bytes[length] = 0;
    }
}

impl<const N: usize> fmt::Debug for Text<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.get().escape_ascii())
    }
}

/// Leaves out what does not fit, which is an error.
impl<const N: usize> fmt::Write for Text<N> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let fits = whole_characters(text, N - 1 - self.length);
        self.push(&text.as_bytes()[..fits]);
        if fits < text.len() {
            Err(fmt::Error)
        } else {
            Ok(())
        }
    }
}

/// Returns how many bytes of a text's beginning are whole characters, at most `most`.
pub(crate) fn whole_characters(text: &str, most: usize) -> usize {
    let mut end = text.len().min(most);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    end
}
