//! The workers: each adds a mapping's pages, maps and unmaps, and subtracts them, until it is told to stop.

use super::designs::Design;
use super::shared::Zeroed;
use super::truth::Step;
use crate::bench::{Padded, spin_until};
use anyhow::{Context, Result, bail, ensure};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64};
use std::time::{Duration, Instant};

/// What is mapped, and what it adds to the counter: in pages of 4 KiB, as the kernel counts what is committed.
pub const BYTES: usize = 128 << 20;
pub const PAGES: i64 = (BYTES / 4096) as i64;

/// What a worker says of itself.
#[derive(Default)]
pub struct Worker {
    pub step: Step,
    /// How many loops it has made, when it has stopped.
    pub loops: AtomicU64,
    /// Why a mapping failed, or 0.
    pub errno: AtomicI32,
}

// SAFETY: atomics whose zero means none.
unsafe impl Zeroed for Padded<Worker> {}

const WAIT: u32 = 0;
const GO: u32 = 1;
const STOP: u32 = 2;

/// Starts and stops the workers.
#[derive(Default)]
pub struct Control {
    state: AtomicU32,
    ready: AtomicU32,
}

// SAFETY: atomics whose zero means that nobody is ready and all wait.
unsafe impl Zeroed for Padded<Control> {}

impl Control {
    /// Waits for all workers and lets them go at once; returns when.
    pub fn go(&self, workers: usize) -> Result<Instant> {
        const PATIENCE: Duration = Duration::from_secs(60);
        let begin = Instant::now();
        let all = || self.ready.load(Acquire) as usize == workers;
        spin_until(|| all() || begin.elapsed() > PATIENCE);
        ensure!(all(), "not all workers started within {PATIENCE:?}");
        let start = Instant::now();
        self.state.store(GO, Release);
        Ok(start)
    }

    pub fn stop(&self) {
        self.state.store(STOP, Release);
    }
}

/// What each worker of a run does.
#[derive(Clone, Copy)]
pub struct Loop {
    /// Map and unmap in between.
    pub mmap: bool,
    /// Publish the steps, for a witness.
    pub publish: bool,
}

impl Loop {
    /// One worker's run.
    pub fn work<D: Design>(self, design: &D, worker: &Worker, control: &Control) {
        match (self.mmap, self.publish) {
            (false, false) => work::<D, false, false>(design, worker, control),
            (false, true) => work::<D, false, true>(design, worker, control),
            (true, false) => work::<D, true, false>(design, worker, control),
            (true, true) => work::<D, true, true>(design, worker, control),
        }
    }
}

fn work<D: Design, const MMAP: bool, const PUBLISH: bool>(
    design: &D,
    worker: &Worker,
    control: &Control,
) {
    let add = |n: i64| {
        if PUBLISH {
            worker.step.begin();
        }
        design.add(n);
        if PUBLISH {
            worker.step.end();
        }
    };
    control.ready.fetch_add(1, Release);
    spin_until(|| control.state.load(Acquire) != WAIT);
    let mut loops = 0;
    while control.state.load(Relaxed) == GO {
        add(PAGES);
        let mapped = if MMAP { map_and_unmap() } else { Ok(()) };
        add(-PAGES);
        if let Err(errno) = mapped {
            worker.errno.store(errno, Release);
            break;
        }
        loops += 1;
    }
    worker.loops.store(loops, Release);
}

#[inline]
fn map_and_unmap() -> Result<(), i32> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new private mapping, which nobody else knows and which goes at once.
    let unmapped = unsafe {
        let at = libc::mmap(null_mut(), BYTES, protection, flags, -1, 0);
        at != libc::MAP_FAILED && libc::munmap(at, BYTES) == 0
    };
    match unmapped {
        true => Ok(()),
        false => Err(io::Error::last_os_error()
            .raw_os_error()
            .unwrap_or(libc::ENOMEM)),
    }
}

/// Runs `work(number)` in as many threads as said, and `lead` in this one; `lead` has to stop the workers, also when it
/// fails.
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

/// As [`threads`], in processes, which share only what lies in shared memory.
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

/// Runs `work` in a child process; returns its id.
fn fork(work: impl FnOnce()) -> io::Result<libc::pid_t> {
    // SAFETY: this process has one thread, so the child has all of it.
    let child = unsafe { libc::fork() };
    match child {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            // Nothing may run past here in the child, unwinding included.
            // SAFETY: no preconditions; if the parent dies, nobody would tell the child to stop.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            let worked = catch_unwind(AssertUnwindSafe(work));
            // SAFETY: ends the child without running what the parent registered for its own end.
            unsafe { libc::_exit(worked.is_err().into()) }
        }
        child => Ok(child),
    }
}

fn wait(child: libc::pid_t) -> Result<()> {
    let mut status = 0;
    // SAFETY: `status` is writable.
    while unsafe { libc::waitpid(child, &raw mut status, 0) } < 0 {
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error).context("waiting for a worker process");
        }
    }
    if status != 0 {
        bail!("a worker process was killed or failed (wait status {status:#x})");
    }
    Ok(())
}
