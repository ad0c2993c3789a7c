//! Each CPU's sheaves of every cache, and how sheaves move between CPUs, barns and threads.
//!
//! A thread can be preempted, moved to another CPU, or interrupted by a signal handler between any
//! two instructions. If a move of a sheaf took two steps, a second thread might find the sheaf
//! between these steps, and two threads might use one sheaf. So a thread takes a sheaf out of a
//! unit, or puts a sheaf into it, by one operation on one word (`place`).
//!
//! # The steps of a slow path
//!
//! A thread takes these steps when an allocation finds the main sheaf empty
//! ([`Descriptor::alloc_slow`]), or a free finds it full ([`Descriptor::free_slow`]):
//!
//! 1. Take the spare: `take_if`. The sheaf now belongs to this thread.
//! 2. If there was no spare, or it was empty for an allocation or full for a free: get a sheaf at
//!    the barn, in exchange for the spare.
//! 3. Pop an object from the sheaf, or push one.
//! 4. Install the sheaf as the main sheaf: `exchange`. This replaces the main sheaf only if that
//!    sheaf is missing, or is empty for an allocation, or is full for a free. The old main sheaf
//!    now belongs to this thread.
//! 5. Put away the sheaf that this thread has now: `put` makes it the spare. If there is a
//!    spare already, put the sheaf into the barn.
//!
//! Between two steps the thread may move to another CPU. That does no harm, because each step
//! compares the current CPU's word before it writes. If the comparison in step 4 fails, the thread
//! keeps its own sheaf, and step 5 puts that sheaf away. At every moment, a sheaf is in exactly one
//! place. So no object is lost or handed out twice.

use super::idle;
use super::sheaf::{Sheaf, word_is_empty, word_is_full};
use crate::cache_units::{DEFERRED, HELD, MAIN, SHEAF_UNITS, SPARE, STOPPING, word};
use crate::lock::Guard;
use crate::segment::SlabEvent;
use crate::slab::cache::descriptor::Descriptor;
use crate::slab::cache::registry;
use crate::slab::node::part::Node;
use crate::spared::{self, Kind};
use crate::{shepherd, sys};
use core::ptr::null_mut;
use core::sync::atomic::AtomicU32;
use core::sync::atomic::Ordering::Relaxed;
use pinfold_rseq::{FenceError, fence, is_stepped, possible};

/// One call of [`tick`] in this many does background work.
const TICK: u32 = 16;

/// Does a share of the background work on every 16th call, and when another process has a request.
/// Takes the idle sheaves of this CPU. Then lets one cache, in round-robin order, give back the
/// memory that it did not need lately. As long as the program uses any cache, unused caches have
/// their turn too. Returns whether this call did any work.
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
    if calls % TICK != TICK - 1 && !shepherd::is_called() {
        return false;
    }
    // A debugger that steps through this thread slows it down so much that the work would be due
    // again as soon as it is done, and the program would hardly advance.
    if is_stepped() {
        return false;
    }
    shepherd::tick_in_passing();
    idle::take_idle_here();
    if let Some((cache, round)) = registry::in_turn(calls / TICK) {
        let now = sys::coarse_milliseconds() as u32;
        for part in cache.parts_in_turn(round) {
            part.release_idle(&cache, now);
        }
    }
    true
}

impl Descriptor {
    /// Takes the current CPU's spare sheaf out of its unit.
    pub(crate) fn take_spare(&self) -> Option<Sheaf> {
        self.place(SPARE).take_if(|_| true)
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
        let left = self.place(MAIN).exchange(sheaf, may_go);
        if let Some(left) = left.and_then(|left| self.place(SPARE).put(left)) {
            self.put(node, left);
        }
    }

    /// Puts a sheaf into `node`'s barn. First sends the sheaf's objects of other nodes to their
    /// slabs.
    pub(crate) fn put(&self, node: &Node, mut sheaf: Sheaf) {
        self.send_home(node, &mut sheaf);
        node.put(self, sheaf);
    }

    /// Allocates an object when the main sheaf is empty: from the spare, the barn, or a slab.
    /// Returns null if the system has no memory.
    #[cold]
    #[inline(never)]
    pub(crate) fn alloc_slow(&self) -> *mut u8 {
        if self.checks() {
            return self.alloc_checked();
        }
        // On the atomic backend, this is the common path, because the fast path always fails. With
        // restartable sequences, it helps a thread that has moved to another CPU since its fast
        // path failed.
        let object = self.place(MAIN).pop();
        if !object.is_null() {
            return object;
        }
        let request = self.request();
        let node = self.part_here(request.node);
        tick();
        let sheaf = match self.spare_unless_sparse(node) {
            Some(spare) if !spare.is_empty() => {
                node.count(SlabEvent::AllocLockless, 1);
                Ok(spare)
            }
            other => self.exchange_for_full(request, node, other),
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
                self.alloc_from(request, &mut object);
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
    pub(crate) unsafe fn free_slow(&self, object: *mut u8) {
        if self.checks() {
            // SAFETY: the caller promises that the object is this cache's and unused.
            return unsafe { self.free_checked(object) };
        }
        // On the atomic backend, this is the common path. With restartable sequences, it helps a
        // thread that has moved to another CPU since its fast path failed.
        // SAFETY: the caller passes ownership of the object.
        if unsafe { self.place(MAIN).push(object) } {
            return;
        }
        let node = self.here();
        tick();
        let spare = self.spare_unless_sparse(node);
        let install = |sheaf| self.install(node, sheaf, word_is_full);
        // SAFETY: the caller passes ownership of the object.
        unsafe { self.free_into(node, spare, object, install) };
    }

    /// Frees an object into `sheaf`, or into a sheaf from the barn if `sheaf` is full or missing.
    /// Hands the sheaf that took the object to `install`. If there is no sheaf with room, frees the
    /// object to its slab.
    ///
    /// # Safety
    ///
    /// `object` came from this cache, and no thread uses it any more.
    pub(crate) unsafe fn free_into(
        &self,
        node: &Node,
        mut sheaf: Option<Sheaf>,
        object: *mut u8,
        install: impl FnOnce(Sheaf),
    ) {
        if let Some(full) = sheaf.as_mut().filter(|sheaf| sheaf.is_full()) {
            // This takes other nodes' objects out, which may make room.
            self.send_home(node, full);
        }
        let sheaf = match sheaf {
            Some(sheaf) if !sheaf.is_full() => {
                node.count(SlabEvent::FreeLockless, 1);
                Ok(sheaf)
            }
            other => self.exchange_for_empty(node, other),
        };
        match sheaf {
            Ok(mut sheaf) if !sheaf.is_full() => {
                // SAFETY: the match found that the sheaf has room.
                unsafe { sheaf.push(object) };
                install(sheaf);
            }
            other => {
                if let Ok(sheaf) | Err(Some(sheaf)) = other {
                    self.put(node, sheaf);
                }
                // SAFETY: the caller passed ownership of the object and no sheaf took it, so this
                // thread owns it.
                unsafe { self.give_home(&mut [object]) };
            }
        }
    }
}

/// Moves the sheaves of all CPUs to their barns, for the caches that `caches` accepts. Does nothing
/// in a signal handler that may not wait for [`STOPPING`].
///
/// 1. Stops each unit: operations that begin later fail, and take the slow paths.
/// 2. Fences, which ends the operations under way. The fence interrupts the CPUs that run threads
///    of this process.
/// 3. Takes the sheaves out of the units.
/// 4. Resumes each unit.
///
/// # Errors
///
/// [`FenceError`], if the kernel cannot fence. On the atomic backend also with `EBUSY`, if an
/// operation does not end within ten seconds, or if this is a signal handler that interrupted the
/// operation. The sheaves then stay where they are.
pub(crate) fn drain(caches: impl Fn(&Descriptor) -> bool) -> Result<(), FenceError> {
    drain_or_fail(caches).or_else(|refused| match refused {
        Refused::Lock => Ok(()),
        Refused::Fence(error) => Err(error),
    })
}

/// The reason that the sheaves stay where they are.
pub(crate) enum Refused {
    /// The caller is a signal handler that may not wait for [`STOPPING`].
    Lock,
    Fence(FenceError),
}

/// Drains as [`drain`] does. Also fails if the caller may not wait for [`STOPPING`].
pub(crate) fn drain_or_fail(caches: impl Fn(&Descriptor) -> bool) -> Result<(), Refused> {
    for attempt in 0..10 {
        if attempt > 0 {
            // A fork may wait for `STOPPING`.
            sys::sleep_microseconds(1000);
        }
        let done = drain_once(STOPPING.lock().ok_or(Refused::Lock)?, &caches);
        if done != Err(BUSY) {
            return done.map_err(Refused::Fence);
        }
    }
    Err(Refused::Fence(BUSY))
}

/// Drains as [`drain`] does, but waits neither for [`STOPPING`] nor long for an operation. Returns
/// whether it drained.
pub(crate) fn try_drain(caches: impl Fn(&Descriptor) -> bool) -> bool {
    let stopping = STOPPING.try_lock();
    stopping.is_some_and(|stopping| drain_once(stopping, caches).is_ok())
}

const BUSY: FenceError = FenceError { errno: libc::EBUSY };

/// Drains as [`drain`] does. On the atomic backend, gives up if an operation does not end within a
/// second.
fn drain_once(
    stopping: Guard<'_, ()>,
    caches: impl Fn(&Descriptor) -> bool,
) -> Result<(), FenceError> {
    let units = || (0..possible()).filter(|&index| !SHEAF_UNITS.unit(index).is_null());
    spared::note(Kind::Drain);
    units().for_each(|index| SHEAF_UNITS.stop(index));
    let fenced = fence();
    let waited = units().take_while(|&index| fenced.is_ok() && SHEAF_UNITS.await_stopped(index));
    let stopped = waited.count();
    let all = stopped == units().count();
    if all {
        registry::for_each(|cache| {
            if caches(cache) {
                units().for_each(|index| drain_unit(cache, SHEAF_UNITS.unit(index)));
            }
        });
    }
    for (nth, index) in units().enumerate() {
        match nth < stopped {
            true => SHEAF_UNITS.resume(index),
            false => SHEAF_UNITS.resume_untouched(index),
        }
    }
    drop(stopping);
    fenced.and_then(|()| all.then_some(()).ok_or(BUSY))
}

/// Takes all sheaves of `cache` out of a stopped unit.
pub(crate) fn drain_unit(cache: &Descriptor, unit: *mut u8) {
    drain_word(cache, unit, cache.main());
    drain_word(cache, unit, cache.main() + SPARE);
    drain_word(cache, unit, cache.main() + HELD);
    drain_deferred(cache, unit);
}

/// Takes the deferred sheaf of `cache` out of a stopped unit and seals it (`deferred`).
pub(crate) fn drain_deferred(cache: &Descriptor, unit: *mut u8) {
    if let Some(sheaf) = take_from_stopped(unit, cache.main() + DEFERRED) {
        cache.seal(sheaf);
    }
}

/// Moves the sheaf at `offset` of a stopped unit to the barn of `cache`.
pub(crate) fn drain_word(cache: &Descriptor, unit: *mut u8, offset: usize) {
    if let Some(sheaf) = take_from_stopped(unit, offset) {
        cache.put(cache.here(), sheaf);
    }
}

/// Takes the sheaf at `offset` out of a stopped unit.
fn take_from_stopped(unit: *mut u8, offset: usize) -> Option<Sheaf> {
    let word = word(unit, offset);
    let sheaf = word.load(Relaxed);
    // A load and a store suffice: the unit is stopped, so no other thread writes the word.
    word.store(0, Relaxed);
    // SAFETY: the word was replaced by 0 above, so this thread owns the sheaf.
    unsafe { Sheaf::from_word(sheaf) }
}
