//! Each CPU's sheaves of every cache, and how sheaves move between CPUs, barns and threads.
//!
//! A thread can be preempted, moved to another CPU, or interrupted by a signal handler between any
//! two instructions. If a slow path could be caught between taking a sheaf out of one place and
//! noting that in another, two threads might use one sheaf. So every move of a sheaf is one
//! operation on one word.
//!
//! # The unit
//!
//! Each CPU has a unit of 128 KiB. Cache number n has four words in it. A word is 0 (no sheaf), or
//! the word of a [`Sheaf`]:
//!
//! | offset | sheaf | use |
//! |---|---|---|
//! | 0 … 63 | | the unit's header |
//! | 8·n | main | the fast paths pop from it and push to it |
//! | 8·n + 32 KiB | spare | a second sheaf, for the slow paths |
//! | 8·n + 64 KiB | deferred | deferred frees push to it (`deferred`) |
//! | 8·n + 96 KiB | held | frees to a hardened cache push to it (`harden`) |
//!
//! A hardened cache has no main sheaf, and allocates from the spare. A debugged cache has only the
//! deferred sheaf.
//!
//! # Who may write a word
//!
//! 1. An operation of [`UNITS`] on the CPU that the unit belongs to: a critical section, or on
//!    atomics a short lock.
//! 2. A thread that holds [`STOPPING`] and has stopped the unit ([`drain`], `idle`). No operation
//!    touches the unit meanwhile.
//!
//! # The steps of a slow path
//!
//! When the main sheaf is empty ([`Cache::alloc_slow`]) or full ([`Cache::free_slow`]):
//!
//! 1. Take the spare: `store_if_equal(spare, s, 0)`. The sheaf now belongs to this thread.
//! 2. If the spare does not help, exchange it at the barn.
//! 3. Pop an object from the sheaf, or push one.
//! 4. Install the sheaf: `store_if_equal(main, w, s)`, where w is 0, or an empty sheaf on alloc and
//!    a full one on free. The sheaf of w now belongs to this thread.
//! 5. Put the sheaf in hand: `store_if_equal(spare, 0, s)`, or into the barn if there is a spare.
//!
//! Between two steps the thread may move to another CPU. Each step compares the word before it
//! writes, so it is right on any CPU. If the comparison in step 4 fails, step 5 puts the thread's
//! own sheaf. A sheaf is in exactly one place at every moment, so that no object is lost or handed
//! out twice.

use super::cache::{self, CACHES_MOST, Cache};
use super::idle;
use super::node::Node;
use super::sheaf::{Sheaf, word_is_empty, word_is_full};
use crate::lock::Lock;
use crate::segment::SlabEvent;
use crate::{nodes, page, shepherd, sys};
use core::alloc::Layout;
use core::ptr::null_mut;
use core::sync::atomic::AtomicU32;
use core::sync::atomic::Ordering::Relaxed;
use pinfold_rseq::{FenceError, Index, Units, fence, near, possible};

/// Bytes from the word of a main sheaf to that of the spare.
pub(super) const SPARE: usize = CACHES_MOST * 8;
/// Bytes from the word of a main sheaf to that of the deferred sheaf.
pub(super) const DEFERRED: usize = 2 * SPARE;
/// Bytes of a unit.
pub(super) const UNIT: usize = 4 * SPARE;
/// Bytes from the word of a main sheaf to that of the held sheaf.
pub(super) const HELD: usize = 3 * SPARE;

/// The units of all caches.
pub(super) static UNITS: Units = Units::new();

/// Returns the units, for fast paths: without a load from the global offset table.
#[inline(always)]
pub(super) fn units() -> &'static Units {
    near!(UNITS, Units)
}

/// Taken to install a unit, to stop CPUs, to take idle sheaves, and to retire a cache.
pub(super) static STOPPING: Lock<()> = Lock::new(());

/// Chooses the backend, once. Returns false while another thread, or a frame that this signal
/// handler interrupted, is choosing. A unit installed then could be used by operations of two
/// backends.
pub(super) fn choose_backend() -> bool {
    if !pinfold_rseq::decided() {
        pinfold_rseq::init(if nodes::count() == 1 {
            Index::Cid
        } else {
            Index::Cpu
        });
    }
    pinfold_rseq::decided()
}

/// Gives the current CPU its unit, after choosing the backend if that has not been done. Returns
/// false if that cannot be done now, or the unit is there already.
#[cold]
fn prepare() -> bool {
    if !choose_backend() {
        return false;
    }
    let index = pinfold_rseq::current();
    if !UNITS.unit(index).is_null() {
        // The unit is stopped, or another thread has just installed it.
        return false;
    }
    // Does not wait, because this may be a signal handler that interrupted the holder of another
    // lock.
    let Some(_stopping) = STOPPING.try_lock() else {
        return false;
    };
    let layout = Layout::from_size_align(UNIT, sys::page_size());
    let Some(unit) = layout.ok().and_then(page::alloc_meta) else {
        return false;
    };
    // SAFETY: `alloc_meta` gives a block of this size a mapping of its own, of whole pages.
    unsafe { crate::percpu::place_near(index, unit.as_ptr(), UNIT) };
    shepherd::register(idle::drain);
    UNITS.install(index, unit.as_ptr()).is_ok()
}

/// Returns the word at `offset` of the current unit. Makes the unit if there is none yet. Returns
/// `None` if there is no unit.
pub(super) fn load(offset: usize) -> Option<u64> {
    // SAFETY: `offset` is the place of a cache's sheaf, which lies in the unit behind the header.
    unsafe { UNITS.load(offset) }.or_else(|| {
        // SAFETY: `offset` is the place of a cache's sheaf, which lies in the unit behind the
        // header.
        prepare().then(|| unsafe { UNITS.load(offset) })?
    })
}

/// One slow path in this many does background work.
const TICK: u32 = 16;

/// Does a share of the background work on every 16th call of a slow path. Returns whether it did.
///
/// Takes idle sheaves of this CPU. Has one cache give back what it does not need, in round-robin
/// order, so that unused caches are trimmed too, as long as any cache is active.
///
/// Costs a few instructions, and on every 16th call some reads of a clock that need no system call.
/// Gives memory back by system calls at most twice a second.
pub fn tick() -> bool {
    /// A counter with a cache line of its own, so that CPUs do not contend. On a large machine
    /// several CPUs share one.
    #[repr(align(64))]
    struct Calls(AtomicU32);
    static CALLS: [Calls; 64] = [const { Calls(AtomicU32::new(0)) }; 64];
    let calls = &CALLS[pinfold_rseq::current() % CALLS.len()].0;
    // Two threads may store the same count. A lost call does no harm.
    let calls = {
        let now = calls.load(Relaxed);
        calls.store(now.wrapping_add(1), Relaxed);
        now
    };
    // Skips the first calls: in a process that has just begun, nothing is idle.
    if calls % TICK != TICK - 1 {
        return false;
    }
    shepherd::tick_in_passing();
    idle::take_idle_here();
    if let Some(cache) = cache::in_turn(calls / TICK) {
        let now = sys::coarse_milliseconds() as u32;
        cache
            .nodes()
            .iter()
            .for_each(|node| node.release_idle(cache, now));
    }
    true
}

impl Cache {
    /// Returns the offset of the main sheaf's word.
    pub(super) fn main(&self) -> usize {
        usize::from(self.slot) * 8
    }

    /// Takes the current CPU's spare sheaf out of its unit.
    pub(super) fn take_spare(&self) -> Option<Sheaf> {
        let offset = self.main() + SPARE;
        let word = load(offset)?;
        // SAFETY: the offset is the place of this cache's spare, which lies in the unit.
        if word == 0 || !unsafe { UNITS.store_if_equal(offset, word, 0) } {
            return None;
        }
        // SAFETY: `store_if_equal` above replaced the word by 0, so this thread owns the sheaf.
        unsafe { Sheaf::from_word(word) }
    }

    /// Takes the current CPU's spare sheaf. While the node's slabs are sparse, sends its objects to
    /// their slabs instead and returns `None`.
    fn spare_unless_sparse(&self, node: &Node) -> Option<Sheaf> {
        let spare = self.take_spare()?;
        if node.is_sparse() && !spare.is_empty() {
            self.put(node, spare);
            return None;
        }
        Some(spare)
    }

    /// Installs `sheaf` as the current CPU's main sheaf if `may_go` accepts the word there. The
    /// sheaf that is left in hand, the old main one or else `sheaf`, becomes the spare or goes to
    /// the barn.
    fn install(&self, node: &Node, sheaf: Sheaf, may_go: impl Fn(u64) -> bool) {
        let exchange = |word: u64| {
            // SAFETY: the offset is the place of this cache's main sheaf. This thread owns `sheaf`,
            // and does not use it after the store.
            may_go(word) && unsafe { UNITS.store_if_equal(self.main(), word, sheaf.word()) }
        };
        let old = match load(self.main()) {
            // SAFETY: the exchange replaced `word`, so this thread owns its sheaf.
            Some(word) if exchange(word) => unsafe { Sheaf::from_word(word) },
            _ => Some(sheaf),
        };
        if let Some(old) = old {
            // SAFETY: the offset is the place of this cache's spare. This thread owns `old`, and
            // does not use it after the store.
            if !unsafe { UNITS.store_if_equal(self.main() + SPARE, 0, old.word()) } {
                self.put(node, old);
            }
        }
    }

    /// Puts a sheaf into `node`'s barn. Sends its objects of other nodes home first.
    pub(super) fn put(&self, node: &Node, mut sheaf: Sheaf) {
        self.send_home(node, &mut sheaf);
        node.put(self, sheaf);
    }

    /// Allocates an object when the main sheaf is empty: from the spare, the barn, or a slab.
    /// Returns null if the system has no memory.
    #[cold]
    #[inline(never)]
    pub(super) fn alloc_slow(&self) -> *mut u8 {
        if self.checks() {
            return self.alloc_checked();
        }
        // This is the common path on atomics. With restartable sequences it helps a thread that has
        // moved to another CPU since the fast path failed.
        // SAFETY: the offset is the place of this cache's main sheaf, so the word is 0 or a stack.
        let object = unsafe { UNITS.pop(self.main()) };
        if !object.is_null() {
            return object;
        }
        let ask = self.ask();
        let node = &self.nodes()[ask.node];
        tick();
        let sheaf = match self.spare_unless_sparse(node) {
            Some(spare) if !spare.is_empty() => {
                node.count(SlabEvent::AllocLockless, 1);
                Ok(spare)
            }
            other => node.exchange_for_full(self, ask, other),
        };
        match sheaf {
            Ok(mut sheaf) => {
                let object = sheaf.pop();
                self.install(node, sheaf, word_is_empty);
                object
            }
            Err(sheaf) => {
                if let Some(sheaf) = sheaf {
                    self.install(node, sheaf, |_| false);
                }
                let mut object = [null_mut()];
                self.alloc_from(ask, &mut object);
                object[0]
            }
        }
    }

    /// Frees an object when the main sheaf is full: into the spare, or into a sheaf from the barn.
    ///
    /// # Safety
    ///
    /// `object` came from this cache, and no thread uses it any more.
    #[cold]
    #[inline(never)]
    pub(super) unsafe fn free_slow(&self, object: *mut u8) {
        if self.checks() {
            // SAFETY: the caller promises that the object is this cache's and unused.
            return unsafe { self.free_checked(object) };
        }
        // The common path on atomics, and a second try for a thread that has moved to another CPU.
        // SAFETY: the offset is the place of this cache's main sheaf; the caller gives the object
        // up.
        if unsafe { UNITS.push(self.main(), object) } {
            return;
        }
        let node = self.here();
        tick();
        let mut spare = self.spare_unless_sparse(node);
        if let Some(full) = spare.as_mut().filter(|spare| spare.is_full()) {
            self.send_home(node, full);
        }
        let sheaf = match spare {
            Some(spare) if !spare.is_full() => {
                node.count(SlabEvent::FreeLockless, 1);
                Ok(spare)
            }
            other => node.exchange_for_empty(self, other),
        };
        match sheaf {
            Ok(mut sheaf) if !sheaf.is_full() => {
                sheaf.push(object);
                self.install(node, sheaf, word_is_full);
            }
            other => {
                if let Ok(sheaf) | Err(Some(sheaf)) = other {
                    self.put(node, sheaf);
                }
                // SAFETY: the object is free, and `home` is the node of its memory.
                unsafe { self.home(object).give_objects(self, &[object]) };
            }
        }
    }
}

/// Moves the sheaves of all CPUs to their barns, for the caches that `caches` accepts.
///
/// 1. Stops each unit: operations that begin later fail, and take the slow paths.
/// 2. Fences, which ends the operations under way. Interrupts the CPUs that run threads of this
///    process.
/// 3. Takes the sheaves out of the units.
/// 4. Resumes each unit.
///
/// # Errors
///
/// [`FenceError`], if the kernel cannot fence. The sheaves then stay where they are.
pub(super) fn drain(caches: impl Fn(&Cache) -> bool) -> Result<(), FenceError> {
    let Some(stopping) = STOPPING.lock() else {
        return Ok(());
    };
    let units = || (0..possible()).filter(|&index| !UNITS.unit(index).is_null());
    units().for_each(|index| UNITS.stop(index));
    let fenced = fence();
    if fenced.is_ok() {
        units().for_each(|index| UNITS.await_stopped(index));
        cache::for_each(|cache| {
            if caches(cache) {
                units().for_each(|index| drain_unit(cache, UNITS.unit(index)));
            }
        });
    }
    units().for_each(|index| UNITS.resume(index));
    drop(stopping);
    fenced
}

/// Takes all sheaves of `cache` out of a stopped unit.
pub(super) fn drain_unit(cache: &Cache, unit: *mut u8) {
    drain_word(cache, unit, cache.main());
    drain_word(cache, unit, cache.main() + SPARE);
    drain_word(cache, unit, cache.main() + HELD);
    drain_deferred(cache, unit);
}

/// Seals the deferred sheaf of `cache` in a stopped unit.
pub(super) fn drain_deferred(cache: &Cache, unit: *mut u8) {
    // SAFETY: the caller has stopped the unit, so no operation uses it. The offset lies in the
    // unit.
    let word = unsafe { unit.add(cache.main() + DEFERRED).cast::<u64>().replace(0) };
    // SAFETY: the word was replaced by 0 above, so this thread owns the sheaf.
    if let Some(sheaf) = unsafe { Sheaf::from_word(word) } {
        cache.seal(sheaf);
    }
}

/// Moves the sheaf at `offset` of a stopped unit to the barn of `cache`.
pub(super) fn drain_word(cache: &Cache, unit: *mut u8, offset: usize) {
    // SAFETY: the caller has stopped the unit, so no operation uses it. The offset lies in the
    // unit.
    let word = unsafe { unit.add(offset).cast::<u64>().replace(0) };
    // SAFETY: the word was replaced by 0 above, so this thread owns the sheaf.
    if let Some(sheaf) = unsafe { Sheaf::from_word(word) } {
        cache.put(cache.here(), sheaf);
    }
}
