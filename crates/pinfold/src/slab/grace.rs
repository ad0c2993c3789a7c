//! Grace periods: how to find out that no thread still uses an object that new readers cannot find.
//!
//! A *reader* is a thread between [`enter`] and the drop of its [`Guard`]. A *grace period* is a
//! span of time in which every reader that was inside at its beginning has left. An object is *out
//! of sight* when new readers cannot find it. After a grace period that began later, no reader uses
//! the object, and it can be freed: see [`free_deferred`](crate::slab::KmemCache::free_deferred).
//!
//! # The counts
//!
//! The counts are those of the kernel's SRCU. There are two *phases*. For each phase, each CPU
//! counts how often readers *entered* it there, and how often they *left* it. A reader loads the
//! current phase from `phase` (the value may be old), enters it, and leaves the same one, perhaps
//! on another CPU. Only critical sections write these words. A reader whose CPU has no such words
//! (no memory, or an unannounced CPU) is *spilled*: it counts in `SPILLED`, by atomic adds. A
//! phase's two counts are sums over all CPUs and `SPILLED`. They only grow (modulo 2^64).
//!
//! # The writer
//!
//! Grace periods are numbered. `started` is the last one that has begun, and `done` the last one
//! that is over. At most one is under way (`done` ≤ `started` ≤ `done` + 1). It has a set of phases
//! that it still waits for, initially both. The *writer* is the holder of the lock `PERIOD`. It
//! advances the grace period one step at a time, in `poll`:
//!
//! 1. Sum the *left* words of each phase.
//! 2. Fence.
//! 3. Sum the *entered* words of each phase. If both sums of a phase are equal, every reader that
//!    entered it before the fence has left. The grace period then stops waiting for that phase.
//! 4. If the set is empty now, the grace period is over (`done`). If only the current phase is left
//!    in the set, make the other one current, so that new readers do not delay the grace period.
//!
//! A step never waits for readers. Threads make steps, and execute fences, only while a thread
//! needs a grace period that is not over (`needed` > `done`).
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
//!    both had equal sums after W. One phase is not enough: a reader may load `phase`, sleep
//!    through a grace period, and then enter the phase that the next grace period would no longer
//!    check.
//! 4. `done` is stored with release order, and read with acquire order before an object is freed.
//!    So R's last use comes before the free.
//!
//! Why W comes before F: a thread draws a ticket after a fence, T, that follows W. The step that
//! begins a grace period stores its number in `started` before F. If T comes before F, so does W.
//! If F comes before T, the thread sees that F's grace period has begun, and draws the number of
//! the next one.
//!
//! # The fence, and what readers pay
//!
//! The first reader or writer decides which of two ways all use, and stores it in `COUNTS`:
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
//! A thread that isolates its CPU ([`isolate`](crate::isolate)) changes a light process to the
//! heavy way, for good:
//!
//! 1. It sets `CHANGING`. While that is set, writers execute the membarrier, which suffices for
//!    readers of both ways.
//! 2. It sets `HEAVY` in `COUNTS`. A reader loads `COUNTS` again after it has counted *entered*,
//!    and before it counts *left*, and fences if it finds `HEAVY`.
//! 3. It executes a membarrier, M, and clears `CHANGING`. A reader that did not find `HEAVY` after
//!    its *entered* passes its point of M later: so every later step counts that *entered*. A
//!    reader that did not find `HEAVY` before its *left* passes its point of M after its last use
//!    of the object. If the kernel refuses M, `CHANGING` stays set, and no step succeeds.
//!
//! # Signals, fork
//!
//! Signal handlers may enter, leave and poll anywhere. If one needs a lock that the interrupted
//! frame holds, it does not wait: it makes no step, or enters as a spilled reader. Guards nest. The
//! child of a fork has no readers. `fork_child` gives it new counts, so that the parent's readers
//! do not block grace periods there. A guard from before the fork leaves by the old counts, which
//! the child does not read.

mod periods;

use crate::counter_units::{self, LazyBlock, units};
use crate::fork as process;
use crate::lock::{Hooks, Lock, Rank, is_any_held};
use crate::sys;
use crate::topology::facts;
use core::fmt;
use core::marker::PhantomData;
use core::mem::ManuallyDrop;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use core::sync::atomic::{
    AtomicBool, AtomicU32, AtomicU64, AtomicUsize, compiler_fence, fence as fence_own,
};
use periods::{LEFT, Periods, SIZE, Spilled};
use pinfold_rseq::{Backend, FenceError, backend};

/// The atomics that `periods` uses. Its model in loom replaces this module by loom's atomics.
mod primitive {
    pub(super) use core::sync::atomic::{AtomicU64, AtomicUsize, fence};
}

/// The offset in every unit of the block of counts. It is a multiple of 32, so its low bits have
/// room for the way that readers use: light or heavy.
static COUNTS: LazyBlock<UNDECIDED> = LazyBlock::new();
/// The bit for the heavy way: readers execute fences.
const HEAVY: usize = 1;
/// There is no block, and there will be none.
const NONE: usize = HEAVY | 2;
/// There is no block yet. Readers count in [`SPILLED`].
const UNDECIDED: usize = HEAVY;
const BLOCK: usize = !(SIZE - 1);

/// The counts of readers that have no block.
static SPILLED: Spilled = Spilled([const { AtomicU64::new(0) }; 4]);
/// Number of forks between the program's start and this process.
static IMAGE: AtomicU32 = AtomicU32::new(0);

/// The phase that readers enter, and the numbers of grace periods.
static PERIODS: Periods = Periods {
    phase: AtomicUsize::new(0),
    started: AtomicU64::new(0),
    done: AtomicU64::new(0),
    needed: AtomicU64::new(0),
};
/// A bit for each phase that the current grace period still waits for. 0 if none is under way.
static PERIOD: Lock<u8> = Lock::new(Rank::Grace, 0);

/// Makes the thread a reader until the guard is dropped. Until then, an object that the thread has
/// looked up is not freed, if all frees of such objects are
/// [deferred](crate::slab::KmemCache::free_deferred). See [`enter`].
///
/// ```
/// use pinfold::slab::grace::{Guard, enter};
/// use std::sync::atomic::{AtomicPtr, Ordering};
///
/// /// Returns the current route, which stays allocated until the guard is dropped.
/// fn look_up(current: &AtomicPtr<u64>) -> (Guard, *mut u64) {
///     let guard = enter();
///     (guard, current.load(Ordering::Acquire))
/// }
/// # let mut route = 7;
/// # let (guard, seen) = look_up(&AtomicPtr::new(&raw mut route));
/// # // SAFETY: `route` is alive.
/// # assert_eq!(unsafe { seen.read() }, 7);
/// # drop(guard);
/// ```
#[must_use = "what is looked at without a guard may be freed meanwhile"]
pub struct Guard {
    /// The offset of the *left* word, with the low bits of [`COUNTS`].
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
    let phase = PERIODS.phase();
    let counts = COUNTS.load();
    // SAFETY: without `HEAVY`, `counts` is the offset of the counts' block, which every unit has.
    if counts & HEAVY != 0 || !unsafe { units().add(counts + phase, 1) } {
        return enter_slow(phase);
    }
    // Pairs with the writer's membarrier. Together they act as a full fence, so that the reader's
    // look-ups come after the add.
    compiler_fence(SeqCst);
    if COUNTS.load() & HEAVY != 0 {
        // The process has changed to the heavy way since the first load.
        fence_own(SeqCst);
    }
    Guard {
        at: counts + phase + LEFT,
        image: 0,
        not_send: PhantomData,
    }
}

#[cold]
#[inline(never)]
fn enter_slow(phase: usize) -> Guard {
    let counts = decide();
    let image = IMAGE.load(Relaxed);
    if !add(counts, phase) {
        SPILLED.enter(phase);
    } else if (counts | COUNTS.load()) & HEAVY != 0 {
        // Pairs with `fence`: either the writer sees the add, or this reader sees what the writer
        // did before.
        fence_own(SeqCst);
    } else {
        // Pairs with the writer's membarrier, as in `enter`.
        compiler_fence(SeqCst);
    }
    Guard {
        at: counts + phase + LEFT,
        image,
        not_send: PhantomData,
    }
}

/// Adds one to word `word` of `counts` on this CPU. Returns false if the CPU has no block.
fn add(counts: usize, word: usize) -> bool {
    let block = counts & BLOCK;
    if block == 0 {
        return false;
    }
    // SAFETY: the caller's word lies in the counts' block, which every unit has.
    let mut added = unsafe { units().add(block + word, 1) };
    if !added && counter_units::install_here().is_some() {
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
        let heavy = (self.at | COUNTS.load()) & HEAVY != 0;
        // SAFETY: without `HEAVY`, `at` is the offset of a word of the counts' block, which every
        // unit has.
        if heavy || !unsafe { units().add(self.at, 1) } {
            leave_slow(self);
        }
    }
}

#[cold]
#[inline(never)]
fn leave_slow(guard: &Guard) {
    // Pairs with `fence`: a heavy or spilled reader's uses of objects come before it counts.
    fence_own(SeqCst);
    let (block, word) = (guard.at & BLOCK, guard.at & (SIZE - 1) & !7);
    if add(block, word) {
        return;
    }
    // A guard from before a fork has not entered in the child's counts, so it does not leave there.
    let here = match block {
        0 => guard.image == IMAGE.load(Relaxed),
        block => COUNTS.load() & BLOCK == block,
    };
    if here {
        SPILLED.leave(word);
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard").finish_non_exhaustive()
    }
}

/// Returns the offset of the counts' block, with the way that readers use. The first call decides
/// both. Returns [`UNDECIDED`] if there is no memory.
#[cold]
fn decide() -> usize {
    let register = || register_fork() && counter_units::register_fork();
    let choose = |block| {
        // The block begins at a multiple of its size, so the bit `HEAVY` of its offset is 0.
        let heavy =
            backend() == Backend::Atomic || some_isolated() || sys::keep_errno(cannot_fence);
        block | if heavy { HEAVY } else { 0 }
    };
    let counts = COUNTS.get_or_alloc(SIZE, register, choose);
    counts.unwrap_or(UNDECIDED)
}

/// Whether the process is changing to the heavy way, so that there may still be light readers.
static CHANGING: AtomicBool = AtomicBool::new(false);

/// Changes the process to the heavy way, so that later grace periods interrupt no CPU. See the
/// module's description. Costs one membarrier if readers were light, and a load otherwise.
///
/// If no reader has decided yet, the first one does, and finds an isolated CPU.
pub(crate) fn let_readers_fence() {
    if COUNTS.load() & HEAVY != 0 && !CHANGING.load(Acquire) {
        return;
    }
    // Ordered before the flag, which has release order: a writer that sees `HEAVY` also sees
    // `CHANGING`, or the end of the change.
    CHANGING.store(true, Relaxed);
    COUNTS.set_flags(HEAVY);
    if sys::keep_errno(pinfold_rseq::fence).is_ok() {
        // Release pairs with the acquire in `fence`.
        CHANGING.store(false, Release);
    }
}

fn cannot_fence() -> bool {
    pinfold_rseq::fence().is_err()
}

/// Returns whether there are CPUs that nothing may interrupt.
fn some_isolated() -> bool {
    facts::any_quiet()
}

/// Decides as [`decide`] does, and publishes [`NONE`] if there is no memory: a writer must not
/// overlook readers that rely on its fence. Returns `None` if a fork in another thread, or a lock
/// that a signal handler interrupted, may have prevented the block's allocation.
fn decided() -> Option<usize> {
    let turn = process::turn();
    match decide() {
        UNDECIDED if process::has_forked_since(turn) => None,
        UNDECIDED if is_any_held(Rank::Units) => None,
        UNDECIDED => Some(COUNTS.publish(NONE)),
        counts => Some(counts),
    }
}

/// Returns the number of a grace period that begins after everything that the caller has done, and
/// asks for that grace period. Costs a memory fence.
pub(super) fn ticket() -> u64 {
    PERIODS.ticket()
}

/// Returns whether the grace period `ticket` is over.
#[inline]
pub(super) fn passed(ticket: u64) -> bool {
    PERIODS.passed(ticket)
}

/// Makes one step of the grace period, if a thread needs one and no other thread is making a step.
/// Never waits for readers. With light readers, interrupts each CPU that runs this process, for
/// some microseconds.
pub(super) fn poll() -> Result<(), FenceError> {
    if !PERIODS.is_needed() {
        return Ok(());
    }
    // Decides before it takes the lock, because that also makes forks take the lock.
    let Some(counts) = decided() else {
        return Ok(());
    };
    match PERIOD.try_lock() {
        Some(mut waited_for) if PERIODS.is_needed() => step(counts, &mut waited_for),
        _ => Ok(()),
    }
}

fn step(counts: usize, waited_for: &mut u8) -> Result<(), FenceError> {
    PERIODS.step(waited_for, |word| sum(counts, word), || fence(counts))
}

/// Returns a word's sum over all CPUs and `SPILLED`.
fn sum(counts: usize, word: usize) -> u64 {
    let mut sum = SPILLED.count(word);
    if counts & BLOCK != 0 {
        counter_units::for_each_used((counts & BLOCK) + word, |[count]| {
            // Acquire, as in `Spilled::count`.
            sum = sum.wrapping_add(count.load(Acquire));
        });
    }
    sum
}

/// The fence F of the module's description.
fn fence(counts: usize) -> Result<(), FenceError> {
    // Pairs with the fences of heavy readers, of spilled readers, and in `ticket`.
    fence_own(SeqCst);
    // Acquire pairs with the release in `let_readers_fence`: the membarrier there is over.
    if counts & HEAVY == 0 || CHANGING.load(Acquire) {
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
    const MAX_NAP: u32 = 1000;
    let mut nap = 10;
    while !passed(ticket) {
        poll()?;
        if !passed(ticket) {
            sys::sleep_microseconds(nap);
            nap = (nap * 2).min(MAX_NAP);
        }
    }
    Ok(())
}

/// Makes forks take the lock of grace periods. Returns false if [`process::register`] does.
fn register_fork() -> bool {
    static HOOKS: [Hooks; 1] = [Hooks {
        child: fork_child,
        ..Hooks::locks(Rank::Grace, |visit| visit(PERIOD.word()))
    }];
    process::register(&HOOKS)
}

/// Begins new counts in the child of a fork, where the readers' threads do not exist. Guards from
/// before the fork keep the old block. The grace period under way goes on.
fn fork_child() {
    IMAGE.fetch_add(1, Relaxed);
    COUNTS.forget();
    SPILLED.clear();
}
