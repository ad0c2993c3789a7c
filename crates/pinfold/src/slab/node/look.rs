//! Reads a node's slabs without changing them: counts the slabs in each state, and checks that the
//! records agree.

use super::objects::Objects;
use super::slabs::{BINS, EMPTY, FULL, NIL, Slab, Slabs, list_of};
use crate::segment::EVENTS;
use core::sync::atomic::Ordering::Relaxed;

/// Where a cache's objects are, and which states its slabs are in.
///
/// `allocated = active + cpu_objects + barn_objects`, and `total = allocated + free objects in
/// slabs`. [`KmemCache::usage`](crate::slab::KmemCache::usage) returns this.
///
/// ```
/// use pinfold::slab::{KmemCache, Usage};
/// use std::alloc::Layout;
///
/// let cache = KmemCache::new("job", Layout::new::<[u64; 4]>())?;
/// let job = cache.alloc().expect("memory");
/// let Usage { active, allocated, total, .. } = cache.usage();
/// println!("{active} in use, {} in sheaves, {} in slabs", allocated - active, total - allocated);
/// assert_eq!(active, 1);
/// # // SAFETY: the object came from this cache and is not used afterwards.
/// # unsafe { cache.free(job) };
/// # Ok::<(), pinfold::slab::CacheError>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// Objects that users hold. Also counts deferred objects whose sheaf has left the CPU, and
    /// objects that are never used again, because a check found them overwritten.
    pub active: usize,
    /// Objects that are not free in their slab: the active objects, and the objects in sheaves.
    pub allocated: usize,
    /// Objects in all slabs.
    pub total: usize,
    /// Sheaves that CPUs have.
    pub cpu_sheaves: usize,
    /// Objects in the sheaves that CPUs have.
    pub cpu_objects: usize,
    /// Full sheaves in the nodes' barns.
    pub barn_sheaves: usize,
    /// Objects in the full sheaves in the nodes' barns.
    pub barn_objects: usize,
    /// Slabs that the cache has.
    pub slabs: usize,
    /// Slabs with some objects free.
    pub slabs_partial: usize,
    /// Slabs with all objects free.
    pub slabs_empty: usize,
    /// Objects of partial slabs that are not free in the slab.
    pub objects_partial: usize,
}

impl Usage {
    /// Returns how many slabs have no free object.
    pub fn slabs_full(&self) -> usize {
        self.slabs - self.slabs_partial - self.slabs_empty
    }
}

/// Everything that one reading of a cache finds.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Reading {
    pub(crate) usage: Usage,
    /// The counts, by [`SlabEvent`].
    pub(crate) counts: [u64; EVENTS],
}

impl Slabs {
    /// Iterates over the slabs of list `list`.
    fn list(&self, list: usize) -> impl Iterator<Item = &Slab> {
        let mut index = self.first_of(list);
        core::iter::from_fn(move || {
            // SAFETY: the slab is in a list of this node.
            let slab = (index != NIL).then(|| unsafe { self.slab(index) })?;
            index = slab.next.get();
            Some(slab)
        })
    }

    /// Adds the number of slabs in each state, and of their objects, to `usage`. Walks the partial
    /// slabs.
    pub(crate) fn tally(&self, cache: &Objects, usage: &mut Usage) {
        let (mut partial, mut used) = (0, 0);
        for slab in (0..BINS).flat_map(|bin| self.list(bin)) {
            partial += 1;
            used += cache.geometry.per_slab - slab.free.get() as usize;
        }
        usage.slabs += self.count;
        usage.slabs_partial += partial;
        usage.slabs_empty += self.empty;
        usage.objects_partial += used;
        let full = self.count - partial - self.empty;
        usage.allocated += used + full * cache.geometry.per_slab;
    }

    /// Returns how many objects are not free in their slab. Walks the partial slabs.
    pub(crate) fn in_use(&self, cache: &Objects) -> usize {
        let mut usage = Usage::default();
        self.tally(cache, &mut usage);
        usage.allocated
    }

    /// Checks the invariants of every partial and every empty slab. On the first fault, returns
    /// what is wrong and where the slab begins.
    pub(crate) fn validate(&self, cache: &Objects) -> Result<(), (&'static str, *const u8)> {
        let mut empty = 0;
        for list in 0..=EMPTY {
            let (mut index, mut before) = (self.first_of(list), NIL);
            while index != NIL {
                // SAFETY: the slab is in a list of this node.
                let slab = unsafe { self.slab(index) };
                let start = slab.start().cast_const();
                let bits: u32 = slab.bits[..cache.geometry.per_slab.div_ceil(64)]
                    .iter()
                    .map(|word| word.load(Relaxed).count_ones())
                    .sum();
                if !core::ptr::eq(slab.cache.get(), cache) {
                    return Err(("slab of another cache in a list", start));
                }
                if slab.part.load(Relaxed) != self.part {
                    return Err(("slab of another part in a list", start));
                }
                if bits != slab.free.get() {
                    return Err(("count of free objects is wrong", start));
                }
                if list_of(cache, slab.free.get()) != list {
                    return Err(("slab is in the list of fuller or emptier ones", start));
                }
                if slab.prev.get() != before {
                    return Err(("list of slabs is broken", start));
                }
                if slab.bits[..slab.hint.get() as usize]
                    .iter()
                    .any(|word| word.load(Relaxed) != 0)
                {
                    return Err(("free object below the hint", start));
                }
                empty += usize::from(list == EMPTY);
                (before, index) = (index, slab.next.get());
            }
        }
        if empty != self.empty {
            return Err(("count of empty slabs is wrong", core::ptr::null()));
        }
        Ok(())
    }

    /// Calls `f` with every slot of a debugged cache, the start of the slot's slab, the slot's
    /// number there, and whether the slot is in use.
    pub(crate) fn for_each_slot(
        &self,
        cache: &Objects,
        mut f: impl FnMut(*mut u8, (*const u8, usize, bool)),
    ) {
        for list in 0..=FULL {
            for slab in self.list(list) {
                for nth in 0..cache.geometry.per_slab {
                    let free = slab.bits[nth / 64].load(Relaxed) >> (nth % 64) & 1 == 1;
                    let slot = slab.start().wrapping_add(nth * cache.geometry.size);
                    f(slot, (slab.start().cast_const(), nth, !free));
                }
            }
        }
    }
}
