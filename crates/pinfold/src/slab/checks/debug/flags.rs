//! The set of checks that a cache makes.

use core::fmt;
use core::ops::BitOr;

/// The set of checks that a cache makes. Each check has a letter in `PINFOLD_SLAB_DEBUG`: the
/// letter that the check has in the kernel's `slab_debug`.
///
/// ```
/// use pinfold::slab::DebugFlags;
///
/// let flags = DebugFlags::RED_ZONE | DebugFlags::POISON;
/// assert!(flags.contains(DebugFlags::POISON));
/// assert_eq!(flags.to_string(), "ZP");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DebugFlags(u8);

impl DebugFlags {
    /// No checks: the cache works at full speed.
    pub const NONE: DebugFlags = DebugFlags(0);
    /// F: checks every address that is freed, and the cache's records of the object there. Every
    /// debugged cache makes this check, so F alone only makes the cache a debugged one.
    pub const CONSISTENCY: DebugFlags = DebugFlags(1);
    /// Z: checks the bytes on both sides of each object, the red zones.
    pub const RED_ZONE: DebugFlags = DebugFlags(2);
    /// P: checks the bytes of free objects. Has no effect on objects with a constructor, which keep
    /// their bytes while they are free.
    pub const POISON: DebugFlags = DebugFlags(4);
    /// U: records the thread, the time and the callers of each object's last allocation and last
    /// free.
    pub const USER: DebugFlags = DebugFlags(8);
    /// T: writes a line to standard error for each allocation and free.
    pub const TRACE: DebugFlags = DebugFlags(16);
    /// F, Z, P and U. Where `PINFOLD_SLAB_DEBUG` gives no letters, it means these.
    pub const DEFAULT: DebugFlags = DebugFlags(15);

    /// The letter of each flag, in the order in which they are displayed.
    const LETTERS: [(char, DebugFlags); 5] = [
        ('F', Self::CONSISTENCY),
        ('Z', Self::RED_ZONE),
        ('P', Self::POISON),
        ('U', Self::USER),
        ('T', Self::TRACE),
    ];

    /// Returns the flag of a letter. The letter may be in upper or lower case.
    pub(super) fn of_letter(letter: char) -> Option<DebugFlags> {
        let letter = letter.to_ascii_uppercase();
        let known = Self::LETTERS.iter().find(|known| known.0 == letter);
        known.map(|known| known.1)
    }

    /// Returns whether all flags of `other` are set.
    pub const fn contains(self, other: DebugFlags) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns whether no flag is set.
    pub const fn is_none(self) -> bool {
        self.0 == 0
    }

    pub(crate) const fn without(self, other: DebugFlags) -> DebugFlags {
        DebugFlags(self.0 & !other.0)
    }
}

impl BitOr for DebugFlags {
    type Output = DebugFlags;
    fn bitor(self, other: DebugFlags) -> DebugFlags {
        DebugFlags(self.0 | other.0)
    }
}

/// Writes the letters of the flags that are set, or `-` if there are none.
impl fmt::Display for DebugFlags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_none() {
            return f.write_str("-");
        }
        for (letter, flag) in Self::LETTERS {
            if self.contains(flag) {
                fmt::Write::write_char(f, letter)?;
            }
        }
        Ok(())
    }
}
