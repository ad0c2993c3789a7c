//! Policies as text: parsing and printing. Accepts the grammar of tmpfs's `mpol=`, the other forms
//! that the kernel prints, and more names of modes.
//!
//! ```text
//! policy  [ "mpol=" ] mode [ "=" flag { "|" flag } ] [ ":" nodes ] [ "@" home ]
//! nodes   "all", or numbers and ranges as in 0-3,8,10-20:2/5
//! ```

use super::{Flags, Mempolicy, Mode, ParseError, Wrong};
use crate::topology::{MAX_NODES, NodeId, NodeSet};
use core::fmt;

/// The longest text that is parsed, in bytes. Every list of 1024 nodes that makes sense is shorter.
pub(super) const MAX_LENGTH: usize = 8192;

/// Names that are accepted besides the kernel's own.
const ALSO: [(&str, Mode); 5] = [
    ("preferred", Mode::Preferred),
    ("preferred-many", Mode::PreferredMany),
    ("prefer-many", Mode::PreferredMany),
    ("preferred (many)", Mode::PreferredMany),
    ("weighted-interleave", Mode::WeightedInterleave),
];

impl Mempolicy {
    /// Parses a policy: `mode[=flag[|flag]][:nodes][@home]`, after an optional `mpol=`.
    ///
    /// * Modes: `default`, `prefer`, `bind`, `interleave`, `weighted interleave`, `local`, `prefer
    ///   (many)`, as in the kernel; also `preferred`, `prefer-many`, `preferred-many`, `preferred
    ///   (many)`, `weighted-interleave`.
    /// * Flags: `static`, `relative`, `balancing`.
    /// * Nodes: numbers and ranges, or `all`. `prefer` takes one number. [`Mempolicy::new`] says
    ///   how many nodes each mode takes.
    /// * Home node: for `bind` and `prefer (many)`.
    ///
    /// Does not check whether the nodes exist. Takes time in proportion to the text's length.
    /// Refuses a text of more than 8 KiB without reading it.
    ///
    /// # Errors
    ///
    /// [`ParseError`] says which piece is wrong, where it begins, and what to write instead.
    ///
    /// # Examples
    ///
    /// ```
    /// use pinfold::mempolicy::Mempolicy;
    ///
    /// let policy = Mempolicy::parse("mpol=bind=static|balancing:0-1")?;
    /// assert_eq!(policy.to_string(), "bind=static|balancing:0-1");
    /// let error = Mempolicy::parse("bind:0-x").unwrap_err();
    /// assert_eq!(error.position(), 5);
    /// assert!(error.to_string().starts_with("\"0-x\" at byte 5:"));
    /// # Ok::<(), pinfold::mempolicy::ParseError>(())
    /// ```
    pub fn parse(text: &str) -> Result<Mempolicy, ParseError> {
        if text.len() > MAX_LENGTH {
            return Err(ParseError::new(Piece { text, at: 0 }, Wrong::TooLong));
        }
        let whole = Piece { text, at: 0 }.trimmed();
        let whole = whole.without("mpol=").unwrap_or(whole);
        let (head, rest) = whole.split_at_any(&[':', '@']);
        let (name, flags) = head.split_at_any(&['=']);
        let mode = mode(name)?;
        let flags = flags.map_or(Ok(Flags::NONE), |(_, text)| flags_of(mode, text))?;
        let (list, home) = match rest {
            Some((':', rest)) => {
                let (list, home) = rest.split_at_any(&['@']);
                (Some(list), home.map(|(_, home)| home))
            }
            other => (None, other.map(|(_, home)| home)),
        };
        let nodes = list.map_or(Ok(NodeSet::EMPTY), |list| nodes_of(mode, list))?;
        let refused = |rule| ParseError::new(whole, Wrong::Rule(rule));
        let mut policy = Mempolicy::new(mode, flags, nodes).map_err(refused)?;
        if let Some(home) = home {
            let one = |error: ParseError| {
                let error = error.instead(Wrong::Number, Wrong::Home);
                error.instead(Wrong::Numactl, Wrong::Home)
            };
            let node = number(home, home).map_err(one)?;
            policy.set_home_node(Some(NodeId(node))).map_err(refused)?;
        }
        Ok(policy)
    }
}

impl core::str::FromStr for Mempolicy {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Mempolicy, ParseError> {
        Mempolicy::parse(text)
    }
}

fn mode(name: Piece<'_>) -> Result<Mode, ParseError> {
    let own = Mode::ALL.map(|mode| (mode.name(), mode));
    let mut known = own.into_iter().chain(ALSO);
    known
        .find(|(known, _)| *known == name.text)
        .map(|(_, mode)| mode)
        .ok_or_else(|| {
            let wrong = nearest(name.text).map_or(Wrong::Mode, Wrong::ModeLike);
            ParseError::new(name, wrong)
        })
}

/// Names of modes in other programs.
const ELSEWHERE: [(&str, Mode); 2] = [("membind", Mode::Bind), ("localalloc", Mode::Local)];

/// Returns the mode whose name differs from `name` only by case, by how words are joined, or by one
/// character.
fn nearest(name: &str) -> Option<Mode> {
    let own = Mode::ALL.map(|mode| (mode.name(), mode));
    let known = || own.into_iter().chain(ALSO).chain(ELSEWHERE);
    let same = known().find(|(known, _)| letters(known).eq(letters(name)));
    let near = || known().find(|(known, _)| nearly(known, name));
    same.or_else(near).map(|(_, mode)| mode)
}

fn letters(name: &str) -> impl DoubleEndedIterator<Item = u8> + Clone {
    let joints = |byte: &u8| !matches!(byte, b' ' | b'_' | b'-' | b'(' | b')');
    let bytes = name.bytes().filter(joints);
    bytes.map(|byte| byte.to_ascii_lowercase())
}

/// Returns whether the names differ by at most one character: wrong, missing or too many.
fn nearly(known: &str, name: &str) -> bool {
    let (one, other) = (letters(known), letters(name));
    let (length, others) = (one.clone().count(), other.clone().count());
    let same = |(one, other): &(u8, u8)| one == other;
    let front = one.clone().zip(other.clone()).take_while(same).count();
    let back = one.rev().zip(other.rev()).take_while(same).count();
    length.abs_diff(others) <= 1 && front + back + 1 >= length.max(others)
}

fn flags_of(mode: Mode, text: Piece<'_>) -> Result<Flags, ParseError> {
    // Older kernels print `bind=:0` for a policy whose only flag is `balancing`.
    if text.text.is_empty() && mode == Mode::Bind {
        return Ok(Flags::BALANCING);
    }
    let colon = Wrong::NodesAsFlag(mode);
    let nodes = |item: Piece<'_>| {
        let of_lists = |byte: u8| byte.is_ascii_digit() || matches!(byte, b'-' | b',');
        let list = item.text.starts_with(|c: char| c.is_ascii_digit());
        let takes = !matches!(mode, Mode::Default | Mode::Local);
        takes && (item.text == "all" || list && item.text.bytes().all(of_lists))
    };
    let mut flags = Flags::NONE;
    for item in text.items(|c| c == '|') {
        let known = FLAGS.iter().find(|(_, name)| *name == item.text);
        let wrong = || ParseError::new(item, if nodes(item) { colon } else { Wrong::Flag });
        let (flag, _) = known.ok_or_else(wrong)?;
        flags = flags | *flag;
    }
    Ok(flags)
}

/// Parses the list behind a colon.
fn nodes_of(mode: Mode, list: Piece<'_>) -> Result<NodeSet, ParseError> {
    if matches!(mode, Mode::Default | Mode::Local) {
        return Err(ParseError::new(list, Wrong::NodesForNone));
    }
    if mode == Mode::Preferred {
        // A range of one node is refused too, as in the kernel.
        let node =
            number(list, list).map_err(|error| error.instead(Wrong::Number, Wrong::OneNode))?;
        return Ok([node].into_iter().collect());
    }
    if list.text == "all" {
        return Ok((0..MAX_NODES).collect());
    }
    let mut nodes = NodeSet::EMPTY;
    // The kernel's parser accepts several commas or blanks as one.
    let items = list.items(|c| c == ',' || c.is_ascii_whitespace());
    for item in items.filter(|item| !item.text.is_empty()) {
        range(item, &mut nodes)?;
    }
    if nodes.is_empty() {
        return Err(ParseError::new(list, Wrong::NoNodes));
    }
    Ok(nodes)
}

/// Inserts the numbers of `first[-last[:used/group]]`.
fn range(item: Piece<'_>, nodes: &mut NodeSet) -> Result<(), ParseError> {
    let (ends, stride) = item.split_at_any(&[':']);
    let (first, last) = ends.split_at_any(&['-']);
    let first = number(first, item)?;
    let last = last.map_or(Ok(first), |(_, last)| number(last, item))?;
    let (used, group) = match stride {
        Some((_, stride)) => {
            let (used, group) = stride.split_at_any(&['/']);
            let (_, group) = group.ok_or(ParseError::new(item, Wrong::Number))?;
            (number(used, item)?, number(group, item)?)
        }
        None => (1, 1),
    };
    if last < first {
        return Err(ParseError::new(item, Wrong::Backwards));
    }
    if used == 0 || used > group {
        return Err(ParseError::new(item, Wrong::Number));
    }
    (first..=last)
        .filter(|n| (n - first) % group < used)
        .for_each(|n| nodes.insert(n));
    Ok(())
}

/// Parses a node's number. An error names the piece `whole`.
fn number(text: Piece<'_>, whole: Piece<'_>) -> Result<usize, ParseError> {
    let digits = text.text.as_bytes();
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        let numactl = whole.text.starts_with(['+', '!']);
        let wrong = if numactl {
            Wrong::Numactl
        } else {
            Wrong::Number
        };
        return Err(ParseError::new(whole, wrong));
    }
    let number = text.text.parse().unwrap_or(usize::MAX);
    if number < MAX_NODES {
        Ok(number)
    } else {
        Err(ParseError::new(whole, Wrong::TooLarge))
    }
}

/// A part of the text, and the byte at which it begins.
#[derive(Clone, Copy)]
pub(super) struct Piece<'t> {
    pub(super) text: &'t str,
    pub(super) at: usize,
}

impl<'t> Piece<'t> {
    fn trimmed(self) -> Self {
        let text = self.text.trim_ascii_start();
        Piece {
            at: self.at + (self.text.len() - text.len()),
            text: text.trim_ascii_end(),
        }
    }

    fn without(self, prefix: &str) -> Option<Self> {
        let text = self.text.strip_prefix(prefix)?;
        Some(Piece {
            text,
            at: self.at + prefix.len(),
        })
    }

    /// Splits at the first of `marks`. Returns the text in front of the mark, the mark, and the
    /// text behind it.
    fn split_at_any(self, marks: &[char]) -> (Self, Option<(char, Self)>) {
        let Some(end) = self.text.find(marks) else {
            return (self, None);
        };
        let (text, rest) = self.text.split_at(end);
        let before = Piece { text, at: self.at };
        let mut rest = rest.chars();
        let mark = rest.next().unwrap_or_default();
        let after = Piece {
            text: rest.as_str(),
            at: self.at + end + 1,
        };
        (before, Some((mark, after)))
    }

    fn items(self, mark: fn(char) -> bool) -> impl Iterator<Item = Piece<'t>> {
        let items = self.text.split(mark);
        items.scan(self.at, |at, text| {
            let item = Piece { text, at: *at };
            *at += text.len() + 1;
            Some(item)
        })
    }
}

/// The flags' names, in the order in which they are printed.
const FLAGS: [(Flags, &str); 3] = [
    (Flags::STATIC, "static"),
    (Flags::RELATIVE, "relative"),
    (Flags::BALANCING, "balancing"),
];

impl fmt::Display for Mempolicy {
    /// Prints `mode[=flag[|flag]][:nodes][@home]`: the policy that the user named, in the kernel's
    /// words.
    ///
    /// A tmpfs accepts the text as `mpol=`. Exceptions are policies with `balancing`, a home node,
    /// or `all` nodes, which a tmpfs does not support.
    ///
    /// [`Mempolicy::parse`] reads the text as the same policy, [unbound](Mempolicy::unbound).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.mode.name())?;
        let mut before = "=";
        for (flag, name) in FLAGS {
            if self.flags.contains(flag) {
                write!(f, "{before}{name}")?;
                before = "|";
            }
        }
        match self.user.len() {
            0 => {}
            MAX_NODES => f.write_str(":all")?,
            _ => write!(f, ":{}", self.user)?,
        }
        self.home.map_or(Ok(()), |home| write!(f, "@{}", home.0))
    }
}
