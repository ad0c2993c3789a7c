//! Making a cache with settings of its own.

use super::cache::{Cache, CacheError, Options};
use super::constructor::Constructor;
use super::{DebugFlags, KmemCache};
use crate::mempolicy::{Mempolicy, Placement};
use core::alloc::Layout;
use core::ffi::c_void;

/// Settings of a cache to be made.
///
/// ```
/// use pinfold::slab::{DebugFlags, KmemCache};
/// use std::alloc::Layout;
///
/// let cache = KmemCache::builder("session", Layout::new::<[u64; 4]>())
///     .debug(DebugFlags::RED_ZONE | DebugFlags::USER)
///     .build()?;
/// assert_eq!(cache.debug_flags().to_string(), "ZU");
/// # Ok::<(), pinfold::slab::CacheError>(())
/// ```
#[derive(Clone, Copy)]
pub struct Builder<'n> {
    name: &'n str,
    layout: Layout,
    options: Options,
}

impl<'n> Builder<'n> {
    pub(super) const fn new(name: &'n str, layout: Layout) -> Self {
        Builder {
            name,
            layout,
            options: Options::NONE,
        }
    }

    /// Makes the cache check its objects, beside what `PINFOLD_SLAB_DEBUG` asks for. Such a cache has no sheaves: each call
    /// takes its node's lock.
    #[must_use]
    pub const fn debug(mut self, flags: DebugFlags) -> Self {
        self.options.debug = flags;
        self
    }

    /// Makes the cache find double frees, frees of what is not its own and writes after the free at once, zero what is freed, and
    /// give freed memory out late and in no order that could be foretold; or not, whatever `PINFOLD_HARDENED` says. A debugged cache is
    /// not hardened besides.
    #[must_use]
    pub const fn hardened(mut self, hardened: bool) -> Self {
        self.options.hardened = Some(hardened);
        self
    }

    /// Gives each CPU's sheaves room for so many objects, from 4 to 125, instead of 128 KiB of them within these bounds. Larger ones are
    /// exchanged at the barn less often, smaller ones keep less memory from others. Debugged caches have no sheaves.
    ///
    /// ```
    /// use pinfold::slab::KmemCache;
    /// use std::alloc::Layout;
    ///
    /// let cache = KmemCache::builder("page", Layout::new::<[u8; 4096]>())
    ///     .sheaf_capacity(8)
    ///     .build()?;
    /// assert_eq!(cache.statistics().sheaf_capacity, 8);
    /// # Ok::<(), pinfold::slab::CacheError>(())
    /// ```
    #[must_use]
    pub const fn sheaf_capacity(mut self, objects: usize) -> Self {
        self.options.sheaf_capacity = Some(objects);
        self
    }

    /// Places the cache's memory by a policy of its own, instead of the process's: its slabs come from the nodes that the policy says, and
    /// objects go back there, wherever they are freed. Taken in turn, nodes change from one refill of a sheaf to the next.
    /// A policy that binds lets an allocation fail when its nodes are full. The `default` policy takes a policy away.
    ///
    /// Nodes that the process cannot use are passed over; when none is left, [`build`](Self::build) fails.
    ///
    /// ```
    /// use pinfold::mempolicy::Mempolicy;
    /// use pinfold::slab::KmemCache;
    /// use std::alloc::Layout;
    ///
    /// let everywhere = Mempolicy::parse("interleave")?;
    /// let cache = KmemCache::builder("bucket", Layout::new::<[u64; 64]>())
    ///     .policy(&everywhere)
    ///     .build()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn policy(mut self, policy: &Mempolicy) -> Self {
        self.options.possible = Placement::is_possible(policy);
        self.options.placement = Placement::of(policy);
        self
    }

    /// Places the cache's memory, by the allocator's own numbers of nodes.
    pub(crate) const fn placed(mut self, placement: Placement) -> Self {
        self.options.placement = Some(placement);
        self
    }

    /// Has each node's barn hold up to `bytes` in full sheaves, before objects go back to their slabs.
    pub(crate) const fn barn_bytes(mut self, bytes: usize) -> Self {
        self.options.barn_bytes = bytes;
        self
    }

    /// Has objects initialised by `constructor` when their slab is made, once, not at each allocation: who frees an object
    /// leaves it as the constructor did.
    ///
    /// # Safety
    ///
    /// `constructor` initialises an object of the layout at the address it is given, and does not unwind nor use this
    /// cache: the node's lock is held.
    #[must_use]
    pub const unsafe fn constructor(mut self, constructor: unsafe fn(*mut u8)) -> Self {
        self.options.constructor = Some(Constructor::Rust(constructor));
        self
    }

    /// As [`constructor`](Self::constructor), with a function of C's.
    ///
    /// # Safety
    ///
    /// As there.
    #[must_use]
    pub const unsafe fn c_constructor(
        mut self,
        constructor: unsafe extern "C" fn(*mut c_void),
    ) -> Self {
        self.options.constructor = Some(Constructor::C(constructor));
        self
    }

    /// Makes the cache.
    ///
    /// # Errors
    ///
    /// [`CacheError`]: the layout is too large, there are too many caches, the system has no memory, or none of the policy's nodes can be
    /// used.
    pub fn build(self) -> Result<KmemCache, CacheError> {
        Cache::create(self.name, self.layout, self.options).map(KmemCache::of)
    }
}
