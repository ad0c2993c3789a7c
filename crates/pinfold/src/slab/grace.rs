//! Grace periods: how to find out that no thread still uses an object that new readers cannot find.
//!
//! A *reader* is a thread between [`enter`] and the drop of its [`Guard`]. A *grace period* is a
//! span of time in which every reader that was inside at its beginning has left. An object is *out
//! of sight* when new readers cannot find it. After a grace period that began later, no reader uses
//! the object, and it can be freed: see [`free_deferred`](super::KmemCache::free_deferred).
//!
//! # The counts
//!
//! The counts are those of the kernel's SRCU. There are two *phases*. For each phase, each CPU
//! counts how often readers *entered* it there, and how often they *left* it. A reader loads the
//! current phase from `PHASE` (the value may be old), enters it, and leaves the same one, perhaps
//! on another CPU. Only critical sections write these words. A reader whose CPU has no such words
//! (no memory, or an unannounced CPU) is *spilled*: it counts in `SPILLED`, by atomic adds. A
//! phase's two counts are sums over all CPUs and `SPILLED`. They only grow (modulo 2^64).
//!
//! # The writer
//!
//! Grace periods are numbered. `STARTED` is the last one that has begun, and `DONE` the last one
//! that is over. At most one is under way (`DONE` ≤ `STARTED` ≤ `DONE` + 1). It has a set of phases
//! that it still waits for, at its beginning both. The *writer* is the holder of the lock `PERIOD`.
//! It advances the grace period one step at a time, in `poll`:
//!
//! 1. Sum the *left* words of each phase.
//! 2. Fence.
//! 3. Sum the *entered* words of each phase. If both sums of a phase are equal, every reader that
//!    entered it before the fence has left. The grace period then stops waiting for that phase.
//! 4. If the set is empty now, the grace period is over (`DONE`). If only the current phase is left
//!    in the set, make the other one current, so that new readers do not delay the grace period.
//!
//! A step never waits for readers. Threads make steps, and execute fences, only while a thread
//! needs a grace period that is not over (`NEEDED` > `DONE`).
//!
//! # Why no reader sees a freed object
//!
//! A thread that defers a free draws a *ticket*: the number of a grace period that begins later.
//! Let W be the store that takes an object out of sight. Let R be a reader that has loaded the
//! object's address nevertheless. Let F be the fence of a step of a grace period whose ticket was
//! drawn after W. F has one *point* in each thread's program. After F, all threads see what a
//! thread did before its point. What a thread does after its point takes effect only after F began.
//!
//! 1. W comes before F (see below). R loaded the address that was there before W, so R's load, and
//!    R's *entered* before the load, come before R's point of F. Step 3 counts that *entered*, in
//!    whichever phase R is.
//! 2. Every *left* that step 1 counted came before F, and so did the *entered* of the same reader.
//!    Step 3 counts those *entered* too. So if the sums are equal, they count the same readers. R
//!    is one of them, so step 1 counted R's *left*, and R's last use of the object came before F.
//! 3. Points 1 and 2 hold for each phase by itself. R may be in either, so a grace period ends when
//!    both had equal sums after W. One phase is not enough: a reader may load `PHASE`, sleep
//!    through a grace period, and then enter the phase that the next grace period would no longer
//!    check.
//! 4. `DONE` is stored with release order, and read with acquire order before an object is freed.
//!    So R's last use comes before the free.
//!
//! Why W comes before F: a thread draws a ticket after a fence, T, that follows W. The step that
//! begins a grace period stores its number in `STARTED` before F. If T comes before F, so does W.
//! If F comes before T, the thread sees that this one has begun, and draws the next.
//!
//! # The fence, and what readers pay
//!
//! The first reader or writer decides which of two ways all use, and stores it in `PLACE`:
//!
//! * **light**: the backend has restartable sequences, the kernel can fence, and no CPU is
//!   isolated. F is a membarrier: a full barrier on every CPU that runs a thread of this process. A
//!   thread that does not run has passed a barrier in the scheduler. Readers need no fence. Only
//!   the compiler must keep the order of their accesses. If the kernel refuses the fence later (in
//!   a sandbox), no step succeeds: deferred objects stay, and waiting calls return an error.
//! * **heavy**: readers execute a sequentially consistent fence after entering and before leaving.
//!   F is the writer's own fence. One of these two fences comes first: either step 3 sees R's
//!   *entered*, or R sees W. No CPU is ever interrupted. Spilled readers always use this way.
//!
//! # Signals, fork
//!
//! Signal handlers may enter, leave and poll anywhere. If one needs a lock that the interrupted
//! frame holds, it does not wait: it makes no step, or enters as a spilled reader. Guards nest. The
//! child of a fork has no readers. `fork_child` gives it new counts, so that the parent's readers
//! do not block grace periods there. A guard from before the fork leaves by the old counts, which
//! the child does not read.

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

/// Bytes of a unit's block: *entered* of phase 0 and 1, *left* of phase 0 and 1.
const SIZE: usize = 32;
/// Bytes from a phase's *entered* to its *left*.
const LEFT: usize = 16;
/// Bytes from phase 0's words to phase 1's.
const PHASE_1: usize = 8;

/// The offset in every unit of the block of counts. It is a multiple of 32, so its low bits have
/// room for the way that readers use: light or heavy.
static PLACE: AtomicUsize = AtomicUsize::new(UNDECIDED);
/// The bit for the heavy way: readers execute fences.
const HEAVY: usize = 1;
/// There is no block, and there will be none.
const NONE: usize = HEAVY | 2;
/// There is no block yet. Readers count in [`SPILLED`].
const UNDECIDED: usize = HEAVY;
const BLOCK: usize = !(SIZE - 1);

/// The phase that readers enter, as the offset of its words in the block: 0 or [`PHASE_1`].
static PHASE: AtomicUsize = AtomicUsize::new(0);

/// The four counts of readers that have no block.
static SPILLED: [AtomicU64; 4] = [const { AtomicU64::new(0) }; 4];
/// Number of forks between the program's start and this process.
static IMAGE: AtomicU32 = AtomicU32::new(0);

/// The number of the last grace period that has begun.
static STARTED: AtomicU64 = AtomicU64::new(0);
/// The number of the last grace period that is over.
static DONE: AtomicU64 = AtomicU64::new(0);
/// The highest number of a grace period that a thread needs.
static NEEDED: AtomicU64 = AtomicU64::new(0);

/// A bit for each phase that the current grace period still waits for. 0 if none is under way.
static PERIOD: Lock<u8> = Lock::new(0);
const BOTH: u8 = 0b11;

/// Makes the thread a reader until the guard is dropped. Until then, an object that the thread has
/// looked up is not freed, if all frees of such objects are
/// [deferred](super::KmemCache::free_deferred). See [`enter`].
#[must_use = "what is looked at without a guard may be freed meanwhile"]
pub struct Guard {
    /// The offset of the *left* word, with the low bits of [`PLACE`].
    at: usize,
    image: u32,
    /// Not `Send`: the proof requires that a reader leaves in the thread in which it entered,
    /// because the fence is a point in that thread's program.
    not_send: PhantomData<*mut ()>,
}

/// Makes the thread a reader until the guard is dropped.
///
/// Costs one add in a critical section. Dropping the guard costs another one. Both also cost a
/// memory fence if the kernel cannot fence, or a CPU is isolated. Takes no lock and does not wait.
/// Any thread or signal handler may call this, and guards may nest.
///
/// A guard that was made before a `fork` protects nothing in the child.
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
/// // Another thread takes the object out of sight and frees it …
/// let old = NonNull::new(CURRENT.swap(null_mut(), Ordering::AcqRel)).expect("set above");
/// // SAFETY: the object came from this cache, and later readers do not find it.
/// unsafe { cache.free_deferred(old) };
/// // … but it stays an object while `reader` may use it.
/// // SAFETY: `reader` keeps the object from being freed.
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
    // Relaxed, because an old phase does no harm: see the module's description. The acquire below
    // pairs with the release in `decide`: a reader that sees the offset also sees the block.
    let phase = PHASE.load(Relaxed);
    let place = PLACE.load(Acquire);
    // SAFETY: without `HEAVY`, `place` is the offset of the counts' block, which every unit has.
    if place & HEAVY != 0 || !unsafe { units().add(place + phase, 1) } {
        return enter_slow(phase);
    }
    // Pairs with the writer's membarrier. Together they act as a full fence, so that the reader's
    // look-ups come after the add.
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
        // Spilled readers fence in light processes too. Pairs with `fence`, as below.
        fence_own(SeqCst);
    } else if place & HEAVY != 0 {
        // Pairs with `fence`: either the writer sees the add, or this reader sees what the writer
        // did before.
        fence_own(SeqCst);
    } else {
        // Pairs with the writer's membarrier, as in `enter`.
        compiler_fence(SeqCst);
    }
    Guard {
        at: place + phase + LEFT,
        image,
        not_send: PhantomData,
    }
}

/// Adds one to word `word` of this CPU's block at `place`. Returns false if the CPU has no block.
fn add(place: usize, word: usize) -> bool {
    let block = place & BLOCK;
    if block == 0 {
        return false;
    }
    // SAFETY: the caller's word lies in the counts' block, which every unit has.
    let mut added = unsafe { units().add(block + word, 1) };
    if !added && percpu::install_here().is_some() {
        // SAFETY: the caller's word lies in the counts' block, which the new unit has too.
        added = unsafe { units().add(block + word, 1) };
    }
    added
}

/// For the C API, which has no drop.
impl Guard {
    /// Returns the guard as two words, for [`from_words`](Self::from_words).
    #[doc(hidden)]
    #[inline]
    pub fn into_words(self) -> [u64; 2] {
        let guard = ManuallyDrop::new(self);
        [guard.at as u64, guard.image.into()]
    }

    /// Returns the guard that [`into_words`](Self::into_words) turned into two words.
    ///
    /// # Safety
    ///
    /// [`into_words`](Self::into_words) returned the words in this thread, and they are passed here
    /// only once.
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
        // Pairs with the writer's membarrier: the reader's uses of objects come before the add.
        compiler_fence(SeqCst);
        // SAFETY: without `HEAVY`, `at` is the offset of a word of the counts' block, which every
        // unit has.
        if self.at & HEAVY != 0 || !unsafe { units().add(self.at, 1) } {
            leave_slow(self);
        }
    }
}

#[cold]
#[inline(never)]
fn leave_slow(guard: &Guard) {
    // Pairs with `fence`: a heavy or spilled reader's uses of objects come before it counts.
    fence_own(SeqCst);
    let (place, word) = (guard.at & BLOCK, guard.at & (SIZE - 1) & !7);
    if add(place, word) {
        return;
    }
    // A guard from before a fork has not entered in the child's counts, so it does not leave there.
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

/// Allocates the counts' block and decides which way readers use. Returns [`UNDECIDED`] if there is
/// no memory.
#[cold]
fn decide() -> usize {
    let registered = fork::register() && percpu::register_fork();
    let Some(block) = registered.then(|| percpu::alloc(SIZE)).flatten() else {
        return UNDECIDED;
    };
    // The block begins at a multiple of its size, so the bit `HEAVY` of its offset is 0.
    let heavy = backend() == Backend::Atomic || some_isolated() || sys::keep_errno(cannot_fence);
    let place = block | if heavy { HEAVY } else { 0 };
    match PLACE.compare_exchange(UNDECIDED, place, AcqRel, Acquire) {
        Ok(_) => place,
        Err(theirs) => {
            // SAFETY: the exchange failed, so no other thread knows this block.
            unsafe { percpu::free(block, SIZE) };
            theirs
        }
    }
}

fn cannot_fence() -> bool {
    pinfold_rseq::fence().is_err()
}

/// Returns whether there are CPUs that nothing may interrupt.
fn some_isolated() -> bool {
    facts::any_quiet()
}

/// Returns the place, after deciding it if needed: a writer must not overlook readers that rely on
/// its fence. Returns `None` if a fork in another thread prevented the block's allocation.
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

/// Returns the number of a grace period that begins after everything that the caller has done, and
/// asks for that grace period. Costs a memory fence.
pub(super) fn ticket() -> u64 {
    // Pairs with the fence of the step that begins a grace period. Either that step sees what the
    // caller did, or the caller sees the new number in `STARTED`.
    fence_own(SeqCst);
    let ticket = STARTED.load(Relaxed) + 1;
    NEEDED.fetch_max(ticket, Relaxed);
    ticket
}

/// Returns whether the grace period `ticket` is over.
#[inline]
pub(super) fn passed(ticket: u64) -> bool {
    // Acquire pairs with the release in `step`: the readers' last uses of objects come before.
    DONE.load(Acquire) >= ticket
}

/// Makes one step of the grace period, if a thread needs one and no other thread is making a step.
/// Never waits for readers. With light readers, interrupts each CPU that runs this process, for
/// some microseconds.
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
        // Relaxed: the fence below comes after this add, and pairs with the fence in `ticket`.
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
        // Pairs with the acquire in `passed`: the readers' last uses of objects come before.
        DONE.store(STARTED.load(Relaxed), Release);
    } else if *waited_for == 1 << (current / PHASE_1) {
        // Relaxed, because the proof holds no matter when readers see the new phase.
        PHASE.store(PHASE_1 - current, Relaxed);
    }
    Ok(())
}

/// Returns a word's sum over all CPUs and `SPILLED`.
fn sum(place: usize, word: usize) -> u64 {
    // Acquire: what a counted reader did before it counted comes before the rest of this step.
    let mut sum = SPILLED[word / 8].load(Acquire);
    if place & BLOCK != 0 {
        percpu::for_each_used((place & BLOCK) + word, |[count]| {
            sum = sum.wrapping_add(count.load(Acquire));
        });
    }
    sum
}

/// The fence F of the module's description.
fn fence(place: usize) -> Result<(), FenceError> {
    // Pairs with the fences of heavy readers, of spilled readers, and in `ticket`.
    fence_own(SeqCst);
    if place & HEAVY == 0 {
        // Pairs with the compiler fences of light readers.
        sys::keep_errno(pinfold_rseq::fence)?;
    }
    // If no other thread of the process runs, the kernel may skip the barrier on this CPU.
    fence_own(SeqCst);
    Ok(())
}

/// Waits until every reader that is inside now has left.
///
/// Without readers, costs a few microseconds, most of them for the fence. If readers execute no
/// fences, it interrupts the CPUs that run threads of this process. A reader must not call this,
/// because it would wait for itself. A signal handler must not call this either.
///
/// # Errors
///
/// [`FenceError`] when the kernel no longer allows the fence, for example in a sandbox. Readers may
/// still be inside then.
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

/// Waits until the grace period `ticket` is over. A reader or a signal handler must not call this.
pub(super) fn wait(ticket: u64) -> Result<(), FenceError> {
    /// The longest sleep, in microseconds: longer than most readers stay. Bounds the interrupts to
    /// about 1000 a second.
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

/// Begins new counts in the child of a fork, where the readers' threads do not exist. Guards from
/// before the fork keep the old block. The grace period under way goes on.
pub(super) fn fork_child() {
    IMAGE.fetch_add(1, Relaxed);
    PLACE.store(UNDECIDED, Relaxed);
    SPILLED.iter().for_each(|count| count.store(0, Relaxed));
}
