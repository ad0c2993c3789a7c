//! What can be wrong with a policy, or go wrong with a call, and how to mend it.

use super::Mode;
use crate::topology::{NODES_MOST, NodeId};
use core::fmt;

/// A call to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
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

impl Call {
    /// The call's name.
    pub const fn name(self) -> &'static str {
        match self {
            Call::SetMempolicy => "set_mempolicy",
            Call::GetMempolicy => "get_mempolicy",
            Call::Mbind => "mbind",
            Call::SetHomeNode => "set_mempolicy_home_node",
            Call::MovePages => "move_pages",
            Call::MigratePages => "migrate_pages",
        }
    }
}

/// Why a policy cannot be, or was not put to use. The text says what to do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PolicyError {
    /// A mode that needs nodes has none.
    NeedsNodes(Mode),
    /// A mode that takes no nodes has some.
    TakesNoNodes(Mode),
    /// `prefer` with several nodes.
    TakesOneNode,
    /// A mode without nodes has a flag that says how they are meant.
    TakesNoFlags(Mode),
    /// `static` and `relative` at once.
    StaticAndRelative,
    /// `balancing` with a mode that has none.
    TakesNoBalancing(Mode),
    /// A home node with a mode that has none.
    TakesNoHome(Mode),
    /// A home node for a thread: the kernel has them for ranges only.
    HomeOfThread,
    /// The kernel has a mode that this library does not know.
    UnknownMode(u32),
    /// A number that no node can have.
    NodeTooLarge(NodeId),
    /// None of the policy's nodes is among those that the process may use.
    NoneAllowed(Mode),
    /// The call wants `CAP_SYS_NICE` for what it was asked: to move pages that others map too, or another process's.
    NeedsRights(Call),
    /// The lists given to one call differ in length.
    LengthsDiffer,
    /// The kernel refused a call.
    Refused {
        /// The call.
        call: Call,
        /// Its `errno`.
        errno: i32,
    },
}

impl PolicyError {
    /// The kernel's error number, where it was the kernel that refused.
    pub const fn errno(self) -> Option<i32> {
        match self {
            PolicyError::Refused { errno, .. } => Some(errno),
            _ => None,
        }
    }

    /// Whether the call is not to be had at all here: a kernel without NUMA, or a filter that forbids it, as in
    /// containers.
    pub const fn is_forbidden(self) -> bool {
        match self {
            PolicyError::Refused { errno, .. } => matches!(errno, libc::ENOSYS | libc::EPERM),
            _ => false,
        }
    }
}

impl fmt::Display for PolicyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            PolicyError::NeedsNodes(mode) => {
                write!(f, "{0} needs nodes; name some, as in {0}:0-1", mode.name())
            }
            PolicyError::TakesNoNodes(mode) => {
                write!(f, "{} takes no nodes; leave them out", mode.name())
            }
            PolicyError::TakesOneNode => {
                f.write_str("prefer takes one node; for several use prefer (many)")
            }
            PolicyError::TakesNoFlags(mode) => {
                let name = mode.name();
                write!(
                    f,
                    "static and relative say how nodes are meant, and {name} has none; leave the flag out"
                )
            }
            PolicyError::StaticAndRelative => {
                f.write_str("static and relative exclude each other; use one of them")
            }
            PolicyError::TakesNoBalancing(mode) => {
                let name = mode.name();
                write!(
                    f,
                    "balancing goes with bind and prefer (many), not with {name}; leave it out"
                )
            }
            PolicyError::TakesNoHome(mode) => {
                let name = mode.name();
                write!(
                    f,
                    "a home node goes with bind and prefer (many), not with {name}; leave it out"
                )
            }
            PolicyError::HomeOfThread => f.write_str(
                "a thread's policy has no home node; leave it out, or apply the policy to a range",
            ),
            PolicyError::UnknownMode(mode) => write!(
                f,
                "the kernel answers with mode {mode}, which this version does not know; set another policy"
            ),
            PolicyError::NodeTooLarge(NodeId(node)) => {
                write!(f, "there is no node {node}; numbers are below {NODES_MOST}")
            }
            PolicyError::NoneAllowed(mode) => write!(
                f,
                "none of the nodes of {} may be used here; see Mems_allowed_list in /proc/self/status, and \
                 /sys/devices/system/node/has_memory",
                mode.name()
            ),
            PolicyError::NeedsRights(Call::Mbind) => f.write_str(
                "mbind: moving pages that others map too needs CAP_SYS_NICE; Move::Own moves the rest",
            ),
            PolicyError::NeedsRights(call) => write!(
                f,
                "{}: pages that others map too, another's process, and nodes that it may not use need CAP_SYS_NICE",
                call.name()
            ),
            PolicyError::LengthsDiffer => {
                f.write_str("there must be one target and one answer for each page")
            }
            PolicyError::Refused { call, errno } => super::refusal::explain(call, errno, f),
        }
    }
}

impl core::error::Error for PolicyError {}
