//! Sets of small numbers, in the format of the kernel's files.

use super::list::List;
use core::fmt;
use core::str::FromStr;

/// A set of small numbers, which parses and prints the kernel's format: `0-3,8,10-14:2/4`.
///
/// ```
/// use pinfold::topology::NodeSet;
///
/// let nodes: NodeSet = [0, 1, 2, 8].into_iter().collect();
/// assert_eq!(nodes.to_string(), "0-2,8");
/// assert_eq!(nodes.without(&"1-8".parse()?).to_string(), "0");
/// # Ok::<(), pinfold::topology::ListError>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Set<const WORDS: usize> {
    pub(crate) words: [u64; WORDS],
}

/// What is wrong with a list of numbers.
///
/// ```
/// use pinfold::topology::{CpuSet, ListError};
///
/// assert_eq!("3-1".parse::<CpuSet>(), Err(ListError::Syntax));
/// assert_eq!("99999".parse::<CpuSet>(), Err(ListError::TooLarge));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ListError {
    /// The text has something else where a number, range or stride should be.
    Syntax,
    /// A number is too large for the set.
    TooLarge,
}

pinfold_rseq::error_texts! { ListError:
    ListError::Syntax => "not a list of numbers and ranges like 0-3,8";
    ListError::TooLarge => "a number is too large";
}

impl<const WORDS: usize> Default for Set<WORDS> {
    fn default() -> Self {
        Set { words: [0; WORDS] }
    }
}

impl<const WORDS: usize> Set<WORDS> {
    /// The empty set.
    pub const EMPTY: Self = Set { words: [0; WORDS] };

    /// Parses a list, as `from_str` does.
    pub(crate) fn parse(list: &[u8]) -> Result<Self, ListError> {
        let mut set = Self::default();
        let mut parser = List::default();
        let bytes = list.iter().map(|&byte| Some(byte)).chain([None]);
        for byte in bytes {
            let range = match byte {
                Some(byte) => parser.feed(byte)?,
                None => core::mem::take(&mut parser).end()?,
            };
            if let Some(range) = range {
                if range.last >= WORDS * 64 {
                    return Err(ListError::TooLarge);
                }
                range.numbers().for_each(|n| set.insert(n));
            }
        }
        Ok(set)
    }

    /// Inserts a number. Ignores a number that is too large for the set.
    pub fn insert(&mut self, n: usize) {
        if let Some(word) = self.words.get_mut(n / 64) {
            *word |= 1 << (n % 64);
        }
    }

    /// Returns whether a number is in the set.
    pub fn contains(&self, n: usize) -> bool {
        self.words
            .get(n / 64)
            .is_some_and(|word| word >> (n % 64) & 1 == 1)
    }

    /// Returns how many numbers are in the set. Takes time in proportion to the set's capacity.
    pub fn len(&self) -> usize {
        self.words
            .iter()
            .map(|word| word.count_ones() as usize)
            .sum()
    }

    /// Returns whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|&word| word == 0)
    }

    /// Returns the numbers in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        let words = self.words.iter().enumerate();
        words.flat_map(|(n, &word)| bits(word).map(move |bit| n * 64 + bit))
    }

    /// Returns the numbers that are in both sets.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        self.combined(other, |word, other| word & other)
    }

    /// Returns the numbers that are in at least one of the sets.
    #[must_use]
    pub fn or(&self, other: &Self) -> Self {
        self.combined(other, |word, other| word | other)
    }

    /// Returns the numbers of this set that are not in `other`.
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        self.combined(other, |word, other| word & !other)
    }

    fn combined(&self, other: &Self, combine: impl Fn(u64, u64) -> u64) -> Self {
        let words = core::array::from_fn(|at| combine(self.words[at], other.words[at]));
        Set { words }
    }
}

impl<const WORDS: usize> FromStr for Set<WORDS> {
    type Err = ListError;

    /// Parses a list in the kernel's format. An empty text is the empty set. White space around the
    /// list is ignored.
    ///
    /// # Errors
    ///
    /// [`ListError::Syntax`] if the text is not a list; [`ListError::TooLarge`] if a number is too
    /// large for the set.
    ///
    /// # Examples
    ///
    /// ```
    /// use pinfold::topology::CpuSet;
    ///
    /// let cpus: CpuSet = "0-3,8,10-20:2/5\n".parse()?;
    /// assert_eq!(cpus.iter().collect::<Vec<_>>(), [0, 1, 2, 3, 8, 10, 11, 15, 16, 20]);
    /// assert_eq!(cpus.to_string().parse::<CpuSet>()?, cpus);
    /// # Ok::<(), pinfold::topology::ListError>(())
    /// ```
    fn from_str(list: &str) -> Result<Self, ListError> {
        Self::parse(list.as_bytes())
    }
}

impl<const WORDS: usize> FromIterator<usize> for Set<WORDS> {
    /// Collects numbers into a set. Ignores numbers that are too large for the set.
    fn from_iter<I: IntoIterator<Item = usize>>(numbers: I) -> Self {
        let mut set = Self::default();
        numbers.into_iter().for_each(|n| set.insert(n));
        set
    }
}

/// Returns the numbers of the bits that are set in `word`, in ascending order.
#[inline]
pub(crate) fn bits(word: u64) -> impl Iterator<Item = usize> {
    let mut rest = word;
    core::iter::from_fn(move || {
        let bit = (rest != 0).then(|| rest.trailing_zeros() as usize)?;
        rest &= rest - 1;
        Some(bit)
    })
}

pub(super) fn number(text: &[u8]) -> Result<usize, ListError> {
    let digits = !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    if !digits {
        return Err(ListError::Syntax);
    }
    let text = core::str::from_utf8(text).map_err(|_| ListError::Syntax)?;
    text.parse().map_err(|_| ListError::TooLarge)
}

impl<const WORDS: usize> fmt::Display for Set<WORDS> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut numbers = self.iter().peekable();
        let mut comma = "";
        while let Some(first) = numbers.next() {
            let mut last = first;
            while let Some(next) = numbers.next_if_eq(&(last + 1)) {
                last = next;
            }
            write!(f, "{comma}{first}")?;
            if last > first {
                write!(f, "-{last}")?;
            }
            comma = ",";
        }
        Ok(())
    }
}

impl<const WORDS: usize> fmt::Debug for Set<WORDS> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{{{self}}}")
    }
}
