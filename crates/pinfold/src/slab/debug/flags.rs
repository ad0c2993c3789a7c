//! Which checks a cache makes.

use core::fmt;
use core::ops::BitOr;

/// Which checks a cache makes; a letter each in `PINFOLD_SLAB_DEBUG`, as in the kernel's `slab_debug`.
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
    /// F: every address that is freed, and what the cache knows of it. Every debugged cache does this; F alone does nothing else.
    pub const CONSISTENCY: DebugFlags = DebugFlags(1);
    /// Z: bytes on both sides of each object.
    pub const RED_ZONE: DebugFlags = DebugFlags(2);
    /// P: the bytes of free objects. Not of those with a constructor, whose bytes are its own.
    pub const POISON: DebugFlags = DebugFlags(4);
    /// U: who allocated and who freed each object last, with backtraces.
    pub const USER: DebugFlags = DebugFlags(8);
    /// T: a line on standard error for each allocation and free.
    pub const TRACE: DebugFlags = DebugFlags(16);
    /// F, Z, P and U: what `PINFOLD_SLAB_DEBUG` means where it names no letters.
    pub const DEFAULT: DebugFlags = DebugFlags(15);

    /// Letters and flags, in the order in which they are written.
    const LETTERS: [(char, DebugFlags); 5] = [
        ('F', Self::CONSISTENCY),
        ('Z', Self::RED_ZONE),
        ('P', Self::POISON),
        ('U', Self::USER),
        ('T', Self::TRACE),
    ];

    /// The flag of a letter, of either case.
    pub(super) fn of_letter(letter: char) -> Option<DebugFlags> {
        let letter = letter.to_ascii_uppercase();
        let known = Self::LETTERS.iter().find(|known| known.0 == letter);
        known.map(|known| known.1)
    }

    /// Whether all of `other` are set.
    pub const fn contains(self, other: DebugFlags) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether nothing is checked.
    pub const fn is_none(self) -> bool {
        self.0 == 0
    }

    pub(in crate::slab) const fn without(self, other: DebugFlags) -> DebugFlags {
        DebugFlags(self.0 & !other.0)
    }
}

impl BitOr for DebugFlags {
    type Output = DebugFlags;
    fn bitor(self, other: DebugFlags) -> DebugFlags {
        DebugFlags(self.0 | other.0)
    }
}

/// The letters, `-` for none.
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
