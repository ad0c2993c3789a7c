//! Moves blocks out of slabs with few blocks in use, for programs that can change all pointers to a
//! block.
//!
//! A slab goes back only when all its blocks are free. So a program that has freed many blocks at
//! random keeps most slabs. If it moves the blocks of the emptier slabs to the fuller ones, the
//! emptier ones go back.
//!
//! A move must not use the CPU's sheaves. The block that a move frees would lie there, and the next
//! move would get it: the blocks would change places, and no slab would become empty. So a move
//! takes the new block from the fullest slab of the node, and gives the old one to its slab.

use super::{MAX_CLASS_SIZE, class_of, class_of_any, is_sampled, of_class};
use crate::arena::{self, NodeRequest};
use crate::slab::cache::descriptor::Descriptor;
use crate::slab::node::part::Node;
use crate::slab::node::slabs::slab_of;
use core::ptr::{NonNull, null_mut};

/// Returns whether a move of `block` helps to empty its slab: the slab is partly in use and not
/// fuller than the node's slabs of the class are on average, and other slabs have room for all its
/// blocks.
///
/// Returns false for blocks that have no slab with others: blocks above 65,600 bytes, sampled and
/// guarded ones, those of a heap or an object cache, and those of caches that check. Returns false
/// for any other address too.
///
/// Takes no lock. Reads the slab's bits (at most 512 bytes) and counts of the node. The answer is
/// approximate while other threads allocate and free.
///
/// # Safety
///
/// `block` is null, or a block that is in use and stays in use during the call.
pub unsafe fn defrag_hint(block: *const u8) -> bool {
    // SAFETY: the caller promises a block that stays in use.
    unsafe { sparse(block.cast_mut()) }.is_some()
}

/// Moves `block` if [`defrag_hint`] says that this helps. Returns the new block, which has the same
/// usable size and content. Returns `None` if the block stays where it is.
///
/// Takes the node's lock twice, and copies the block.
///
/// # Safety
///
/// The caller owns `block`, which is null or in use. If the call returns a block, `block` is not
/// used any more.
pub unsafe fn defrag(block: *mut u8) -> Option<NonNull<u8>> {
    // SAFETY: the caller owns the block.
    let (cache, node) = unsafe { sparse(block) }?;
    let number = cache.node_of(block);
    let mut taken = [null_mut()];
    if node.take_objects(cache, NodeRequest::only(number), &mut taken, true) == 0 {
        return None;
    }
    let [new] = taken;
    let head = |object: *mut u8| arena::head_of(object as usize);
    if head(new) == head(block) {
        // SAFETY: this thread has just taken the object from its slab.
        unsafe { node.give_objects(cache, &mut [new]) };
        return None;
    }
    // SAFETY: both blocks are of the cache, whose objects have this size. The caller owns one, and
    // this thread has just taken the other. `sparse` returned the node of the block's memory.
    unsafe {
        new.copy_from_nonoverlapping(block, cache.geometry.size);
        node.give_objects(cache, &mut [block]);
    }
    NonNull::new(new)
}

/// Allocates a block of `size` bytes from the fullest slab, as the new place of a block that moves.
/// Returns `None` for a size whose blocks share no slab, in a process whose caches check, if there
/// is no memory, and while another thread forks.
///
/// Takes the node's lock.
pub fn defrag_alloc(size: usize) -> Option<NonNull<u8>> {
    let class = (size <= MAX_CLASS_SIZE).then(|| class_of(size))?;
    let cache = of_class(class).filter(|cache| shares_slabs(cache))?;
    let request = cache.request();
    let mut taken = [null_mut()];
    cache.take_objects(request, &mut taken);
    NonNull::new(taken[0])
}

/// Gives a block to its slab, past the CPU's sheaf. Returns false, and does nothing, for a block
/// that has its slab alone, and in a process whose caches check.
///
/// Takes the node's lock.
///
/// # Safety
///
/// The caller owns `block`, which is in use. If the call returns true, `block` is not used any
/// more.
pub unsafe fn defrag_free(block: *mut u8) -> bool {
    let class = unsampled(block);
    let cache = class.and_then(of_class).filter(|cache| shares_slabs(cache));
    cache.is_some_and(|cache| {
        // SAFETY: the caller passes ownership of the block. The page map says that it is of the
        // cache, and `home` returns the node of its memory.
        unsafe { cache.give_home(&mut [block]) };
        true
    })
}

/// Returns the class of a block, or its data twin. Returns `None` for a sampled block, and for one
/// of no class.
fn unsampled(block: *mut u8) -> Option<usize> {
    class_of_any(arena::entry(block as usize)).filter(|&class| !is_sampled(class))
}

/// Returns whether a slab of the cache has several blocks, which the cache does not check.
fn shares_slabs(cache: &Descriptor) -> bool {
    cache.geometry.per_slab > 1 && !cache.checks()
}

/// Returns the cache and the node of a block that [should move](defrag_hint).
///
/// # Safety
///
/// `block` is null, or a block that is in use and stays in use during the call.
unsafe fn sparse(block: *mut u8) -> Option<(&'static Descriptor, &'static Node)> {
    let cache = of_class(unsampled(block)?);
    let cache = cache.filter(|cache| shares_slabs(cache))?;
    let per_slab = cache.geometry.per_slab;
    // SAFETY: the page map says that the block lies in a slab of the cache. The slab stays as long
    // as the block is in use, which the caller promises. This accesses only atomics.
    let used = unsafe { slab_of(block) }.used_now(per_slab);
    let node = cache.home(block);
    let (slabs, all_used) = node.count_and_in_use_now();
    let free = (slabs * per_slab).saturating_sub(all_used);
    let elsewhere = free.saturating_sub(per_slab - used);
    let helps = used < per_slab && used * slabs <= all_used && used <= elsewhere;
    helps.then_some((cache, node))
}

#[cfg(test)]
mod tests {
    use super::super::{alloc_from, data, init};
    use super::*;

    #[test]
    fn a_data_block_of_any_size_goes_to_its_slab() {
        // Another test's thread may be choosing the backend.
        while !init() {
            std::thread::yield_now();
        }
        for size in [100, 10_000, 40_000] {
            let block = alloc_from(data(class_of(size)), size);
            assert!(!block.is_null());
            // SAFETY: the block was allocated above, and is not used any more.
            assert!(unsafe { defrag_free(block) }, "{size}");
        }
    }
}
