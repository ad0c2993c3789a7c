//! Parses a policy's text and shows where it is wrong.

use anyhow::{Result, anyhow};
use pinfold::mempolicy::{Mempolicy, ParseError};
use std::ffi::OsStr;

/// Number of characters shown before and after the beginning of the error.
const AROUND: usize = 36;

/// Parses a policy.
///
/// # Errors
///
/// The error names the wrong part, says what to write instead, and shows where the part is.
pub fn parse(text: &OsStr) -> Result<Mempolicy> {
    let Some(text) = text.to_str() else {
        let shown: String = text.to_string_lossy().chars().take(AROUND).collect();
        return Err(anyhow!(
            "{shown:?} is not UTF-8 text; write a policy like interleave:0-3"
        ));
    };
    Mempolicy::parse(text).map_err(|error| anyhow!("{error}\n{}", pointed_at(text, &error)))
}

/// Returns the text, and a line below it that points to the wrong part. Shortens a long text.
fn pointed_at(text: &str, error: &ParseError) -> String {
    let mut at = error.position().min(text.len());
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    let (before, after) = text.split_at(at);
    let skipped = before.chars().count().saturating_sub(AROUND);
    let mut line = String::from(if skipped > 0 { "…" } else { "" });
    line.extend(before.chars().skip(skipped).map(printable));
    let indent = line.chars().count();
    line.extend(after.chars().take(AROUND).map(printable));
    if after.chars().nth(AROUND).is_some() {
        line.push('…');
    }
    let tail = error.piece().chars().count().saturating_sub(1);
    format!(
        "    {line}\n    {}^{}",
        " ".repeat(indent),
        "~".repeat(tail)
    )
}

/// Replaces a character that a terminal would obey, or that does not take exactly one column.
fn printable(character: char) -> char {
    // The characters that `escape_debug` escapes also include those without a width and those that
    // change the direction of the line.
    let harmless = character.escape_debug().count() == 1 || matches!(character, '"' | '\'' | '\\');
    if harmless { character } else { '?' }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(text: &str) -> String {
        let error = parse(OsStr::new(text)).unwrap_err().to_string();
        error.split_once('\n').unwrap().1.to_owned()
    }

    #[test]
    fn the_caret_points_to_the_wrong_part() {
        assert_eq!(shown("bind:0-x"), "    bind:0-x\n         ^~~");
        assert_eq!(shown("bind=fixed:0"), "    bind=fixed:0\n         ^~~~~");
        assert_eq!(shown(""), "    \n    ^");
        assert_eq!(shown("bind:"), "    bind:\n         ^");
    }

    #[test]
    fn long_texts_are_shortened_and_control_characters_replaced() {
        let long = shown(&"bind:0,".repeat(1000));
        assert!(long.chars().count() < 200, "{long}");
        let far = format!("bind:{}x", "0,".repeat(100));
        let far = shown(&far);
        let column = |line: usize, mark| far.lines().nth(line).unwrap().find(mark);
        let before = far.lines().next().unwrap().split_once('x').unwrap().0;
        assert_eq!(column(1, '^'), Some(before.chars().count()), "{far}");
        assert!(!shown("bind\u{1b}[31m:0").contains('\u{1b}'));
        assert!(!shown("bind\u{202e}:0").contains('\u{202e}'));
        assert!(shown("bünd:0").contains("bünd:0\n    ^~~~"));
    }
}
