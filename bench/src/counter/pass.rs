//! A pass: threads that add a given number of times, timed.

use super::subjects::Subject;
use anyhow::{Result, ensure};
use pinfold_lab::Barrier;
use pinfold_lab::cpus::pin;
use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Number of adds before the timed ones, so that thread-local variables and pages exist.
const WARMUP: u32 = 1_000;

/// Number of counters that a thread adds to in turn, if it does not add to only one. The number of
/// adds is a multiple of it.
pub const SPREAD: usize = 8;

/// The parameters of a pass.
#[derive(Clone, Copy, Debug)]
pub struct Pass {
    /// Number of threads that add.
    pub threads: usize,
    /// Number of adds per thread, over all counters.
    pub adds: u32,
    /// Whether one more thread sums all the time.
    pub summing: bool,
}

impl Pass {
    /// Returns nanoseconds of CPU time per add, over all threads.
    ///
    /// The threads add to `subjects` in turn: one of them or [`SPREAD`]. Each thread is pinned to a
    /// CPU if there are enough CPUs.
    pub fn run<S: Subject>(self, subjects: &[S], cpus: &[usize]) -> Result<f64> {
        let sum = || subjects.iter().map(S::sum).sum::<i64>();
        let before = sum();
        let everyone = self.threads + usize::from(self.summing);
        let place = |thread: usize| (everyone <= cpus.len()).then(|| cpus[thread]);
        let (barrier, adding) = (Barrier::new(everyone), AtomicUsize::new(self.threads));
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
                .map(|adder| adder.join().expect("an adding thread panicked"))
                .collect();
            summer.map_or(Ok(()), |summer| {
                summer.join().expect("the summing thread panicked")
            })?;
            times
        });
        let counted = sum() - before;
        let expected = self.threads as i64 * i64::from(self.adds + WARMUP);
        ensure!(
            counted == expected,
            "the counters counted {counted} adds, but {expected} were made"
        );
        Ok(times?.iter().sum::<f64>() / self.threads as f64 / f64::from(self.adds))
    }
}

fn settle(cpu: Option<usize>) -> Result<()> {
    cpu.map_or(Ok(()), pin)
}

fn adder<S: Subject>(subjects: &[S], thread: usize, adds: u32, barrier: &Barrier) -> f64 {
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
fn time(adds: u32, barrier: &Barrier, add: impl Fn(u32)) -> f64 {
    add(WARMUP);
    barrier.wait();
    let start = cpu_time();
    add(adds);
    cpu_time() - start
}

/// The loop, which is the same for every subject. `black_box` makes the compiler write each count
/// to memory before the next one.
#[inline(always)]
fn repeat(times: u32, add: impl Fn()) {
    for _ in 0..times {
        add();
        black_box(());
    }
}

/// Returns how many nanoseconds this thread has run. Time that other programs take does not count.
fn cpu_time() -> f64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is a live local variable that the kernel may write to.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}
