//! Statements of how far a counter's shards can have moved, on which limited adds rely without a
//! lock.
//!
//! A limited add must know that no shard carries the value past the limit at the moment when it
//! adds. The shards of other CPUs move without notice, and folds let them move further.
//!
//! So a counter with limited adds states a *reach*: how far all shards together can have moved.
//! Folds keep the statement true. A fold that would take the totals out of the reach does not
//! happen. The shard then runs out of room, and its adds go to the base.
//!
//! The reach lies beside the base. A limited add compares and exchanges both words in one
//! instruction ([`base`](super::base)). So it adds to the base only if the base and the reach are
//! still the values that it has judged.

/// The bits of a [`Reach`] that hold the exponent.
const EXPONENT: u64 = 63;
/// The largest exponent: a centre and its width stay far below 2^63.
const MAX_EXPONENT: u32 = 60;

/// A statement about the shards of a counter: what was added to them, less what was taken away, is
/// at most `2^exponent` from a centre. Zero states nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reach(pub(super) u64);

impl Reach {
    pub(super) const NONE: Reach = Reach(0);

    /// Returns the widest reach that is at most `width` wide. Its centre is `moved`, rounded down
    /// to a multiple of 64. Returns [`NONE`](Reach::NONE) for a width below 2.
    pub(super) fn around(moved: i64, width: u64) -> Reach {
        let exponent = width.checked_ilog2().unwrap_or(0).min(MAX_EXPONENT);
        if exponent == 0 {
            return Reach::NONE;
        }
        Reach(moved as u64 & !EXPONENT | u64::from(exponent))
    }

    pub(super) fn centre(self) -> i64 {
        (self.0 & !EXPONENT) as i64
    }

    pub(super) fn width(self) -> u64 {
        1 << (self.0 & EXPONENT)
    }

    /// Returns whether the statement stays true if the shards are at `moved` and move on by at most
    /// `slack` in either direction.
    pub(super) fn allows(self, moved: i64, slack: u64) -> bool {
        let off = moved.wrapping_sub(self.centre()).unsigned_abs();
        self == Reach::NONE || off.saturating_add(slack) <= self.width()
    }

    /// Returns the farthest value, in the direction of `amount`, that a counter with base `base`
    /// can have.
    #[inline]
    pub(super) fn farthest(self, base: i64, amount: i64) -> i64 {
        let middle = base.wrapping_add(self.centre());
        if amount >= 0 {
            middle.saturating_add_unsigned(self.width())
        } else {
            middle.saturating_sub_unsigned(self.width())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reach_says_where_it_ends() {
        let reach = Reach::around(1000, 5000);
        assert_eq!((reach.centre(), reach.width()), (960, 4096));
        assert!(reach.allows(960 + 4000, 96) && !reach.allows(960 + 4000, 97));
        assert!(reach.allows(960 - 4000, 96) && !reach.allows(960 - 4000, 97));
        assert_eq!(reach.farthest(40, 1), 1000 + 4096);
        assert_eq!(reach.farthest(40, -1), 1000 - 4096);
        assert_eq!(Reach::around(7, 1), Reach::NONE);
        assert!(Reach::NONE.allows(i64::MIN, u64::MAX));
        assert_eq!(Reach::around(-1, u64::MAX).width(), 1 << 60);
    }
}
