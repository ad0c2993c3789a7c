//! How many blocks each cache has in use, and how many it keeps free.

use super::info::read;
use crate::arena::GRANULE;
use crate::slab::cache::registry;

/// The blocks of one cache, and the memory of its slabs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Blocks {
    /// Bytes of a block.
    pub size: usize,
    /// Blocks that the program holds.
    pub active: usize,
    /// Free blocks in the sheaves of CPUs and barns.
    pub in_sheaves: usize,
    /// Free blocks in slabs.
    pub in_slabs: usize,
    /// Bytes of the slabs.
    pub bytes: usize,
    /// Bytes of the slabs in which no block is in use: empty slabs, and the slabs of blocks in
    /// sheaves if each slab is one block.
    pub unused: usize,
}

/// Calls `f` with the blocks of each cache, also of malloc's size classes. Makes no cache.
///
/// Each cache is read as [`Info::usage`](super::info::Info::usage) reads it. A cache that another
/// thread destroys meanwhile is left out.
pub fn for_each_blocks(mut f: impl FnMut(Blocks)) {
    registry::all().for_each(|cache| {
        let usage = read(&cache).usage;
        let geometry = cache.geometry;
        let slab = geometry.granules * GRANULE;
        let in_sheaves = usage.cpu_objects + usage.barn_objects;
        let whole = if geometry.per_slab == 1 {
            in_sheaves
        } else {
            0
        };
        let blocks = Blocks {
            size: geometry.size,
            active: usage.active,
            in_sheaves,
            in_slabs: usage.total.saturating_sub(usage.allocated),
            bytes: usage.slabs * slab,
            unused: (usage.slabs_empty + whole) * slab,
        };
        if cache.is_alive() {
            f(blocks);
        }
    });
}
