//! A policy's mode and flags.

use super::abi;
use core::ops::BitOr;

/// What a policy does with its nodes. The numbers are the kernel's `MPOL_*`.
///
/// ```
/// use pinfold::mempolicy::{Mempolicy, Mode};
///
/// let policy = Mempolicy::parse("preferred-many:0,2")?;
/// assert_eq!(policy.mode(), Mode::PreferredMany);
/// // The kernel's MPOL_PREFERRED_MANY is 5.
/// assert_eq!(policy.mode() as u8, 5);
/// # Ok::<(), pinfold::mempolicy::ParseError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Mode {
    /// No policy. A range with this mode follows the thread's policy. A thread with this mode
    /// follows the system's policy.
    Default = 0,
    /// One node first, then the others by distance from it.
    Preferred = 1,
    /// Only these nodes, the nearest first.
    Bind = 2,
    /// The nodes in turn, page by page.
    Interleave = 3,
    /// The node of the CPU that first touches the page, then the others by distance.
    Local = 4,
    /// These nodes, the nearest first; then the others, the nearest first.
    PreferredMany = 5,
    /// The nodes in turn, as many pages on each as its weight.
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

    /// Returns the mode's name as the kernel prints it. The kernel's own parser accepts it.
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

    /// Returns the mode with the kernel's number `number`.
    pub(crate) fn from_number(number: u64) -> Option<Mode> {
        Mode::ALL.get(usize::try_from(number).ok()?).copied()
    }

    /// Returns whether the mode uses its nodes in turn.
    pub(crate) const fn interleaves(self) -> bool {
        matches!(self, Mode::Interleave | Mode::WeightedInterleave)
    }
}

/// How a policy's nodes follow the allowed nodes: a set of flags, combined by `|`.
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
    /// No flag. When the allowed nodes change, each node is replaced by the node at the same
    /// position among the new allowed nodes.
    pub const NONE: Flags = Flags(0);
    /// The nodes are the machine's node numbers. Nodes that are not allowed are left out.
    pub const STATIC: Flags = Flags(abi::MPOL_F_STATIC_NODES);
    /// The nodes are positions among the allowed nodes: 0 is the first of them.
    pub const RELATIVE: Flags = Flags(abi::MPOL_F_RELATIVE_NODES);
    /// A page may move to the node whose CPUs use it, if this node is one of the policy's nodes.
    /// For `bind`, and since Linux 6.10 also for `prefer (many)`.
    pub const BALANCING: Flags = Flags(abi::MPOL_F_NUMA_BALANCING);

    /// Returns whether all flags of `other` are set.
    pub const fn contains(self, other: Flags) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns whether no flag is set.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns the kernel's bits.
    pub const fn bits(self) -> u16 {
        self.0
    }

    /// Returns the flags among the kernel's bits. Other bits are ignored.
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
