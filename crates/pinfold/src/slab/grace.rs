//! Grace periods: waiting until everybody who may still look at something has stopped looking.
//!
//! A *reader* is a thread between [`enter`] and the drop of the [`Guard`]. A *grace period* is a span of time in which every reader that
//! was in at its beginning has left. What was taken out of sight before a grace period began is looked at by nobody after
//! it, and can be freed: see [`free_deferred`](super::KmemCache::free_deferred).
//!
//! # The counts
//!
//! As in the kernel's SRCU: two *phases*, and for each, on each CPU, how often it was entered and how often left. A reader
//! enters the phase that is current by its load of `PHASE`, which may be old, and leaves the same, on whatever CPU. Only critical
//! sections write these words. Where there is none to be had (no memory, a CPU that was not announced) the same counts
//! are kept in `SPILLED`, by atomic adds. A phase's count is the sum over all; it only grows, modulo 2^64.
//!
//! # The writer
//!
//! `STARTED` numbers the grace periods. At most one is under way (`DONE` ≤ `STARTED` ≤ `DONE` + 1), with a set of phases that
//! it still waits for: at its beginning both. Whoever holds `PERIOD` moves it by one step at a time, `poll`:
//!
//! 1. sum what has left each phase; 2. fence; 3. sum what has entered. Where both are equal, nobody who was in at the fence
//!    is left in that phase: it is waited for no more. 4. With none left the grace period is over (`DONE`). With only the current phase
//!    left, the other becomes the current one: whoever enters from then on is not waited for.
//!
//! A step never waits. No step is made, and nothing fenced, while nobody needs a grace period that is not over (`NEEDED` ≤ `DONE`).
//!
//! # Why no reader sees a freed object
//!
//! Let W be the store that takes an object out of sight, R a reader that has loaded its address nevertheless, and F
//! the fence of a step of a grace period whose `ticket` was drawn after W. The fence is a point in every thread's program,
//! with everything before it done, for all to see, and everything after it to come.
//!
//! * W is before F. R has loaded the address from before W, so that load is before R's point of F, and R's *entered* before that:
//!   step 3 counts it, in whichever phase R is.
//! * Every *left* that step 1 has counted was done before F, so its *entered* was: step 3 counts that too. So when the sums are equal, they
//!   are of the same readers, and R's *left* is among them: its last look at the object was before F.
//! * That holds for each phase by itself, and a grace period is over when it did for both, after W: R may be in either. One
//!   phase is not enough: a reader may load `PHASE`, sleep through a grace period, and enter the phase that then seems empty for good.
//! * `DONE` is stored with release order and read with acquire order before anything is freed.
//!
//! # The fence, and what readers pay
//!
//! Decided once, before the first reader that would rely on it, and written down in `PLACE`:
//!
//! * **light**: the backend has restartable sequences, the kernel can fence, and no CPU is isolated. F is a membarrier: a full
//!   barrier on every CPU that runs a thread of this process; what does not run has passed one in the scheduler. Readers need none of
//!   their own, only that the compiler keeps the order. When the kernel refuses the fence later on (a sandbox was closed) no step is made
//!   any more and whatever waits is kept: waiting says so, nothing is freed early.
//! * **heavy**: readers execute a sequentially consistent fence after entering and before leaving. F is the writer's own fence: of
//!   two such fences one is first, so that either step 3 sees *entered* or R sees W. No CPU is ever interrupted. What is counted in
//!   `SPILLED` is always done this way.
//!
//! A ticket needs care: that no grace period numbered so has begun is read after a fence, behind W; the step that begins one stores
//! its number before F. One of both fences is first: so W is before F, or the ticket is for the next.
//!
//! # Signals, fork
//!
//! Handlers may enter and leave anywhere, and poll; they are refused a lock that the interrupted frame holds. Guards nest. In the child of
//! a fork there are no readers: the counts begin anew, elsewhere (`fork_child`), so that threads that are gone block nobody, and a
//! guard that came along counts where nobody looks.

use super::fork;
use crate::fork as process;
use crate::lock::Lock;
use crate::percpu::{self, units};
use crate::sys;
use crate::topology::facts;
use core::fmt;
use core::marker::PhantomData;
use core::mem::ManuallyDrop;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, compiler_fence, fence as fence_own};
use pinfold_rseq::{Backend, FenceError, backend};

/// The block of a unit: entered phase 0, entered phase 1, left phase 0, left phase 1.
const SIZE: usize = 32;
/// From a phase's *entered* to its *left*.
const LEFT: usize = 16;
/// From phase 0's words to phase 1's.
const PHASE_1: usize = 8;

/// Where the block is in every unit, a multiple of 32, and in the low bits what readers do.
static PLACE: AtomicUsize = AtomicUsize::new(UNDECIDED);
/// Readers fence for themselves.
const HEAVY: usize = 1;
/// There is no block and will be none.
const NONE: usize = HEAVY | 2;
/// There is no block yet: readers count in [`SPILLED`].
const UNDECIDED: usize = HEAVY;
const BLOCK: usize = !(SIZE - 1);

/// What is added to a block's offset for the phase to enter: 0 or [`PHASE_1`].
static PHASE: AtomicUsize = AtomicUsize::new(0);

/// The same four counts, for readers without a unit.
static SPILLED: [AtomicU64; 4] = [const { AtomicU64::new(0) }; 4];
/// How many forks ago the program began.
static IMAGE: AtomicU32 = AtomicU32::new(0);

/// The last grace period that has begun.
static STARTED: AtomicU64 = AtomicU64::new(0);
/// The last one that is over.
static DONE: AtomicU64 = AtomicU64::new(0);
/// The last one that somebody waits for.
static NEEDED: AtomicU64 = AtomicU64::new(0);

/// What is known of the grace period under way: a bit for each phase that is waited for; 0 when there is none.
static PERIOD: Lock<u8> = Lock::new(0);
const BOTH: u8 = 0b11;

/// A reader, until it is dropped. What it has looked up stays as it is so long, if whoever takes it out of sight frees it
/// [deferred](super::KmemCache::free_deferred).
#[must_use = "what is looked at without a guard may be freed meanwhile"]
pub struct Guard {
    /// The offset of the word to leave by, and [`HEAVY`] if so.
    at: usize,
    image: u32,
    /// It leaves in the thread in which it entered: the fence is a point in that thread's program.
    not_send: PhantomData<*mut ()>,
}

/// Becomes a reader. Costs one add in a critical section, and as much again when the guard is dropped; where the kernel cannot fence, or
/// some CPU is isolated, each with a memory fence more. No lock and no waiting, in any thread or signal handler; guards may nest.
///
/// A guard that lives on in the child of a `fork` protects nothing there.
///
/// ```
/// use pinfold::slab::{KmemCache, grace};
/// use std::alloc::Layout;
/// use std::ptr::{NonNull, null_mut};
/// use std::sync::atomic::{AtomicPtr, Ordering};
///
/// static CURRENT: AtomicPtr<u8> = AtomicPtr::new(null_mut());
///
/// let cache = KmemCache::new("route", Layout::new::<u64>())?;
/// CURRENT.store(cache.alloc().expect("memory").as_ptr(), Ordering::Release);
///
/// let reader = grace::enter();
/// let seen = CURRENT.load(Ordering::Acquire);
/// // Another thread takes it out of sight and frees it …
/// let old = NonNull::new(CURRENT.swap(null_mut(), Ordering::AcqRel)).expect("set above");
/// // SAFETY: it came from this cache, and whoever comes now does not find it.
/// unsafe { cache.free_deferred(old) };
/// // … but not while somebody may look at it.
/// // SAFETY: still an object, for `reader` is there.
/// unsafe { seen.read_volatile() };
/// drop(reader);
///
/// cache.flush_deferred()?;
/// cache.destroy().expect("every object came back");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(alias = "srcu_read_lock")]
#[doc(alias = "rcu_read_lock")]
#[inline]
pub fn enter() -> Guard {
    // Relaxed: an old phase is as good, see the module.
    let phase = PHASE.load(Relaxed);
    let place = PLACE.load(Acquire);
    // SAFETY: a light place is the offset of the counts' block.
    if place & HEAVY != 0 || !unsafe { units().add(place + phase, 1) } {
        return enter_slow(phase);
    }
    // Together with the writer's membarrier a full fence: what is looked up comes after the add.
    compiler_fence(SeqCst);
    Guard {
        at: place + phase + LEFT,
        image: 0,
        not_send: PhantomData,
    }
}

#[cold]
#[inline(never)]
fn enter_slow(phase: usize) -> Guard {
    let place = match PLACE.load(Acquire) {
        UNDECIDED => decide(),
        place => place,
    };
    let image = IMAGE.load(Relaxed);
    if !add(place, phase) {
        SPILLED[phase / 8].fetch_add(1, Relaxed);
        // A spilled reader fences for itself, whatever the others do. Pairs with the writer's.
        fence_own(SeqCst);
    } else if place & HEAVY != 0 {
        // Pairs with the writer's: it sees the add, or this reader what the writer did before.
        fence_own(SeqCst);
    } else {
        // As in `enter`.
        compiler_fence(SeqCst);
    }
    Guard {
        at: place + phase + LEFT,
        image,
        not_send: PhantomData,
    }
}

/// Adds one to a word of this CPU's block at `place`; false when there is none.
fn add(place: usize, word: usize) -> bool {
    let block = place & BLOCK;
    if block == 0 {
        return false;
    }
    // SAFETY: the word lies in the counts' block.
    let mut added = unsafe { units().add(block + word, 1) };
    if !added && percpu::install_here().is_some() {
        // SAFETY: as above.
        added = unsafe { units().add(block + word, 1) };
    }
    added
}

/// For C, which has no guards to drop.
impl Guard {
    /// The guard as two words, which [`from_words`](Self::from_words) takes back.
    #[doc(hidden)]
    #[inline]
    pub fn into_words(self) -> [u64; 2] {
        let guard = ManuallyDrop::new(self);
        [guard.at as u64, guard.image.into()]
    }

    /// The guard that these words were.
    ///
    /// # Safety
    ///
    /// They came from [`into_words`](Self::into_words) in this thread, and are taken back only once.
    #[doc(hidden)]
    #[inline]
    pub unsafe fn from_words([at, image]: [u64; 2]) -> Guard {
        Guard {
            at: at as usize,
            image: image as u32,
            not_send: PhantomData,
        }
    }
}

impl Drop for Guard {
    #[inline]
    fn drop(&mut self) {
        // As in `enter`: what was looked up comes before the add.
        compiler_fence(SeqCst);
        // SAFETY: an offset of a word of the counts' block.
        if self.at & HEAVY != 0 || !unsafe { units().add(self.at, 1) } {
            leave_slow(self);
        }
    }
}

#[cold]
#[inline(never)]
fn leave_slow(guard: &Guard) {
    // For heavy and spilled readers: everything was looked at before it is counted. Pairs with the writer's.
    fence_own(SeqCst);
    let (place, word) = (guard.at & BLOCK, guard.at & (SIZE - 1) & !7);
    if add(place, word) {
        return;
    }
    // The child of a fork counts anew: a guard that came along is not among them.
    let here = match place {
        0 => guard.image == IMAGE.load(Relaxed),
        block => PLACE.load(Relaxed) & BLOCK == block,
    };
    if here {
        SPILLED[word / 8].fetch_add(1, Release);
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard").finish_non_exhaustive()
    }
}

/// Gives the counts their place and decides what readers do; [`UNDECIDED`] still when there is no memory.
#[cold]
fn decide() -> usize {
    let registered = fork::register() && percpu::register_fork();
    let Some(block) = registered.then(|| percpu::alloc(SIZE)).flatten() else {
        return UNDECIDED;
    };
    // A small block does not cross a line, and begins at a multiple of its size.
    let heavy = backend() == Backend::Atomic || some_isolated() || sys::keep_errno(cannot_fence);
    let place = block | if heavy { HEAVY } else { 0 };
    match PLACE.compare_exchange(UNDECIDED, place, AcqRel, Acquire) {
        Ok(_) => place,
        Err(theirs) => {
            // SAFETY: nobody else knows of it.
            unsafe { percpu::free(block, SIZE) };
            theirs
        }
    }
}

fn cannot_fence() -> bool {
    pinfold_rseq::fence().is_err()
}

/// Whether there are CPUs that nothing may interrupt.
fn some_isolated() -> bool {
    facts::any_quiet()
}

/// Returns the place, decided for good: a writer must not overlook readers that rely on its fence.
/// Returns `None` if a fork in another thread kept the counts from getting their place.
fn decided() -> Option<usize> {
    let mut place = PLACE.load(Acquire);
    let turn = process::turn();
    if place == UNDECIDED {
        place = decide();
    }
    if place == UNDECIDED {
        if !turn.is_multiple_of(2) || turn != process::turn() {
            return None;
        }
        place = match PLACE.compare_exchange(UNDECIDED, NONE, AcqRel, Acquire) {
            Ok(_) => NONE,
            Err(theirs) => theirs,
        };
    }
    Some(place)
}

/// The number of a grace period that begins after everything that the caller has done, and wants it. Costs a memory fence.
pub(super) fn ticket() -> u64 {
    // Pairs with the fence of a step: see the module.
    fence_own(SeqCst);
    let ticket = STARTED.load(Relaxed) + 1;
    NEEDED.fetch_max(ticket, Relaxed);
    ticket
}

/// Whether the grace period `ticket` is over.
#[inline]
pub(super) fn passed(ticket: u64) -> bool {
    // Acquire pairs with the release in `step`: readers' last looks come before.
    DONE.load(Acquire) >= ticket
}

/// Makes one step if a grace period is needed, and nobody else is at it; never waits.
///
/// Interrupts, where readers are light, each CPU that runs a thread of this process; some microseconds.
pub(super) fn poll() -> Result<(), FenceError> {
    let needed = || !passed(NEEDED.load(Relaxed));
    if !needed() {
        return Ok(());
    }
    match PERIOD.try_lock() {
        Some(mut waited_for) if needed() => step(&mut waited_for),
        _ => Ok(()),
    }
}

fn step(waited_for: &mut u8) -> Result<(), FenceError> {
    let Some(place) = decided() else {
        return Ok(());
    };
    if *waited_for == 0 {
        // Relaxed: before the fence below, with which that of `ticket` pairs.
        STARTED.fetch_add(1, Relaxed);
        *waited_for = BOTH;
    }
    let left = [LEFT, LEFT + PHASE_1].map(|word| sum(place, word));
    fence(place)?;
    let entered = [0, PHASE_1].map(|word| sum(place, word));
    for phase in 0..2 {
        if left[phase] == entered[phase] {
            *waited_for &= !(1 << phase);
        }
    }
    let current = PHASE.load(Relaxed);
    if *waited_for == 0 {
        // Release pairs with the acquire in `passed`.
        DONE.store(STARTED.load(Relaxed), Release);
    } else if *waited_for == 1 << (current / PHASE_1) {
        // Relaxed: nothing depends on when readers see it.
        PHASE.store(PHASE_1 - current, Relaxed);
    }
    Ok(())
}

/// The sum of a word over all CPUs, and what was spilled.
fn sum(place: usize, word: usize) -> u64 {
    // Acquire: what was counted, and what came before it in its thread, is seen from here on.
    let mut sum = SPILLED[word / 8].load(Acquire);
    if place & BLOCK != 0 {
        percpu::for_each_used((place & BLOCK) + word, |[count]| {
            sum = sum.wrapping_add(count.load(Acquire));
        });
    }
    sum
}

/// F of the module's text.
fn fence(place: usize) -> Result<(), FenceError> {
    // Pairs with the fences of heavy readers, of spilled ones, and of `ticket`.
    fence_own(SeqCst);
    if place & HEAVY == 0 {
        // Pairs with the order of light readers' programs.
        sys::keep_errno(pinfold_rseq::fence)?;
    }
    // What the kernel leaves out where no other thread runs.
    fence_own(SeqCst);
    Ok(())
}

/// Returns when every reader that was in when it was called has left.
///
/// Costs, with no reader about, a few microseconds, most of them the fence that interrupts the CPUs running this process's threads (none
/// where readers fence for themselves). Not for readers, who would wait for themselves, nor for signal handlers.
///
/// # Errors
///
/// [`FenceError`] when the kernel has become unable to fence, by a sandbox for instance; readers may be in then.
///
/// ```
/// use pinfold::slab::grace;
///
/// let reader = grace::enter();
/// drop(reader);
/// grace::synchronize()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(alias = "synchronize_rcu")]
#[doc(alias = "synchronize_srcu")]
pub fn synchronize() -> Result<(), FenceError> {
    wait(ticket())
}

/// Returns when the grace period `ticket` is over; not for readers, nor for signal handlers.
pub(super) fn wait(ticket: u64) -> Result<(), FenceError> {
    /// Longer than most readers are in; and no more than so many interrupts a second.
    const NAP_MOST: u32 = 1000;
    let mut nap = 10;
    while !passed(ticket) {
        poll()?;
        if !passed(ticket) {
            sys::sleep_microseconds(nap);
            nap = (nap * 2).min(NAP_MOST);
        }
    }
    Ok(())
}

pub(super) fn is_lock_held(thread: u64) -> bool {
    PERIOD.is_held_by(thread)
}

pub(super) fn lock_for_fork() {
    PERIOD.lock_for_fork();
}

pub(super) fn unlock_after_fork() {
    PERIOD.unlock_after_fork();
}

/// In the child: the readers are gone, their threads with them. Their block is left to the guards that came along; the
/// grace period that was under way goes on with the new counts.
pub(super) fn fork_child() {
    IMAGE.fetch_add(1, Relaxed);
    PLACE.store(UNDECIDED, Relaxed);
    SPILLED.iter().for_each(|count| count.store(0, Relaxed));
}
