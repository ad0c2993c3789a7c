//! Memory policies.

mod buffer;
mod latch;
mod ranges;

pub use ranges::RangeError;
pub(crate) use ranges::{fork_done, fork_prepare, is_lock_held};

/// What the model in loom replaces.
mod primitive {
    pub(super) use core::sync::atomic::{AtomicPtr, AtomicU64, fence};
}
