//! Reads a node's slabs without changing them: counts the slabs in each state, and checks that the
//! records agree.

use super::cache::Cache;
use super::info::Usage;
use super::slabs::{BINS, EMPTY, FULL, NIL, Slab, Slabs, list_of, slab};

impl Slabs {
    /// Iterates over the slabs of list `list`.
    ///
    /// # Safety
    ///
    /// The caller holds the node's lock for as long as it iterates.
    unsafe fn list(&self, list: usize) -> impl Iterator<Item = &'static Slab> {
        let mut index = self.first_of(list);
        core::iter::from_fn(move || {
            // SAFETY: the slab is in a list of this node, and the caller holds the lock.
            let slab = (index != NIL).then(|| &*unsafe { slab(index) })?;
            index = slab.next;
            Some(slab)
        })
    }

    /// Adds the number of slabs in each state, and of their objects, to `usage`. Walks the partial
    /// slabs.
    pub(super) fn tally(&self, cache: &Cache, usage: &mut Usage) {
        let (mut partial, mut used) = (0, 0);
        // SAFETY: the caller holds the node's lock: it reaches `self` only through the lock's
        // guard.
        for slab in (0..BINS).flat_map(|bin| unsafe { self.list(bin) }) {
            partial += 1;
            used += cache.per_slab - slab.free as usize;
        }
        usage.slabs += self.count;
        usage.slabs_partial += partial;
        usage.slabs_empty += self.empty;
        usage.objects_partial += used;
        let full = self.count - partial - self.empty;
        usage.allocated += used + full * cache.per_slab;
    }

    /// Returns how many objects are not free in their slab. Walks the partial slabs.
    pub(super) fn in_use(&self, cache: &Cache) -> usize {
        let mut usage = Usage::default();
        self.tally(cache, &mut usage);
        usage.allocated
    }

    /// Checks the invariants of every partial and every empty slab. On the first fault, returns
    /// what is wrong and where the slab begins.
    pub(super) fn validate(&self, cache: &Cache) -> Result<(), (&'static str, *const u8)> {
        let mut empty = 0;
        for list in 0..=EMPTY {
            let (mut index, mut before) = (self.first_of(list), NIL);
            while index != NIL {
                // SAFETY: the slab is in a list of this node, and the caller holds the lock.
                let slab = unsafe { slab(index) };
                let start = slab.start.cast_const();
                let bits: u32 = slab.bits[..cache.per_slab.div_ceil(64)]
                    .iter()
                    .map(|word| word.count_ones())
                    .sum();
                if !core::ptr::eq(slab.cache, cache) {
                    return Err(("slab of another cache in a list", start));
                }
                if bits != slab.free {
                    return Err(("count of free objects is wrong", start));
                }
                if list_of(cache, slab.free) != list {
                    return Err(("slab is in the list of fuller or emptier ones", start));
                }
                if slab.prev != before {
                    return Err(("list of slabs is broken", start));
                }
                if slab.bits[..slab.hint as usize]
                    .iter()
                    .any(|&word| word != 0)
                {
                    return Err(("free object below the hint", start));
                }
                empty += usize::from(list == EMPTY);
                (before, index) = (index, slab.next);
            }
        }
        if empty != self.empty {
            return Err(("count of empty slabs is wrong", core::ptr::null()));
        }
        Ok(())
    }

    /// Calls `f` with every slot of a debugged cache, the start of the slot's slab, the slot's
    /// number there, and whether the slot is in use.
    pub(super) fn for_each_slot(
        &self,
        cache: &Cache,
        mut f: impl FnMut(*mut u8, (*const u8, usize, bool)),
    ) {
        for list in 0..=FULL {
            // SAFETY: the caller holds the node's lock: it reaches `self` only through the lock's
            // guard.
            for slab in unsafe { self.list(list) } {
                for nth in 0..cache.per_slab {
                    let free = slab.bits[nth / 64] >> (nth % 64) & 1 == 1;
                    let slot = slab.start.wrapping_add(nth * cache.size);
                    f(slot, (slab.start, nth, !free));
                }
            }
        }
    }
}
