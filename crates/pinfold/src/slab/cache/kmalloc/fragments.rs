//! How much free memory the blocks that a sample stands for keep in slabs.
//!
//! A slab goes back to the arena only when all its blocks are free. So the blocks in use keep the
//! free ones in memory, each of them the same part: free / used blocks.
//!
//! A sampled block lies in a slab of its class's twin, and the other blocks that its sample stands
//! for lie in slabs of the class. So a block of the class *stands in* for it, from the sampled
//! block's allocation to its free: the block that the program would have got without the profile.
//! The slabs of the class are then as without the profile, and the slab of the stand-in is one of
//! those that such blocks keep.

use super::{UNSAMPLED, alloc_from, class_of_any, free_class, is_sampled};
use super::{of_class, size_of_class};
use crate::arena;
use crate::profile::StandIn;
use crate::slab::cache::descriptor::Descriptor;
use crate::slab::node::slabs::slab_of_index;
use core::num::NonZero;
use core::ptr::null_mut;

/// Returns the stand-in of a sampled block, which the caller passes to [`release`] later. If the
/// sample stands for no other block (`is_alone`), the block stands for itself. Returns
/// [`StandIn::NONE`] if there is no memory, and for a block that is of no twin, is checked, or has
/// its slab alone.
// Not inlined, so that its variables take no stack where calls go deep.
#[inline(never)]
pub fn stand_in(block: *mut u8, is_alone: bool) -> StandIn {
    let entry = arena::entry(block as usize);
    let twin = class_of_any(entry).filter(|&class| is_sampled(class) && shared(class).is_some());
    let Some(twin) = twin else {
        return StandIn::NONE;
    };
    if is_alone {
        return in_slab_of(block, null_mut());
    }
    let class = twin - UNSAMPLED;
    if of_class(class).is_some_and(|cache| cache.checks()) {
        return StandIn::NONE;
    }
    let block = alloc_from(class, size_of_class(class));
    if block.is_null() {
        return StandIn::NONE;
    }
    in_slab_of(block, block)
}

/// Returns a stand-in in the slab of `object`, with `block` to be freed.
fn in_slab_of(object: *mut u8, block: *mut u8) -> StandIn {
    match NonZero::new(arena::head_of(object as usize)) {
        Some(slab) => StandIn { slab, block },
        None => StandIn {
            block,
            ..StandIn::NONE
        },
    }
}

/// Frees the block of a stand-in, or does nothing if `block` is null.
///
/// # Safety
///
/// `block` is that of a [`stand_in`], and is not used any more.
#[inline(never)]
pub unsafe fn release(block: *mut u8) {
    if let Some(class) = class_of_any(arena::entry(block as usize)) {
        // SAFETY: the page map says that the block is of this class. The caller gives it up.
        unsafe { free_class(block, class) };
    }
}

/// Returns how many bytes of free blocks a block in slab `slab` keeps, the slab of a stand-in.
/// Takes no lock, so the number is approximate while other threads allocate and free.
pub fn free_beside(slab: u32) -> f64 {
    // If another thread has freed the sampled block, the slab may be another one by now, or none,
    // or have no block in use.
    let cache = class_of_any(arena::entry_at(slab)).and_then(shared);
    let Some(cache) = cache else {
        return 0.0;
    };
    // SAFETY: the granule is or was the first of a slab.
    let used = unsafe { slab_of_index(slab) }.used_now(cache.geometry.per_slab);
    let free = cache.geometry.per_slab.saturating_sub(used);
    match used {
        0 => 0.0,
        _ => (free * cache.geometry.size) as f64 / used as f64,
    }
}

/// Returns the cache of a class or a twin whose slabs have several blocks, if it does not check
/// them.
fn shared(class: usize) -> Option<&'static Descriptor> {
    of_class(class).filter(|cache| cache.geometry.per_slab > 1 && !cache.checks())
}
