//! What a cache is: its descriptor, and the registry of all caches.

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

/// Caches that can exist at once. The number of a cache is also its place in every CPU's unit.
pub const CACHES_MOST: usize = 4096;
/// The first cache number: smaller ones would lie in the units' headers, and 0 means nobody in the page map.
pub const FIRST_SLOT: usize = pinfold_rseq::UNIT_HEADER / 8;
/// Numbers kept for the caches of [`kmalloc`](super::kmalloc), from [`FIRST_SLOT`] on.
const KEPT_SLOTS: usize = kmalloc::CLASSES;
/// Bytes of the largest object.
pub const OBJECT_MOST: usize = 64 << 10;
/// Bytes that slabs of a cache begin apart, at least: a cache line.
const COLOR_STEP: usize = 64;
/// Colors at most.
const COLORS_MOST: usize = 16;

/// A cache's descriptor. Lives for ever, and is never used for another cache: who found it in the registry may look at it when
/// the cache was destroyed meanwhile.
pub struct Cache {
    /// Bytes of an object as its users know it.
    pub(super) object: usize,
    /// What its address is a multiple of.
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
    /// ceil(2^40 / size): a division by `size` as a multiplication.
    reciprocal: u64,
    /// The cache's number.
    pub(super) slot: u16,
    /// Slabs begin this many bytes apart, in this many colors: objects of a power of two would else share few sets of the
    /// processor's caches.
    color_step: usize,
    colors: usize,
    pub(super) constructor: Option<Constructor>,
    /// What a debugged cache's objects look like.
    pub(super) plan: Option<Plan>,
    /// What a hardened cache needs, unless it is debugged.
    pub(super) hardening: Option<Hardening>,
    /// Whether pages of free objects ever went back to the system, and of a hardened cache the keys in them.
    pub(super) purged: AtomicBool,
    name: [u8; 32],
    /// One per node.
    nodes: *const Node,
    node_count: usize,
    /// Where its memory is to be, if it has a policy of its own.
    pub(super) placement: Option<Placement>,
    /// Bytes in full sheaves that a node's barn holds.
    pub(super) barn_bytes: usize,
    /// How many refills there were, for policies that take nodes in turn.
    pub(super) turn: AtomicU32,
    /// What waits for its readers.
    pub(super) deferred: Deferred,
}

// SAFETY: the raw pointers are to memory that lives for ever and is itself shared: nodes lock, rows are atomics.
unsafe impl Sync for Cache {}
// SAFETY: as above.
unsafe impl Send for Cache {}

/// What a cache is made with.
#[derive(Clone, Copy)]
pub(super) struct Options {
    pub(super) constructor: Option<Constructor>,
    /// Checks, beside those that the environment asks for.
    pub(super) debug: DebugFlags,
    /// Whether slabs begin at a granule's start.
    pub(super) one_color: bool,
    /// Whether it is hardened, if not as the environment says.
    pub(super) hardened: Option<bool>,
    /// Objects in a sheaf, if not by their size.
    pub(super) sheaf_capacity: Option<usize>,
    /// Where its memory is to be, if it has a policy of its own.
    pub(super) placement: Option<Placement>,
    /// Whether the policy that was asked for can be followed.
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

/// Why a cache cannot be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheError {
    /// The object is larger than [`OBJECT_MOST`] or its alignment exceeds 64 KiB.
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

/// Numbers of destroyed caches, and how many numbers behind the kept ones were ever given. All zero
/// at the start, so that the library's file holds nothing of the table.
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

/// The cache with number `slot`, if there is one.
pub(super) fn by_slot(slot: usize) -> Option<&'static Cache> {
    // SAFETY: the registry holds addresses of descriptors, which live for ever.
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

    /// Makes the first kept cache, if it is not there yet. Waits until a fork is over.
    pub(super) fn create_first(name: &str, size: usize) -> Option<&'static Cache> {
        let _numbers = NUMBERS.lock()?;
        page::init();
        Cache::enter_kept(name, size, FIRST_SLOT)
    }

    /// Makes another kept cache, if it is not there yet. `None` too while another thread forks.
    pub(super) fn create_kept(name: &str, size: usize, slot: usize) -> Option<&'static Cache> {
        // An interrupted frame of this thread may hold a lock that the holder of this one waits for.
        let _numbers = NUMBERS.lock_or_divert(is_lock_held)?;
        Cache::enter_kept(name, size, slot)
    }

    /// Makes and enters the cache, if it is not there yet; the caller holds the registry's lock.
    fn enter_kept(name: &str, size: usize, slot: usize) -> Option<&'static Cache> {
        // Blocks of a class are aligned as its size is, and at most as their slab is.
        let align = (1 << size.trailing_zeros()).min(GRANULE);
        let layout = Layout::from_size_align(size, align).ok()?;
        let options = Options {
            one_color: true,
            ..Options::NONE
        };
        by_slot(slot).or_else(|| Cache::enter(name, layout, slot, options))
    }

    /// Makes the descriptor and enters it; the caller holds the registry's lock.
    fn enter(name: &str, layout: Layout, slot: usize, options: Options) -> Option<&'static Cache> {
        fork::register();
        let nodes = Node::make_all()?;
        let memory = page::alloc_meta(Layout::new::<Cache>())?;
        let cache = memory.cast::<Cache>().as_ptr();
        // SAFETY: zeroed memory of the right layout, which is ours.
        unsafe { cache.write(Cache::new(name, layout, slot as u16, options, nodes)) };
        USED.fetch_max(slot + 1, Relaxed);
        // Release pairs with the acquire in `by_slot`.
        REGISTRY[slot].store(cache, Release);
        // SAFETY: written above; lives for ever.
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

    /// Makes a slot ready for its first allocation.
    ///
    /// # Safety
    ///
    /// The slot is of this cache and nobody's.
    pub(super) unsafe fn prepare(&self, slot: *mut u8) {
        let left = self.plan().map_or(0, |plan| plan.left);
        if let Some(plan) = self.plan() {
            // SAFETY: the caller's promise.
            unsafe { plan.prepare(slot) };
        }
        if let Some(constructor) = self.constructor {
            // SAFETY: the caller's promise.
            unsafe { constructor.make(slot.add(left)) };
        }
    }

    /// Bytes of an object that its user may write to.
    pub(super) fn room(&self) -> usize {
        let checked = self.hardening.map(|hardening| hardening.usable());
        let debugged = self.plan().map(|plan| plan.object);
        debugged.or(checked).unwrap_or(self.size)
    }

    /// Where in the units the sheaf that allocations use has its word.
    pub(super) fn source(&self) -> usize {
        match &self.hardening {
            Some(_) => self.main() + SPARE,
            None => self.main(),
        }
    }

    /// Whether slots have to be [prepared](Self::prepare).
    pub(super) fn prepares(&self) -> bool {
        self.constructor.is_some() || self.plan.is_some()
    }

    /// Takes the cache out of the registry; its number may be used again. All its objects have come back.
    pub(super) fn retire(&self) {
        // A thread that takes idle sheaves may have found this cache in the registry.
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
            // Pairs with the fence in `is_registered`: who sees words that are used anew also sees that the cache has gone.
            fence(Release);
            let freed = numbers.freed;
            numbers.free[freed] = self.slot;
            numbers.freed += 1;
            self.unclaim();
        }
    }

    /// Whether the cache has not been destroyed; then what was read of it before is its own.
    pub(super) fn is_registered(&self) -> bool {
        fence(Acquire);
        by_slot(usize::from(self.slot)).is_some_and(|cache| core::ptr::eq(cache, self))
    }

    /// Returns how many bytes behind the beginning of the run `index` a slab's objects begin. A slab
    /// made again of the same run has the same color, so that the processor's caches still hold the
    /// lines of its objects.
    pub(super) fn color_of(&self, index: u32) -> usize {
        index as usize / self.granules % self.colors * self.color_step
    }

    /// The size class that the cache is for, if it is one of `kmalloc`'s.
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
            // A long name was cut inside a character.
            Err(error) => core::str::from_utf8(&text[..error.valid_up_to()]).unwrap_or(""),
        }
    }

    pub(super) fn nodes(&self) -> &[Node] {
        // SAFETY: set from a slice that lives for ever.
        unsafe { core::slice::from_raw_parts(self.nodes, self.node_count) }
    }

    /// Which object begins `offset` bytes into a slab, rounded down. Exact for offsets and sizes
    /// below 2^20; a slab of a debugged class is at most twelve granules long. The reciprocal is too
    /// large by less than 1, so the product by less than 2^20. 2^20 / 2^40 is less than the distance
    /// of a quotient to the next integer, which is at least 1 / size.
    pub(super) fn nth(&self, offset: usize) -> usize {
        ((offset as u64).wrapping_mul(self.reciprocal) >> 40) as usize
    }

    /// The number of the run that `object` lies in; ends the process when that is no slab of this cache.
    ///
    /// Any address may be asked about: only the page map and the slab's frame are read.
    pub(super) fn run_of(&self, object: *mut u8) -> u32 {
        if page::entry(object as usize) != self.slot {
            self.wrong(object);
        }
        page::head_of(object as usize)
    }

    /// An object was freed to this cache that is not its own.
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

/// The cache whose turn it is, of all numbers that were ever used.
pub(super) fn in_turn(turn: u32) -> Option<&'static Cache> {
    by_slot(FIRST_SLOT + turn as usize % used())
}

/// How many numbers were ever used, at least 1.
pub(super) fn used() -> usize {
    USED.load(Relaxed) - FIRST_SLOT
}

/// The caches there are, by number.
pub(super) fn all() -> impl Iterator<Item = &'static Cache> {
    (FIRST_SLOT..CACHES_MOST).filter_map(by_slot)
}

/// Whether a thread holds the lock of a node, or one that comes after these. Reads a word of every node of every cache: for a thread
/// that would sleep else.
#[cold]
pub(super) fn is_lock_held(thread: u64) -> bool {
    all().any(|cache| cache.nodes().iter().any(|node| node.is_held_by(thread)))
        || sheaf::is_lock_held(thread)
        || page::is_lock_held(thread)
}

/// Calls `f` for every cache there is.
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
