//! Each CPU's sheaves of every cache, and how sheaves move between CPUs, barns and threads.
//!
//! A thread can be preempted, moved to another CPU, or interrupted by a signal handler between any
//! two instructions. If a move of a sheaf took two steps, a second thread might find the sheaf
//! between these steps, and two threads might use one sheaf. So a thread takes a sheaf out of a
//! unit, or puts a sheaf into it, by one operation on one word.
//!
//! # The unit
//!
//! A *unit* is the memory of one CPU: 128 KiB. Cache number n has four words in each unit. A word
//! is 0 if there is no sheaf. Otherwise it is a [`Sheaf`] in one word: an address that tells both
//! the sheaf's block and how many objects are in it.
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
//! 1. An operation of [`UNITS`] on the unit's CPU. The operation is a critical section. On the
//!    atomic backend, a short lock in the unit replaces the critical section.
//! 2. A thread that holds [`STOPPING`] and has stopped the unit ([`drain`], `idle`). While the unit
//!    is stopped, operations on it fail.
//!
//! # The steps of a slow path
//!
//! A thread takes these steps when an allocation finds the main sheaf empty
//! ([`Cache::alloc_slow`]), or a free finds it full ([`Cache::free_slow`]):
//!
//! 1. Take the spare: `store_if_equal(spare, s, 0)`. The sheaf now belongs to this thread.
//! 2. If there was no spare, or it was empty for an allocation or full for a free: get a sheaf at
//!    the barn, in exchange for the spare.
//! 3. Pop an object from the sheaf, or push one.
//! 4. Install the sheaf: `store_if_equal(main, w, s)`. Here w is the word of the main sheaf: 0, an
//!    empty sheaf for an allocation, or a full sheaf for a free. The sheaf of w now belongs to this
//!    thread.
//! 5. Put away the sheaf that this thread has now: `store_if_equal(spare, 0, s)`. If there is a
//!    spare already, put the sheaf into the barn.
//!
//! Between two steps the thread may move to another CPU. That does no harm, because each step
//! compares the current CPU's word before it writes. If the comparison in step 4 fails, the thread
//! keeps its own sheaf, and step 5 puts that sheaf away. At every moment, a sheaf is in exactly one
//! place. So no object is lost or handed out twice.

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

/// Bytes from the word of a main sheaf to the word of the spare.
pub(super) const SPARE: usize = CACHES_MOST * 8;
/// Bytes from the word of a main sheaf to the word of the deferred sheaf.
pub(super) const DEFERRED: usize = 2 * SPARE;
/// Bytes of a unit.
pub(super) const UNIT: usize = 4 * SPARE;
/// Bytes from the word of a main sheaf to the word of the held sheaf.
pub(super) const HELD: usize = 3 * SPARE;

/// The units of all caches.
pub(super) static UNITS: Units = Units::new();

/// Returns the units. For fast paths: costs no load from the global offset table.
#[inline(always)]
pub(super) fn units() -> &'static Units {
    near!(UNITS, Units)
}

/// A thread holds this lock while it installs a unit, stops CPUs, takes idle sheaves, or retires a
/// cache.
pub(super) static STOPPING: Lock<()> = Lock::new(());

/// Chooses the backend, once. Returns false while another thread is choosing, or a frame that this
/// signal handler interrupted. The caller must not install a unit then, because operations of two
/// backends could use the unit.
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

/// Gives the current CPU its unit. Chooses the backend first, if no thread has done so. Returns
/// false if the CPU has a unit already, or cannot get one now.
#[cold]
fn prepare() -> bool {
    if !choose_backend() {
        return false;
    }
    let index = pinfold_rseq::current();
    if !UNITS.unit(index).is_null() {
        // The unit is stopped now, or another thread has just installed it.
        return false;
    }
    // Only tries the lock. This may be a signal handler that interrupted the holder of another
    // lock, and `STOPPING`'s holder may wait for that lock.
    let Some(_stopping) = STOPPING.try_lock() else {
        return false;
    };
    let layout = Layout::from_size_align(UNIT, sys::page_size());
    let Some(unit) = layout.ok().and_then(page::alloc_meta) else {
        return false;
    };
    // SAFETY: `alloc_meta` gives a block of this size a mapping of its own, so the range is whole
    // pages that no other data shares.
    unsafe { crate::percpu::place_near(index, unit.as_ptr(), UNIT) };
    shepherd::register(idle::drain);
    UNITS.install(index, unit.as_ptr()).is_ok()
}

/// Returns the word at `offset` of the current CPU's unit. Makes the unit if the CPU has none yet.
/// Returns `None` if the CPU still has no unit.
pub(super) fn load(offset: usize) -> Option<u64> {
    // SAFETY: callers pass the offset of one of a cache's four words, which every unit has.
    unsafe { UNITS.load(offset) }.or_else(|| {
        // SAFETY: callers pass the offset of one of a cache's four words, which every unit has.
        prepare().then(|| unsafe { UNITS.load(offset) })?
    })
}

/// One call of [`tick`] in this many does background work.
const TICK: u32 = 16;

/// Does a share of the background work on every 16th call. Takes the idle sheaves of this CPU. Then
/// lets one cache, in round-robin order, give back the memory that it did not need lately. As long
/// as the program uses any cache, unused caches have their turn too. Returns whether this call did
/// any work.
///
/// Every slow path calls this. Costs a few instructions, and on every 16th call some reads of a
/// clock, without a system call. Gives memory back by system calls, for each cache at most about
/// twice a second.
pub fn tick() -> bool {
    /// A counter with a cache line of its own, so that CPUs do not contend. On a machine with more
    /// than 64 CPUs, several CPUs share a counter.
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
        // SAFETY: every unit has a word for this cache's spare at `offset`.
        if word == 0 || !unsafe { UNITS.store_if_equal(offset, word, 0) } {
            return None;
        }
        // SAFETY: `store_if_equal` above replaced the word by 0, so this thread owns the sheaf.
        unsafe { Sheaf::from_word(word) }
    }

    /// Takes the current CPU's spare sheaf. While the node's slabs are [sparse](Node::is_sparse),
    /// returns only an empty spare: sends the objects of any other spare to their slabs, and
    /// returns `None`.
    fn spare_unless_sparse(&self, node: &Node) -> Option<Sheaf> {
        let spare = self.take_spare()?;
        if node.is_sparse() && !spare.is_empty() {
            self.put(node, spare);
            return None;
        }
        Some(spare)
    }

    /// Installs `sheaf` as the current CPU's main sheaf if `may_go` accepts the word of the present
    /// one. This thread may then have one sheaf left: the old main sheaf, or `sheaf` if it was not
    /// installed. That sheaf becomes the spare, or goes to the barn if there is a spare.
    fn install(&self, node: &Node, sheaf: Sheaf, may_go: impl Fn(u64) -> bool) {
        let exchange = |word: u64| {
            // SAFETY: every unit has a word for this cache's main sheaf at this offset. This thread
            // owns `sheaf`, and does not use it after a successful store.
            may_go(word) && unsafe { UNITS.store_if_equal(self.main(), word, sheaf.word()) }
        };
        let old = match load(self.main()) {
            // SAFETY: `exchange` replaced `word` in the unit, so this thread owns the sheaf of
            // `word`.
            Some(word) if exchange(word) => unsafe { Sheaf::from_word(word) },
            _ => Some(sheaf),
        };
        if let Some(old) = old {
            // SAFETY: every unit has a word for this cache's spare at this offset. This thread owns
            // `old`, and does not use it after a successful store.
            if !unsafe { UNITS.store_if_equal(self.main() + SPARE, 0, old.word()) } {
                self.put(node, old);
            }
        }
    }

    /// Puts a sheaf into `node`'s barn. First sends the sheaf's objects of other nodes to their
    /// slabs.
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
        // On atomics, this is the common path, because the fast path always fails. With restartable
        // sequences, it helps a thread that has moved to another CPU since its fast path failed.
        // SAFETY: every unit has a word for this cache's main sheaf at this offset. The word is 0
        // or a sheaf, which is a stack.
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
        // On atomics, this is the common path. With restartable sequences, it helps a thread that
        // has moved to another CPU since its fast path failed.
        // SAFETY: every unit has a word for this cache's main sheaf at this offset. The caller
        // gives the object up.
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
                // SAFETY: the caller gave the object up and no sheaf took it, so this thread owns
                // it. `home` returns the node of its memory.
                unsafe { self.home(object).give_objects(self, &[object]) };
            }
        }
    }
}

/// Moves the sheaves of all CPUs to their barns, for the caches that `caches` accepts.
///
/// 1. Stops each unit: operations that begin later fail, and take the slow paths.
/// 2. Fences, which ends the operations under way. The fence interrupts the CPUs that run threads
///    of this process.
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

/// Takes the deferred sheaf of `cache` out of a stopped unit and seals it (`deferred`).
pub(super) fn drain_deferred(cache: &Cache, unit: *mut u8) {
    // SAFETY: the caller has stopped the unit, so no operation uses it. Every unit has a word for
    // this cache's deferred sheaf at this offset.
    let word = unsafe { unit.add(cache.main() + DEFERRED).cast::<u64>().replace(0) };
    // SAFETY: the word was replaced by 0 above, so this thread owns the sheaf.
    if let Some(sheaf) = unsafe { Sheaf::from_word(word) } {
        cache.seal(sheaf);
    }
}

/// Moves the sheaf at `offset` of a stopped unit to the barn of `cache`.
pub(super) fn drain_word(cache: &Cache, unit: *mut u8, offset: usize) {
    // SAFETY: the caller has stopped the unit, so no operation uses it. `offset` is the offset of
    // one of the cache's words, which every unit has.
    let word = unsafe { unit.add(offset).cast::<u64>().replace(0) };
    // SAFETY: the word was replaced by 0 above, so this thread owns the sheaf.
    if let Some(sheaf) = unsafe { Sheaf::from_word(word) } {
        cache.put(cache.here(), sheaf);
    }
}
