//! A policy's text, and where it is wrong.

use anyhow::{Result, anyhow};
use pinfold::mempolicy::{Mempolicy, ParseError};
use std::ffi::OsStr;

/// Characters shown on each side of where a fault begins.
const AROUND: usize = 36;

/// Reads a policy; the error names the wrong piece, says what to write, and shows where it stands.
pub fn parse(text: &OsStr) -> Result<Mempolicy> {
    let Some(text) = text.to_str() else {
        let shown: String = text.to_string_lossy().chars().take(AROUND).collect();
        return Err(anyhow!(
            "{shown:?} is not text in UTF-8; policies look like interleave:0-3"
        ));
    };
    Mempolicy::parse(text).map_err(|error| anyhow!("{error}\n{}", pointed_at(text, &error)))
}

/// The text, and a line below it that points to the wrong piece. Of a long text only what is around it.
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

/// One column for each character, and nothing that a terminal would obey.
fn printable(character: char) -> char {
    // What `escape_debug` would write otherwise also has no width of its own, or turns the line around.
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
    fn the_caret_stands_below_the_piece() {
        assert_eq!(shown("bind:0-x"), "    bind:0-x\n         ^~~");
        assert_eq!(shown("bind=fixed:0"), "    bind=fixed:0\n         ^~~~~");
        assert_eq!(shown(""), "    \n    ^");
        assert_eq!(shown("bind:"), "    bind:\n         ^");
    }

    #[test]
    fn long_and_strange_texts_stay_short_and_harmless() {
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
