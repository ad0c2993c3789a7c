//! One run of one design: start the workers, let them count, sum meanwhile, check the result.

use super::SubjectName;
use super::designs::{
    self, AddStart, Atomic, Design, Shared, Slowcount, SpinlockBatch, SpinlockRseq, TotalRseq,
};
use super::hand_over;
use super::percpu::PerCpu;
use super::shared::SharedSlice;
use super::truth::Witness;
use super::workers::{self, Control, Loop, Wave, Worker};
use crate::{Padded, spin_until};
use anyhow::{Result, bail, ensure};
use pinfold::counter::PerCpuCounter;
use std::io;
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::Acquire;
use std::time::{Duration, Instant};

/// The parameters of a run.
#[derive(Clone, Copy)]
pub struct Setup {
    pub threads: usize,
    /// Whether the workers are processes instead of threads.
    pub processes: bool,
    pub mmap: bool,
    /// Whether one worker of a pair adds, and the other one subtracts.
    pub hand_over: bool,
    pub summing: bool,
    pub time: Duration,
    pub wave: Wave,
}

/// The results of a run.
pub struct Outcome {
    pub ns_per_op: f64,
    /// CPU time in the program and in the kernel, with that of the summing thread.
    pub user_ns_per_op: f64,
    pub sys_ns_per_op: f64,
    /// Number of sums made.
    pub sums: u64,
    pub sum_error_max: u64,
    /// How far a cheap read may be off after the run, or `None` if there is no bound.
    pub error_bound: Option<u64>,
}

/// Runs a design. Only a whole run is one dynamic call.
pub type Contender = Box<dyn Fn(Setup) -> Result<Outcome>>;

/// Makes a subject's counter. The kernel's designs always lie in shared memory, so that threads and
/// processes are measured under the same conditions.
pub fn contender(name: SubjectName, batch: i64) -> Result<Contender> {
    Ok(match name {
        SubjectName::SpinlockBatch => shared::<SpinlockBatch>(batch)?,
        SubjectName::Slowcount => shared::<Slowcount>(batch)?,
        SubjectName::AddStart => shared::<AddStart<AtomicI32>>(batch)?,
        SubjectName::AddStartPercpu => shared::<AddStart<PerCpu>>(batch)?,
        SubjectName::Atomic => shared::<Atomic>(batch)?,
        SubjectName::SpinlockRseq => own(SpinlockRseq::new(batch)),
        SubjectName::TotalRseq => own(TotalRseq::<false>::new(batch)),
        SubjectName::OverstepRseq => own(TotalRseq::<true>::new(batch)),
        SubjectName::PinfoldShared => own(designs::in_shared()?),
        SubjectName::Pinfold => own(designs::with_max_drift()),
        SubjectName::PinfoldBatch => own(PerCpuCounter::new().with_batch(batch.unsigned_abs())),
    })
}

fn shared<D: Shared + 'static>(batch: i64) -> Result<Contender> {
    let mut counter = SharedSlice::<D>::new(1)?;
    counter[0].set_batch(batch);
    Ok(Box::new(move |setup| run(&counter[0], setup)))
}

fn own<D: Design + 'static>(counter: D) -> Contender {
    Box::new(move |setup| run(&counter, setup))
}

fn run<D: Design>(design: &D, setup: Setup) -> Result<Outcome> {
    let control = SharedSlice::<Padded<Control>>::new(1)?;
    let shares = match setup.hand_over {
        true => setup.threads / hand_over::PAIR,
        false => setup.threads,
    };
    let workers = SharedSlice::<Padded<Worker>>::new(shares)?;
    let control = &control[0].0;
    let round = Loop {
        mmap: setup.mmap,
        publish: setup.summing,
        wave: setup.wave,
    };
    let work = |number: usize| match setup.hand_over {
        true => hand_over::work(design, &workers, number, control, setup.wave.amount),
        false => round.work(design, &workers[number].0, control),
    };
    let lead = || {
        let led = lead(design, &workers, control, setup);
        control.stop();
        led
    };
    let before = CpuTime::now();
    let led = match setup.processes {
        true => workers::processes(setup.threads, control, work, lead),
        false => workers::threads(setup.threads, control, work, lead),
    }?;
    let used = CpuTime::now();
    check(design, &workers, setup.wave)?;
    let loops: u64 = workers
        .iter()
        .map(|worker| worker.0.loops.load(Acquire))
        .sum();
    ensure!(
        loops > 0,
        "no loop ended in {:?}; give more --seconds",
        setup.time
    );
    let ops = (loops * setup.wave.adds) as f64;
    let per_op = |time: Duration| time.as_nanos() as f64 / ops;
    Ok(Outcome {
        ns_per_op: per_op(led.elapsed),
        user_ns_per_op: per_op(used.user - before.user),
        sys_ns_per_op: per_op(used.sys - before.sys),
        sums: led.sums,
        sum_error_max: led.error,
        error_bound: design.error_bound(),
    })
}

/// The CPU time of this process and of the children that it has waited for.
struct CpuTime {
    user: Duration,
    sys: Duration,
}

impl CpuTime {
    fn now() -> CpuTime {
        let of = |who| {
            let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
            // SAFETY: `getrusage` writes one `rusage`, for which `usage` has room. Zero bytes are
            // a valid `rusage`, so the value is initialised even if the call fails.
            unsafe {
                libc::getrusage(who, usage.as_mut_ptr());
                usage.assume_init()
            }
        };
        let time = |time: libc::timeval| {
            Duration::from_secs(time.tv_sec as u64) + Duration::from_micros(time.tv_usec as u64)
        };
        let (own, children) = (of(libc::RUSAGE_SELF), of(libc::RUSAGE_CHILDREN));
        CpuTime {
            user: time(own.ru_utime) + time(children.ru_utime),
            sys: time(own.ru_stime) + time(children.ru_stime),
        }
    }
}

struct Led {
    elapsed: Duration,
    sums: u64,
    error: u64,
}

/// Runs on the main thread while the workers run.
fn lead<D: Design>(
    design: &D,
    workers: &[Padded<Worker>],
    control: &Control,
    setup: Setup,
) -> Result<Led> {
    let mut witness = Witness::new(workers, setup.wave);
    let (mut sums, mut error) = (0, 0);
    let start: Instant = control.go(setup.threads)?;
    if setup.summing {
        while control.lasts(start, setup.time) {
            error = witness.error_of(|| design.sum()).max(error);
            sums += 1;
        }
    } else {
        std::thread::sleep(setup.time);
        spin_until(|| !control.lasts(start, setup.time));
    }
    Ok(Led {
        elapsed: start.elapsed(),
        sums,
        error,
    })
}

/// Checks that the counter is 0: the workers subtracted all that they added, and every design is
/// exact at rest.
fn check<D: Design>(design: &D, workers: &[Padded<Worker>], wave: Wave) -> Result<()> {
    for worker in workers {
        match worker.0.errno.load(Acquire) {
            0 => {}
            errno => bail!(
                "mapping {} pages in each worker failed: {}; give a smaller --amount or --threads, give --mmap no, or raise ulimit -v",
                wave.amount,
                io::Error::from_raw_os_error(errno)
            ),
        }
    }
    match design.sum() {
        0 => Ok(()),
        left => bail!(
            "the counter is {left} after every worker subtracted what it added; please report this"
        ),
    }
}
