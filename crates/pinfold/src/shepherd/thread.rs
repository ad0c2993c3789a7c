//! The shepherd's thread.

use super::housekeeping::Housekeeping;
use super::pressure::{self, Pressure};
use super::spawn::{Body, spawn};
use super::{FOLDS, Reach, Shepherd, ShepherdError, drain, thread_begins, thread_ended};
use crate::sys;
use crate::topology::{Topology, affinity};
use core::ops::Deref;
use core::ptr::NonNull;
use core::sync::atomic::AtomicU32;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::time::Duration;

/// Intervals without a fold after which the thread looks less often.
const QUIET: u32 = 3;
/// How many intervals it sleeps at most.
const BACK_OFF_MOST: u32 = 8;
/// Naps are no longer than this, unless the interval is.
const NAP_MOST: Duration = Duration::from_secs(1);
/// Milliseconds between checks of which CPUs the thread may run on, at least.
const FOLLOW_EVERY_MS: u64 = 1000;
/// Enough for the file buffers of a look at the machine; one that is too small for the program's thread-local variables is
/// refused, and the default taken.
const STACK: usize = 256 << 10;

const RUN: u32 = 0;
const STOP: u32 = 1;

/// What the thread and its owner share, in a mapping of its own.
struct Shared {
    state: AtomicU32,
    shepherd: Shepherd,
    housekeeping: Housekeeping,
    body: Body,
}

/// A shepherd with a thread of its own, which stops when this is dropped.
#[derive(Debug)]
pub struct Running {
    shepherd: Shepherd,
    shared: NonNull<Shared>,
    thread: libc::pthread_t,
    /// The process the thread is in: after `fork` the child has none.
    process: libc::pid_t,
}

// SAFETY: only `state` is touched by two threads, and it is an atomic; any thread may join another.
unsafe impl Send for Running {}
// SAFETY: as above; `&Running` gives out nothing but `&Shepherd`.
unsafe impl Sync for Running {}

impl Deref for Running {
    type Target = Shepherd;
    fn deref(&self) -> &Shepherd {
        &self.shepherd
    }
}

impl Running {
    pub(super) fn start(shepherd: Shepherd) -> Result<Running, ShepherdError> {
        let machine = Topology::read(b"/").ok();
        let own = || {
            let all = machine.as_ref().map(|machine| machine.online.clone());
            affinity().or(all).unwrap_or_default()
        };
        let bound = shepherd.cpus.clone().unwrap_or_else(own);
        if machine.is_some_and(|machine| bound.and(&machine.allowed).is_empty()) {
            return Err(ShepherdError::NoCpu);
        }
        let memory = sys::map_memory(shared_bytes()).ok_or(ShepherdError::OutOfMemory)?;
        let shared = memory.cast::<Shared>();
        // SAFETY: mapped just now, large enough and aligned to a page.
        unsafe {
            shared.write(Shared {
                state: AtomicU32::new(RUN),
                shepherd: shepherd.clone(),
                housekeeping: Housekeeping::new(bound),
                body: Body {
                    run,
                    argument: shared.as_ptr().cast(),
                    stack: STACK,
                    normal_policy: is_real_time(),
                },
            });
        }
        // The slow paths leave the ticks to the thread from here on.
        thread_begins();
        // SAFETY: the mapping with the body stays until the thread has been joined.
        match unsafe { spawn(&raw mut (*shared.as_ptr()).body) } {
            Ok(thread) => Ok(Running {
                shepherd,
                shared,
                thread,
                // SAFETY: no preconditions.
                process: unsafe { libc::getpid() },
            }),
            Err(errno) => {
                thread_ended();
                // SAFETY: no thread knows of it.
                unsafe { sys::unmap(memory.as_ptr(), shared_bytes()) };
                Err(ShepherdError::Thread { errno })
            }
        }
    }

    /// How many shards all shepherds of this process have folded so far.
    pub fn folds(&self) -> u64 {
        FOLDS.load(Relaxed)
    }

    /// Stops the thread and waits for it: at most as long as a tick takes. What drop does too.
    pub fn stop(self) {}
}

impl Drop for Running {
    fn drop(&mut self) {
        // SAFETY: no preconditions.
        let here = unsafe { libc::getpid() } == self.process;
        if here {
            // SAFETY: the mapping stays until below.
            let state = unsafe { &self.shared.as_ref().state };
            state.store(STOP, Release);
            sys::wake(state);
            // SAFETY: the thread was started by `start`, and is joined once.
            unsafe { libc::pthread_join(self.thread, core::ptr::null_mut()) };
            thread_ended();
        }
        // SAFETY: the thread is gone, or stayed behind in the parent, which has a mapping of its own.
        unsafe { sys::unmap(self.shared.as_ptr().cast(), shared_bytes()) };
    }
}

fn shared_bytes() -> usize {
    size_of::<Shared>().next_multiple_of(sys::page_size())
}

/// Whether the calling thread has a real-time policy, which a thread of its making would inherit.
fn is_real_time() -> bool {
    // SAFETY: no preconditions.
    let policy = unsafe { libc::sched_getscheduler(0) } & !libc::SCHED_RESET_ON_FORK;
    matches!(
        policy,
        libc::SCHED_FIFO | libc::SCHED_RR | libc::SCHED_DEADLINE
    )
}

fn run(shared: *mut libc::c_void) {
    // SAFETY: a literal with NUL; a thread may name itself.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"pinfold".as_ptr()) };
    let shared = shared.cast::<Shared>();
    // SAFETY: `start` filled it in, and it stays until this thread is joined. The owner touches `state` only, and this thread is
    // the only one that touches `housekeeping`.
    let (state, shepherd, housekeeping) = unsafe {
        (
            &(*shared).state,
            &(*shared).shepherd,
            &mut (*shared).housekeeping,
        )
    };
    let mut quiet = 0;
    let mut followed = 0;
    let mut pressure = Pressure::watch();
    // Acquire pairs with the release in `drop`.
    while state.load(Acquire) == RUN {
        let now = sys::coarse_milliseconds();
        if followed == 0 || now.wrapping_sub(followed) >= FOLLOW_EVERY_MS {
            housekeeping.follow();
            followed = now.max(1);
        }
        quiet = if shepherd.tick() == 0 { quiet + 1 } else { 0 };
        // Memory that the program frees meanwhile goes back at the next tick.
        let longest = shepherd.interval.max(NAP_MOST);
        let nap = (shepherd.interval * back_off(quiet)).min(longest);
        sleep(state, nap, &mut pressure);
    }
}

/// Sleeps for `nap`, or until the owner stops the thread. Has everything free go back when there is
/// memory pressure meanwhile.
fn sleep(state: &AtomicU32, nap: Duration, pressure: &mut Option<Pressure>) {
    let mut left = nap;
    // Acquire pairs with the release in `drop`.
    while state.load(Acquire) == RUN && !left.is_zero() {
        let part = pressure.as_ref().map_or(left, |_| left.min(pressure::LOOK));
        sys::wait_for_change(state, RUN, part);
        left = left.saturating_sub(part);
        match pressure.as_ref().map(Pressure::has_risen) {
            Some(Ok(true)) => drain(Reach::Everything),
            // The program has closed the file, and the number may be another file's by now.
            Some(Err(())) => core::mem::forget(pressure.take()),
            _ => {}
        }
    }
}

/// How many intervals to sleep after `quiet` ticks that folded nothing.
fn back_off(quiet: u32) -> u32 {
    (1 << (quiet / QUIET).min(31)).min(BACK_OFF_MOST)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::CpuSet;

    #[test]
    fn naps_grow_when_nothing_moves() {
        let naps: std::vec::Vec<_> = [0, 2, 3, 5, 6, 9, 1000].map(back_off).to_vec();
        assert_eq!(naps, [1, 1, 2, 2, 4, 8, 8]);
    }

    #[test]
    fn quiet_cpus_are_preferred_and_vanished_ones_replaced() {
        use crate::shepherd::housekeeping::choose;
        let set = |list: &str| CpuSet::parse(list.as_bytes()).unwrap();
        let mut machine = Topology::system().unwrap();
        machine.allowed = set("0-7");
        machine.online = set("0-7");
        machine.isolated = set("6");
        machine.nohz_full = set("7");
        assert_eq!(choose(&machine, &set("2-7")), set("2-5"));
        assert_eq!(choose(&machine, &set("6-7")), set("6-7"));
        machine.allowed = set("0-3");
        assert_eq!(choose(&machine, &set("2-7")), set("2-3"));
        assert_eq!(choose(&machine, &set("6-7")), set("0-3"));
    }
}
