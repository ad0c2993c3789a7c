//! The shepherd of a program that runs on this allocator.
//!
//! At a *tick*, memory that has been idle for a while goes back to the system. Slow paths of malloc
//! tick. If all threads of a program sleep, no slow path runs, and idle memory would never go back.
//! So a program with threads also gets a thread that ticks, the *shepherd*.
//!
//! # When there is a thread
//!
//! | [`VARIABLE`] | the thread | runs while the program has |
//! |---|---|---|
//! | `auto`, or not set | an automatic one | two threads or more |
//! | `on`, or milliseconds | one that the user asked for | one thread or more |
//! | `off` | none | |
//!
//! Profiles at moments (`heap_dumps`) ask for a thread too, unless the variable says otherwise.
//!
//! The shepherd must end in time, for two reasons. The kernel lets only a process with one thread
//! change its namespaces, so the automatic shepherd must be gone when the program has one thread. A
//! process ends only when its last thread ends, so no shepherd may outlive the program's threads.
//!
//! So the library counts the program's threads. The creating thread calls [`thread_begins`], and
//! the ending thread calls [`thread_ended`]. If a thread's end leaves too few threads, this thread
//! stops the shepherd, and waits for the shepherd's end before it ends itself.
//!
//! Two events forbid the automatic thread for the rest of the process:
//!
//! * The program used a real-time policy. The shepherd would inherit the policy from the thread
//!   that starts it.
//! * The system refused a thread to the program, and had room for it once the shepherd was stopped.
//!
//! A program that makes and joins threads all the time would pay for a new shepherd each time. So
//! after `MAX_SHORT` shepherds in a row that lived for less than `SHORT` milliseconds, none is
//! started for `PAUSE` milliseconds. After the pause, the next thread that begins or ends starts
//! one.
//!
//! # The state
//!
//! `STATE` says whether there is a shepherd, and whether a thread is starting or stopping it. A
//! thread that finds `BUSY` returns at once. No change of the count is missed, because the thread
//! that wrote `BUSY` reads the count of threads again after its step.
//!
//! | state | changed by | to |
//! |---|---|---|
//! | `OFF` | a thread that finds enough threads | `BUSY` |
//! | `ON` | a thread that finds too few threads | `BUSY` |
//! | `BUSY` | the thread that wrote `BUSY`, after it started the shepherd or failed to | `ON` |
//! | `BUSY` | the thread that wrote `BUSY`, after it stopped the shepherd | `OFF` |

use crate::heap_dumps;
use core::cell::UnsafeCell;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU32};
use core::time::Duration;
use pinfold::internal::fork::{self, Hooks, Rank};
use pinfold::internal::{coarse_milliseconds, heap, keep_errno, uncancelled};
use pinfold::shepherd::{self, Automatic, Running, Shepherd};
use pinfold::topology::{self, CpuSet};

/// The environment variable that says when there is a shepherd: `auto`, `on`, `off`, or a number. A
/// number means `on`, and is the milliseconds between ticks.
pub const VARIABLE: &str = "PINFOLD_SHEPHERD";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wish {
    Auto,
    On(Option<Duration>),
    Off,
}

/// Parses the variable's value. Returns `None` for an invalid value.
pub(crate) fn parse(value: &[u8]) -> Option<Wish> {
    match value {
        b"auto" => Some(Wish::Auto),
        b"on" => Some(Wish::On(None)),
        b"off" => Some(Wish::Off),
        _ => {
            let number = core::str::from_utf8(value).ok()?.parse().ok();
            let milliseconds = number.filter(|number| (1..=86_400_000).contains(number))?;
            Some(Wish::On(Some(Duration::from_millis(milliseconds))))
        }
    }
}

/// The user's settings, read when the library is loaded.
struct Settings {
    wish: UnsafeCell<Wish>,
    /// The CPUs for the automatic shepherd. `None` on a machine without isolated CPUs.
    housekeeping: UnsafeCell<Option<CpuSet>>,
    are_read: AtomicBool,
}

// SAFETY: `library_loaded` writes the cells once, before it stores `are_read`. Other threads read
// the cells only after they have seen `are_read`.
unsafe impl Sync for Settings {}

static SETTINGS: Settings = Settings {
    wish: UnsafeCell::new(Wish::Off),
    housekeeping: UnsafeCell::new(None),
    are_read: AtomicBool::new(false),
};

/// Returns the settings, or `None` before [`library_loaded`] has read them.
fn settings() -> Option<(Wish, Option<&'static CpuSet>)> {
    // Acquire pairs with the release in `library_loaded`: a thread that sees `are_read` also sees
    // the cells.
    SETTINGS.are_read.load(Acquire).then(|| {
        // SAFETY: `are_read` is set, so the cells are written, and no thread writes them again.
        unsafe {
            (
                *SETTINGS.wish.get(),
                (*SETTINGS.housekeeping.get()).as_ref(),
            )
        }
    })
}

/// How many threads of the program were counted and have not ended.
static THREADS: AtomicU32 = AtomicU32::new(0);
/// Whether the automatic shepherd must not be started any more.
static FORBIDDEN: AtomicBool = AtomicBool::new(false);

/// A shepherd that lives for fewer milliseconds than this counts as short-lived.
const SHORT: u32 = 100;
const MAX_SHORT: u32 = 8;
const PAUSE: u32 = 1000;
/// How many shepherds in a row were short-lived.
static SHORT_LIVES: AtomicU32 = AtomicU32::new(0);
/// When the last shepherd was started or stopped, in milliseconds, wrapping.
static CHANGED: AtomicU32 = AtomicU32::new(0);

/// Returns the milliseconds of a coarse monotonic clock, wrapping.
fn now() -> u32 {
    coarse_milliseconds() as u32
}

/// Returns whether too many short-lived shepherds ended too recently to start another one.
fn pauses() -> bool {
    SHORT_LIVES.load(Relaxed) >= MAX_SHORT && now().wrapping_sub(CHANGED.load(Relaxed)) < PAUSE
}

static STATE: AtomicU8 = AtomicU8::new(OFF);
const OFF: u8 = 0;
const BUSY: u8 = 1;
const ON: u8 = 2;

#[expect(
    clippy::large_enum_variant,
    reason = "there is one, in a static, and no heap to put it in"
)]
enum Thread {
    Automatic(Automatic),
    Asked(Running),
}

struct Place(UnsafeCell<Option<Thread>>);
// SAFETY: only the thread that wrote `BUSY` to `STATE` touches the place.
unsafe impl Sync for Place {}
static THREAD: Place = Place(UnsafeCell::new(None));

/// Reads the environment and which CPUs are isolated, and starts the allocator.
///
/// The thread that loads the library calls this and then [`thread_begins`]. The allocator must
/// start now. A program with a malloc of its own would otherwise start it later, when the program
/// makes a thread. By then, the program may be in a sandbox that forbids the system calls of the
/// start.
pub fn library_loaded() {
    heap::ready();
    let wish = match pinfold_rseq::env::parsed(VARIABLE, parse) {
        // Profiles are written by a thread that the user asked for.
        None | Some(Wish::Auto) if heap_dumps::is_asked() => Wish::On(None),
        wish => wish.unwrap_or(Wish::Auto),
    };
    // SAFETY: the loader calls this once, before anything reads the settings.
    unsafe {
        *SETTINGS.wish.get() = wish;
        if wish == Wish::Auto {
            *SETTINGS.housekeeping.get() = topology::housekeeping_where_some_are_isolated();
        }
    }
    note_policy(shepherd::policy());
    static HOOKS: [Hooks; 1] = [Hooks::in_child(Rank::Threads, fork_child)];
    // These hooks take nothing, so a fork that is under way already may do without them.
    fork::register(&HOOKS);
    // Release pairs with the acquire in `settings`: a thread that sees `are_read` also sees the
    // cells.
    SETTINGS.are_read.store(true, Release);
}

/// Notes that a thread of the program has, or will have, the scheduling policy `policy`.
pub fn note_policy(policy: libc::c_int) {
    let policy = policy & !libc::SCHED_RESET_ON_FORK;
    if matches!(
        policy,
        libc::SCHED_FIFO | libc::SCHED_RR | libc::SCHED_DEADLINE
    ) {
        FORBIDDEN.store(true, Relaxed);
    }
}

/// Notes that the program is about to enter a sandbox. To be called before each call that may do
/// so. May wait some microseconds.
pub fn enters_sandbox() {
    pinfold_rseq::forbid_registration();
    shepherd::forbid_fences();
}

/// Counts a thread of the program, which exists or is about to be made.
pub fn thread_begins() {
    THREADS.fetch_add(1, SeqCst);
}

/// Takes a thread of the program out of the count, because the thread ends now or was never made.
/// If too few threads are left, stops the shepherd and waits until the shepherd is gone.
pub fn thread_ended() {
    THREADS.fetch_sub(1, SeqCst);
    adjust();
}

/// Returns whether a thread that begins in `start` is a shepherd's, and not the program's.
pub fn is_shepherd(start: *const core::ffi::c_void) -> bool {
    shepherd::is_entry(start)
}

/// Starts or stops the shepherd if the number of threads calls for it.
pub fn adjust() {
    // Sequentially consistent, like the changes of `THREADS`. One thread changes `THREADS` and then
    // loads `STATE`. The other stores `STATE` and then loads `THREADS`. At least one of them sees
    // the other's store.
    while let Some(change) = wanted_change(STATE.load(SeqCst)) {
        let (from, to) = match change {
            Change::Start => (OFF, ON),
            Change::Stop => (ON, OFF),
        };
        // Acquire pairs with the store of `STATE` below: this thread sees the place as the last
        // thread left it.
        if STATE
            .compare_exchange(from, BUSY, Acquire, Relaxed)
            .is_err()
        {
            return;
        }
        // SAFETY: this thread wrote `BUSY`, so no other thread touches the place.
        let place = unsafe { &mut *THREAD.0.get() };
        // If a signal handler forked here, its child would go on in the middle of this change. So
        // signals are blocked.
        let signals = shepherd::Signals::block();
        // `pthread_create` and the end of a thread change errno, so errno is restored.
        match change {
            Change::Start => *place = keep_errno(start),
            Change::Stop => {
                keep_errno(|| stop(place.take()));
                let is_short = now().wrapping_sub(CHANGED.load(Relaxed)) < SHORT;
                let lives = SHORT_LIVES.load(Relaxed);
                SHORT_LIVES.store(if is_short { lives.saturating_add(1) } else { 0 }, Relaxed);
            }
        }
        drop(signals);
        CHANGED.store(now(), Relaxed);
        let failed = to == ON && place.is_none();
        STATE.store(to, SeqCst);
        if failed {
            // The state is `ON` although there is no shepherd. So no thread tries again until the
            // number of threads has fallen.
            return;
        }
    }
}

#[derive(Clone, Copy)]
enum Change {
    Start,
    Stop,
}

fn wanted_change(state: u8) -> Option<Change> {
    let (wish, _) = settings()?;
    let least = match wish {
        Wish::Auto => 2,
        Wish::On(_) => 1,
        Wish::Off => return None,
    };
    match (state, THREADS.load(SeqCst) >= least) {
        (OFF, true) if wish != Wish::Auto || !(is_forbidden() || pauses()) => Some(Change::Start),
        (ON, false) => Some(Change::Stop),
        (ON, true) if wish == Wish::Auto && GIVES_WAY.load(Relaxed) => Some(Change::Stop),
        _ => None,
    }
}

/// Returns whether the automatic shepherd must not be started.
fn is_forbidden() -> bool {
    FORBIDDEN.load(Relaxed) || GIVES_WAY.load(Relaxed)
}

/// Set once the automatic shepherd has given its place to a thread of the program. Cleared if the
/// thread could not be made in spite of that.
static GIVES_WAY: AtomicBool = AtomicBool::new(false);

/// Calls `create`, which makes a thread of the program and returns an error number. If the system
/// has no place for the thread and the automatic shepherd runs, stops the shepherd and calls
/// `create` again. If this helps, the shepherd stays stopped: the thread has its place.
pub fn create_thread(mut create: impl FnMut() -> libc::c_int) -> libc::c_int {
    let mut error = create();
    if error == libc::EAGAIN && give_way() {
        // The kernel reports the end of a thread shortly before it frees the thread's place, so
        // this loop tries for a while.
        for _ in 0..TRIES {
            error = create();
            if error != libc::EAGAIN {
                break;
            }
            shepherd::nap(NAP);
        }
        // The system refuses the thread for another reason, such as its large stack.
        if error != 0 {
            GIVES_WAY.store(false, Relaxed);
        }
    }
    error
}

/// How often, and with what pauses, [`create_thread`] tries to get the shepherd's place.
const TRIES: u32 = 200;
const NAP: Duration = Duration::from_micros(100);

/// Stops the automatic shepherd. Returns whether it ran.
fn give_way() -> bool {
    let ran = STATE.load(SeqCst) == ON && !GIVES_WAY.swap(true, Relaxed);
    adjust();
    ran
}

fn start() -> Option<Thread> {
    match settings()? {
        // SAFETY: this thread wrote `BUSY` in place of `OFF`. So there is no automatic shepherd,
        // and no other thread starts one.
        (Wish::Auto, cpus) => unsafe { Automatic::start(cpus) }.map(Thread::Automatic),
        (Wish::On(interval), _) => {
            let shepherd =
                interval.map_or_else(Shepherd::new, |interval| Shepherd::new().interval(interval));
            shepherd.start().ok().map(Thread::Asked)
        }
        (Wish::Off, _) => None,
    }
}

fn stop(thread: Option<Thread>) {
    // Waiting for a thread is a cancellation point. This thread is ending already, and must not be
    // cancelled while it waits.
    uncancelled(|| match thread {
        Some(Thread::Automatic(thread)) => thread.stop(),
        Some(Thread::Asked(running)) => running.stop(),
        None => {}
    });
}

/// Resets the count and the state in the child of a fork, which has one thread and no shepherd.
fn fork_child() {
    THREADS.store(1, Relaxed);
    STATE.store(OFF, Relaxed);
    GIVES_WAY.store(false, Relaxed);
    // The shepherd's thread exists only in the parent, so its handle must not be dropped.
    // SAFETY: this thread is the only thread of the child.
    core::mem::forget(unsafe { (*THREAD.0.get()).take() });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_the_variable() {
        let milliseconds = |n| Wish::On(Some(Duration::from_millis(n)));
        for (value, wish) in [
            (&b""[..], None),
            (b"auto", Some(Wish::Auto)),
            (b"on", Some(Wish::On(None))),
            (b"off", Some(Wish::Off)),
            (b"250", Some(milliseconds(250))),
            (b"0", None),
            (b"-1", None),
            (b"99999999999999999999", None),
            (b"\xff", None),
        ] {
            assert_eq!(parse(value), wish, "{value:?}");
        }
    }
}
