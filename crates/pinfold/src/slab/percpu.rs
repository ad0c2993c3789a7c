//! Each CPU's part of every cache: a main sheaf, a spare, one for deferred frees, and one for what is freed to hardened caches.
//!
//! # The unit
//!
//! ```text
//! offset  0        64                            32 KiB + 64                  64 KiB + 64                       96 KiB + 64
//!         ┌────────┬─────────────────────────┬───┬────────────────────────┬───┬───────────────────────────┬───┬─────────────────┐
//!         │ header │ main sheaf, word n: 8·n │ … │ spare sheaf of cache n │ … │ deferred sheaf of cache n │ … │ held of cache n │
//!         └────────┴─────────────────────────┴───┴────────────────────────┴───┴───────────────────────────┴───┴─────────────────┘
//! ```
//!
//! The words are 0 (no sheaf) or a [`Sheaf`]'s. Hardened caches have no main sheaf: they allocate from the spare and free to the held one. Fast
//! paths pop from and push to the main sheaf. The slow paths move sheaves between the first two, the barn and themselves, by one
//! operation each:
//!
//! * take the spare: `store_if_equal(spare, s, 0)`; the sheaf is the thread's own then;
//! * install a main sheaf: `store_if_equal(main, w, s)` where w is an empty one (on alloc) or a full one (on free); the
//!   thread owns w's sheaf then;
//! * put the spare: `store_if_equal(spare, 0, s)`.
//!
//! Between the steps the thread may move to another CPU, or signal handlers may run the same code: each step is right by
//! itself on whatever CPU it lands, and when one finds that things have changed, the sheaf in hand goes to the barn.
//! A sheaf is at every moment in exactly one place, so nothing is lost or doubled.

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

/// Bytes from the main sheaves' words to the spares'.
pub(super) const SPARE: usize = CACHES_MOST * 8;
/// Bytes from the main sheaves' words to those of the sheaves for deferred frees.
pub(super) const DEFERRED: usize = 2 * SPARE;
/// Bytes of a unit.
pub(super) const UNIT: usize = 4 * SPARE;
/// Bytes from the main sheaves' words to those of the sheaves that hold what was freed to hardened caches.
pub(super) const HELD: usize = 3 * SPARE;

/// The units of all caches.
pub(super) static UNITS: Units = Units::new();

/// The units, for fast paths.
#[inline(always)]
pub(super) fn units() -> &'static Units {
    near!(UNITS, Units)
}

/// Held while units are installed, and while the CPUs are stopped.
pub(super) static STOPPING: Lock<()> = Lock::new(());

/// Chooses the backend, once. Returns false while another thread, or the frame that this handler
/// interrupted, is choosing: a unit that went in then would be worked on in both ways.
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

/// Makes the choice of backend and gives the current CPU its unit; false when there is no memory for it.
#[cold]
fn prepare() -> bool {
    if !choose_backend() {
        return false;
    }
    let index = pinfold_rseq::current();
    if !UNITS.unit(index).is_null() {
        // Stopped, or just installed.
        return false;
    }
    // No waiting: this may be a handler's slow path, in the midst of another's.
    let Some(_stopping) = STOPPING.try_lock() else {
        return false;
    };
    let layout = Layout::from_size_align(UNIT, sys::page_size());
    let Some(unit) = layout.ok().and_then(page::alloc_meta) else {
        return false;
    };
    // SAFETY: `alloc_meta` gives so large a block a mapping of its own, of whole pages.
    unsafe { crate::percpu::place_near(index, unit.as_ptr(), UNIT) };
    shepherd::register(idle::drain);
    UNITS.install(index, unit.as_ptr()).is_ok()
}

/// The word at `offset` of the current unit, which is made if it is not there; `None` where there is none.
pub(super) fn load(offset: usize) -> Option<u64> {
    // SAFETY: offsets of caches lie in the unit.
    unsafe { UNITS.load(offset) }.or_else(|| {
        // SAFETY: as above.
        prepare().then(|| unsafe { UNITS.load(offset) })?
    })
}

/// Every how many slow paths the clock is read, and another cache is looked at.
const TICK: u32 = 16;

/// Now and then lets a cache, another each time, give back what it does not need: also caches that are not used any more
/// come back to mind as long as any is.
pub(super) fn tick() {
    /// A line for each CPU, or several of a large machine: CPUs do not meet here.
    #[repr(align(64))]
    struct Calls(AtomicU32);
    static CALLS: [Calls; 64] = [const { Calls(AtomicU32::new(0)) }; 64];
    let calls = &CALLS[pinfold_rseq::current() % CALLS.len()].0;
    // A call that is lost between two threads does no harm.
    let calls = {
        let now = calls.load(Relaxed);
        calls.store(now.wrapping_add(1), Relaxed);
        now
    };
    // Not the first call: in a process that has just begun, nothing has stood idle.
    if calls % TICK != TICK - 1 {
        return;
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
}

impl Cache {
    /// The offset of the main sheaf's word.
    pub(super) fn main(&self) -> usize {
        usize::from(self.slot) * 8
    }

    /// Takes the current CPU's spare sheaf.
    pub(super) fn take_spare(&self) -> Option<Sheaf> {
        let offset = self.main() + SPARE;
        let word = load(offset)?;
        // SAFETY: the offset lies in the unit.
        if word == 0 || !unsafe { UNITS.store_if_equal(offset, word, 0) } {
            return None;
        }
        // SAFETY: taken out just now.
        unsafe { Sheaf::from_word(word) }
    }

    /// Takes the current CPU's spare sheaf; while sparse slabs drain, sends its objects to their slabs.
    fn spare_unless_sparse(&self, node: &Node) -> Option<Sheaf> {
        let spare = self.take_spare()?;
        if node.is_sparse() && !spare.is_empty() {
            self.put(node, spare);
            return None;
        }
        Some(spare)
    }

    /// Makes `sheaf` the current CPU's main one if what is there `may_go`, and keeps what was there, or else `sheaf`, as
    /// the spare or in the barn.
    fn install(&self, node: &Node, sheaf: Sheaf, may_go: impl Fn(u64) -> bool) {
        let exchange = |word: u64| {
            // SAFETY: the offset lies in the unit; the sheaf is the unit's once it is stored.
            may_go(word) && unsafe { UNITS.store_if_equal(self.main(), word, sheaf.word()) }
        };
        let old = match load(self.main()) {
            // SAFETY: taken out by the exchange.
            Some(word) if exchange(word) => unsafe { Sheaf::from_word(word) },
            _ => Some(sheaf),
        };
        if let Some(old) = old {
            // SAFETY: the offset lies in the unit; the sheaf is the unit's once it is stored.
            if !unsafe { UNITS.store_if_equal(self.main() + SPARE, 0, old.word()) } {
                self.put(node, old);
            }
        }
    }

    /// Puts a sheaf into `node`'s barn, after its objects of other nodes have gone home.
    pub(super) fn put(&self, node: &Node, mut sheaf: Sheaf) {
        self.send_home(node, &mut sheaf);
        node.put(self, sheaf);
    }

    /// An object when the main sheaf had none: from the spare, the barn, or a slab. Null when the system has no memory.
    #[cold]
    #[inline(never)]
    pub(super) fn alloc_slow(&self) -> *mut u8 {
        if self.checks() {
            return self.alloc_checked();
        }
        // The common path on atomics. With restartable sequences the thread may be on another CPU now.
        // SAFETY: the offset lies in the unit.
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

    /// Takes back an object when the main sheaf was full: into the spare, or one from the barn.
    ///
    /// # Safety
    ///
    /// `object` is the caller's, from this cache.
    #[cold]
    #[inline(never)]
    pub(super) unsafe fn free_slow(&self, object: *mut u8) {
        if self.checks() {
            // SAFETY: the caller's promise.
            return unsafe { self.free_checked(object) };
        }
        // As in `alloc_slow`.
        // SAFETY: the offset lies in the unit, and the object is the caller's to give.
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
                // SAFETY: the object is the caller's to give, and of that node.
                unsafe { self.home(object).give_objects(self, &[object]) };
            }
        }
    }
}

/// Takes the sheaves of every CPU that `wanted` says, of all caches that it says, to their barns; interrupts the CPUs that
/// run this process's threads once.
///
/// While it works, operations of all caches take the slow paths.
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

/// Empties a stopped unit's words for `cache`.
pub(super) fn drain_unit(cache: &Cache, unit: *mut u8) {
    drain_word(cache, unit, cache.main());
    drain_word(cache, unit, cache.main() + SPARE);
    drain_word(cache, unit, cache.main() + HELD);
    drain_deferred(cache, unit);
}

/// Seals what is deferred in a stopped unit for `cache`.
pub(super) fn drain_deferred(cache: &Cache, unit: *mut u8) {
    // SAFETY: as in `drain_word`.
    let word = unsafe { unit.add(cache.main() + DEFERRED).cast::<u64>().replace(0) };
    // SAFETY: taken out just now.
    if let Some(sheaf) = unsafe { Sheaf::from_word(word) } {
        cache.seal(sheaf);
    }
}

/// Takes the sheaf in one of a stopped unit's words for `cache` to the barn.
pub(super) fn drain_word(cache: &Cache, unit: *mut u8, offset: usize) {
    // SAFETY: the unit is stopped: it is the caller's, and the offset lies in it.
    let word = unsafe { unit.add(offset).cast::<u64>().replace(0) };
    // SAFETY: taken out just now.
    if let Some(sheaf) = unsafe { Sheaf::from_word(word) } {
        cache.put(cache.here(), sheaf);
    }
}
