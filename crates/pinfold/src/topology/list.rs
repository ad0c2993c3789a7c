//! Parses the kernel's lists of numbers, such as `0-3,8,10-14:2/4`, a byte at a time.

use super::set::ListError;

/// The numbers from `first` to `last`. Of each `group` of these numbers in a row, only the first
/// `used`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) first: usize,
    pub(super) last: usize,
    used: usize,
    group: usize,
}

impl Range {
    /// Returns the numbers of the range.
    pub(super) fn numbers(self) -> impl Iterator<Item = usize> {
        let used = move |n: &usize| (n - self.first) % self.group < self.used;
        (self.first..=self.last).filter(used)
    }
}

/// The fields of a range, in the order of [`List::fields`].
const FIRST: usize = 0;
const LAST: usize = 1;
const USED: usize = 2;
const GROUP: usize = 3;

/// A parser of a list. Accepts white space around the list.
#[derive(Default)]
pub(super) struct List {
    fields: [usize; 4],
    /// The field that the next digit belongs to.
    field: usize,
    /// Whether the field has a digit.
    digits: bool,
    /// Whether the list has begun.
    begun: bool,
    /// Whether the list has ended, by white space.
    ended: bool,
}

impl List {
    /// Parses the next byte. Returns a range if one ends in front of the byte.
    pub(super) fn feed(&mut self, byte: u8) -> Result<Option<Range>, ListError> {
        if byte.is_ascii_whitespace() {
            self.ended = self.begun;
            return Ok(None);
        }
        if self.ended {
            return Err(ListError::Syntax);
        }
        self.begun = true;
        if byte.is_ascii_digit() {
            let field = &mut self.fields[self.field];
            *field = field
                .checked_mul(10)
                .and_then(|tens| tens.checked_add(usize::from(byte - b'0')))
                .ok_or(ListError::TooLarge)?;
            self.digits = true;
            return Ok(None);
        }
        if !self.digits {
            return Err(ListError::Syntax);
        }
        let field = match (byte, self.field) {
            (b',', _) => return self.range().map(Some),
            (b'-', FIRST) => LAST,
            (b':', FIRST | LAST) => USED,
            (b'/', USED) => GROUP,
            _ => return Err(ListError::Syntax),
        };
        if field == USED && self.field == FIRST {
            self.fields[LAST] = self.fields[FIRST];
        }
        self.field = field;
        self.digits = false;
        Ok(None)
    }

    /// Ends the list. Returns its last range, or `None` if the list is empty.
    pub(super) fn end(mut self) -> Result<Option<Range>, ListError> {
        if !self.begun {
            return Ok(None);
        }
        if !self.digits {
            return Err(ListError::Syntax);
        }
        self.range().map(Some)
    }

    /// Returns the range of the fields so far, and starts another.
    fn range(&mut self) -> Result<Range, ListError> {
        let [first, last, used, group] = core::mem::take(&mut self.fields);
        let (last, used, group) = match core::mem::take(&mut self.field) {
            FIRST => (first, 1, 1),
            LAST => (last, 1, 1),
            USED => return Err(ListError::Syntax),
            _ => (last, used, group),
        };
        self.digits = false;
        if last < first || used == 0 || used > group {
            return Err(ListError::Syntax);
        }
        Ok(Range {
            first,
            last,
            used,
            group,
        })
    }
}
