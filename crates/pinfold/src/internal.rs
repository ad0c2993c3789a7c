//! What the other crates of this workspace use. Other crates must not use it: it may change in any
//! release.

use crate::topology::{Topology, TopologyError};

pub use crate::sys::{
    Text, coarse_milliseconds, decimal, die as abort, keep_errno, loader_is_idle, set_errno,
    uncancelled,
};

pub use crate::topology::cgroup::with_tightest as with_tightest_cgroup;

/// Reads the machine whose files are below `root`, without the affinity. For tests, and for the
/// command's `--root`.
///
/// # Errors
///
/// [`TopologyError`] if a file's content makes no sense.
pub fn topology_below(root: &[u8]) -> Result<Topology, TopologyError> {
    Topology::read_below(root)
}

pub mod arena {
    //! Memory from the system.
    pub use crate::arena::*;
}

pub mod fork {
    //! The table of what a fork takes.
    pub use crate::fork::*;
}

pub mod guarded {
    //! Guarded blocks.
    pub use crate::guarded::*;
}

pub mod heap {
    //! The engine of malloc.
    pub use crate::heap::*;
}

pub mod kmalloc {
    //! Caches by size.
    pub use crate::slab::kmalloc::*;
}

pub mod profile {
    //! The records of heap profiles.
    pub use crate::profile::*;
}

pub mod refcount {
    //! Reference counts per CPU.
    pub use crate::percpu::{Killed, RefCount, kill, revive};
}

pub mod segment {
    //! The layout of what a process shows, and its mailbox.
    pub use crate::segment::*;
}

pub mod show {
    //! How the process shows itself, and which server its requests have.
    pub use crate::show::*;
}
