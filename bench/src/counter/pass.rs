//! A pass: threads that add so many times, timed.

use super::subjects::Subject;
use crate::pool::{SpinBarrier, pin};
use anyhow::{Result, ensure};
use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Adds before the timed ones, so that thread-local variables and pages exist.
const WARMUP: u32 = 1_000;

/// Counters that a thread adds to in turn, when it does not add to one only. Numbers of adds are multiples of it.
pub const SPREAD: usize = 8;

/// How a pass goes.
#[derive(Clone, Copy, Debug)]
pub struct Pass {
    /// How many threads add.
    pub threads: usize,
    /// How often each, over all counters.
    pub adds: u32,
    /// Whether one more thread sums all the time.
    pub summing: bool,
}

impl Pass {
    /// Nanoseconds of CPU time per add, over all threads, which add to `subjects` in turn: one of them or [`SPREAD`]. Threads are
    /// pinned, each to a CPU, where there are enough CPUs.
    pub fn run<S: Subject>(self, subjects: &[S], cpus: &[usize]) -> Result<f64> {
        let sum = || subjects.iter().map(S::sum).sum::<i64>();
        let before = sum();
        let everyone = self.threads + usize::from(self.summing);
        let place = |thread: usize| (everyone <= cpus.len()).then(|| cpus[thread]);
        let (barrier, adding) = (SpinBarrier::new(everyone), AtomicUsize::new(self.threads));
        let times: Result<Vec<f64>> = thread::scope(|scope| {
            let adders: Vec<_> = (0..self.threads)
                .map(|thread| {
                    let (barrier, adding) = (&barrier, &adding);
                    scope.spawn(move || {
                        let pinned = settle(place(thread));
                        let time = adder(subjects, thread, self.adds, barrier);
                        adding.fetch_sub(1, Ordering::Release);
                        pinned.map(|()| time)
                    })
                })
                .collect();
            let summer = self.summing.then(|| {
                scope.spawn(|| {
                    let pinned = settle(place(self.threads));
                    barrier.wait();
                    while adding.load(Ordering::Acquire) > 0 {
                        black_box(sum());
                    }
                    pinned
                })
            });
            let times = (adders.into_iter())
                .map(|adder| adder.join().expect("a thread panicked"))
                .collect();
            summer.map_or(Ok(()), |summer| summer.join().expect("a thread panicked"))?;
            times
        });
        let counted = sum() - before;
        let expected = self.threads as i64 * i64::from(self.adds + WARMUP);
        ensure!(
            counted == expected,
            "{counted} adds were counted where {expected} were made"
        );
        Ok(times?.iter().sum::<f64>() / self.threads as f64 / f64::from(self.adds))
    }
}

fn settle(cpu: Option<usize>) -> Result<()> {
    cpu.map_or(Ok(()), |cpu| Ok(pin(cpu)?))
}

fn adder<S: Subject>(subjects: &[S], thread: usize, adds: u32, barrier: &SpinBarrier) -> f64 {
    let time = match subjects {
        [one] => {
            let add = one.adder(thread);
            time(adds, barrier, |times| repeat(times, &add))
        }
        several => {
            let all: [_; SPREAD] = std::array::from_fn(|at| several[at].adder(thread));
            time(adds, barrier, |times| {
                for _ in 0..times / SPREAD as u32 {
                    for add in &all {
                        repeat(1, add);
                    }
                }
            })
        }
    };
    subjects.iter().for_each(S::finish);
    time
}

#[inline(always)]
fn time(adds: u32, barrier: &SpinBarrier, add: impl Fn(u32)) -> f64 {
    add(WARMUP);
    barrier.wait();
    let start = cpu_time();
    add(adds);
    cpu_time() - start
}

/// The loop, the same for every subject. The black box makes the compiler write each count to memory before the next.
#[inline(always)]
fn repeat(times: u32, add: impl Fn()) {
    for _ in 0..times {
        add();
        black_box(());
    }
}

/// Nanoseconds for which this thread has run: what other programs do in between does not count.
fn cpu_time() -> f64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: writes to `time` only.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}
