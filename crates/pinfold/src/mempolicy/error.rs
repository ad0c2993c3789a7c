//! The errors of policies and of their system calls, with what to do about each.

use super::Mode;
use super::refusal::Refusal;
use crate::topology::{MAX_NODES, NodeId};

/// A system call for policies.
///
/// ```
/// use pinfold::mempolicy::{Syscall, PolicyError};
///
/// let error = PolicyError::Refused { call: Syscall::SetHomeNode, errno: 38 };
/// let text = "set_mempolicy_home_node: not available here (ENOSYS): the call needs Linux 5.17";
/// assert!(error.to_string().starts_with(text));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Syscall {
    /// `set_mempolicy`.
    SetMempolicy,
    /// `get_mempolicy`.
    GetMempolicy,
    /// `mbind`.
    Mbind,
    /// `set_mempolicy_home_node`.
    SetHomeNode,
    /// `move_pages`.
    MovePages,
    /// `migrate_pages`.
    MigratePages,
}

impl Syscall {
    /// Returns the system call's name.
    pub const fn name(self) -> &'static str {
        match self {
            Syscall::SetMempolicy => "set_mempolicy",
            Syscall::GetMempolicy => "get_mempolicy",
            Syscall::Mbind => "mbind",
            Syscall::SetHomeNode => "set_mempolicy_home_node",
            Syscall::MovePages => "move_pages",
            Syscall::MigratePages => "migrate_pages",
        }
    }
}

/// Why a policy is invalid, or why a system call for it failed. The text says what to do about it.
///
/// ```
/// use pinfold::mempolicy::{Mempolicy, PolicyError};
/// use pinfold::topology::NodeId;
///
/// let error = Mempolicy::preferred(NodeId(5000)).unwrap_err();
/// assert_eq!(error, PolicyError::NodeTooLarge(NodeId(5000)));
/// assert_eq!(error.to_string(), "there is no node 5000; numbers are below 1024");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PolicyError {
    /// A mode that needs nodes has none.
    NeedsNodes(Mode),
    /// A mode that takes no nodes has some.
    TakesNoNodes(Mode),
    /// `prefer` has several nodes.
    TakesOneNode,
    /// A flag for the meaning of node numbers (`static` or `relative`) is set for a mode that takes
    /// no nodes.
    TakesNoFlags(Mode),
    /// The flags `static` and `relative` are combined.
    StaticAndRelative,
    /// The flag `balancing` is set for a mode that does not support it.
    TakesNoBalancing(Mode),
    /// A home node is set for a mode that does not support it.
    TakesNoHome(Mode),
    /// A thread's policy has a home node. The kernel supports home nodes only for policies of
    /// address ranges.
    HomeOfThread,
    /// The kernel returned a mode that this version does not know.
    UnknownMode(u32),
    /// The node's number is [`MAX_NODES`] or more.
    NodeTooLarge(NodeId),
    /// None of the policy's nodes is allowed.
    NoneAllowed(Mode),
    /// The call needs `CAP_SYS_NICE`, because it was asked to move another process's pages, or
    /// pages that other processes also map.
    NeedsRights(Syscall),
    /// The slices passed to one call differ in length.
    LengthsDiffer,
    /// The kernel refused a call.
    Refused {
        /// The call.
        call: Syscall,
        /// The error number.
        errno: i32,
    },
}

impl PolicyError {
    /// Returns the kernel's error number, if the kernel refused a call.
    pub const fn errno(self) -> Option<i32> {
        match self {
            PolicyError::Refused { errno, .. } => Some(errno),
            _ => None,
        }
    }

    /// Returns whether the call is unavailable here: the kernel has no NUMA support, or a filter
    /// forbids the call, as in containers.
    pub const fn is_forbidden(self) -> bool {
        match self {
            PolicyError::Refused { errno, .. } => matches!(errno, libc::ENOSYS | libc::EPERM),
            _ => false,
        }
    }
}

pinfold_rseq::error_texts! { PolicyError:
    PolicyError::NeedsNodes(mode) => "{0} needs nodes; name some, as in {0}:0-1", mode.name();
    PolicyError::TakesNoNodes(mode) => "{} takes no nodes; leave them out", mode.name();
    PolicyError::TakesOneNode =>
        "prefer takes one node; for several nodes use the mode \"prefer (many)\"";
    PolicyError::TakesNoFlags(mode) => "static and relative say how nodes are counted, and {} \
        takes no nodes; leave the flag out", mode.name();
    PolicyError::StaticAndRelative =>
        "static and relative exclude each other; use one of them";
    PolicyError::TakesNoBalancing(mode) =>
        "balancing goes with bind and prefer (many), not with {}; leave it out", mode.name();
    PolicyError::TakesNoHome(mode) =>
        "a home node goes with bind and prefer (many), not with {}; leave it out", mode.name();
    PolicyError::HomeOfThread =>
        "a thread's policy has no home node; leave it out, or apply the policy to a range";
    PolicyError::UnknownMode(mode) => "the kernel answers with mode {mode}, which this version \
        does not know; set another policy";
    PolicyError::NodeTooLarge(NodeId(node)) =>
        "there is no node {node}; numbers are below {MAX_NODES}";
    PolicyError::NoneAllowed(mode) => "none of the nodes of {} may be used here; see \
        Mems_allowed_list in /proc/self/status, and /sys/devices/system/node/has_memory",
        mode.name();
    PolicyError::NeedsRights(Syscall::Mbind) => "mbind: moving pages that others map too needs \
        CAP_SYS_NICE; Move::Own moves the rest";
    PolicyError::NeedsRights(call) => "{}: pages that others map too, another's process, and nodes \
        that it may not use need CAP_SYS_NICE", call.name();
    PolicyError::LengthsDiffer => "there must be one target and one answer for each page";
    PolicyError::Refused { call, errno } => "{}: {}", call.name(), Refusal(*call, *errno);
}
