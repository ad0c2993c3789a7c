//! A cache's descriptor, and the registry of all caches.
//!
//! A thread may find a descriptor in the registry while another thread destroys the cache. So a
//! descriptor is never freed or reused. [`Descriptor::is_registered`] tells whether the cache is
//! alive. Only the holder of the registry's lock writes the registry and the free numbers.

use super::debug::DebugFlags;
use super::node::Node;
use super::objects::{Objects, Treatment};
use super::sheaf::{self, SheafList};
use super::tune::{self, BARN_BYTES, Capacity};
use crate::arena::{self, GRANULE, LARGE};
use crate::cache_units::{ALL_CLASSES, CLASSES, CacheId, MAX_CACHES, SPARE, STOPPING};
use crate::lock::{Lock, Word};
use crate::mempolicy::Placement;
use crate::sys::die;
use core::alloc::Layout;
use core::ops::Deref;
use core::ptr::null_mut;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, fence};

/// Bytes of the largest object.
pub const MAX_OBJECT_SIZE: usize = 64 << 10;

/// A cache's descriptor, which is never freed or reused.
///
/// Dereferences to [`Objects`]: what the cache knows of its objects.
pub(super) struct Descriptor {
    objects: Objects,
    /// Objects in a sheaf.
    pub(super) sheaves: Capacity,
    /// The cache's part on each node.
    nodes: &'static [Node],
    /// Where the cache's memory should be, if the cache has a policy of its own.
    pub(super) placement: Option<Placement>,
    /// Bytes in full sheaves that a node's barn holds.
    barn_bytes: usize,
    /// Counts refills, for a policy that takes nodes in turn.
    pub(super) turn: AtomicU32,
    /// Objects that wait for their readers.
    pub(super) deferred: Deferred,
    /// Whether heap profiles sample the objects.
    pub(super) is_profiled: bool,
}

impl Deref for Descriptor {
    type Target = Objects;

    #[inline(always)]
    fn deref(&self) -> &Objects {
        &self.objects
    }
}

/// A cache's deferred objects that have left the CPUs' units (`deferred`).
pub(super) struct Deferred {
    /// The head of the sealed list: the word of the sheaf that was sealed last. Slot 0 of each
    /// sheaf's block holds the word of the sheaf that was sealed before it.
    pub(super) sealed: AtomicU64,
    pub(super) pending: Lock<Pending>,
    /// Whether an object was ever deferred.
    pub(super) used: AtomicBool,
}

/// The sheaves that wait for a grace period.
pub(super) struct Pending {
    pub(super) sheaves: SheafList,
    /// The number of the grace period that the sheaves wait for.
    pub(super) ticket: u64,
}

impl Deferred {
    const fn new() -> Deferred {
        Deferred {
            sealed: AtomicU64::new(0),
            pending: Lock::new(Pending {
                sheaves: SheafList::new(),
                ticket: 0,
            }),
            used: AtomicBool::new(false),
        }
    }

    pub(super) fn is_used(&self) -> bool {
        self.used.load(Relaxed)
    }
}

/// The settings that a cache is made with.
#[derive(Clone, Copy)]
pub(super) struct Options {
    pub(super) treatment: Treatment,
    /// Objects in a sheaf; `None` to choose by their size.
    pub(super) sheaf_capacity: Option<usize>,
    /// Where the cache's memory should be, if the cache has a policy of its own.
    pub(super) placement: Option<Placement>,
    /// Whether the process may use at least one node of the policy.
    pub(super) possible: bool,
    /// Bytes in full sheaves that a node's barn holds.
    pub(super) barn_bytes: usize,
    /// Whether heap profiles sample the objects.
    pub(super) profiled: bool,
}

impl Options {
    pub(super) const NONE: Options = Options {
        treatment: Treatment {
            constructor: None,
            debug: DebugFlags::NONE,
            hardened: None,
            one_color: false,
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
pub enum CacheError {
    /// The object is larger than [`MAX_OBJECT_SIZE`], or its alignment exceeds 64 KiB.
    TooLarge,
    /// There are [`MAX_CACHES`] caches already.
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
                "objects of a cache are at most 64 KiB large and aligned; use pinfold::arena for larger ones"
            }
            CacheError::TooMany => "there are 4096 caches already; destroy some, or share one for equal layouts",
            CacheError::NoNodes => {
                "none of the nodes of the cache's policy may be used here; see Mems_allowed_list in /proc/self/status"
            }
            CacheError::NoMemory => "the system has no memory for a new cache",
        })
    }
}

impl core::error::Error for CacheError {}

static REGISTRY: [AtomicPtr<Descriptor>; MAX_CACHES] =
    [const { AtomicPtr::new(null_mut()) }; MAX_CACHES];

/// Whether the cache of a size class checks its blocks.
// `near!` needs it.
#[used]
pub(super) static CLASSES_CHECK: AtomicBool = AtomicBool::new(false);

/// The count of numbers from the smallest one to the largest one that was ever used.
static USED: AtomicUsize = AtomicUsize::new(1);

/// The numbers of destroyed caches, and how many numbers after those of the classes were ever given
/// out. All are zero at the start, so that the table takes no room in the library's file.
struct Numbers {
    free: [u16; MAX_CACHES],
    freed: usize,
    given: usize,
}

static NUMBERS: Lock<Numbers> = Lock::new(Numbers {
    free: [0; MAX_CACHES],
    freed: 0,
    given: 0,
});

/// Returns the cache with number `id`, if there is one.
#[inline]
pub(super) fn by_id(id: CacheId) -> Option<&'static Descriptor> {
    // SAFETY: an entry is null or a descriptor's address, and descriptors are never freed.
    unsafe { REGISTRY.get(id.index())?.load(Acquire).as_ref() }
}

/// Returns the cache whose slab the entry of the page map names, if there is one.
pub(super) fn by_entry(entry: u16) -> Option<&'static Descriptor> {
    by_id(CacheId::from_entry(entry))
}

/// Returns the cache of a class, or of a twin, if it was made.
#[inline]
pub(super) fn of_class(class: usize) -> Option<&'static Descriptor> {
    by_id(CacheId::of_class(class))
}

impl Descriptor {
    /// Makes a cache and enters it into the registry.
    pub(super) fn create(
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
        let mut numbers = NUMBERS.lock().ok_or(CacheError::NoMemory)?;
        let id = match numbers.freed.checked_sub(1) {
            Some(last) => Some(CacheId::from_entry(numbers.free[last])),
            None => CacheId::nth(ALL_CLASSES + numbers.given),
        };
        let id = id.ok_or(CacheError::TooMany)?;
        arena::init();
        let cache = Descriptor::enter(name, layout, id, options).ok_or(CacheError::NoMemory)?;
        if numbers.freed > 0 {
            numbers.freed -= 1;
        } else {
            numbers.given += 1;
        }
        Ok(cache)
    }

    /// Returns the cache of the first size class, and makes it if needed. Waits for a fork. Returns
    /// `None` in a signal handler that would have to wait while it holds a node's lock, or a lock
    /// after that: the registry's holder may wait for that lock.
    pub(super) fn create_first(name: &str, size: usize) -> Option<&'static Descriptor> {
        let _numbers = NUMBERS.lock_unless(is_lock_held)?;
        arena::init();
        Descriptor::enter_class(name, size, 0)
    }

    /// Returns the cache of another size class, and makes it if needed. Returns `None` if it would
    /// have to wait for a fork.
    pub(super) fn create_class(
        name: &str,
        size: usize,
        class: usize,
    ) -> Option<&'static Descriptor> {
        // Does not wait while an interrupted frame of this thread holds a node's lock: the
        // registry's holder may wait for that lock.
        let _numbers = NUMBERS.lock_or_divert(is_lock_held)?;
        Descriptor::enter_class(name, size, class)
    }

    /// Returns the cache of a size class, and makes it if needed. The caller holds the registry's
    /// lock.
    fn enter_class(name: &str, size: usize, class: usize) -> Option<&'static Descriptor> {
        // Blocks of a class are aligned to the largest power of two that divides its size, at most
        // a granule.
        let align = (1 << size.trailing_zeros()).min(GRANULE);
        let layout = Layout::from_size_align(size, align).ok()?;
        let mut options = Options::NONE;
        options.treatment.one_color = true;
        if class >= CLASSES {
            // Few blocks are sampled, so a sheaf should not hold many.
            options.sheaf_capacity = (size < GRANULE / 2).then_some(tune::MIN_CAPACITY);
        }
        let id = CacheId::of_class(class);
        by_id(id).or_else(|| Descriptor::enter(name, layout, id, options))
    }

    /// Makes a descriptor and enters it into the registry. The caller holds the registry's lock.
    fn enter(
        name: &str,
        layout: Layout,
        id: CacheId,
        options: Options,
    ) -> Option<&'static Descriptor> {
        let nodes = Node::make_all()?;
        let memory = arena::alloc_metadata(Layout::new::<Descriptor>())?;
        let objects = Objects::new(id, name, layout, options.treatment);
        if id.any_class().is_some() && objects.checks() {
            CLASSES_CHECK.store(true, Relaxed);
        }
        let (size, has_sheaves) = (objects.geometry.size, objects.slot_layout.is_none());
        let cache = memory.cast::<Descriptor>().as_ptr();
        // SAFETY: `alloc_metadata` gave memory of this layout to this thread alone.
        unsafe {
            cache.write(Descriptor {
                objects,
                sheaves: Capacity::new(size, options.sheaf_capacity, has_sheaves),
                nodes,
                placement: options.placement,
                barn_bytes: options.barn_bytes,
                turn: AtomicU32::new(0),
                deferred: Deferred::new(),
                is_profiled: options.profiled,
            });
        }
        USED.fetch_max(id.position() + 1, Relaxed);
        // Pairs with the acquire in `by_id`: a thread that sees the address sees the fields.
        REGISTRY[id.index()].store(cache, Release);
        // SAFETY: the descriptor was written above, and its memory is never freed.
        let cache: &'static Descriptor = unsafe { &*cache };
        cache.show();
        Some(cache)
    }

    /// Takes the cache out of the registry, so that its number may be used again. The caller has
    /// seen that no object is in use.
    pub(super) fn retire(&self) {
        // A thread that takes idle sheaves may be using this cache. It holds this lock while it
        // does so.
        let _stopping = STOPPING.lock();
        let Some(mut numbers) = NUMBERS.lock() else {
            return;
        };
        let me = core::ptr::from_ref(self).cast_mut();
        if REGISTRY[self.id.index()]
            .compare_exchange(me, null_mut(), AcqRel, Relaxed)
            .is_ok()
        {
            // Pairs with the fence in `is_registered`: a thread that has read words of the next
            // cache with this number also sees that this cache is gone.
            fence(Release);
            self.hide();
            let freed = numbers.freed;
            numbers.free[freed] = self.id.entry();
            numbers.freed += 1;
            self.sheaves.retire();
        }
    }

    /// Returns whether the cache is alive. If so, all that the caller has read belonged to this
    /// cache, not to the next one with its number.
    pub(super) fn is_registered(&self) -> bool {
        fence(Acquire);
        by_id(self.id).is_some_and(|cache| core::ptr::eq(cache, self))
    }

    pub(super) fn nodes(&self) -> &'static [Node] {
        self.nodes
    }

    /// Returns the node whose memory holds `object`, which is an object of this cache.
    pub(super) fn home(&self, object: *mut u8) -> &'static Node {
        &self.nodes[arena::node_of(object as usize).min(self.nodes.len() - 1)]
    }

    /// Returns the offset of the main sheaf's word in every unit.
    pub(super) fn main(&self) -> usize {
        self.id.main()
    }

    /// Returns the offset, in a unit, of the word of the sheaf that allocations pop from.
    pub(super) fn source(&self) -> usize {
        match &self.hardening {
            Some(_) => self.main() + SPARE,
            None => self.main(),
        }
    }

    /// Returns the capacity for a sheaf that is filled now.
    #[inline]
    pub(super) fn capacity(&self) -> usize {
        self.sheaves.now()
    }

    /// Returns the most full sheaves that the cache's barn holds on a node where the cache has
    /// `slabs` slabs.
    pub(super) fn barn_most(&self, slabs: usize) -> usize {
        let in_slabs = self
            .id
            .any_class()
            .map(|_| slabs * self.geometry.slab_bytes);
        tune::barn_most(
            self.geometry.size,
            self.capacity(),
            self.barn_bytes,
            in_slabs,
        )
    }

    /// Ends the process, because `object` was freed to this cache but is not one of its objects.
    #[cold]
    pub(super) fn wrong(&self, object: *mut u8) -> ! {
        let name = self.name();
        match arena::entry(object as usize) {
            0 => die(format_args!(
                "free of {object:p} to cache {name}: the address is not Pinfold's"
            )),
            LARGE => die(format_args!(
                "free of {object:p} to cache {name}: it is a large block of malloc's"
            )),
            entry => die(format_args!(
                "free of {object:p} to cache {name}: the object belongs to cache {}",
                by_entry(entry).map_or("(destroyed)", |other| other.name())
            )),
        }
    }
}

/// Returns the cache that `turn` selects, if it exists. Successive turns select all numbers that
/// were ever used, one after the other.
pub(super) fn in_turn(turn: u32) -> Option<&'static Descriptor> {
    by_id(CacheId::nth(turn as usize % USED.load(Relaxed))?)
}

/// Returns all caches, in the order of their numbers.
pub(super) fn all() -> impl Iterator<Item = &'static Descriptor> {
    (0..MAX_CACHES).filter_map(CacheId::nth).filter_map(by_id)
}

/// Returns whether the thread with thread pointer `thread` holds a node's lock, or a lock after it
/// in the lock order. Reads a word of every node of every cache, so only a thread that is about to
/// sleep calls this.
#[cold]
pub(super) fn is_lock_held(thread: u64) -> bool {
    all().any(|cache| cache.nodes().iter().any(|node| node.is_held_by(thread)))
        || sheaf::is_lock_held(thread)
        || arena::is_lock_held(thread)
}

/// Calls `f` for every cache.
pub(super) fn for_each(f: impl FnMut(&'static Descriptor)) {
    all().for_each(f);
}

/// Sets the sheaf budget: how many bytes one CPU's sheaves of all caches together may hold. The
/// default is 32 MiB.
///
/// All caches claim their part of the budget again, except those whose capacity the program chose.
/// The size classes come first, smallest sizes first. A cache that finds the budget used up has the
/// smallest sheaves. Sheaves keep their capacity until they are next filled or emptied. Costs two
/// walks over a table of [`MAX_CACHES`] words.
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

/// Returns the word of the registry's lock, for a fork.
pub(super) fn registry_word() -> &'static Word {
    NUMBERS.word()
}
