//! Which call stacks keep free memory in slabs.

use crate::profile;
use crate::slab::kmalloc;

/// Notes in the profile how many free bytes in slabs the blocks in use of each call stack keep.
/// Returns false if there is no profile, or if another thread is at it. Makes no system call. Takes
/// some milliseconds if there are many sampled blocks.
pub fn look() -> bool {
    profile::weigh_fragments(kmalloc::free_beside)
}
