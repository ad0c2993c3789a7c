//! The shepherd: folds the counters of other CPUs, and has caches give back idle memory.
//!
//! Each CPU keeps counts of its own. To *fold* them is to make reads of the counter see them. The
//! kernel's shepherd (`vmstat_shepherd`) runs a worker on the CPU whose counts are to be folded,
//! and so disturbs that CPU. This shepherd folds from whichever CPU it runs on: it reads the words
//! of the other CPUs, and stores the sum of what they hold beside the counter's total. The other
//! CPUs get no interrupt, no wake-up and no context switch. The shepherd writes nothing to their
//! cache lines. It reads them, so a CPU's next add must get its line back for writing.
//!
//! Most counters have not moved since they were folded last. The shepherd finds that out by reading
//! the words of their shards. It takes no lock for that.
//!
//! A shepherd folds only counters that are *watched*. The list of watched counters belongs to the
//! process: every shepherd of the process folds all of them.
//!
//! At each *tick*, a shepherd folds, and calls the functions that [`register`] was given, the
//! *drains*, which give back idle memory. A shepherd works in one of two ways:
//!
//! * as a thread on housekeeping CPUs, which [`Shepherd::start`] starts;
//! * in the program's own loop, which calls [`Shepherd::tick`].
//!
//! ```
//! use core::time::Duration;
//! use pinfold::counter::PerCpuCounter;
//! use pinfold::shepherd::{self, Shepherd};
//!
//! static OPEN: PerCpuCounter = PerCpuCounter::new();
//!
//! shepherd::watch(&OPEN)?;
//! let running = Shepherd::new().interval(Duration::from_millis(10)).start()?;
//! OPEN.add(7);
//! while OPEN.read() != 7 {
//!     std::thread::sleep(Duration::from_millis(1));
//! }
//! running.stop();
//! # Ok::<(), pinfold::shepherd::ShepherdError>(())
//! ```

mod apart;
mod automatic;
mod bell;
mod housekeeping;
mod pressure;
mod spawn;
mod thread;

#[doc(hidden)]
pub use apart::run_apart;
pub use automatic::{Automatic, forbid_fences, is_automatic, nap};
pub(crate) use automatic::{fence_by_itself, fences_are_forbidden};
#[doc(hidden)]
pub use bell::sleep_on;
#[doc(hidden)]
pub use spawn::{Signals, is_entry};
pub use thread::{Running, policy};

use crate::counter::{Counters, PerCpuCounter, fold_watched, watch_block};
use crate::fork;
use crate::lock::{Hooks, Rank};
use crate::topology::{CpuSet, facts};
use crate::{spared, sys};
use core::ptr::null_mut;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64};
use core::time::Duration;
use pinfold_rseq::{Backend, Index};

/// The time between two ticks if the program sets no interval.
const INTERVAL: Duration = Duration::from_secs(1);

/// The time between two ticks if the program has started no shepherd. Idle memory needs four ticks,
/// two seconds, to go from a CPU's cache to the system.
const PASSING: Duration = Duration::from_millis(500);

/// The least time between two ticks if another process has requests, so that these do not take all
/// the time of the program's slow paths.
const CALLED: Duration = Duration::from_millis(10);

/// Why a shepherd cannot watch a counter or start.
///
/// ```
/// use core::time::Duration;
/// use pinfold::shepherd::{Shepherd, ShepherdError};
///
/// let refused = Shepherd::new().interval(Duration::ZERO).start().unwrap_err();
/// assert_eq!(refused, ShepherdError::Interval);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ShepherdError {
    /// The interval is 0 or above a day.
    Interval,
    /// None of the CPUs that the shepherd may run on is online and in the process's cgroup.
    NoCpu,
    /// There is no memory for the shepherd, or for the list of watched counters.
    OutOfMemory,
    /// The system refuses a thread.
    Thread {
        /// The error number that `pthread_create` returned.
        errno: i32,
    },
}

pinfold_rseq::error_texts! { ShepherdError:
    ShepherdError::Interval => "an interval of 0 or above a day: give one between";
    ShepherdError::NoCpu =>
        "the shepherd may run on none of the CPUs that are online: name others";
    ShepherdError::OutOfMemory => "no memory for the shepherd";
    ShepherdError::Thread { errno } =>
        "the system gives the shepherd no thread (errno {errno})";
}

/// Marks the types that a shepherd can watch: [`PerCpuCounter`], [`Counters`] and
/// [`VmStat`](crate::vmstat::VmStat).
///
/// ```
/// use pinfold::counter::PerCpuCounter;
/// use pinfold::shepherd::{self, ShepherdError, Watch};
///
/// fn watch_all(counters: &[impl Watch]) -> Result<(), ShepherdError> {
///     counters.iter().try_for_each(shepherd::watch)
/// }
/// watch_all(&[PerCpuCounter::new(), PerCpuCounter::new()])?;
/// # Ok::<(), ShepherdError>(())
/// ```
pub trait Watch: sealed::Watch {}

impl<W: sealed::Watch> Watch for W {}

pub(crate) mod sealed {
    pub trait Watch {
        /// Begins or ends the folding of this value's counters. Returns false if there is no memory
        /// for the list of watched counters.
        fn set_watched(&self, watched: bool) -> bool;
    }
}

impl sealed::Watch for PerCpuCounter {
    fn set_watched(&self, watched: bool) -> bool {
        self.shards_or_alloc().is_some_and(|shards| {
            watch_block(shards.offset(), crate::counter::shards::SIZE, watched)
        })
    }
}

impl sealed::Watch for Counters {
    fn set_watched(&self, watched: bool) -> bool {
        self.iter().all(|counter| counter.set_watched(watched))
    }
}

/// Has every shepherd of this process fold `what` from now on, until `what` is [unwatched](unwatch)
/// or dropped.
///
/// `what` may be watched already.
///
/// # Errors
///
/// [`ShepherdError::OutOfMemory`] if there is no memory for the counter, or for the list of watched
/// counters.
pub fn watch(what: &impl Watch) -> Result<(), ShepherdError> {
    if what.set_watched(true) {
        Ok(())
    } else {
        Err(ShepherdError::OutOfMemory)
    }
}

/// Ends the folding of `what`.
pub fn unwatch(what: &impl Watch) {
    what.set_watched(false);
}

/// Describes how a shepherd works, and [ticks](Self::tick) for programs that have their own loops.
///
/// ```
/// use pinfold::counter::PerCpuCounter;
/// use pinfold::shepherd::{self, Shepherd};
///
/// let bytes = PerCpuCounter::new();
/// shepherd::watch(&bytes)?;
/// let shepherd = Shepherd::new();
/// bytes.add(5);
/// while bytes.read() != 5 {
///     shepherd.tick();
/// }
/// # Ok::<(), pinfold::shepherd::ShepherdError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Shepherd {
    interval: Duration,
    cpus: Option<CpuSet>,
    fold_isolated: bool,
}

impl Default for Shepherd {
    fn default() -> Self {
        Self::new()
    }
}

impl Shepherd {
    /// Returns a shepherd that ticks every second, on housekeeping CPUs.
    ///
    /// Like the kernel's shepherd, it leaves alone CPUs that are isolated (`isolcpus=`, cpuset
    /// partitions) or without a periodic tick (`nohz_full=`). It neither reads nor writes the cache
    /// lines of these CPUs, except of the CPU on which it runs itself. Their counts reach the total
    /// when their own adds fold them, or when the program calls [`PerCpuCounter::fold`]. A
    /// [`sum`](PerCpuCounter::sum) is exact in any case. See
    /// [`fold_isolated`](Self::fold_isolated).
    ///
    /// This needs counts by CPU number, which are the default on a machine with such CPUs. With
    /// `PINFOLD_RSEQ=cid`, counts are kept by concurrency id, none belongs to one CPU, and all are
    /// folded. If the process began with CPU numbers, a CPU that is isolated later is left alone
    /// too.
    ///
    /// ```
    /// use pinfold::shepherd::Shepherd;
    ///
    /// static SHEPHERD: Shepherd = Shepherd::new();
    /// // The program's own loop decides when to fold. Here, no counter is watched.
    /// assert_eq!(SHEPHERD.tick(), 0);
    /// ```
    pub const fn new() -> Self {
        Shepherd {
            interval: INTERVAL,
            cpus: None,
            fold_isolated: false,
        }
    }

    /// Has the thread tick every `interval`.
    ///
    /// If no counter has moved for a while, the thread ticks less often: up to eight intervals
    /// apart. But if the interval is shorter than a second, ticks are at most a second apart.
    ///
    /// Ticks fall on whole multiples of the interval on the system's clock, or up to a tenth of the
    /// interval later, at most 0.1 s. So the kernel can wake a CPU once for all of its timers.
    #[must_use]
    pub fn interval(mut self, interval: Duration) -> Self {
        self.interval = interval;
        self
    }

    /// Has the thread run on these CPUs only, instead of on all CPUs that the starting thread may
    /// use.
    ///
    /// The thread uses only those of these CPUs that are online and in the process's cgroup. It
    /// avoids isolated and `nohz_full` CPUs if there are others.
    #[must_use]
    pub fn on(mut self, cpus: CpuSet) -> Self {
        self.cpus = Some(cpus);
        self
    }

    /// For the C API: as [`on`](Self::on), or with `None` on all CPUs that the starting thread may
    /// use.
    #[doc(hidden)]
    #[must_use]
    pub fn on_or_all(mut self, cpus: Option<CpuSet>) -> Self {
        self.cpus = cpus;
        self
    }

    /// Has the shepherd fold the counts of isolated CPUs too.
    ///
    /// A fold interrupts no CPU. But it reads the cache line of the CPU's count, which the CPU's
    /// next add must then get back for writing.
    #[must_use]
    pub fn fold_isolated(mut self) -> Self {
        self.fold_isolated = true;
        self
    }

    /// Does at once what the thread does every interval: folds the watched counters that have
    /// moved, and calls the [registered](register) drains. Returns how many shards it folded: those
    /// that hold something, of counters that have moved. A shard is the part of a counter that one
    /// CPU adds to.
    ///
    /// Looks at each watched counter's words on each CPU, which takes about a nanosecond while they
    /// are in the cache. Takes a lock of each counter that has moved, and leaves out a counter of
    /// which another thread holds that lock. Must not be called in a signal handler, because a
    /// drain may not be safe there.
    pub fn tick(&self) -> usize {
        tick(&wanted(!self.fold_isolated), Reach::AllCpus)
    }

    /// Starts a thread that ticks, until [`Running::stop`] is called or the result is dropped.
    ///
    /// The thread is named `pinfold`. It blocks all signals, except those that the kernel raises
    /// for a fault and those that the C library keeps for itself. It moves when a CPU goes offline
    /// or is isolated, when the cgroup's CPUs change, and when another thread sets its affinity. It
    /// ends with the process. A child after `fork` does not have it.
    ///
    /// # Errors
    ///
    /// * [`ShepherdError::Interval`] if the interval is 0 or above a day.
    /// * [`ShepherdError::NoCpu`] if none of the given CPUs is online and in the process's cgroup.
    /// * [`ShepherdError::OutOfMemory`] if there is no memory for the thread's state.
    /// * [`ShepherdError::Thread`] if the system refuses a thread.
    pub fn start(self) -> Result<Running, ShepherdError> {
        check(self.interval)?;
        Running::start(self)
    }
}

/// Checks an interval.
fn check(interval: Duration) -> Result<(), ShepherdError> {
    match interval.is_zero() || interval > Duration::from_secs(86_400) {
        true => Err(ShepherdError::Interval),
        false => Ok(()),
    }
}

/// The interval of all shepherds of this process in nanoseconds, or 0 if each has its own.
static EVERY: AtomicU64 = AtomicU64::new(0);

/// Sets the interval of all shepherds of this process, also of those that start later. With `None`,
/// each shepherd has its own interval again. `pinfold set PID shepherd-interval` does the same from
/// outside.
///
/// Shepherds that sleep wake up, tick, and follow the new interval. In a process without a
/// shepherd's thread, slow paths of the allocator tick: they follow the new interval too. Costs at
/// most three system calls. A signal handler may call this.
///
/// # Errors
///
/// [`ShepherdError::Interval`] if the interval is 0 or above a day.
///
/// ```
/// use core::time::Duration;
/// use pinfold::shepherd;
///
/// shepherd::set_interval(Some(Duration::from_millis(20)))?;
/// assert_eq!(shepherd::interval(), Some(Duration::from_millis(20)));
/// shepherd::set_interval(None)?;
/// # Ok::<(), pinfold::shepherd::ShepherdError>(())
/// ```
#[doc(alias = "stat_interval")]
pub fn set_interval(interval: Option<Duration>) -> Result<(), ShepherdError> {
    interval.map_or(Ok(()), check)?;
    let every = interval.map_or(0, |interval| interval.as_nanos() as u64);
    // Relaxed: the ring below publishes the store.
    EVERY.store(every, Relaxed);
    bell::ring();
    Ok(())
}

/// Returns the interval that [`set_interval`] has set for all shepherds of this process, or `None`
/// if each has its own. One load.
pub fn interval() -> Option<Duration> {
    match EVERY.load(Relaxed) {
        0 => None,
        every => Some(Duration::from_nanos(every)),
    }
}

/// Returns which units the calling thread folds: that of the CPU on which it runs, and all others
/// except those of CPUs that a thread has isolated. If it is to `spare` isolated CPUs, also except
/// those of CPUs that the kernel has isolated.
fn wanted(spare: bool) -> impl Fn(usize) -> bool {
    let spare = spare && pinfold_rseq::backend() != Backend::Rseq(Index::Cid);
    let own = pinfold_rseq::current();
    let left_out = move |unit| spared::has_unit(unit) || spare && facts::is_quiet_cpu(unit);
    move |unit| unit == own || !left_out(unit)
}

/// The number of shards that all shepherds of this process have folded.
static FOLDS: AtomicU64 = AtomicU64::new(0);
/// The number of ticks of this process.
static TICKS: AtomicU64 = AtomicU64::new(0);
/// Nanoseconds spent in ticks that have ended.
static IN_TICKS: AtomicU64 = AtomicU64::new(0);
/// The time of the last tick, in milliseconds of the coarse clock.
static LAST: AtomicU64 = AtomicU64::new(0);
/// The number of threads that tick.
static THREADS: AtomicU32 = AtomicU32::new(0);

/// Says what a drain may do at a tick.
///
/// ```
/// use pinfold::shepherd::{Reach, register};
///
/// fn drain(reach: Reach) {
///     if reach == Reach::Everything {
///         // Free the program's own caches: memory is short.
///     }
/// }
/// assert!(register(drain));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// The drain may take back memory that the CPU on which it runs holds. It must disturb no other
    /// CPU, and make only the system calls that malloc makes. Such a tick comes from a thread that
    /// allocates, or from the thread that a preloaded Pinfold starts by itself.
    ///
    /// Pinfold's own drain also fences at some ticks of that thread, until the program enters a
    /// sandbox.
    ThisCpu,
    /// The drain may also stop and fence the other CPUs, and read files. Such a tick comes from a
    /// shepherd that the program or its user asked for.
    AllCpus,
    /// The drain should give back all free memory now, whatever its age, because memory is short.
    /// It may do all that [`AllCpus`](Reach::AllCpus) allows.
    Everything,
}

/// The functions that [`register`] was given; null in a free entry.
static DRAINS: [AtomicPtr<()>; 16] = [const { AtomicPtr::new(null_mut()) }; 16];

/// Folds the watched counters in the units that `wanted` accepts, and calls the drains. Returns how
/// many shards it folded.
fn tick(wanted: &impl Fn(usize) -> bool, reach: Reach) -> usize {
    let begin = sys::nanoseconds();
    let folded = fold_watched(wanted);
    LAST.store(sys::coarse_milliseconds(), Relaxed);
    FOLDS.fetch_add(folded as u64, Relaxed);
    TICKS.fetch_add(1, Relaxed);
    drain(reach);
    IN_TICKS.fetch_add(sys::nanoseconds().saturating_sub(begin), Relaxed);
    folded
}

/// What the shepherds of this process have done, for the statistics segment.
pub(crate) struct Work {
    pub(crate) ticks: u64,
    /// Nanoseconds spent in ticks that have ended.
    pub(crate) nanoseconds: u64,
    /// Shards folded.
    pub(crate) folds: u64,
    /// The number of threads that tick.
    pub(crate) threads: u32,
}

/// Returns what the shepherds have done. Four loads.
pub(crate) fn work() -> Work {
    Work {
        ticks: TICKS.load(Relaxed),
        nanoseconds: IN_TICKS.load(Relaxed),
        folds: FOLDS.load(Relaxed),
        threads: THREADS.load(Relaxed),
    }
}

/// Calls the registered drains, which are functions of the modules above. That of the slab layer is
/// in `slab/cpu/idle.rs`.
fn drain(reach: Reach) {
    DRAINS.iter().for_each(|drain| {
        // Acquire pairs with the release in `register`: a thread that sees the drain also sees what
        // the registering thread wrote before.
        let drain = drain.load(Acquire);
        if !drain.is_null() {
            // SAFETY: `register`, which alone stores to `DRAINS`, stored a function of this type.
            unsafe { core::mem::transmute::<*mut (), fn(Reach)>(drain)(reach) };
        }
    });
}

/// Has every tick of this process call `drain`, so that a cache can give back memory that was idle
/// for some ticks.
///
/// A drain stays registered until the process ends. Registering the same function twice has no
/// further effect. Returns false if 16 other drains are registered already.
pub fn register(drain: fn(Reach)) -> bool {
    let drain = drain as *mut ();
    DRAINS.iter().any(|place| {
        // Release pairs with the acquire in the function `drain`: a thread that sees the new drain
        // also sees what this thread wrote before.
        let taken = place.compare_exchange(null_mut(), drain, AcqRel, Acquire);
        taken.is_ok_and(|_| true) || taken == Err(drain)
    })
}

/// Ticks if no shepherd thread runs, and half a second or the interval of [`set_interval`] has
/// passed since the last tick, or 10 ms if another process has a request. The slow paths of the
/// caches call this function.
///
/// Costs one read of a clock that needs no system call, except when it ticks.
pub fn tick_in_passing() {
    if has_thread() || runs_isolated() {
        return;
    }
    let (now, last) = (sys::coarse_milliseconds(), LAST.load(Relaxed));
    let called = bell::has_rung();
    let pause = if called {
        CALLED
    } else {
        interval().unwrap_or(PASSING)
    };
    let due = now.wrapping_sub(last) >= pause.as_millis() as u64;
    // If several threads find a tick due, the exchange succeeds for one of them, which ticks.
    // Without a request from another process, the first call only notes the time: the process has
    // just begun, so no memory has been idle.
    if due && LAST.compare_exchange(last, now, Release, Relaxed).is_ok() && (called || last != 0) {
        bell::note_rings();
        tick(&wanted(true), Reach::ThisCpu);
    }
}

/// Returns whether a call of [`tick_in_passing`] is wanted soon, because another process has a
/// request. At most four loads, and one in a process with a shepherd thread.
pub(crate) fn is_called() -> bool {
    !has_thread() && bell::has_rung() && !runs_isolated()
}

/// Returns whether the calling thread has isolated its CPU, so that it does no work for other
/// threads. One load if no CPU is isolated.
fn runs_isolated() -> bool {
    spared::any() && spared::has_unit(pinfold_rseq::current())
}

/// Returns whether a shepherd thread runs, so that the program's own calls need not tick. One load.
pub(crate) fn has_thread() -> bool {
    THREADS.load(Relaxed) != 0
}

/// Makes forks reset what belongs to threads that the child does not have.
pub(crate) fn register_fork() {
    static HOOKS: [Hooks; 1] = [Hooks::in_child(Rank::Shepherd, || {
        THREADS.store(0, Relaxed);
        automatic::forget();
        spared::forget();
    })];
    fork::register(&HOOKS);
}

/// The number of threads that have followed the last change of the isolated CPUs.
static MOVED: AtomicU32 = AtomicU32::new(0);

/// Notes that the calling thread has left CPUs that a thread has isolated, as far as it may.
fn has_moved() {
    // Release pairs with the acquire in `await_moves`.
    MOVED.fetch_add(1, Release);
}

/// Wakes the shepherds' threads, and waits until they have left the CPUs that a thread has
/// isolated, for at most 0.1 s.
pub(crate) fn await_moves() {
    MOVED.store(0, Relaxed);
    wake();
    for _ in 0..100 {
        // Acquire pairs with the release in `has_moved`.
        if MOVED.load(Acquire) >= THREADS.load(Relaxed) {
            return;
        }
        sys::sleep_microseconds(1000);
    }
}

/// Wakes the shepherds' threads, so that they tick.
pub(crate) fn wake() {
    bell::ring();
}

/// Notes that a thread ticks from now on.
fn thread_begins() {
    register_fork();
    THREADS.fetch_add(1, Relaxed);
}

/// Notes that a thread no longer ticks.
fn thread_ended() {
    THREADS.fetch_sub(1, Relaxed);
}
