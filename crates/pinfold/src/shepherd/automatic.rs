//! The thread that a preloaded Pinfold starts by itself once the program has threads.
//!
//! The program did not ask for this thread, and must not notice it:
//!
//! * The thread makes only the system calls that malloc makes: `futex`, `madvise`, and the clock.
//!   The program may have entered a sandbox that ends the process at any other system call. Until
//!   the program does, the thread also calls `membarrier` ([`fence_by_itself`]).
//! * Its start makes only the system calls of `pthread_create`.
//! * It blocks all signals that other threads and processes send, and has no name of its own.
//! * The allocator stops the thread as soon as the program has only one thread, and waits until the
//!   thread is gone.
//! * On a machine with isolated CPUs, it first sets its affinity to the other CPUs. When the
//!   program isolates a CPU ([`isolate`](crate::isolate)), it leaves that CPU.

use super::bell::Rings;
use super::spawn::{Body, spawn};
use super::{PASSING, Reach, bell, has_moved, interval, thread_begins, thread_ended, tick, wanted};
use crate::topology::{CpuSet, affinity, set_affinity};
use crate::{sanitizer, spared, sys};
use core::cell::UnsafeCell;
use core::ptr::null_mut;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU32, AtomicUsize};
use core::time::Duration;
use pinfold_rseq::thread_pointer;

/// Bytes of stack. A tick uses at most 4 KiB. The rest is for the program's thread-local variables,
/// and for the handler of a signal that the thread itself causes.
///
/// The stack is small enough that the C library does not give its memory back when the thread ends.
/// For a larger stack, the C library would make this system call with all signals blocked. If a
/// sandbox's filter trapped this call with a signal, the kernel would end the process, because the
/// signal is blocked.
const STACK: usize = if libc::PTHREAD_STACK_MIN > 20 << 10 {
    libc::PTHREAD_STACK_MIN
} else {
    20 << 10
};

/// [`RUN`] while the thread should go on ticking, and [`STOP`] otherwise.
static STATE: AtomicU32 = AtomicU32::new(STOP);
const STOP: u32 = 0;
const RUN: u32 = 1;

/// The thread pointer of the automatic thread, or 0.
static THREAD: AtomicUsize = AtomicUsize::new(0);

/// Returns whether the calling thread is the automatic thread.
pub fn is_automatic() -> bool {
    THREAD.load(Relaxed) == thread_pointer()
}

/// Forgets the thread in the child of a fork, which does not have it. A new thread of the child may
/// get the same thread pointer.
pub(super) fn forget() {
    THREAD.store(0, Relaxed);
    let _ = FENCES.compare_exchange(FENCING, ALLOWED, Relaxed, Relaxed);
}

/// Whether the automatic thread may fence. It may until the program enters a sandbox, whose filter
/// may end the process at a call of `membarrier`.
///
/// | state | changed by | to |
/// |---|---|---|
/// | [`ALLOWED`] | the automatic thread, before it fences | [`FENCING`] |
/// | `FENCING` | the automatic thread, after it has fenced | `ALLOWED` |
/// | `ALLOWED` | a thread that is about to enter a sandbox | [`FORBIDDEN`] |
///
/// The entering thread waits while the state is `FENCING`. So no call of `membarrier` begins or is
/// under way once the sandbox is there.
static FENCES: AtomicU32 = AtomicU32::new(ALLOWED);
const ALLOWED: u32 = 0;
const FENCING: u32 = 1;
const FORBIDDEN: u32 = 2;

/// Calls `fence`, which makes no system call but `membarrier` and takes no lock, unless the program
/// has entered a sandbox. Returns what `fence` returns, or false. The caller is the automatic
/// thread.
pub(crate) fn fence_by_itself(fence: impl FnOnce() -> bool) -> bool {
    // Relaxed, because the state guards no memory. This thread and an entering thread agree on the
    // order of their changes, because both exchange the same word.
    let allowed = FENCES.compare_exchange(ALLOWED, FENCING, Relaxed, Relaxed);
    allowed.is_ok() && {
        let fenced = fence();
        // Release pairs with the acquire in `forbid_fences`: the system call is over.
        FENCES.store(ALLOWED, Release);
        fenced
    }
}

/// Returns whether the automatic thread may never fence again.
pub(crate) fn fences_are_forbidden() -> bool {
    // Relaxed, because the answer guards no memory. `fence_by_itself` decides.
    FENCES.load(Relaxed) == FORBIDDEN
}

/// Has the automatic thread never fence again. Waits until a fence that is under way is over: some
/// microseconds. To be called before the program enters a sandbox.
pub fn forbid_fences() {
    // Acquire pairs with the release in `fence_by_itself`.
    while FENCES.compare_exchange(ALLOWED, FORBIDDEN, Acquire, Relaxed) == Err(FENCING) {
        sys::sleep_microseconds(50);
    }
}

struct Shared(UnsafeCell<Body>);
// SAFETY: only `Automatic::start` writes the body, at a time when no automatic thread runs.
unsafe impl Sync for Shared {}
static BODY: Shared = Shared(UnsafeCell::new(Body {
    run,
    argument: null_mut(),
    stack: STACK,
    normal_policy: false,
}));

/// The automatic thread, while it runs.
#[derive(Debug)]
pub struct Automatic {
    thread: libc::pthread_t,
}

impl Automatic {
    /// Starts the thread. Returns `None` if the system refuses a thread, or if ThreadSanitizer is
    /// in the process, because it would not see how this thread orders its accesses. With `cpus`,
    /// the thread runs on these CPUs only.
    ///
    /// # Safety
    ///
    /// No other automatic thread runs in this process.
    pub unsafe fn start(cpus: Option<&'static CpuSet>) -> Option<Automatic> {
        if sanitizer::orders_accesses() {
            return None;
        }
        let argument = cpus.map_or(null_mut(), |cpus| core::ptr::from_ref(cpus).cast_mut());
        // SAFETY: the caller promises that no automatic thread runs. Only such a thread reads the
        // body.
        unsafe { (*BODY.0.get()).argument = argument.cast() };
        // The new thread sees this store, because `pthread_create` orders it.
        STATE.store(RUN, Release);
        // From here on, the slow paths leave ticking to the thread.
        thread_begins();
        // SAFETY: the body is in a static, which stays where it is.
        match unsafe { spawn(BODY.0.get()) } {
            Ok(thread) => Some(Automatic { thread }),
            Err(_) => {
                thread_ended();
                None
            }
        }
    }

    /// Stops the thread, and waits until it is gone: at most as long as a tick takes. Must not be
    /// called in a child after `fork`, which does not have the thread.
    pub fn stop(self) {
        bell::stop(&STATE, STOP);
        // SAFETY: `start` made the thread, and did not detach it. `stop` consumes the only handle,
        // so the thread is joined once.
        unsafe { libc::pthread_join(self.thread, null_mut()) };
        thread_ended();
    }
}

/// Sleeps for `time` in a call of `futex`. Malloc makes this call too, so a sandbox allows it.
pub fn nap(time: Duration) {
    let word = AtomicU32::new(0);
    sys::wait_for_change(&word, 0, time);
}

/// The thread: moves to `cpus` if these are given, and ticks until it is stopped.
fn run(cpus: *mut libc::c_void) {
    // SAFETY: the pointer is null, or comes from the `&'static CpuSet` that `start` was given.
    if let Some(cpus) = unsafe { cpus.cast::<CpuSet>().as_ref() } {
        set_affinity(cpus);
    }
    THREAD.store(thread_pointer(), Relaxed);
    let mut room = Room::default();
    // Acquire pairs with the release in `bell::stop`: the thread sees `STOP` and ends.
    while STATE.load(Acquire) == RUN {
        let rings = bell::rings();
        room.follow();
        tick(&wanted(true), Reach::ThisCpu);
        sleep(rings, interval().unwrap_or(PASSING));
    }
    // A later thread may get the same thread pointer.
    THREAD.store(0, Relaxed);
}

/// The CPUs that the thread may use.
#[derive(Default)]
struct Room {
    /// Those with which it began, once a thread of the program has isolated a CPU.
    own: Option<CpuSet>,
    /// The last value of [`spared::changes`].
    changes: u32,
}

impl Room {
    /// Moves the thread away from CPUs that threads of the program have isolated, if this changed.
    /// In a sandbox, which may forbid the system calls, the thread stays where it is.
    fn follow(&mut self) {
        let changes = spared::changes();
        if changes != self.changes {
            self.changes = changes;
            fence_by_itself(|| self.move_away());
            has_moved();
        }
    }

    #[cold]
    #[inline(never)]
    fn move_away(&mut self) -> bool {
        let own = self
            .own
            .get_or_insert_with(|| affinity().unwrap_or_default());
        let mut isolated = CpuSet::default();
        spared::for_each(|cpu, _| isolated.insert(cpu));
        let others = own.without(&isolated);
        !others.is_empty() && set_affinity(&others)
    }
}

/// Sleeps for `time`, until the thread is stopped, or until a ring after `rings`.
fn sleep(rings: Rings, time: Duration) {
    let end = sys::nanoseconds() + time.as_nanos() as u64;
    let left = || Duration::from_nanos(end.saturating_sub(sys::nanoseconds()));
    // Acquire pairs with the release in `bell::stop`, as in `run`.
    while STATE.load(Acquire) == RUN && bell::rings() == rings && !left().is_zero() {
        bell::sleep(&STATE, RUN, rings, left());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::AtomicBool;

    #[test]
    fn no_fence_meets_a_sandbox() {
        static ENTERED: AtomicBool = AtomicBool::new(false);
        let fencing = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let fenced = fence_by_itself(|| {
                    fencing.wait();
                    std::thread::sleep(Duration::from_millis(20));
                    !ENTERED.load(Acquire)
                });
                assert!(fenced, "the sandbox was there before the fence was over");
            });
            fencing.wait();
            forbid_fences();
            ENTERED.store(true, Release);
        });
        assert!(fences_are_forbidden());
        assert!(!fence_by_itself(|| true), "a fence in a sandbox");
        FENCES.store(ALLOWED, Relaxed);
    }
}
