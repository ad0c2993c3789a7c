//! A cache's descriptor, and the registry of all caches.
//!
//! A thread may find a descriptor in the registry while another thread destroys the cache. So a
//! descriptor is never freed or reused. [`Cache::is_registered`] tells whether the cache is alive.
//! Only the holder of the registry's lock writes the registry and the free numbers.

use super::constructor::Constructor;
use super::debug::{self, DebugFlags, Plan};
use super::deferred::Deferred;
use super::fork;
use super::harden;
use super::key::Hardening;
use super::kmalloc;
use super::node::Node;
use super::percpu::{SPARE, STOPPING};
use super::sheaf;
use super::slabs::OBJECTS_MOST;
use super::tune::{BARN_BYTES, Capacity, granules_for};
use crate::lock::Lock;
use crate::mempolicy::Placement;
use crate::page::{self, GRANULE, LARGE};
use crate::sys::{self, die};
use core::alloc::Layout;
use core::ptr::null_mut;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, fence};

/// The most caches that can exist at once. The number of a cache is also its place in every CPU's
/// unit.
pub const CACHES_MOST: usize = 4096;
/// The first cache number. The words of a smaller one would lie in the units' headers.
pub const FIRST_SLOT: usize = pinfold_rseq::UNIT_HEADER / 8;
/// How many numbers, from [`FIRST_SLOT`] on, are kept for the caches of [`kmalloc`].
const KEPT_SLOTS: usize = kmalloc::CLASSES;
/// Bytes of the largest object.
pub const OBJECT_MOST: usize = 64 << 10;
/// The smallest distance between two colors: a cache line.
const COLOR_STEP: usize = 64;
/// The most colors of a cache.
const COLORS_MOST: usize = 16;

/// A cache's descriptor, which is never freed or reused.
pub struct Cache {
    /// Bytes of an object in its layout.
    pub(super) object: usize,
    /// Alignment of an object in bytes.
    pub(super) align: usize,
    /// Bytes from one object to the next.
    pub(super) size: usize,
    /// Objects in a sheaf.
    pub(super) sheaves: Capacity,
    /// Objects in a slab.
    pub(super) per_slab: usize,
    /// Bytes of a slab that are objects.
    pub(super) slab_bytes: usize,
    /// Granules in a slab.
    pub(super) granules: usize,
    /// ceil(2^40 / size), with which `nth` divides by `size` by a multiplication.
    reciprocal: u64,
    /// The cache's number.
    pub(super) slot: u16,
    /// Bytes between two colors. A slab's color is where its objects begin. With one color, objects
    /// whose size is a power of two would share few sets of the processor's caches.
    color_step: usize,
    colors: usize,
    pub(super) constructor: Option<Constructor>,
    /// The layout of a slot, if the cache is debugged.
    pub(super) plan: Option<Plan>,
    /// What a hardened cache knows of its objects. `None` for a debugged cache.
    pub(super) hardening: Option<Hardening>,
    /// Whether pages of free objects ever went back to the system, with the keys in them.
    pub(super) purged: AtomicBool,
    name: [u8; 32],
    /// The cache's part on each node.
    nodes: *const Node,
    node_count: usize,
    /// Where the cache's memory should be, if the cache has a policy of its own.
    pub(super) placement: Option<Placement>,
    /// Bytes in full sheaves that a node's barn holds.
    pub(super) barn_bytes: usize,
    /// Counts refills, for a policy that takes nodes in turn.
    pub(super) turn: AtomicU32,
    /// Objects that wait for their readers.
    pub(super) deferred: Deferred,
}

// SAFETY: the pointers lead to memory that is never freed, and that locks and atomics protect.
unsafe impl Sync for Cache {}
// SAFETY: no field belongs to one thread, and the pointers lead to memory that all threads may use.
unsafe impl Send for Cache {}

/// The settings that a cache is made with.
#[derive(Clone, Copy)]
pub(super) struct Options {
    pub(super) constructor: Option<Constructor>,
    /// The checks that the program asks for. The environment may ask for more.
    pub(super) debug: DebugFlags,
    /// Whether the objects of each slab begin at a granule's start.
    pub(super) one_color: bool,
    /// Whether the cache is hardened; `None` to follow the environment.
    pub(super) hardened: Option<bool>,
    /// Objects in a sheaf; `None` to choose by their size.
    pub(super) sheaf_capacity: Option<usize>,
    /// Where the cache's memory should be, if the cache has a policy of its own.
    pub(super) placement: Option<Placement>,
    /// Whether the process may use at least one node of the policy.
    pub(super) possible: bool,
    /// Bytes in full sheaves that a node's barn holds.
    pub(super) barn_bytes: usize,
}

impl Options {
    pub(super) const NONE: Options = Options {
        constructor: None,
        debug: DebugFlags::NONE,
        one_color: false,
        hardened: None,
        sheaf_capacity: None,
        placement: None,
        possible: true,
        barn_bytes: BARN_BYTES,
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
    /// The object is larger than [`OBJECT_MOST`], or its alignment exceeds 64 KiB.
    TooLarge,
    /// There are [`CACHES_MOST`] caches already.
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
                "objects of a cache are at most 64 KiB large and aligned; use the page layer for larger ones"
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

static REGISTRY: [AtomicPtr<Cache>; CACHES_MOST] =
    [const { AtomicPtr::new(null_mut()) }; CACHES_MOST];

/// One more than the largest number ever used.
static USED: AtomicUsize = AtomicUsize::new(FIRST_SLOT + 1);

/// The numbers of destroyed caches, and how many numbers after the kept ones were ever given out.
/// All are zero at the start, so that the table takes no room in the library's file.
struct Numbers {
    free: [u16; CACHES_MOST],
    freed: usize,
    given: usize,
}

static NUMBERS: Lock<Numbers> = Lock::new(Numbers {
    free: [0; CACHES_MOST],
    freed: 0,
    given: 0,
});

/// Returns the cache with number `slot`, if there is one.
pub(super) fn by_slot(slot: usize) -> Option<&'static Cache> {
    // SAFETY: an entry is null or a descriptor's address, and descriptors are never freed.
    unsafe { REGISTRY.get(slot)?.load(Acquire).as_ref() }
}

impl Cache {
    /// Makes a cache and enters it into the registry.
    pub(super) fn create(
        name: &str,
        layout: Layout,
        options: Options,
    ) -> Result<&'static Cache, CacheError> {
        if layout.size() > OBJECT_MOST || layout.align() > GRANULE {
            return Err(CacheError::TooLarge);
        }
        if !options.possible {
            return Err(CacheError::NoNodes);
        }
        fork::register();
        let mut numbers = NUMBERS.lock().ok_or(CacheError::NoMemory)?;
        let next = FIRST_SLOT + KEPT_SLOTS + numbers.given;
        let slot = match numbers.freed.checked_sub(1) {
            Some(last) => usize::from(numbers.free[last]),
            None if next < CACHES_MOST => next,
            None => return Err(CacheError::TooMany),
        };
        page::init();
        let cache = Cache::enter(name, layout, slot, options).ok_or(CacheError::NoMemory)?;
        if numbers.freed > 0 {
            numbers.freed -= 1;
        } else {
            numbers.given += 1;
        }
        Ok(cache)
    }

    /// Returns the cache of `kmalloc`'s first class, and makes it if needed. Waits for a fork.
    pub(super) fn create_first(name: &str, size: usize) -> Option<&'static Cache> {
        let _numbers = NUMBERS.lock()?;
        page::init();
        Cache::enter_kept(name, size, FIRST_SLOT)
    }

    /// Returns another cache of `kmalloc`, and makes it if needed. Returns `None` if it would have
    /// to wait for a fork.
    pub(super) fn create_kept(name: &str, size: usize, slot: usize) -> Option<&'static Cache> {
        // Does not wait while an interrupted frame of this thread holds a node's lock: the
        // registry's holder may wait for that lock.
        let _numbers = NUMBERS.lock_or_divert(is_lock_held)?;
        Cache::enter_kept(name, size, slot)
    }

    /// Returns cache number `slot`, and makes it if needed. The caller holds the registry's lock.
    fn enter_kept(name: &str, size: usize, slot: usize) -> Option<&'static Cache> {
        // Blocks of a class are aligned to the largest power of two that divides its size, at most
        // a granule.
        let align = (1 << size.trailing_zeros()).min(GRANULE);
        let layout = Layout::from_size_align(size, align).ok()?;
        let options = Options {
            one_color: true,
            ..Options::NONE
        };
        by_slot(slot).or_else(|| Cache::enter(name, layout, slot, options))
    }

    /// Makes a descriptor and enters it into the registry. The caller holds the registry's lock.
    fn enter(name: &str, layout: Layout, slot: usize, options: Options) -> Option<&'static Cache> {
        fork::register();
        let nodes = Node::make_all()?;
        let memory = page::alloc_meta(Layout::new::<Cache>())?;
        let cache = memory.cast::<Cache>().as_ptr();
        // SAFETY: `alloc_meta` gave memory of this layout to this thread alone.
        unsafe { cache.write(Cache::new(name, layout, slot as u16, options, nodes)) };
        USED.fetch_max(slot + 1, Relaxed);
        // Pairs with the acquire in `by_slot`: a thread that sees the address sees the fields.
        REGISTRY[slot].store(cache, Release);
        // SAFETY: the descriptor was written above, and its memory is never freed.
        Some(unsafe { &*cache })
    }

    fn new(
        name: &str,
        layout: Layout,
        slot: u16,
        options: Options,
        nodes: &'static [Node],
    ) -> Cache {
        let flags = options.debug | debug::for_cache(name);
        let plan =
            (!flags.is_none()).then(|| Plan::new(flags, layout, options.constructor.is_some()));
        let hardened = plan.is_none() && options.hardened.unwrap_or_else(harden::wanted);
        let kept = options.constructor.map(|_| layout.size());
        let hardening = hardened.then(|| Hardening::new(layout.size(), kept));
        let align = layout.align().max(8);
        let room = hardening.map_or(layout.size().max(8), |hardening| hardening.room);
        let size = plan.map_or(room.next_multiple_of(align), |plan| plan.stride);
        let color_step = align.max(COLOR_STEP);
        let colors = if options.one_color || plan.is_some() || hardened || size >= GRANULE {
            1
        } else {
            (size / color_step).clamp(1, COLORS_MOST)
        };
        let guard = if hardened { sys::page_size() } else { 0 };
        let granules = granules_for(size, (colors - 1) * color_step + guard);
        let room = granules * GRANULE - (colors - 1) * color_step - guard;
        let per_slab = (room / size).min(OBJECTS_MOST);
        let mut text = [0; 32];
        let length = name.len().min(text.len());
        text[..length].copy_from_slice(&name.as_bytes()[..length]);
        Cache {
            object: layout.size(),
            align,
            size,
            sheaves: Capacity::new(size, options.sheaf_capacity, plan.is_none()),
            per_slab,
            slab_bytes: per_slab * size,
            granules,
            reciprocal: (1u64 << 40).div_ceil(size as u64),
            slot,
            color_step,
            colors,
            constructor: options.constructor,
            plan,
            hardening,
            purged: AtomicBool::new(false),
            name: text,
            nodes: nodes.as_ptr(),
            node_count: nodes.len(),
            placement: options.placement,
            barn_bytes: options.barn_bytes,
            turn: AtomicU32::new(0),
            deferred: Deferred::new(),
        }
    }

    /// Makes a slot ready for its first allocation: writes the debugging bytes, and runs the
    /// constructor.
    ///
    /// # Safety
    ///
    /// The slot is one of this cache's, and no other thread uses it.
    pub(super) unsafe fn prepare(&self, slot: *mut u8) {
        let left = self.plan().map_or(0, |plan| plan.left);
        if let Some(plan) = self.plan() {
            // SAFETY: the slot has the plan's size, and the caller promises that no thread uses it.
            unsafe { plan.prepare(slot) };
        }
        if let Some(constructor) = self.constructor {
            // SAFETY: the object begins `left` bytes into the slot. The caller promises that no
            // thread uses the slot.
            unsafe { constructor.make(slot.add(left)) };
        }
    }

    /// Returns how many bytes of an object its user may write to.
    pub(super) fn room(&self) -> usize {
        let checked = self.hardening.map(|hardening| hardening.usable());
        let debugged = self.plan().map(|plan| plan.object);
        debugged.or(checked).unwrap_or(self.size)
    }

    /// Returns the offset, in a unit, of the word of the sheaf that allocations pop from.
    pub(super) fn source(&self) -> usize {
        match &self.hardening {
            Some(_) => self.main() + SPARE,
            None => self.main(),
        }
    }

    /// Returns whether slots must be [prepared](Self::prepare) before their first use.
    pub(super) fn prepares(&self) -> bool {
        self.constructor.is_some() || self.plan.is_some()
    }

    /// Takes the cache out of the registry, so that its number may be used again. The caller has
    /// seen that no object is in use.
    pub(super) fn retire(&self) {
        // A thread that takes idle sheaves may be using this cache. It holds this lock meanwhile.
        let _stopping = STOPPING.lock();
        let Some(mut numbers) = NUMBERS.lock() else {
            return;
        };
        let number = usize::from(self.slot);
        let me = core::ptr::from_ref(self).cast_mut();
        if REGISTRY[number]
            .compare_exchange(me, null_mut(), AcqRel, Relaxed)
            .is_ok()
        {
            // Pairs with the fence in `is_registered`: a thread that has read words of the number's
            // next cache also sees that this cache has gone.
            fence(Release);
            let freed = numbers.freed;
            numbers.free[freed] = self.slot;
            numbers.freed += 1;
            self.unclaim();
        }
    }

    /// Returns whether the cache is alive. If so, all that the caller has read belonged to this
    /// cache, not to the next one with its number.
    pub(super) fn is_registered(&self) -> bool {
        fence(Acquire);
        by_slot(usize::from(self.slot)).is_some_and(|cache| core::ptr::eq(cache, self))
    }

    /// Returns the color of a slab in run `index`: how many bytes into the run its objects begin. A
    /// slab made again of the same run has the same color, so the processor's caches still hold the
    /// lines of its objects.
    pub(super) fn color_of(&self, index: u32) -> usize {
        index as usize / self.granules % self.colors * self.color_step
    }

    /// Returns the cache's size class, if it is one of `kmalloc`'s.
    pub(super) fn class(&self) -> Option<usize> {
        let class = usize::from(self.slot) - FIRST_SLOT;
        (class < KEPT_SLOTS).then_some(class)
    }

    pub(super) fn name(&self) -> &str {
        let length = self
            .name
            .iter()
            .position(|&byte| byte == 0)
            .unwrap_or(self.name.len());
        let text = &self.name[..length];
        match core::str::from_utf8(text) {
            Ok(name) => name,
            // A long name may be cut inside a character.
            Err(error) => core::str::from_utf8(&text[..error.valid_up_to()]).unwrap_or(""),
        }
    }

    pub(super) fn nodes(&self) -> &[Node] {
        // SAFETY: `new` stored the address and length of a slice whose memory is never freed.
        unsafe { core::slice::from_raw_parts(self.nodes, self.node_count) }
    }

    /// Returns the number of the object that lies `offset` bytes into a slab. Exact for offsets and
    /// sizes below 2^20; slabs are at most twelve granules long. The reciprocal is too large by
    /// less than 1, so the result is too large by less than 2^20 / 2^40 = 1 / 2^20, before it is
    /// rounded down. That is less than 1 / size, the least distance from the exact result to the
    /// next integer.
    pub(super) fn nth(&self, offset: usize) -> usize {
        ((offset as u64).wrapping_mul(self.reciprocal) >> 40) as usize
    }

    /// Returns the number of the first granule of `object`'s run. Ends the process if that run is
    /// not a slab of this cache. `object` may be any address, because this reads only the page map
    /// and the run's frame.
    pub(super) fn run_of(&self, object: *mut u8) -> u32 {
        if page::entry(object as usize) != self.slot {
            self.wrong(object);
        }
        page::head_of(object as usize)
    }

    /// Ends the process, because `object` was freed to this cache but is not one of its objects.
    #[cold]
    fn wrong(&self, object: *mut u8) -> ! {
        let name = self.name();
        match page::entry(object as usize) {
            0 => die(format_args!(
                "free of {object:p} to cache {name}: the address is not Pinfold's"
            )),
            LARGE => die(format_args!(
                "free of {object:p} to cache {name}: it is a large block of malloc's"
            )),
            slot => die(format_args!(
                "free of {object:p} to cache {name}: the object belongs to cache {}",
                by_slot(usize::from(slot)).map_or("(destroyed)", Cache::name)
            )),
        }
    }
}

/// Returns the cache whose turn it is, if it exists. Turns go over all numbers that were ever used.
pub(super) fn in_turn(turn: u32) -> Option<&'static Cache> {
    by_slot(FIRST_SLOT + turn as usize % used())
}

/// Returns how many numbers were ever used, at least 1.
pub(super) fn used() -> usize {
    USED.load(Relaxed) - FIRST_SLOT
}

/// Returns all caches, in the order of their numbers.
pub(super) fn all() -> impl Iterator<Item = &'static Cache> {
    (FIRST_SLOT..CACHES_MOST).filter_map(by_slot)
}

/// Returns whether the thread with thread pointer `thread` holds a node's lock, or a lock after it
/// in the lock order. Reads a word of every node of every cache, so this is for a thread about to
/// sleep.
#[cold]
pub(super) fn is_lock_held(thread: u64) -> bool {
    all().any(|cache| cache.nodes().iter().any(|node| node.is_held_by(thread)))
        || sheaf::is_lock_held(thread)
        || page::is_lock_held(thread)
}

/// Calls `f` for every cache.
pub(super) fn for_each(f: impl FnMut(&'static Cache)) {
    all().for_each(f);
}

pub(super) fn is_registry_held(thread: u64) -> bool {
    NUMBERS.is_held_by(thread)
}

pub(super) fn lock_for_fork() {
    NUMBERS.lock_for_fork();
}

pub(super) fn unlock_after_fork() {
    NUMBERS.unlock_after_fork();
}
