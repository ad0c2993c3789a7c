//! Sets of small numbers, as the kernel writes them in its files.

use super::list::List;
use core::fmt;

/// A set of small numbers, as the kernel writes them: `0-3,8,10-14:2/4`.
#[derive(Clone, PartialEq, Eq)]
pub struct Set<const WORDS: usize> {
    pub(crate) words: [u64; WORDS],
}

/// What is wrong with a list of numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListError {
    /// Not a number, range or stride where one should be.
    Syntax,
    /// A number larger than the set can hold.
    TooLarge,
}

impl fmt::Display for ListError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ListError::Syntax => "not a list of numbers and ranges like 0-3,8",
            ListError::TooLarge => "a number is too large",
        })
    }
}

impl core::error::Error for ListError {}

impl<const WORDS: usize> Default for Set<WORDS> {
    fn default() -> Self {
        Set { words: [0; WORDS] }
    }
}

impl<const WORDS: usize> Set<WORDS> {
    /// The empty set.
    pub const EMPTY: Self = Set { words: [0; WORDS] };

    /// The set of the numbers in a list as the kernel writes it; an empty text is the empty set.
    ///
    /// # Errors
    ///
    /// [`ListError`].
    ///
    /// ```
    /// use pinfold::topology::CpuSet;
    ///
    /// let cpus = CpuSet::parse(b"0-3,8,10-20:2/5\n")?;
    /// assert_eq!(cpus.iter().collect::<Vec<_>>(), [0, 1, 2, 3, 8, 10, 11, 15, 16, 20]);
    /// assert_eq!(CpuSet::parse(cpus.to_string().as_bytes())?, cpus);
    /// # Ok::<(), pinfold::topology::ListError>(())
    /// ```
    pub fn parse(list: &[u8]) -> Result<Self, ListError> {
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

    /// Puts a number in; one that is too large is left out.
    pub fn insert(&mut self, n: usize) {
        if let Some(word) = self.words.get_mut(n / 64) {
            *word |= 1 << (n % 64);
        }
    }

    /// Whether a number is in the set.
    pub fn contains(&self, n: usize) -> bool {
        self.words
            .get(n / 64)
            .is_some_and(|word| word >> (n % 64) & 1 == 1)
    }

    /// How many numbers are in the set.
    pub fn len(&self) -> usize {
        self.words
            .iter()
            .map(|word| word.count_ones() as usize)
            .sum()
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|&word| word == 0)
    }

    /// The numbers, ascending.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.words.iter().enumerate().flat_map(|(n, &word)| {
            let mut rest = word;
            core::iter::from_fn(move || {
                let bit = rest.trailing_zeros() as usize;
                (rest != 0).then(|| {
                    rest &= rest - 1;
                    n * 64 + bit
                })
            })
        })
    }

    /// The numbers that are in both sets.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        let mut both = self.clone();
        both.words
            .iter_mut()
            .zip(other.words)
            .for_each(|(word, other)| *word &= other);
        both
    }

    /// The numbers that are in either set.
    #[must_use]
    pub fn or(&self, other: &Self) -> Self {
        let mut either = self.clone();
        either
            .words
            .iter_mut()
            .zip(other.words)
            .for_each(|(word, other)| *word |= other);
        either
    }

    /// The numbers that are not in the other set.
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        let mut rest = self.clone();
        rest.words
            .iter_mut()
            .zip(other.words)
            .for_each(|(word, other)| *word &= !other);
        rest
    }
}

impl<const WORDS: usize> FromIterator<usize> for Set<WORDS> {
    /// The set of some numbers; those that are too large are left out.
    fn from_iter<I: IntoIterator<Item = usize>>(numbers: I) -> Self {
        let mut set = Self::default();
        numbers.into_iter().for_each(|n| set.insert(n));
        set
    }
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
