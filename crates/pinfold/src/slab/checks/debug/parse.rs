//! The grammar of `PINFOLD_SLAB_DEBUG`, which is that of the kernel's `slab_debug=`.
//!
//! ```text
//! settings = block { ";" block }
//! block    = letters [ "," name { "," name } ]
//! letters  = "" (F, Z, P and U) | "-" (none) | letter { letter }
//! letter   = F | Z | P | U | T | A | O
//! name     = a cache's name; "*" stands for any text, "?" for any character
//! ```
//!
//! The first block that names a cache applies to that cache. The last block without names applies
//! to all other caches. Empty blocks are ignored. `A` (inject failures) and `O` (no debugging where
//! slabs would grow) are accepted, but have no effect here.

use super::DebugFlags;
use core::fmt;

/// The settings hold a character that is no known letter.
///
/// ```
/// use pinfold::slab::debug::check_settings;
///
/// let error = check_settings("FZ,sessions;Q").unwrap_err();
/// assert_eq!((error.letter, error.at), ('Q', 12));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ParseError {
    /// The letter.
    pub letter: char,
    /// The letter's offset in the text, in bytes.
    pub at: usize,
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "'{}' at {} is no letter of F, Z, P, U, T, A, O; write letters, then names after commas, as in FZP,kmalloc-*;U,sessions",
            self.letter, self.at
        )
    }
}

impl core::error::Error for ParseError {}

/// Checks a text for `PINFOLD_SLAB_DEBUG`, for a caller that starts a program with it. Costs one
/// pass over the text.
///
/// ```
/// use pinfold::slab::debug::check_settings;
///
/// assert!(check_settings("FZPU,session*;-").is_ok());
/// assert_eq!(check_settings("FQ").unwrap_err().letter, 'Q');
/// ```
///
/// # Errors
///
/// [`ParseError`]: the first letter that is not known.
pub fn check(text: &str) -> Result<(), ParseError> {
    flags_for(text, "").map(drop)
}

/// Returns the checks that the settings ask of the cache `name`.
pub(super) fn flags_for(text: &str, name: &str) -> Result<DebugFlags, ParseError> {
    let (mut general, mut named) = (None, None);
    let mut at = 0;
    for block in text.split(';') {
        if block.trim().is_empty() && text.contains(';') {
            at += block.len() + 1;
            continue;
        }
        let (letters, names) = match block.split_once(',') {
            Some((letters, names)) => (letters, Some(names)),
            None => (block, None),
        };
        let flags = letters_of(letters, at)?;
        at += block.len() + 1;
        match names {
            None if !text.is_empty() => general = Some(flags),
            Some(names) if names.split(',').any(|pattern| matches(pattern, name)) => {
                named = named.or(Some(flags));
            }
            _ => {}
        }
    }
    Ok(named.or(general).unwrap_or_default())
}

fn letters_of(letters: &str, at: usize) -> Result<DebugFlags, ParseError> {
    let at = at + letters.len() - letters.trim_start().len();
    let letters = letters.trim();
    match letters {
        "" => return Ok(DebugFlags::DEFAULT),
        "-" => return Ok(DebugFlags::NONE),
        _ => {}
    }
    let mut flags = DebugFlags::NONE;
    for (nth, letter) in letters.char_indices() {
        match DebugFlags::of_letter(letter) {
            Some(flag) => flags = flags | flag,
            None if "aoAO".contains(letter) => {}
            None => {
                return Err(ParseError {
                    letter,
                    at: at + nth,
                });
            }
        }
    }
    Ok(flags)
}

/// Returns whether the pattern `pattern` matches `name`.
fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name) = (pattern.trim().as_bytes(), name.as_bytes());
    // `star` says where to continue after a mismatch: at the last star of the pattern that was
    // reached, and at the byte of the name up to which this star has matched. Each retry lets the
    // star match one more byte.
    let (mut p, mut n, mut star) = (0, 0, None);
    while n < name.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p, n));
                p += 1;
            }
            Some(&byte) if byte == b'?' || byte == name[n] => (p, n) = (p + 1, n + 1),
            _ => match star {
                Some((at, taken)) => {
                    (p, n) = (at + 1, taken + 1);
                    star = Some((at, taken + 1));
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|&byte| byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn letters(text: &str, name: &str) -> std::string::String {
        std::format!("{}", flags_for(text, name).unwrap())
    }

    #[test]
    fn blocks_names_and_letters() {
        for (text, name, flags) in [
            ("", "any", "-"),
            ("FZ", "any", "FZ"),
            ("-", "any", "-"),
            (",session", "session", "FZPU"),
            (",session", "other", "-"),
            ("pz,session*", "sessions", "ZP"),
            ("FZ;-,kmalloc-*", "kmalloc-00064", "-"),
            ("FZ;-,kmalloc-*", "session", "FZ"),
            ("U,a,b,c;T,b", "b", "U"),
            ("FZ,a;", "other", "-"),
            (";;P", "any", "P"),
            ("AO", "any", "-"),
            ("F,a*c?e", "abbbcde", "F"),
            ("F,a*c?e", "abbbcd", "-"),
            ("F,*", "", "F"),
        ] {
            assert_eq!(letters(text, name), flags, "{text} of {name}");
        }
    }

    #[test]
    fn a_wrong_letter_is_named() {
        let error = check("FZ,x;PQ,y").unwrap_err();
        assert_eq!((error.letter, error.at), ('Q', 6));
        let error = check("F; Zx").unwrap_err();
        assert_eq!((error.letter, error.at), ('x', 4));
        assert!(check("FZPUTAO,x;,y;-").is_ok());
    }

    #[test]
    fn stars_backtrack() {
        assert!(matches("*ab", "aab") && matches("a*b*c", "axxbyybc"));
        assert!(!matches("a*b", "acbd") && !matches("ab", "abc") && matches("***", "x"));
    }
}
