//! The shepherd's thread that the program or its user starts.

use super::bell::Rings;
use super::housekeeping::Housekeeping;
use super::pressure::{self, Pressure};
use super::spawn::{Body, spawn};
use super::{
    FOLDS, Reach, Shepherd, ShepherdError, bell, check, drain, has_moved, interval, thread_begins,
    thread_ended,
};
use crate::topology::{Topology, affinity};
use crate::{spared, sys};
use core::ptr::NonNull;
use core::sync::atomic::Ordering::{Acquire, Relaxed};
use core::sync::atomic::{AtomicU32, AtomicU64};
use core::time::Duration;
use pinfold_rseq::{kernel, syscall};

/// After this many ticks that folded nothing, the thread ticks less often.
const QUIET: u32 = 3;
/// The largest number of intervals that the thread sleeps.
const MAX_BACK_OFF: u32 = 8;
/// The longest sleep. If the interval is longer, the longest sleep is the interval.
const MAX_NAP: Duration = Duration::from_secs(1);
/// The least number of milliseconds between two checks of the CPUs that the thread may run on.
const FOLLOW_EVERY_MS: u64 = 1000;
/// The timer slack is the interval divided by this number.
const SLACK_PART: u32 = 10;
/// The largest timer slack.
const MAX_SLACK: Duration = Duration::from_millis(100);
/// Bytes of stack: enough for the file buffers with which the thread reads the machine's state. If
/// the C library refuses this size as too small for the program's thread-local variables, the
/// thread gets the default size.
const STACK: usize = 256 << 10;

const RUN: u32 = 0;
const STOP: u32 = 1;

/// What the thread and its owner share, in a mapping of its own.
struct Shared {
    state: AtomicU32,
    /// The thread's own interval in nanoseconds. The owner writes it, and then rings.
    interval: AtomicU64,
    shepherd: Shepherd,
    housekeeping: Housekeeping,
    body: Body,
}

/// A shepherd with a thread of its own. The thread stops when this value is dropped.
///
/// ```
/// use pinfold::counter::PerCpuCounter;
/// use pinfold::shepherd::{self, Shepherd};
///
/// let running = Shepherd::new().start()?;
/// let bytes = PerCpuCounter::new();
/// shepherd::watch(&bytes)?;
/// bytes.add(5);
/// running.tick();
/// running.stop();
/// # Ok::<(), pinfold::shepherd::ShepherdError>(())
/// ```
#[derive(Debug)]
pub struct Running {
    shepherd: Shepherd,
    shared: NonNull<Shared>,
    thread: libc::pthread_t,
    /// The process that has the thread. A child after `fork` does not have it.
    process: libc::pid_t,
}

// SAFETY: until the thread is gone, the owner uses only `state` and `interval` of the shared
// mapping, which are atomics. A `Running` can be dropped in any thread, because any thread may join
// another.
unsafe impl Send for Running {}
// SAFETY: `&Running` uses only its `Shepherd`, which is `Sync`, and atomics: the shared mapping's
// `interval`, and the process's count of folds.
unsafe impl Sync for Running {}

impl Running {
    pub(super) fn start(shepherd: Shepherd) -> Result<Running, ShepherdError> {
        let machine = Topology::read_below(b"/").ok();
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
        // SAFETY: `map_memory` above made the mapping. It is at least as large as `Shared`, and
        // aligned to a page. No other thread knows it.
        unsafe {
            shared.write(Shared {
                state: AtomicU32::new(RUN),
                interval: AtomicU64::new(shepherd.interval.as_nanos() as u64),
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
        // From here on, the slow paths leave ticking to the thread.
        thread_begins();
        // SAFETY: `drop` unmaps the body only after it has joined the thread.
        match unsafe { spawn(&raw mut (*shared.as_ptr()).body) } {
            Ok(thread) => Ok(Running {
                shepherd,
                shared,
                thread,
                process: kernel::process(),
            }),
            Err(errno) => {
                thread_ended();
                // SAFETY: no thread was started, so only this function knows the mapping, which it
                // made above with this size.
                unsafe { sys::unmap(memory.as_ptr(), shared_bytes()) };
                Err(ShepherdError::Thread { errno })
            }
        }
    }

    /// Does at once what the thread does every interval, as [`Shepherd::tick`] does. Returns how
    /// many shards it folded.
    pub fn tick(&self) -> usize {
        self.shepherd.tick()
    }

    /// Returns how many shards all shepherds of this process have folded so far.
    pub fn folds(&self) -> u64 {
        FOLDS.load(Relaxed)
    }

    /// Sets the thread's interval. A thread that sleeps wakes up, ticks, and follows the new
    /// interval. While [`set_interval`](super::set_interval) gives all shepherds of the process one
    /// interval, the thread goes by that one.
    ///
    /// Costs at most three system calls. In a child after `fork`, which does not have the thread,
    /// this has no effect.
    ///
    /// # Errors
    ///
    /// [`ShepherdError::Interval`] if the interval is 0 or above a day.
    ///
    /// ```
    /// use core::time::Duration;
    /// use pinfold::shepherd::Shepherd;
    ///
    /// let running = Shepherd::new().interval(Duration::from_secs(3600)).start()?;
    /// running.set_interval(Duration::from_millis(10))?;
    /// # Ok::<(), pinfold::shepherd::ShepherdError>(())
    /// ```
    pub fn set_interval(&self, interval: Duration) -> Result<(), ShepherdError> {
        check(interval)?;
        // SAFETY: `drop`, which alone unmaps the mapping, cannot run during the borrow of `self`.
        let own = unsafe { &(*self.shared.as_ptr()).interval };
        // Relaxed: the ring below publishes the store.
        own.store(interval.as_nanos() as u64, Relaxed);
        bell::ring();
        Ok(())
    }

    /// Stops the thread, and waits until it is gone: at most as long as a tick takes. Dropping the
    /// value does the same.
    pub fn stop(self) {}
}

impl Drop for Running {
    fn drop(&mut self) {
        if kernel::process() == self.process {
            // SAFETY: the end of this function unmaps the mapping, after the last use of `state`.
            let state = unsafe { &self.shared.as_ref().state };
            bell::stop(state, STOP);
            // SAFETY: `start` made the thread in this process, and only `drop` joins it, once.
            unsafe { libc::pthread_join(self.thread, core::ptr::null_mut()) };
            thread_ended();
        }
        // SAFETY: in the process that started the thread, the thread has been joined. A child never
        // had the thread, and its copy of the mapping is its own. Nothing else refers to the
        // mapping.
        unsafe { sys::unmap(self.shared.as_ptr().cast(), shared_bytes()) };
    }
}

/// Returns the size of the mapping that holds a [`Shared`].
fn shared_bytes() -> usize {
    size_of::<Shared>().next_multiple_of(sys::page_size())
}

/// Returns whether the calling thread has a real-time policy, which a thread that it starts would
/// inherit.
fn is_real_time() -> bool {
    matches!(
        policy() & !libc::SCHED_RESET_ON_FORK,
        libc::SCHED_FIFO | libc::SCHED_RR | libc::SCHED_DEADLINE
    )
}

/// Returns the calling thread's scheduling policy, or −1 if the system does not tell it.
#[doc(hidden)]
pub fn policy() -> libc::c_int {
    // SAFETY: the call takes a number and touches no memory of the process.
    let policy = unsafe { syscall(libc::SYS_sched_getscheduler, [0]) };
    policy.map_or(-1, |policy| policy as libc::c_int)
}

/// The thread: ticks and sleeps, until the owner stops it.
fn run(shared: *mut libc::c_void) {
    let name = c"pinfold".as_ptr() as usize;
    // SAFETY: the name is a literal that ends with a NUL, and the kernel copies it.
    let _ = unsafe { syscall(libc::SYS_prctl, [libc::PR_SET_NAME as usize, name]) };
    let shared = shared.cast::<Shared>();
    // SAFETY: `start` wrote a `Shared` there, which stays until this thread has been joined. The
    // owner uses only `state` and `interval`, and no other thread uses `housekeeping`.
    let (state, own, shepherd, housekeeping) = unsafe {
        (
            &(*shared).state,
            &(*shared).interval,
            &(*shared).shepherd,
            &mut (*shared).housekeeping,
        )
    };
    let mut pace = Pace::new();
    let mut followed = 0;
    let mut changes = spared::changes();
    let mut pressure = Pressure::watch();
    // Acquire pairs with the release in `bell::stop`: the thread sees `STOP` and ends.
    while state.load(Acquire) == RUN {
        let now = sys::coarse_milliseconds();
        let moves = spared::changes() != changes;
        if moves {
            changes = spared::changes();
            housekeeping.look_again();
        }
        if moves || followed == 0 || now.wrapping_sub(followed) >= FOLLOW_EVERY_MS {
            housekeeping.follow(now);
            followed = now.max(1);
        }
        if moves {
            has_moved();
        }
        let rings = bell::rings();
        let folded = shepherd.tick();
        // After `rings`: if the interval changes later, the ring ends the sleep.
        let own = || Duration::from_nanos(own.load(Relaxed));
        let nap = pace.nap(interval().unwrap_or_else(own), folded);
        sleep(state, rings, nap, &mut pressure);
    }
}

/// How long the thread sleeps from one tick to the next.
struct Pace {
    interval: Duration,
    /// The number of ticks that folded nothing, since one folded or the interval changed.
    quiet: u32,
    /// The timer slack in nanoseconds with which the thread began.
    slack: Option<usize>,
}

impl Pace {
    fn new() -> Pace {
        // SAFETY: the call takes a number, and changes nothing.
        let slack = unsafe { syscall(libc::SYS_prctl, [libc::PR_GET_TIMERSLACK as usize]) };
        Pace {
            interval: Duration::ZERO,
            quiet: 0,
            slack: slack.ok(),
        }
    }

    /// Returns how long to sleep after a tick that folded `folded` shards.
    fn nap(&mut self, interval: Duration, folded: usize) -> Duration {
        self.quiet = if folded == 0 { self.quiet + 1 } else { 0 };
        if interval != self.interval {
            self.interval = interval;
            self.quiet = 0;
            self.allow_slack();
        }
        // Memory that the program frees during a nap goes back only at the next tick. So naps have
        // a bound.
        (interval * back_off(self.quiet)).min(interval.max(MAX_NAP))
    }

    /// Lets the kernel delay the calling thread's wake-ups by up to a tenth of the interval, so
    /// that the kernel can serve them together with other timers of the CPU. Keeps the slack with
    /// which the thread began if that is larger.
    fn allow_slack(&self) {
        let slack = (self.interval / SLACK_PART).min(MAX_SLACK).as_nanos() as usize;
        if let Some(least) = self.slack {
            let arguments = [libc::PR_SET_TIMERSLACK as usize, slack.max(least)];
            // SAFETY: the call takes numbers, and changes nothing but the calling thread's slack.
            let _ = unsafe { syscall(libc::SYS_prctl, arguments) };
        }
    }
}

/// Sleeps for about `nap`, up to the next whole multiple of `nap` on the system's clock, or until
/// the owner stops the thread or another process rings. If memory pressure begins during the sleep,
/// calls the drains, so that all free memory goes back.
///
/// All shepherds of the machine with one interval wake up together, as the kernel's periodic work
/// does (`round_jiffies`). So an idle CPU is woken once for all of them.
fn sleep(state: &AtomicU32, rings: Rings, nap: Duration, pressure: &mut Option<Pressure>) {
    let begin = now();
    let end = begin + until_whole(nap, begin);
    // Acquire pairs with the release in `bell::stop`: the thread sees `STOP`, and does not sleep
    // on.
    while state.load(Acquire) == RUN {
        let now = now();
        let left = end.saturating_sub(now);
        if left.is_zero() {
            return;
        }
        let look = |_: &Pressure| left.min(until_whole(pressure::LOOK, now));
        bell::sleep(state, RUN, rings, pressure.as_ref().map_or(left, look));
        if bell::rings() != rings {
            return;
        }
        match pressure.as_ref().map(Pressure::has_risen) {
            Some(Ok(true)) => drain(Reach::Everything),
            // The program has closed the file, whose number may belong to another file by now. So
            // this function does not close the number.
            Some(Err(())) => core::mem::forget(pressure.take()),
            _ => {}
        }
    }
}

/// Returns the time from `now` to a whole multiple of `step`: at least half a step, and less than
/// one and a half.
fn until_whole(step: Duration, now: Duration) -> Duration {
    let (step, now) = (step.as_nanos() as u64, now.as_nanos() as u64);
    let left = step - now % step;
    Duration::from_nanos(if left < step / 2 { left + step } else { left })
}

/// Returns the time since the system started, without the time that it was suspended.
fn now() -> Duration {
    Duration::from_nanos(sys::nanoseconds())
}

/// Returns how many intervals to sleep after `quiet` ticks that folded nothing.
fn back_off(quiet: u32) -> u32 {
    (1 << (quiet / QUIET).min(31)).min(MAX_BACK_OFF)
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
    fn naps_end_at_whole_multiples() {
        let milliseconds = Duration::from_millis;
        for (step, now, left) in [
            (100, 0, 100),
            (100, 30, 70),
            (100, 50, 50),
            (100, 51, 149),
            (100, 1_234_599, 101),
            (86_400_000, 1, 86_399_999),
        ] {
            let nap = until_whole(milliseconds(step), milliseconds(now));
            assert_eq!(nap, milliseconds(left), "{step} at {now}");
        }
        let shortest = Duration::from_nanos(1);
        assert_eq!(until_whole(shortest, milliseconds(7)), shortest);
    }

    #[test]
    fn housekeeping_cpus_come_first_and_missing_cpus_are_replaced() {
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
