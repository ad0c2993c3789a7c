//! A cache's descriptor: how it is made, and how it is retired.
//!
//! A descriptor's memory is never freed. After the cache was destroyed and once no thread reads the
//! descriptor any more, another cache may get it (`registry`).

use super::registry::{self, for_each, of_class_id};
use super::tune::{self, BARN_BYTES, Capacity};
use crate::arena::{self, GRANULE};
use crate::cache_units::{ALL_CLASSES, CacheId, MAX_CACHES, SPARE, STOPPING, UNSAMPLED};
use crate::lock::{Guard, Llist, Lock, Rank, Word};
use crate::mempolicy::Placement;
use crate::slab::checks::debug::DebugFlags;
use crate::slab::cpu::place::{self, Place};
use crate::slab::cpu::sheaf::SheafList;
use crate::slab::node::objects::{Objects, Treatment};
use crate::slab::node::part::Node;
use crate::slab::node::parts::Rich;
use crate::sys;
use crate::topology::facts;
use core::alloc::Layout;
use core::ops::Deref;
use core::ptr::{NonNull, null_mut};
use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64};

/// Bytes of the largest object.
pub const MAX_OBJECT_SIZE: usize = 64 << 10;

/// A cache's descriptor.
///
/// Dereferences to [`Objects`]: what the cache knows of its objects.
pub(crate) struct Descriptor {
    objects: Objects,
    /// Objects in a sheaf.
    pub(crate) sheaves: Capacity,
    /// The cache's part on each node. The next cache with this descriptor gets the same memory.
    nodes: NonNull<[Node]>,
    /// The parts of a split cache besides these (`parts`), or null if the descriptor never had any.
    pub(crate) more: AtomicPtr<Node>,
    /// Whether the cache is split.
    pub(crate) split: AtomicBool,
    /// Which parts of a split cache have many free objects.
    pub(crate) rich: Rich,
    /// Where the cache's memory should be, if the cache has a policy of its own.
    pub(crate) placement: Option<Placement>,
    /// Bytes in full sheaves that a node's barn holds.
    barn_bytes: usize,
    /// Counts refills, for a policy that takes nodes in turn.
    pub(crate) turn: AtomicU32,
    /// Objects that wait for their readers.
    pub(crate) deferred: Deferred,
    /// Whether heap profiles sample the objects.
    pub(crate) is_profiled: bool,
}

// SAFETY: threads may share the nodes that `nodes` points to, as they may share all other fields.
// The nodes' memory is never freed.
unsafe impl Sync for Descriptor {}

impl Deref for Descriptor {
    type Target = Objects;

    #[inline(always)]
    fn deref(&self) -> &Objects {
        &self.objects
    }
}

/// A cache's deferred objects that have left the CPUs' units (`deferred`).
pub(crate) struct Deferred {
    /// The list of the sealed sheaves' words. Slot 0 of each sheaf's block is the link.
    pub(crate) sealed: Llist,
    pub(crate) pending: Lock<Pending>,
    /// Whether an object was ever deferred.
    pub(crate) used: AtomicBool,
}

/// The sheaves that wait for a grace period.
pub(crate) struct Pending {
    pub(crate) sheaves: SheafList,
    /// The number of the grace period that the sheaves wait for.
    pub(crate) ticket: u64,
}

impl Deferred {
    const fn new() -> Deferred {
        Deferred {
            sealed: Llist::new(AtomicU64::new(0)),
            pending: Lock::new(
                Rank::Pending,
                Pending {
                    sheaves: SheafList::new(),
                    ticket: 0,
                },
            ),
            used: AtomicBool::new(false),
        }
    }

    pub(crate) fn is_used(&self) -> bool {
        self.used.load(Relaxed)
    }
}

/// The settings that a cache is made with.
#[derive(Clone, Copy)]
pub(crate) struct Options {
    pub(crate) treatment: Treatment,
    /// The capacity of a sheaf, or `None` to choose it by the objects' size.
    pub(crate) sheaf_capacity: Option<usize>,
    /// Where the cache's memory should be, if the cache has a policy of its own.
    pub(crate) placement: Option<Placement>,
    /// Whether the process may use at least one node of the policy.
    pub(crate) possible: bool,
    /// Bytes in full sheaves that a node's barn holds.
    pub(crate) barn_bytes: usize,
    /// Whether heap profiles sample the objects.
    pub(crate) profiled: bool,
}

impl Options {
    pub(crate) const NONE: Options = Options {
        treatment: Treatment {
            constructor: None,
            debug: DebugFlags::NONE,
            hardened: None,
            one_color: false,
            account: None,
        },
        sheaf_capacity: None,
        placement: None,
        possible: true,
        barn_bytes: BARN_BYTES,
        profiled: false,
    };
}

/// The reason that a cache cannot be made.
///
/// ```
/// use pinfold::slab::{CacheError, KmemCache};
/// use std::alloc::Layout;
///
/// let large = KmemCache::new("large", Layout::new::<[u8; 1 << 20]>());
/// assert_eq!(large.err(), Some(CacheError::TooLarge));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CacheError {
    /// The object is larger than [`MAX_OBJECT_SIZE`], or its alignment exceeds 64 KiB.
    TooLarge,
    /// All numbers below [`MAX_CACHES`] that caches can have are in use.
    TooMany,
    /// The system has no memory.
    NoMemory,
    /// None of the nodes that the cache's policy names has memory that this process may use.
    NoNodes,
}

impl core::fmt::Display for CacheError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            CacheError::TooLarge => {
                "objects of a cache are at most 64 KiB large and aligned; use malloc for larger ones"
            }
            CacheError::TooMany => "there are 3,674 caches already; destroy some, or share one for equal layouts",
            CacheError::NoNodes => {
                "none of the nodes of the cache's policy may be used here; see Mems_allowed_list in /proc/self/status"
            }
            CacheError::NoMemory => "the system has no memory for a new cache",
        })
    }
}

impl core::error::Error for CacheError {}

/// Whether the cache of a size class checks its blocks.
// `near!` needs it.
#[used]
pub(crate) static CLASSES_CHECK: AtomicBool = AtomicBool::new(false);

/// The numbers of destroyed caches, and how many numbers after those of the classes were ever given
/// out. All are zero at the start, so that the table takes no room in the library's file.
struct Numbers {
    free: [u16; MAX_CACHES],
    freed: usize,
    given: usize,
}

static NUMBERS: Lock<Numbers> = Lock::new(
    Rank::Registry,
    Numbers {
        free: [0; MAX_CACHES],
        freed: 0,
        given: 0,
    },
);

impl Numbers {
    /// Chooses the number of a new cache: that of a destroyed cache whose descriptor no thread
    /// reads, or one that was never used. Returns the number, and its index in `free` if it is
    /// there.
    fn choose(&self) -> Option<(CacheId, Option<usize>)> {
        let freed = (0..self.freed).rev();
        let mut freed = freed.map(|at| (CacheId::from_entry(self.free[at]), Some(at)));
        freed
            .find(|&(id, _)| registry::is_free(id))
            .or_else(|| Some((CacheId::nth(ALL_CLASSES + self.given)?, None)))
    }

    /// Notes that the number that [`choose`](Self::choose) returned with `at` now has a cache.
    fn take(&mut self, at: Option<usize>) {
        match at {
            Some(at) => {
                self.freed -= 1;
                self.free[at] = self.free[self.freed];
            }
            None => self.given += 1,
        }
    }
}

impl Descriptor {
    /// Makes a cache and enters it into the registry.
    pub(crate) fn create(
        name: &str,
        layout: Layout,
        options: Options,
    ) -> Result<&'static Descriptor, CacheError> {
        if layout.size() > MAX_OBJECT_SIZE || layout.align() > GRANULE {
            return Err(CacheError::TooLarge);
        }
        if !options.possible {
            return Err(CacheError::NoNodes);
        }
        arena::init();
        let numbers = NUMBERS.lock().ok_or(CacheError::NoMemory)?;
        Descriptor::create_with(numbers, name, layout, options)
    }

    /// Makes a cache and enters it into the registry, in a process that has made a cache before.
    /// The layout is one that [`create`](Self::create) accepts, and the options are possible. Takes
    /// less stack than `create`. Fails with [`CacheError::NoMemory`] if it would have to wait for a
    /// fork.
    pub(crate) fn create_another(
        name: &str,
        layout: Layout,
        options: Options,
    ) -> Result<&'static Descriptor, CacheError> {
        let numbers = NUMBERS.lock_or_divert().ok_or(CacheError::NoMemory)?;
        Descriptor::create_with(numbers, name, layout, options)
    }

    fn create_with(
        mut numbers: Guard<'_, Numbers>,
        name: &str,
        layout: Layout,
        options: Options,
    ) -> Result<&'static Descriptor, CacheError> {
        let (id, at) = numbers.choose().ok_or(CacheError::TooMany)?;
        let cache = Descriptor::enter(name, layout, id, options).ok_or(CacheError::NoMemory)?;
        numbers.take(at);
        Ok(cache)
    }

    /// Returns the cache of the first size class, and makes it if needed. Waits for a fork. Returns
    /// `None` in a signal handler that may not wait for the registry's lock.
    pub(crate) fn create_first(name: &str, layout: Layout) -> Option<&'static Descriptor> {
        let _numbers = NUMBERS.lock()?;
        arena::init();
        Descriptor::enter_class(name, layout, false, 0)
    }

    /// Returns the cache of another size class, and makes it if needed. With `one_color`, each
    /// slab's first block lies at the slab's start. Returns `None` if it would have to wait for a
    /// fork.
    pub(crate) fn create_class(
        name: &str,
        layout: Layout,
        one_color: bool,
        class: usize,
    ) -> Option<&'static Descriptor> {
        let _numbers = NUMBERS.lock_or_divert()?;
        Descriptor::enter_class(name, layout, one_color, class)
    }

    /// Returns the cache of a size class, and makes it if needed. The caller holds the registry's
    /// lock.
    fn enter_class(
        name: &str,
        layout: Layout,
        one_color: bool,
        class: usize,
    ) -> Option<&'static Descriptor> {
        let mut options = Options::NONE;
        options.treatment.one_color = one_color;
        if class >= UNSAMPLED {
            // Few blocks are sampled, so a sheaf should not hold many.
            let is_short = layout.size() < GRANULE / 2;
            options.sheaf_capacity = is_short.then_some(tune::MIN_CAPACITY);
        }
        let id = CacheId::of_class(class);
        of_class_id(id).or_else(|| Descriptor::enter(name, layout, id, options))
    }

    /// Makes the descriptor of number `id`, which is free, and enters it into the registry. The
    /// caller holds the registry's lock.
    fn enter(
        name: &str,
        layout: Layout,
        id: CacheId,
        options: Options,
    ) -> Option<&'static Descriptor> {
        let (cache, nodes, more) = match registry::retired(id) {
            Some(cache) => {
                // SAFETY: the number is free and the registry is locked, so no other thread uses
                // the descriptor or its parts.
                let (nodes, more) = unsafe { cache.as_ref().renew_parts() };
                (cache, nodes, more)
            }
            None => {
                let nodes = Node::make(0, crate::nodes::count())?;
                let memory = arena::alloc_metadata(Layout::new::<Descriptor>())?;
                (memory.cast(), nodes, null_mut())
            }
        };
        let objects = Objects::new(id, name, layout, options.treatment);
        if id.any_class().is_some() && objects.checks() {
            CLASSES_CHECK.store(true, Relaxed);
        }
        let (size, has_sheaves) = (objects.geometry.size, objects.slot_layout.is_none());
        // SAFETY: the memory has room for a descriptor, and only this thread uses it: it is new, or
        // its number is free.
        unsafe {
            cache.write(Descriptor {
                objects,
                sheaves: Capacity::new(size, options.sheaf_capacity, has_sheaves),
                nodes,
                more: AtomicPtr::new(more),
                split: AtomicBool::new(false),
                rich: Rich::none(),
                placement: options.placement,
                barn_bytes: options.barn_bytes,
                turn: AtomicU32::new(0),
                deferred: Deferred::new(),
                is_profiled: options.profiled,
            });
        }
        registry::publish(id, cache);
        if id.main().is_multiple_of(sys::page_size()) && facts::any_quiet() {
            place::make_units_resident();
        }
        // SAFETY: the descriptor was written above. It stays as it is until its owner retires it,
        // and the owner is the caller.
        let cache: &'static Descriptor = unsafe { cache.as_ref() };
        cache.show();
        Some(cache)
    }

    /// Takes the cache out of the registry, so that its number and its descriptor may be used
    /// again. Does nothing in a signal handler that may not wait for the locks. The caller
    /// owns the cache, has seen that it [is bare](Self::is_bare), and does not use it any more.
    pub(crate) fn retire(&self) {
        // A thread that takes idle sheaves may be using this cache. It holds the first lock while
        // it does so.
        self.retire_under(STOPPING.lock(), || NUMBERS.lock());
    }

    /// Retires the cache as [`retire`](Self::retire) does, but leaves its number unused if it would
    /// have to wait for a fork.
    pub(crate) fn retire_or_divert(&self) {
        self.retire_under(STOPPING.lock_or_divert(), || NUMBERS.lock_or_divert());
    }

    fn retire_under<'l>(
        &self,
        stopping: Option<Guard<'_, ()>>,
        numbers: impl FnOnce() -> Option<Guard<'l, Numbers>>,
    ) {
        let Some(_stopping) = stopping else {
            return;
        };
        let Some(mut numbers) = numbers() else {
            return;
        };
        registry::retire(self.id);
        self.hide();
        self.sheaves.retire();
        let freed = numbers.freed;
        numbers.free[freed] = self.id.entry();
        numbers.freed += 1;
    }

    /// Returns whether the cache has no slab, no object in a barn, and none that is set aside or
    /// deferred. Returns false in a signal handler that may not wait for the locks.
    pub(crate) fn is_bare(&self) -> bool {
        let deferred = &self.deferred;
        let none_pending = || {
            let pending = deferred.pending.lock();
            pending.is_some_and(|pending| pending.sheaves.length == 0)
        };
        let none_waits = !deferred.is_used() || (deferred.sealed.is_empty() && none_pending());
        none_waits && self.parts().all(Node::is_bare)
    }

    /// Returns whether malloc may allocate from this cache or free to it: the cache is a size
    /// class's, or a heap's. Such a call never waits for a forking thread (`fork`).
    pub(crate) fn serves_malloc(&self) -> bool {
        self.id.any_class().is_some() || self.account.is_some()
    }

    /// Makes the parts of a destroyed cache ready for a new one, and returns them.
    ///
    /// # Safety
    ///
    /// No other thread uses the descriptor or its parts.
    unsafe fn renew_parts(&self) -> (NonNull<[Node]>, *mut Node) {
        let more = self.more.load(Relaxed);
        let first: *mut Node = self.nodes.cast().as_ptr();
        for (first, count) in [(first, self.nodes.len()), (more, self.more().len())] {
            for nth in 0..count {
                // SAFETY: there are `count` parts from `first` on, and the caller promises that no
                // other thread uses them.
                unsafe { (*first.add(nth)).renew() };
            }
        }
        (self.nodes, more)
    }

    /// Returns the first part on each node.
    pub(crate) fn nodes(&self) -> &[Node] {
        // SAFETY: `enter` wrote the nodes. They are only written anew with the descriptor, to which
        // this thread has a reference.
        unsafe { self.nodes.as_ref() }
    }

    /// Returns the current CPU's word of one of this cache's sheaves.
    #[inline(always)]
    pub(crate) fn place(&self, kind: usize) -> Place {
        Place::of(self.id, kind)
    }

    /// Returns the offset of the main sheaf's word in every unit.
    pub(crate) fn main(&self) -> usize {
        self.id.main()
    }

    /// Returns the offset, in a unit, of the word of the sheaf that allocations pop from.
    pub(crate) fn source(&self) -> usize {
        match &self.hardening {
            Some(_) => self.main() + SPARE,
            None => self.main(),
        }
    }

    /// Returns the capacity for a sheaf that is filled now.
    #[inline]
    pub(crate) fn capacity(&self) -> usize {
        self.sheaves.now()
    }

    /// Returns the most full sheaves that the cache's barn holds on a node where the cache has
    /// `slabs` slabs.
    pub(crate) fn barn_most(&self, slabs: usize, extra: usize) -> usize {
        let in_slabs = self
            .id
            .any_class()
            .map(|_| slabs * self.geometry.slab_bytes);
        tune::barn_most(
            self.geometry.size,
            self.capacity(),
            self.barn_bytes,
            in_slabs,
            extra,
            self.is_split(),
        )
    }
}

/// Sets the sheaf budget: how many bytes one CPU's sheaves of all caches together may hold. The
/// default is 32 MiB.
///
/// All caches claim their part of the budget again, except those whose capacity the program chose.
/// The size classes come first, smallest sizes first. A cache that finds the budget used up gets
/// the smallest sheaves. Sheaves keep their capacity until they are next filled or emptied. Costs
/// two walks over a table of [`MAX_CACHES`] words.
///
/// ```
/// use pinfold::slab::set_sheaf_budget;
///
/// set_sheaf_budget(8 << 20);
/// ```
pub fn set_sheaf_budget(bytes: usize) {
    tune::set_budget(bytes);
    for_each(|cache| cache.sheaves.shrink());
    for_each(|cache| cache.sheaves.grow());
}

/// Takes the registry's lock if it is free.
pub(crate) fn registry_try_lock() -> Option<impl Drop> {
    NUMBERS.try_lock()
}

/// Returns the word of the registry's lock, for a fork.
pub(crate) fn registry_word() -> &'static Word {
    NUMBERS.word()
}
