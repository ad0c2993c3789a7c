//! The threads of a round. Each touches the pages of its slice and measures its time.

use super::subjects::Subject;
use crate::bench::counter::workers::{self, Control};
use anyhow::{Context, Result};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The result of a round, or of one of its threads.
#[derive(Clone, Copy)]
pub struct Lap {
    start: Instant,
    end: Instant,
    cpu: Duration,
    /// Page faults that the kernel served.
    pub kernels_faults: u64,
}

impl Lap {
    /// Returns the time from the earliest start to the latest end.
    pub fn wall_seconds(&self) -> f64 {
        self.end.duration_since(self.start).as_secs_f64()
    }

    /// Returns the CPU time of all threads.
    pub fn cpu_seconds(&self) -> f64 {
        self.cpu.as_secs_f64()
    }

    fn and(self, other: Lap) -> Lap {
        Lap {
            start: self.start.min(other.start),
            end: self.end.max(other.end),
            cpu: self.cpu + other.cpu,
            kernels_faults: self.kernels_faults + other.kernels_faults,
        }
    }
}

/// Touches all `pages` of the subject's region once, with `threads` threads.
pub fn run(subject: &dyn Subject, threads: usize, pages: usize) -> Result<Lap> {
    let (control, laps) = (Control::default(), Mutex::new(Vec::with_capacity(threads)));
    let work = |worker: usize| {
        let slice = worker * pages / threads..(worker + 1) * pages / threads;
        if control.wait_to_go() {
            let lap = lap(|| subject.touch(slice));
            laps.lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(lap);
        }
    };
    let lead = || {
        let start = control.go(threads);
        start.inspect_err(|_| control.stop())
    };
    workers::threads(threads, &control, work, lead)?;
    let laps = laps.into_inner().unwrap_or_else(PoisonError::into_inner);
    let laps = laps.into_iter().collect::<Result<Vec<Lap>>>()?;
    let all = laps.into_iter().reduce(Lap::and);
    all.context("no thread measured anything")
}

fn lap(work: impl FnOnce() -> Result<()>) -> Result<Lap> {
    let faults = faults()?;
    let (start, cpu) = (Instant::now(), cpu_time()?);
    work()?;
    let (cpu, end) = (cpu_time()?.saturating_sub(cpu), Instant::now());
    Ok(Lap {
        start,
        end,
        cpu,
        kernels_faults: self::faults()? - faults,
    })
}

/// Returns the CPU time of this thread, user and system together.
///
/// This reads a clock, not `getrusage`: the kernel updates those figures only at clock ticks, a few
/// milliseconds apart. A thread may need no longer than that for its slice.
fn cpu_time() -> Result<Duration> {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is a live local variable that the kernel may write to.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    match failed {
        0 => Ok(Duration::new(time.tv_sec as u64, time.tv_nsec as u32)),
        _ => Err(std::io::Error::last_os_error()).context("reading the thread's CPU time"),
    }
}

/// Returns how many page faults without I/O this thread has had.
fn faults() -> Result<u64> {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: `usage` is a live local variable that the kernel may write to.
    if unsafe { libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr()) } != 0 {
        return Err(std::io::Error::last_os_error()).context("reading the thread's page faults");
    }
    // SAFETY: `usage` is zeroed at least, and zero bytes are a valid `rusage`, which holds only
    // numbers.
    Ok(unsafe { usage.assume_init() }.ru_minflt as u64)
}
