//! What a heap needs of its caches (`heaps`): to make them, to allocate runs with their numbers,
//! and to drop all their slabs with the objects in use.

pub(crate) use super::descriptor::{CacheError, Descriptor, Options};
use super::registry;
pub(crate) use super::registry::{birth_of, pin_by_entry};
use super::tune::{MAX_CAPACITY, MIN_CAPACITY};
use crate::account::Account;
use crate::arena::{self, Purpose, Run};
use crate::cache_units::CacheId;
use crate::fork as process;
pub(crate) use crate::slab::cpu::place::Place;
pub(crate) use crate::slab::cpu::sheaf_units::{Refused, drain_or_fail, try_drain};
use crate::slab::fork;
use crate::sys;
use core::alloc::Layout;

/// Bytes of objects in a sheaf of a heap's cache. Less than in other caches, so that a heap with a
/// small limit does not lie in sheaves.
const SHEAF_BYTES: usize = 16 << 10;

/// Returns the cache with number `id`.
///
/// # Safety
///
/// The caller owns the cache, or an object of it, for as long as it uses the reference.
pub(crate) unsafe fn kept_alive(id: CacheId) -> &'static Descriptor {
    // SAFETY: the caller promises that the cache is not retired meanwhile.
    unsafe { registry::kept_alive(id) }
        .unwrap_or_else(|| sys::die(format_args!("a heap's cache has no descriptor")))
}

impl Options {
    /// Makes the cache without objects that a heap takes its number from.
    ///
    /// # Errors
    ///
    /// [`CacheError`]
    pub(crate) fn create_own(&self, name: &str) -> Result<&'static Descriptor, CacheError> {
        // A fork under way may not know this layer's locks, and would copy a half-made cache.
        process::retry(|| fork::register().then_some(()));
        let layout = Layout::new::<[u64; 2]>();
        let mut made = Err(CacheError::NoMemory);
        process::retry(|| {
            made = Descriptor::create(name, layout, *self);
            // A fork may have refused a lock.
            (made.as_ref().err() != Some(&CacheError::NoMemory)).then_some(())
        });
        made
    }

    /// Makes a cache of a heap that has its number. Does not wait for a fork.
    ///
    /// # Errors
    ///
    /// [`CacheError`]
    pub(crate) fn create_of_heap(
        &self,
        name: &str,
        layout: Layout,
        account: &'static Account,
    ) -> Result<&'static Descriptor, CacheError> {
        let mut options = *self;
        options.treatment.account = Some(account);
        // Aligned blocks rely on the place of the first object.
        options.treatment.one_color = true;
        let fit = SHEAF_BYTES / layout.size();
        options.sheaf_capacity = Some(fit.clamp(MIN_CAPACITY, MAX_CAPACITY / 2));
        Descriptor::create_another(name, layout, options)
    }
}

impl Descriptor {
    /// Allocates a run whose granules all have this cache's entry in the page map, where the
    /// cache's memory should be.
    pub(crate) fn alloc_run(&self, granules: usize) -> Option<Run> {
        let request = self.request();
        let alloc =
            |request| arena::alloc_run_on(granules, request, self.id.entry(), true, Purpose::Other);
        let mut run = alloc(request);
        if run.is_none() {
            self.others(request, |other| {
                run = alloc(other);
                run.is_some()
            });
        }
        run
    }

    /// Drops all slabs, whatever objects are in use, and all sheaves in barns. The caller frees the
    /// slabs' runs. Returns false, and leaves some nodes as they were, in a signal handler that may
    /// not wait for a lock.
    pub(crate) fn abandon(&self) -> bool {
        self.parts().all(|part| part.abandon(self))
    }
}

/// Opens the guard page of the slab that begins at `start`, so that the run can be freed. Returns
/// false if the kernel refuses.
///
/// # Safety
///
/// `start` begins a slab of a cache that [`Descriptor::abandon`] has emptied.
pub(crate) unsafe fn open_guard(start: *mut u8, entry: u16) -> bool {
    let Some(cache) = pin_by_entry(entry) else {
        return true;
    };
    if cache.hardening.is_none() {
        return true;
    }
    // SAFETY: the caller promises that a slab begins at `start`, which no thread uses. A hardened
    // cache has initialised its guard.
    unsafe {
        let slab = crate::slab::node::slabs::slab_of(start);
        slab.open_guard(start, cache.geometry.granules)
    }
}
