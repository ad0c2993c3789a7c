//! What a policy does with its nodes, and how it takes a change of the nodes that the process may use.

use super::abi;
use core::ops::BitOr;

/// What a policy does with its nodes; the numbers are the kernel's `MPOL_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Mode {
    /// None of its own: whatever stands behind it, a thread's policy behind a range's, the system's behind a thread's.
    Default = 0,
    /// One node first, then the others by distance from it.
    Preferred = 1,
    /// These nodes and no others, the nearest first.
    Bind = 2,
    /// Page by page around the nodes.
    Interleave = 3,
    /// The node of the CPU that first touches the page, then the others by distance.
    Local = 4,
    /// These nodes first, the nearest of them before the others; then all.
    PreferredMany = 5,
    /// Around the nodes, as many pages on each as its weight.
    WeightedInterleave = 6,
}

impl Mode {
    /// All modes, in the order of their numbers.
    pub const ALL: [Mode; 7] = [
        Mode::Default,
        Mode::Preferred,
        Mode::Bind,
        Mode::Interleave,
        Mode::Local,
        Mode::PreferredMany,
        Mode::WeightedInterleave,
    ];

    /// The name, as the kernel prints it: one that its own reader takes.
    ///
    /// ```
    /// use pinfold::mempolicy::Mode;
    ///
    /// assert_eq!(Mode::PreferredMany.name(), "prefer (many)");
    /// ```
    pub const fn name(self) -> &'static str {
        match self {
            Mode::Default => "default",
            Mode::Preferred => "prefer",
            Mode::Bind => "bind",
            Mode::Interleave => "interleave",
            Mode::Local => "local",
            Mode::PreferredMany => "prefer (many)",
            Mode::WeightedInterleave => "weighted interleave",
        }
    }

    /// The mode of a number of the kernel's.
    pub(crate) fn from_number(number: u64) -> Option<Mode> {
        Mode::ALL.get(usize::try_from(number).ok()?).copied()
    }

    /// Whether pages go around the nodes.
    pub(crate) const fn interleaves(self) -> bool {
        matches!(self, Mode::Interleave | Mode::WeightedInterleave)
    }
}

/// How a policy's nodes follow the nodes that the process may use; a set, made by `|`.
///
/// ```
/// use pinfold::mempolicy::Flags;
///
/// let flags = Flags::STATIC | Flags::BALANCING;
/// assert!(flags.contains(Flags::STATIC) && !flags.contains(Flags::RELATIVE));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Flags(u16);

impl Flags {
    /// The nodes are carried over when the allowed ones change.
    pub const NONE: Flags = Flags(0);
    /// The nodes are meant by their numbers: those of them that are allowed.
    pub const STATIC: Flags = Flags(abi::MPOL_F_STATIC_NODES);
    /// The nodes are positions among the allowed ones: 0 is the first of them.
    pub const RELATIVE: Flags = Flags(abi::MPOL_F_RELATIVE_NODES);
    /// Pages may move to the node that uses them, if it is one of the policy's. For `bind`; for `prefer (many)` since Linux
    /// 6.10.
    pub const BALANCING: Flags = Flags(abi::MPOL_F_NUMA_BALANCING);

    /// Whether all of `other` are set.
    pub const fn contains(self, other: Flags) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether none is set.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The kernel's bits.
    pub const fn bits(self) -> u16 {
        self.0
    }

    /// The flags of the kernel's bits; others than flags are left out.
    pub(crate) const fn from_bits(bits: u16) -> Flags {
        Flags(bits & (Flags::STATIC.0 | Flags::RELATIVE.0 | Flags::BALANCING.0))
    }
}

impl BitOr for Flags {
    type Output = Flags;

    fn bitor(self, other: Flags) -> Flags {
        Flags(self.0 | other.0)
    }
}
