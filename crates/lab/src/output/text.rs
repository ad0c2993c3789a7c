//! The one place that makes text harmless before it is shown.
//!
//! Names of programs, functions, files, caches and counters, and what an environment holds, were
//! chosen by other processes. A control character in them could move the cursor, change the
//! terminal's title, or fake a line of the command's own. So all text that the command shows goes
//! through this module: [`print()`](super::print) and [`note`](super::note) escape control
//! characters in whatever they get, and [`Lines`] and [`Table`](super::Table) also escape the ends
//! of lines, so that each line is the command's own. Escaping twice changes nothing more.

use std::borrow::Cow;
use std::fmt;

/// Returns whether a character does nothing but appear.
fn is_harmless(character: char) -> bool {
    let changes_order_or_line = matches!(
        character,
        '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
            | '\u{feff}' | '\u{fff9}'..='\u{fffb}'
    );
    !character.is_control() && !changes_order_or_line
}

/// Escapes the characters that are not harmless, except those that are `kept`. The escapes are
/// those of JSON, so that an escaped JSON text still means the same.
fn escape<'t>(text: &'t str, kept: &[char]) -> Cow<'t, str> {
    let stays = |character: char| is_harmless(character) || kept.contains(&character);
    if text.chars().all(stays) {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(text.len() + 16);
    for character in text.chars() {
        match stays(character) {
            true => escaped.push(character),
            false => escaped += &format!("\\u{:04x}", u32::from(character)),
        }
    }
    Cow::Owned(escaped)
}

/// Escapes everything in a text of one line that is not harmless. Needed only where text does not
/// leave by this module.
pub fn escaped(text: &str) -> Cow<'_, str> {
    escape(text, &[])
}

/// Escapes everything that is not harmless in a text that has lines and columns of its own.
pub(super) fn escaped_lines(text: &str) -> Cow<'_, str> {
    escape(text, &['\n', '\t'])
}

/// Text for people, line by line.
#[derive(Debug, Default)]
pub struct Lines(String);

impl Lines {
    /// Adds a line. What it holds cannot begin another one.
    pub fn add(&mut self, line: impl fmt::Display) {
        self.0 += &escaped(&line.to_string());
        self.0.push('\n');
    }
}

impl fmt::Display for Lines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_but_harmless_characters_is_left() {
        let all: String = ('\0'..='\u{ff}').collect();
        let once = escaped(&all).into_owned();
        assert!(!once.chars().any(char::is_control));
        assert!(once.contains("\\u001b") && once.contains("\\u009b") && once.contains("é"));
        assert_eq!(escaped(&once), once);
        assert_eq!(escaped("\\ \" ' a\u{202e}b"), "\\ \" ' a\\u202eb");
    }

    #[test]
    fn json_means_the_same_after_it_was_escaped() {
        let all: String = ('\0'..='\u{2fff}').collect();
        let json = serde_json::to_string(&all).unwrap();
        let shown = escaped_lines(&json);
        assert!(!shown.chars().any(char::is_control));
        assert_eq!(serde_json::from_str::<String>(&shown).unwrap(), all);
    }

    #[test]
    fn a_line_stays_one() {
        let mut lines = Lines::default();
        lines.add("a\nb\t\u{1b}[2J");
        assert_eq!(lines.to_string(), "a\\u000ab\\u0009\\u001b[2J\n");
    }
}
