//! The folder: keeps totals fresh from afar, and has idle caches give back what they hold.
//!
//! The kernel's shepherd runs a worker on the CPU whose counts are to be folded. This one folds from wherever it runs: it
//! reads the CPU's words and moves their marks, and the CPU notices nothing but that its lines were read. No
//! interrupt, no wake-up, no context switch.
//!
//! Counters are folded when they are *watched*; what is watched is the process's affair, whichever shepherd looks. A
//! shepherd is a thread on housekeeping CPUs ([`Shepherd::start`]), or whoever calls [`Shepherd::tick`].
//!
//! ```
//! use core::time::Duration;
//! use pinfold::counter::PercpuCounter;
//! use pinfold::shepherd::Shepherd;
//!
//! static OPEN: PercpuCounter = PercpuCounter::new();
//!
//! let shepherd = Shepherd::new().interval(Duration::from_millis(10));
//! shepherd.watch(&OPEN)?;
//! let running = shepherd.start()?;
//! OPEN.add(7);
//! while OPEN.read() != 7 {
//!     std::thread::sleep(Duration::from_millis(1));
//! }
//! running.stop();
//! # Ok::<(), pinfold::shepherd::ShepherdError>(())
//! ```

mod automatic;
mod housekeeping;
mod pressure;
mod spawn;
mod thread;

#[doc(hidden)]
pub use automatic::Automatic;
#[doc(hidden)]
pub use spawn::{SYNCHRONOUS, is_entry};
pub use thread::Running;

use crate::counter::{Counters, PercpuCounter, fold_watched, watch_block};
use crate::fork::{self, Hooks, Rank};
use crate::sys;
use crate::topology::{CpuSet, facts};
use core::fmt;
use core::ptr::null_mut;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64};
use core::time::Duration;
use pinfold_rseq::{Backend, Index};

/// How often a shepherd looks when nobody says otherwise.
const INTERVAL: Duration = Duration::from_secs(1);

/// How often memory that stands idle is looked for where there is no shepherd that was asked for. It
/// takes four looks until idle memory has come from the sheaves to the system: two seconds.
const PASSING: Duration = Duration::from_millis(500);

/// Why a shepherd cannot do what it was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ShepherdError {
    /// An interval of 0, or above a day.
    Interval,
    /// None of the CPUs it may run on is there.
    NoCpu,
    /// There is no memory for what has to be noted.
    OutOfMemory,
    /// The system gives no thread.
    Thread {
        /// The system's reason.
        errno: i32,
    },
}

impl fmt::Display for ShepherdError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ShepherdError::Interval => {
                write!(f, "an interval of 0 or above a day: give one between")
            }
            ShepherdError::NoCpu => write!(
                f,
                "the shepherd may run on none of the CPUs that are online: name others"
            ),
            ShepherdError::OutOfMemory => write!(f, "no memory for the shepherd"),
            ShepherdError::Thread { errno } => {
                write!(f, "the system gives the shepherd no thread (errno {errno})")
            }
        }
    }
}

impl core::error::Error for ShepherdError {}

/// What a shepherd can watch.
pub trait Watch: sealed::Watch {}

impl<W: sealed::Watch> Watch for W {}

pub(crate) mod sealed {
    pub trait Watch {
        /// Puts the thing's counts on the list, or takes them off; false without memory for it.
        fn set_watched(&self, watched: bool) -> bool;
    }
}

impl sealed::Watch for PercpuCounter {
    fn set_watched(&self, watched: bool) -> bool {
        self.place().is_some_and(|shards| {
            watch_block(shards.offset(), crate::counter::shards::SIZE, watched)
        })
    }
}

impl sealed::Watch for Counters {
    fn set_watched(&self, watched: bool) -> bool {
        self.iter().all(|counter| counter.set_watched(watched))
    }
}

/// A shepherd: how it works, and a [`tick`](Self::tick) of it for programs that own their loops.
#[derive(Clone, Debug)]
pub struct Shepherd {
    interval: Duration,
    cpus: Option<CpuSet>,
    spare_isolated: bool,
}

impl Default for Shepherd {
    fn default() -> Self {
        Self::new()
    }
}

impl Shepherd {
    /// One that looks every second, from housekeeping CPUs, and folds the counts of isolated CPUs too, for that disturbs none.
    pub const fn new() -> Self {
        Shepherd {
            interval: INTERVAL,
            cpus: None,
            spare_isolated: false,
        }
    }

    /// Looks every `interval`; when nothing has moved for a while, less often: up to eight intervals
    /// apart, but no more than a second if the interval is shorter.
    #[must_use]
    pub fn interval(mut self, interval: Duration) -> Self {
        self.interval = interval;
        self
    }

    /// Runs on these CPUs only, instead of all that the starting thread may use. Of them it takes those that are online, in the
    /// process's cgroup, and, if there are any, neither isolated nor without a tick.
    #[must_use]
    pub fn on(mut self, cpus: CpuSet) -> Self {
        self.cpus = Some(cpus);
        self
    }

    /// Does not even read the counts of isolated CPUs: their lines stay where they are, and their counts become visible when they
    /// fold themselves. Concurrency ids name no CPU: where they index the shards this has no effect, `PINFOLD_RSEQ=cpu` selects
    /// CPU numbers.
    #[must_use]
    pub fn leave_isolated_alone(mut self) -> Self {
        self.spare_isolated = true;
        self
    }

    /// Has `what` folded from now on, by every shepherd of this process. Any number of times; once
    /// [`unwatch`](Self::unwatch)ed or dropped it is folded no more.
    ///
    /// # Errors
    ///
    /// [`ShepherdError::OutOfMemory`].
    pub fn watch(&self, what: &impl Watch) -> Result<(), ShepherdError> {
        match what.set_watched(true) {
            true => Ok(()),
            false => Err(ShepherdError::OutOfMemory),
        }
    }

    /// Has `what` folded no more.
    pub fn unwatch(&self, what: &impl Watch) {
        what.set_watched(false);
    }

    /// Does now what the thread does every interval: folds what is watched and has moved, and calls the
    /// [registered](register) drains. Returns how many shards it folded.
    ///
    /// Reads two words for each watched counter and CPU that adds; waits for nobody. Not for signal handlers, because of the
    /// drains.
    pub fn tick(&self) -> usize {
        let by_cpu = pinfold_rseq::backend() != Backend::Rseq(Index::Cid);
        let spared = self.spare_isolated && by_cpu;
        let wanted = |unit| !(spared && facts::is_quiet_cpu(unit));
        tick(&wanted, Reach::AllCpus)
    }

    /// Starts a thread that ticks until [`Running::stop`], or until the result is dropped.
    ///
    /// The thread blocks all signals that others send, is named `pinfold`, and follows the machine:
    /// when a CPU goes offline or is isolated, or the cgroup or (by another thread) its affinity
    /// changes, it moves. It ends with the process; in a child after `fork` it is not there.
    ///
    /// # Errors
    ///
    /// [`ShepherdError`].
    pub fn start(self) -> Result<Running, ShepherdError> {
        if self.interval.is_zero() || self.interval > Duration::from_secs(86_400) {
            return Err(ShepherdError::Interval);
        }
        Running::start(self)
    }
}

/// Shards folded by all shepherds of this process so far.
static FOLDS: AtomicU64 = AtomicU64::new(0);
/// When somebody ticked last, by the coarse clock in milliseconds.
static LAST: AtomicU64 = AtomicU64::new(0);
/// Threads that tick.
static THREADS: AtomicU32 = AtomicU32::new(0);

/// What a drain may do at a tick.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// It takes back what the CPU holds on which it runs. It disturbs no other CPU and makes only
    /// the system calls that malloc makes: the tick is made in passing by a thread that allocates,
    /// or by the thread that a preloaded Pinfold starts by itself.
    ThisCpu,
    /// It may stop and fence the other CPUs, and read files: the tick is one of a shepherd that the
    /// program or its user asked for.
    AllCpus,
    /// Everything free is to go back now, whatever its age: memory is short. It may do what it may
    /// at [`AllCpus`](Reach::AllCpus).
    Everything,
}

/// What [`register`] was given.
static DRAINS: [AtomicPtr<()>; 16] = [const { AtomicPtr::new(null_mut()) }; 16];

/// Folds the watched counters in the units that are `wanted`, and calls the drains. Returns how
/// many shards it folded.
fn tick(wanted: &impl Fn(usize) -> bool, reach: Reach) -> usize {
    let folded = fold_watched(wanted);
    LAST.store(sys::coarse_milliseconds(), Relaxed);
    FOLDS.fetch_add(folded as u64, Relaxed);
    drain(reach);
    folded
}

/// Calls the drains.
fn drain(reach: Reach) {
    DRAINS.iter().for_each(|drain| {
        // Acquire pairs with the release in `register`.
        let drain = drain.load(Acquire);
        if !drain.is_null() {
            // SAFETY: `register` stored a function of this type.
            unsafe { core::mem::transmute::<*mut (), fn(Reach)>(drain)(reach) };
        }
    });
}

/// Has every tick of this process call `drain`: for caches that give back what stood idle for some
/// ticks. A drain stays registered for good; the same function twice counts once. Returns false if
/// 16 drains are registered already.
pub fn register(drain: fn(Reach)) -> bool {
    let drain = drain as *mut ();
    DRAINS.iter().any(|place| {
        // Release pairs with the acquire in `tick`.
        let taken = place.compare_exchange(null_mut(), drain, AcqRel, Acquire);
        taken.is_ok_and(|_| true) || taken == Err(drain)
    })
}

/// Ticks if no thread does and half a second has passed. Slow paths call it. Costs one read of a
/// clock that needs no system call, except once in an interval.
pub fn tick_in_passing() {
    if THREADS.load(Relaxed) != 0 {
        return;
    }
    let (now, last) = (sys::coarse_milliseconds(), LAST.load(Relaxed));
    let due = now.wrapping_sub(last) >= PASSING.as_millis() as u64;
    // One of the threads that find a tick due makes it. The first call only notes the time: the
    // process has begun just now, and nothing has stood idle.
    if due && LAST.compare_exchange(last, now, Release, Relaxed).is_ok() && last != 0 {
        tick(&|_| true, Reach::ThisCpu);
    }
}

/// Counts a thread that ticks from now on.
fn thread_begins() {
    static HOOKS: Hooks = Hooks {
        rank: Rank::Shepherd,
        holds: |_| false,
        before: || {},
        child: || THREADS.store(0, Relaxed),
        after: || {},
    };
    fork::register(&HOOKS);
    THREADS.fetch_add(1, Relaxed);
}

/// Counts a thread that ticked until now.
fn thread_ended() {
    THREADS.fetch_sub(1, Relaxed);
}
