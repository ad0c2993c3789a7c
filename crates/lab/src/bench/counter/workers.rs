//! The workers. Until it is told to stop, each adds mappings' pages, maps and unmaps, and subtracts
//! the pages.

use super::designs::Design;
use super::shared::Zeroed;
use super::truth::Step;
use crate::{Padded, spin_until};
use anyhow::{Context, Result, bail, ensure};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64};
use std::time::{Duration, Instant};

/// Bytes of a page. The counter counts mappings in these pages, as the kernel counts committed
/// memory.
const PAGE: usize = 4096;
/// Pages of the mapping in the kernel developers' loop: 128 MiB.
pub const PAGES: i64 = (128 << 20) / PAGE as i64;

/// What a worker reports.
#[derive(Default)]
pub struct Worker {
    pub step: Step,
    /// Number of loops made. Stored when the worker stops.
    pub loops: AtomicU64,
    /// 1 after the last hand-over of a pair's giver.
    pub gave_all: AtomicU32,
    /// The error number of a failed mapping, or 0.
    pub errno: AtomicI32,
}

// SAFETY: the type holds only atomics and padding, for which zero bytes are valid.
unsafe impl Zeroed for Padded<Worker> {}

const WAIT: u32 = 0;
const GO: u32 = 1;
const STOP: u32 = 2;

/// Starts and stops the workers.
///
/// The workers increment `ready` with release ordering, and [`go`](Self::go) loads it with acquire
/// ordering. The stores of `state` pair with the workers' acquiring load in the same way.
#[derive(Default)]
pub struct Control {
    state: AtomicU32,
    ready: AtomicU32,
    /// 1 after a worker has begun.
    has_begun: AtomicU32,
}

/// How long the leader waits for the workers.
const PATIENCE: Duration = Duration::from_secs(60);

// SAFETY: the type holds only atomics and padding, for which zero bytes are valid. They mean that
// no worker is ready and that all wait.
unsafe impl Zeroed for Padded<Control> {}

impl Control {
    /// Waits until all workers are ready, lets them go at once, and returns the time of that.
    pub fn go(&self, workers: usize) -> Result<Instant> {
        let begin = Instant::now();
        let all = || self.ready.load(Acquire) as usize == workers;
        spin_until(|| all() || begin.elapsed() > PATIENCE);
        ensure!(
            all(),
            "only {} of {workers} workers started within {PATIENCE:?}; give a smaller --threads",
            self.ready.load(Acquire)
        );
        let start = Instant::now();
        self.state.store(GO, Release);
        Ok(start)
    }

    pub fn stop(&self) {
        self.state.store(STOP, Release);
    }

    /// Reports a worker as ready, and waits until all workers may begin or must stop. Returns
    /// whether they may begin.
    pub fn wait_to_go(&self) -> bool {
        self.ready.fetch_add(1, Release);
        spin_until(|| self.state.load(Acquire) != WAIT);
        let may_begin = self.is_going();
        if may_begin {
            // Relaxed: the flag orders nothing.
            self.has_begun.store(1, Relaxed);
        }
        may_begin
    }

    /// Returns whether a run of length `time` that began at `start` must go on. On a busy machine,
    /// the first worker may get a CPU only after `time`. The run then goes on until that moment.
    pub fn lasts(&self, start: Instant, time: Duration) -> bool {
        let gone = start.elapsed();
        gone < time || self.has_begun.load(Relaxed) == 0 && gone < PATIENCE
    }

    /// Returns whether the workers must go on.
    #[inline(always)]
    pub fn is_going(&self) -> bool {
        // Relaxed: a worker that sees the end later only works a little longer.
        self.state.load(Relaxed) == GO
    }
}

/// What each worker of a run does.
#[derive(Clone, Copy)]
pub struct Loop {
    /// Whether to map and unmap between the adds.
    pub mmap: bool,
    /// Whether to publish the steps for a [`Witness`](super::truth::Witness).
    pub publish: bool,
    pub wave: Wave,
}

/// How a worker's share of the counter goes up and down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wave {
    /// The pages of one mapping: the number that each add adds.
    pub amount: i64,
    /// The number of adds before the worker begins to subtract, and then of subtractions.
    pub adds: u64,
}

impl Wave {
    /// Returns the wave of a pair that hands over: one add, and then one subtraction.
    pub fn hand_over(amount: i64) -> Wave {
        Wave { amount, adds: 1 }
    }

    /// Returns the wave for mappings of `amount` pages.
    ///
    /// One add of at least a batch reaches the shared count. Of a smaller amount, a worker adds two
    /// batches and one amount before it subtracts, because an add and its subtraction would
    /// cancel each other in the CPU's value and never reach the shared count.
    ///
    /// Without `mmap` between the adds, a wave has at least [`LEAST`](Self::LEAST) adds, so that
    /// the figure is that of an add and not of the loop around it.
    pub fn new(amount: i64, batch: i64, mmap: bool) -> Wave {
        let to_reach = match amount >= batch {
            true => 1,
            false => 2 * batch / amount + 1,
        };
        let least = if mmap { 1 } else { Self::LEAST };
        Wave {
            amount,
            adds: (to_reach as u64).max(least),
        }
    }

    /// The least number of adds of a wave that does not map.
    const LEAST: u64 = 64;
}

impl Loop {
    /// Runs one worker until `control` stops it.
    pub fn work<D: Design>(self, design: &D, worker: &Worker, control: &Control) {
        match (self.mmap, self.publish) {
            (false, false) => work::<D, false, false>(design, worker, control, self.wave),
            (false, true) => work::<D, false, true>(design, worker, control, self.wave),
            (true, false) => work::<D, true, false>(design, worker, control, self.wave),
            (true, true) => work::<D, true, true>(design, worker, control, self.wave),
        }
    }
}

fn work<D: Design, const MMAP: bool, const PUBLISH: bool>(
    design: &D,
    worker: &Worker,
    control: &Control,
    wave: Wave,
) {
    let mut goes_on = control.wait_to_go();
    let mut loops = 0;
    // A worker that has begun makes a loop, even if the run has ended meanwhile.
    while goes_on {
        let there = repeat::<D, MMAP, PUBLISH>(design, &worker.step, wave.amount, wave.adds);
        let back = repeat::<D, false, PUBLISH>(design, &worker.step, -wave.amount, wave.adds);
        if let Err(errno) = there.and(back) {
            worker.errno.store(errno, Release);
            break;
        }
        loops += 1;
        goes_on = control.is_going();
    }
    worker.loops.store(loops, Release);
}

/// Makes `adds` adds of `n`, and maps and unmaps after each if `MMAP`. Returns the error number of
/// the first mapping that failed.
///
/// Never inlined, so that the loop has few variables and keeps them in registers. A loop that
/// stores one of them on the stack slows a design that adds with a locked instruction more than
/// the others, because that instruction waits for the store.
#[inline(never)]
fn repeat<D: Design, const MMAP: bool, const PUBLISH: bool>(
    design: &D,
    step: &Step,
    n: i64,
    adds: u64,
) -> Result<(), i32> {
    let mut mapped = Ok(());
    for _ in 0..adds {
        if PUBLISH {
            step.begin();
        }
        design.add(n);
        if PUBLISH {
            step.end();
        }
        if MMAP {
            mapped = mapped.and(map_and_unmap(n.unsigned_abs() as usize * PAGE));
        }
    }
    mapped
}

#[inline]
fn map_and_unmap(bytes: usize) -> Result<(), i32> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: maps new private memory that no reference points to, and unmaps exactly that memory.
    let unmapped = unsafe {
        let at = libc::mmap(null_mut(), bytes, protection, flags, -1, 0);
        at != libc::MAP_FAILED && libc::munmap(at, bytes) == 0
    };
    match unmapped {
        true => Ok(()),
        false => Err(io::Error::last_os_error()
            .raw_os_error()
            .unwrap_or(libc::ENOMEM)),
    }
}

/// Runs `work(number)` in `count` threads and `lead` in this one. `lead` must stop the workers even
/// if it fails.
pub fn threads<R>(
    count: usize,
    control: &Control,
    work: impl Fn(usize) + Sync,
    lead: impl FnOnce() -> Result<R>,
) -> Result<R> {
    let work = &work;
    std::thread::scope(|scope| {
        for number in 0..count {
            let thread = std::thread::Builder::new().spawn_scoped(scope, move || work(number));
            if let Err(error) = thread {
                control.stop();
                return Err(error).with_context(|| too_many("thread", number, count));
            }
        }
        lead()
    })
}

/// Runs `work(number)` in `count` processes and `lead` in this one. The processes share only
/// [`SharedSlice`](super::shared::SharedSlice) memory. This function stops the workers.
pub fn processes<R>(
    count: usize,
    control: &Control,
    work: impl Fn(usize),
    lead: impl FnOnce() -> Result<R>,
) -> Result<R> {
    let mut children = Vec::with_capacity(count);
    let mut started = Ok(());
    for number in 0..count {
        match fork(|| work(number)) {
            Ok(child) => children.push(child),
            Err(error) => {
                control.stop();
                started = Err(error).with_context(|| too_many("process", number, count));
                break;
            }
        }
    }
    let led = started.and_then(|()| lead());
    control.stop();
    let ended = children.into_iter().map(wait).fold(Ok(()), Result::and);
    let result = led?;
    ended.map(|()| result)
}

fn too_many(what: &str, number: usize, count: usize) -> String {
    format!(
        "starting {what} {} of {count}; give a smaller --threads",
        number + 1
    )
}

/// Runs `work` in a child process and returns the child's id.
fn fork(work: impl FnOnce()) -> io::Result<libc::pid_t> {
    // SAFETY: this process has only one thread, so no lock is held by a thread that the child
    // lacks.
    let child = unsafe { libc::fork() };
    match child {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            // The child must not return from here, not even by unwinding. The kernel kills it if
            // the parent dies, because nothing else would stop it.
            // SAFETY: this prctl takes integers only and changes no memory.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            let worked = catch_unwind(AssertUnwindSafe(work));
            // SAFETY: `_exit` ends the child without running the parent's exit handlers, and
            // touches no memory.
            unsafe { libc::_exit(worked.is_err().into()) }
        }
        child => Ok(child),
    }
}

fn wait(child: libc::pid_t) -> Result<()> {
    let mut status = 0;
    // SAFETY: `status` is a live local variable that the kernel may write to.
    while unsafe { libc::waitpid(child, &raw mut status, 0) } < 0 {
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error).context("waiting for a worker process");
        }
    }
    if status != 0 {
        bail!(
            "worker process {child} was killed or failed (wait status {status:#x}); give a smaller --threads if memory is short"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Otherwise a short run on a busy machine ends before any worker gets a CPU.
    #[test]
    fn a_run_lasts_until_a_worker_has_begun() {
        let control = Control::default();
        control.state.store(GO, Release);
        let start = Instant::now();
        assert!(control.lasts(start, Duration::ZERO));
        assert!(control.wait_to_go());
        assert!(!control.lasts(start, Duration::ZERO));
        control.stop();
        assert!(!control.wait_to_go());
    }
}
