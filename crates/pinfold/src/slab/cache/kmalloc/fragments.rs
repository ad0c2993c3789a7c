//! How much free memory a sampled block keeps in slabs.
//!
//! A slab goes back to the arena only when all its blocks are free. So the blocks in use keep the
//! free ones in memory, each of them the same part: free / used blocks.
//!
//! A sampled block lies in a slab of its class's twin, in which all blocks in use are sampled. The
//! other blocks that its sample stands for lie in slabs of the class. When a block is sampled,
//! [`homes`] notes the slab that serves the class then. So the samples that note a slab stand for
//! as many blocks as are in use there, on average.

use super::{CLASSES, alloc_from, class_of_any, free_class, is_sampled, size_of_class};
use crate::arena;
use crate::profile::Homes;
use crate::slab::cache::descriptor::Descriptor;
use crate::slab::cache::registry::of_class;
use crate::slab::node::look::{slab_at, used_in};

/// Returns the slabs of a sampled block. If its sample stands for other blocks too (`has_others`),
/// allocates a block of the class, and frees it. Returns [`Homes::NONE`] if there is no memory for
/// it, and for a block that is of no twin, is checked, or has its slab alone.
///
/// # Safety
///
/// The caller owns `block`.
// Not inlined, so that its variables take no stack where calls go deep.
#[inline(never)]
pub unsafe fn homes(block: *mut u8, has_others: bool) -> Homes {
    let twin = twin_of(block as usize).filter(|&twin| cache_of(twin).is_some());
    let Some(twin) = twin else {
        return Homes::NONE;
    };
    // SAFETY: the caller owns the block, so its slab stays.
    let own = unsafe { slab_at(block) };
    if !has_others {
        return Homes::new(own, own);
    }
    let class = twin - CLASSES;
    let other = alloc_from(class, size_of_class(class));
    if other.is_null() {
        return Homes::NONE;
    }
    // SAFETY: the block was just allocated. Its slab stays until it is freed.
    let others = unsafe { slab_at(other) };
    // SAFETY: as above. The block is not used any more.
    unsafe { free_class(other, class) };
    Homes::new(own, others)
}

/// Returns how many bytes of free blocks are kept by the blocks that a sample stands for. `block` is
/// the sampled one, and `objects` is how many they are. Slabs that have gone back count nothing.
/// Takes no lock, so the number is approximate while other threads allocate and free.
pub fn fragment_bytes(block: usize, homes: Homes, objects: f64) -> f64 {
    // Another thread may have freed the block.
    let Some(twin) = twin_of(block) else {
        return 0.0;
    };
    let part = |class, slab| {
        let cache = cache_of(class)?;
        // A slab that became empty is kept by no block.
        let used = used_in(cache, slab).filter(|&used| used > 0)?;
        let free = cache.geometry.per_slab.saturating_sub(used);
        Some((free * cache.geometry.size) as f64 / used as f64)
    };
    let own = part(twin, homes.own()).unwrap_or(0.0);
    let others = part(twin - CLASSES, homes.others()).unwrap_or(0.0);
    own + (objects - 1.0).max(0.0) * others
}

/// Returns the twin that the block at `address` is of.
fn twin_of(address: usize) -> Option<usize> {
    class_of_any(arena::entry(address)).filter(|&class| is_sampled(class))
}

/// Returns the cache of a class or a twin whose slabs have several blocks, if it does not check
/// them.
fn cache_of(class: usize) -> Option<&'static Descriptor> {
    of_class(class).filter(|cache| cache.geometry.per_slab > 1 && !cache.checks())
}
