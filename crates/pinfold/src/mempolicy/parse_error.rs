//! The error of a policy's text.

use super::parse::{MAX_LENGTH, Piece};
use super::{Mode, PolicyError};
use crate::sys::whole_characters;
use crate::topology::MAX_NODES;
use core::fmt;

/// What is wrong with a piece of a policy's text.
///
/// ```
/// use pinfold::mempolicy::{Mempolicy, Mode, PolicyError, Wrong};
///
/// let wrong = |text| Mempolicy::parse(text).map_err(|error| error.wrong());
/// assert_eq!(wrong("bin:0"), Err(Wrong::ModeLike(Mode::Bind)));
/// assert_eq!(wrong("bind:3-1"), Err(Wrong::Backwards));
/// let both = Wrong::Rule(PolicyError::StaticAndRelative);
/// assert_eq!(wrong("bind=static|relative:0"), Err(both));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Wrong {
    /// The text is longer than any policy.
    TooLong,
    /// No mode has this name.
    Mode,
    /// No mode has this name, but this mode's name is similar.
    ModeLike(Mode),
    /// No flag has this name.
    Flag,
    /// A list of nodes stands where flags should, behind this mode's name.
    NodesAsFlag(Mode),
    /// The piece is not a number, a range or a stride.
    Number,
    /// The range's last number is less than its first.
    Backwards,
    /// The piece uses a sign that only `numactl` has.
    Numactl,
    /// The text behind the `@` is not one number.
    Home,
    /// The number is not below [`MAX_NODES`].
    TooLarge,
    /// A list stands where one number should.
    OneNode,
    /// The list behind the colon is empty.
    NoNodes,
    /// The mode takes no nodes, but the text has a list.
    NodesForNone,
    /// Each piece is valid, but they do not go together.
    Rule(PolicyError),
}

/// Bytes of the wrong piece that an error keeps.
const KEPT: usize = 24;

/// Which piece of a policy's text is wrong, where it begins, and what to write instead.
///
/// Holds a copy of the piece, cut after 24 bytes. Allocates nothing.
///
/// ```
/// use pinfold::mempolicy::{Mempolicy, Wrong};
///
/// let error = Mempolicy::parse("bind=statik:0").unwrap_err();
/// assert_eq!((error.wrong(), error.piece(), error.position()), (Wrong::Flag, "statik", 5));
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ParseError {
    wrong: Wrong,
    position: u32,
    length: u8,
    cut: bool,
    piece: [u8; KEPT],
}

impl ParseError {
    pub(super) fn new(piece: Piece<'_>, wrong: Wrong) -> ParseError {
        let length = whole_characters(piece.text, KEPT);
        let mut kept = [0; KEPT];
        kept[..length].copy_from_slice(&piece.text.as_bytes()[..length]);
        ParseError {
            wrong,
            position: u32::try_from(piece.at).unwrap_or(u32::MAX),
            length: length as u8,
            cut: length < piece.text.len(),
            piece: kept,
        }
    }

    /// Returns the error with the kind `wrong` if its kind is `of`.
    pub(super) fn instead(self, of: Wrong, wrong: Wrong) -> ParseError {
        ParseError {
            wrong: if self.wrong == of { wrong } else { self.wrong },
            ..self
        }
    }

    /// Returns what is wrong with the piece.
    pub const fn wrong(&self) -> Wrong {
        self.wrong
    }

    /// Returns the byte of the text at which the piece begins.
    pub const fn position(&self) -> usize {
        self.position as usize
    }

    /// Returns the piece, cut after 24 bytes.
    pub fn piece(&self) -> &str {
        core::str::from_utf8(&self.piece[..usize::from(self.length)]).unwrap_or("")
    }
}

impl fmt::Debug for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ParseError({self})")
    }
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // In quotes, so that blanks and control characters are visible.
        let more = if self.cut { "…" } else { "" };
        write!(f, "{:?}{more} at byte {}: ", self.piece(), self.position)?;
        match self.wrong {
            Wrong::TooLong => write!(f, "longer than any policy; at most {MAX_LENGTH} bytes"),
            Wrong::Mode => {
                f.write_str("no such mode; write one of ")?;
                let mut before = "";
                for mode in Mode::ALL {
                    write!(f, "{before}{}", plain(mode))?;
                    before = ", ";
                }
                Ok(())
            }
            Wrong::ModeLike(mode) => write!(f, "no such mode; did you mean {}?", plain(mode)),
            Wrong::NodesAsFlag(mode) => write!(
                f,
                "nodes stand behind a colon; write {}:{}{more}",
                plain(mode),
                self.piece()
            ),
            Wrong::Backwards => {
                f.write_str("the range runs backwards; write the smaller number first, like 0-3")
            }
            Wrong::Numactl => f.write_str(
                "numactl's + and ! have no meaning here; write the flag relative for +, and the other nodes for !",
            ),
            Wrong::Home => f.write_str("a home node is one number, as in bind:0-3@2"),
            Wrong::Flag => {
                f.write_str("no such flag; write static, relative or balancing, joined by |")
            }
            Wrong::Number => {
                f.write_str("not a list of nodes; write numbers and ranges, like 0-3,8")
            }
            Wrong::TooLarge => write!(f, "no node has this number; they are below {MAX_NODES}"),
            Wrong::OneNode => f.write_str(
                "prefer takes one node, a plain number; for several write prefer-many",
            ),
            Wrong::NoNodes => f.write_str("no nodes behind the colon; name some, like 0-3,8"),
            Wrong::NodesForNone => {
                f.write_str("this mode takes no nodes; leave the colon and the list out")
            }
            Wrong::Rule(rule) => rule.fmt(f),
        }
    }
}

impl core::error::Error for ParseError {}

/// Returns the mode's name in the form that needs no quotes in a shell.
const fn plain(mode: Mode) -> &'static str {
    match mode {
        Mode::PreferredMany => "prefer-many",
        Mode::WeightedInterleave => "weighted-interleave",
        _ => mode.name(),
    }
}
