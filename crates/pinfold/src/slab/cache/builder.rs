//! Makes a cache with settings of its own.

use super::descriptor::{CacheError, Descriptor, Options};
use super::kmem_cache::KmemCache;
use crate::fork as process;
use crate::mempolicy::{Mempolicy, Placement};
use crate::slab::checks::debug::DebugFlags;
use crate::slab::fork;
use crate::slab::node::objects::Constructor;
use core::alloc::Layout;
use core::ffi::c_void;
use core::marker::PhantomData;

/// The settings for a new cache, which [`build`](Self::build) makes. Each method costs a few
/// stores.
///
/// [`KmemCache::builder`] returns a builder of an untyped cache. [`Cache::builder`],
/// [`SharedCache::builder`] and [`ObjectCache::builder`] return builders of typed caches, which
/// have the same settings except the constructor.
///
/// [`Cache::builder`]: crate::slab::Cache::builder
/// [`SharedCache::builder`]: crate::slab::SharedCache::builder
/// [`ObjectCache::builder`]: crate::slab::ObjectCache::builder
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
pub struct Builder<'n, C = KmemCache> {
    name: &'n str,
    layout: Layout,
    options: Options,
    /// The type of the cache that the builder makes.
    cache: PhantomData<fn() -> C>,
}

impl<C> Clone for Builder<'_, C> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<C> Copy for Builder<'_, C> {}

/// A cache that a [`Builder`] makes from the untyped cache.
pub(crate) mod sealed {
    use crate::slab::KmemCache;

    pub trait FromRaw {
        /// Returns the cache around `raw`, which was made for this type's objects.
        fn from_raw(raw: KmemCache) -> Self;
    }
}

impl sealed::FromRaw for KmemCache {
    fn from_raw(raw: KmemCache) -> Self {
        raw
    }
}

impl<'n, C> Builder<'n, C> {
    /// Returns a builder of caches of `layout`, which is the layout of the objects of `C`.
    pub(crate) const fn new(name: &'n str, layout: Layout) -> Self {
        Builder {
            name,
            layout,
            options: Options::NONE,
            cache: PhantomData,
        }
    }

    /// Sets a constructor, for the typed caches that have one.
    ///
    /// # Safety
    ///
    /// As for [`constructor`](Builder::constructor).
    pub(crate) const unsafe fn constructed_by(mut self, constructor: unsafe fn(*mut u8)) -> Self {
        self.options.treatment.constructor = Some(Constructor::Rust(constructor));
        self
    }

    /// Makes the cache a debugged one. It makes the checks in `flags`, and those that
    /// `PINFOLD_SLAB_DEBUG` asks for. A debugged cache uses no sheaves: each call takes a node's
    /// lock.
    #[must_use]
    pub const fn debug(mut self, flags: DebugFlags) -> Self {
        self.options.treatment.debug = flags;
        self
    }

    /// Makes the cache hardened or not, whatever `PINFOLD_HARDENED` says. A debugged cache is never
    /// hardened.
    ///
    /// A hardened cache:
    ///
    /// * finds double frees, frees of addresses that are not objects of the cache, and writes after
    ///   a free;
    /// * zeroes each object when it is freed, if the cache has no constructor;
    /// * delays the reuse of freed objects, and hands out the objects of a fresh slab in an order
    ///   that cannot be predicted.
    #[must_use]
    pub const fn hardened(mut self, hardened: bool) -> Self {
        self.options.treatment.hardened = Some(hardened);
        self
    }

    /// Gives each sheaf room for `objects` objects, from 4 to 125. By default, a sheaf holds 128
    /// KiB of objects, and at most 125 objects. Larger sheaves make slow paths rarer. Smaller
    /// sheaves leave more memory for other caches. Debugged caches use no sheaves.
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

    /// Puts the cache's objects into heap profiles, with the call stacks that allocated them. By
    /// default, profiles leave the objects of caches out.
    ///
    /// Each allocation and free of such a cache takes a slow path, even while no profile is on. The
    /// two together cost about 10 ns instead of 1.5 ns, and 15 ns while a profile is on. An object
    /// whose free is deferred counts as in use until it is free. Objects in a
    /// [`Prefilled`](crate::slab::Prefilled) or in a memory pool's reserve count as in use.
    ///
    /// ```
    /// use pinfold::slab::KmemCache;
    /// use std::alloc::Layout;
    ///
    /// let sessions = KmemCache::builder("session", Layout::new::<[u64; 64]>())
    ///     .profiled(true)
    ///     .build()?;
    /// let session = sessions.alloc().expect("memory");
    /// // SAFETY: the object came from this cache and is not used afterwards.
    /// unsafe { sessions.free(session) };
    /// # Ok::<(), pinfold::slab::CacheError>(())
    /// ```
    #[must_use]
    pub const fn profiled(mut self, profiled: bool) -> Self {
        self.options.profiled = profiled;
        self
    }

    /// Places the cache's memory by `policy` instead of the process's policy.
    ///
    /// * Slabs come from the nodes that the policy names. Objects go back to these nodes, wherever
    ///   they are freed.
    /// * With an interleaving policy, the node changes from one refill of a sheaf to the next.
    /// * With a binding policy, an allocation fails when the nodes are full.
    /// * The policy `default` removes a policy that was set before.
    /// * Nodes that the process cannot use are ignored. If no node is left, [`build`](Self::build)
    ///   fails.
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

    /// Places the cache's memory by `placement`, which uses the allocator's own numbers of nodes.
    pub(crate) const fn placed(mut self, placement: Placement) -> Self {
        self.options.placement = Some(placement);
        self
    }

    /// Lets each node's barn hold up to `bytes` in full sheaves. Objects go back to their slabs
    /// only beyond that.
    pub(crate) const fn barn_bytes(mut self, bytes: usize) -> Self {
        self.options.barn_bytes = bytes;
        self
    }

    /// Makes the cache. Takes the registry's lock and maps the descriptor. Makes no slab yet.
    ///
    /// # Errors
    ///
    /// [`CacheError`], if the layout is too large, there are too many caches, the system has no
    /// memory, or the process can use none of the policy's nodes.
    ///
    /// # Examples
    ///
    /// ```
    /// use pinfold::mempolicy::Mempolicy;
    /// use pinfold::slab::{CacheError, KmemCache};
    /// use std::alloc::Layout;
    ///
    /// let absent = Mempolicy::parse("bind:1023")?;
    /// let far = KmemCache::builder("far", Layout::new::<u64>()).policy(&absent);
    /// assert_eq!(far.build().err(), Some(CacheError::NoNodes));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn build(self) -> Result<C, CacheError>
    where
        C: sealed::FromRaw,
    {
        // A fork under way may not know this layer's locks, and would copy a half-made cache.
        process::retry(|| fork::register().then_some(()));
        let mut made = Err(CacheError::NoMemory);
        process::retry(|| {
            made = Descriptor::create(self.name, self.layout, self.options);
            // A fork may have refused a lock.
            (made.as_ref().err() != Some(&CacheError::NoMemory)).then_some(())
        });
        Ok(C::from_raw(KmemCache::of(made?)))
    }
}

impl Builder<'_> {
    /// Makes the cache initialise its objects by `constructor` once, when their slab is made.
    /// Allocating does not initialise an object again, so a caller frees an object in the
    /// constructed state.
    ///
    /// # Safety
    ///
    /// * `constructor` initialises an object of the layout at the address that it is given.
    /// * It does not unwind.
    /// * It does not use this cache, because its caller holds a node's lock.
    ///
    /// # Examples
    ///
    /// ```
    /// # use pinfold::slab::KmemCache;
    /// # use std::alloc::Layout;
    /// unsafe fn clear(bits: *mut u8) {
    ///     // SAFETY: the cache passes an object of the layout of a `u64`.
    ///     unsafe { bits.cast::<u64>().write(0) };
    /// }
    /// let builder = KmemCache::builder("bits", Layout::new::<u64>());
    /// // SAFETY: `clear` initialises an object, does not unwind and uses no cache.
    /// let cache = unsafe { builder.constructor(clear) }.build()?;
    /// let bits = cache.alloc().expect("memory").cast::<u64>();
    /// // SAFETY: the constructor has initialised the object.
    /// assert_eq!(unsafe { bits.read() }, 0);
    /// # // SAFETY: the object came from this cache and is not used afterwards.
    /// # unsafe { cache.free(bits.cast()) };
    /// # Ok::<(), pinfold::slab::CacheError>(())
    /// ```
    #[must_use]
    pub const unsafe fn constructor(self, constructor: unsafe fn(*mut u8)) -> Self {
        // SAFETY: the caller promises what this function requires of a constructor.
        unsafe { self.constructed_by(constructor) }
    }

    /// Sets a constructor as [`constructor`](Self::constructor) does, with a C function.
    ///
    /// # Safety
    ///
    /// * `constructor` initialises an object of the layout at the address that it is given.
    /// * It does not unwind.
    /// * It does not use this cache, because its caller holds a node's lock.
    #[must_use]
    pub const unsafe fn c_constructor(
        mut self,
        constructor: unsafe extern "C" fn(*mut c_void),
    ) -> Self {
        self.options.treatment.constructor = Some(Constructor::C(constructor));
        self
    }
}
