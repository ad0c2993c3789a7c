//! The loop on the CPU that should be left alone, and the threads that fold its counter.

use super::interrupts::Interrupts;
use super::{SubjectName, Totals};
use crate::{cpus, cycles};
use anyhow::{Context, Result, ensure};
use hdrhistogram::Histogram;
use pinfold::counter::PerCpuCounter;
use pinfold::shepherd::{self, Running, Shepherd};
use pinfold::topology::CpuSet;
use std::io;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Whether the loop counts.
static COUNTS: AtomicBool = AtomicBool::new(true);
/// The loop's counter. While the loop counts, there is always something to fold.
static COUNTED: PerCpuCounter = PerCpuCounter::new();

/// The histogram that the loop records into: a subject's number, or one of the constants below.
static RECORD_FOR: AtomicUsize = AtomicUsize::new(NOBODY);
const NOBODY: usize = usize::MAX;
const END: usize = usize::MAX - 1;

/// The longest gap that the histogram can tell apart, in cycles: some ten seconds.
const LONGEST: u64 = 1 << 36;
/// How long the threads run before a slice is measured.
const SETTLE: Duration = Duration::from_millis(50);

pub type Gaps = Histogram<u64>;

/// The loop's thread.
pub struct Loop {
    thread: JoinHandle<Vec<Gaps>>,
    id: i32,
}

impl Loop {
    pub fn start(cpu: usize, subjects: usize) -> Result<Loop> {
        static ID: AtomicI32 = AtomicI32::new(0);
        let gaps =
            || Gaps::new_with_bounds(1, LONGEST, 3).context("making the histogram of the gaps");
        let mut gaps = (0..subjects).map(|_| gaps()).collect::<Result<Vec<_>>>()?;
        let thread = std::thread::Builder::new().spawn(move || {
            let pinned = cpus::pin(cpu).is_ok();
            // SAFETY: the call takes no arguments and touches no memory.
            let id = unsafe { libc::gettid() };
            ID.store(if pinned { id } else { -1 }, Release);
            if pinned {
                run(&mut gaps);
            }
            gaps
        });
        let thread = thread.context("starting the loop's thread")?;
        let id = loop {
            match ID.load(Acquire) {
                0 => std::thread::sleep(Duration::from_millis(1)),
                id => break id,
            }
        };
        ensure!(
            id > 0,
            "the loop cannot run on CPU {cpu}; give another CPU to --cpu"
        );
        Ok(Loop { thread, id })
    }

    /// Measures one subject for `time`.
    pub fn slice(&self, setup: Setup, subject: SubjectName, time: Duration) -> Result<Totals> {
        COUNTS.store(subject.counts(), Relaxed);
        let shepherd = Folder::start(setup, subject)?;
        if subject == SubjectName::Fifo {
            self.set_policy(libc::SCHED_FIFO, 1)
                .context("giving the loop the policy SCHED_FIFO")?;
        }
        let measured = self.record(setup, subject, time, &shepherd);
        if subject == SubjectName::Fifo {
            // First, so that the worker can run and end.
            self.set_policy(libc::SCHED_OTHER, 0)
                .context("giving the loop its normal policy back")?;
        }
        shepherd.stop();
        measured
    }

    /// Records the loop's gaps for `time`, and counts what happens meanwhile.
    fn record(
        &self,
        setup: Setup,
        subject: SubjectName,
        time: Duration,
        shepherd: &Folder,
    ) -> Result<Totals> {
        std::thread::sleep(SETTLE);
        if !subject.counts() {
            // What the loop has counted in an earlier slice.
            COUNTED.fold();
        }
        let before = (
            Interrupts::of(setup.cpu)?,
            self.context_switches()?,
            shepherd.folds(),
        );
        RECORD_FOR.store(subject as usize, Release);
        let begin = Instant::now();
        std::thread::sleep(time);
        RECORD_FOR.store(NOBODY, Release);
        let seconds = begin.elapsed().as_secs_f64();
        Ok(Totals {
            interrupts: Interrupts::of(setup.cpu)? - before.0,
            context_switches: self.context_switches()?.saturating_sub(before.1),
            folds: shepherd.folds().saturating_sub(before.2),
            seconds,
        })
    }

    /// Gives the loop the policy SCHED_FIFO for a moment, to find out whether that is permitted.
    pub fn try_fifo(&self) -> io::Result<()> {
        self.set_policy(libc::SCHED_FIFO, 1)?;
        self.set_policy(libc::SCHED_OTHER, 0)
    }

    fn set_policy(&self, policy: i32, priority: i32) -> io::Result<()> {
        // SAFETY: zeroes are a valid `sched_param`.
        let mut parameter: libc::sched_param = unsafe { std::mem::zeroed() };
        parameter.sched_priority = priority;
        // SAFETY: the call reads one `sched_param`, and changes nothing in this process's memory.
        match unsafe { libc::sched_setscheduler(self.id, policy, &raw const parameter) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Ends the loop and returns the gaps of each subject.
    pub fn end(self) -> Result<Vec<Gaps>> {
        RECORD_FOR.store(END, Release);
        let joined = self.thread.join();
        joined.map_err(|_| anyhow::anyhow!("the loop's thread panicked; please report this"))
    }

    /// Returns how often the loop's thread has lost its CPU.
    fn context_switches(&self) -> Result<u64> {
        let path = format!("/proc/self/task/{}/status", self.id);
        let text = std::fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
        let switches = text.lines().filter(|line| line.contains("_ctxt_switches:"));
        let numbers =
            switches.filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
        Ok(numbers.sum())
    }
}

/// Runs the loop: it counts if it should, and records the time since its last pass.
fn run(gaps: &mut [Gaps]) {
    let mut last = cycles::now();
    let mut before = NOBODY;
    loop {
        if COUNTS.load(Relaxed) {
            COUNTED.inc();
        }
        let now = cycles::now();
        let subject = RECORD_FOR.load(Relaxed);
        if subject == END {
            return;
        }
        // A gap that began in another slice, or outside of a slice, is not recorded.
        if subject == before
            && let Some(gaps) = gaps.get_mut(subject)
        {
            gaps.saturating_record(now.wrapping_sub(last));
        }
        before = subject;
        last = now;
    }
}

/// The parameters that all slices share.
#[derive(Clone, Copy)]
pub struct Setup<'a> {
    pub cpu: usize,
    /// The CPUs that this process may use, without the loop's.
    pub others: &'a [usize],
    pub interval: Duration,
}

/// The thread that folds the loop's counter.
enum Folder {
    Nobody,
    Local(LocalWorker),
    Pinfold(Box<Running>),
}

impl Folder {
    fn start(setup: Setup, subject: SubjectName) -> Result<Folder> {
        Ok(match subject {
            SubjectName::None => Folder::Nobody,
            SubjectName::LocalWorker | SubjectName::IdleLocalWorker | SubjectName::Fifo => {
                Folder::Local(LocalWorker::start(setup)?)
            }
            SubjectName::IdleOnDemand => Folder::Local(LocalWorker::start_on_demand(setup)?),
            SubjectName::Pinfold => {
                let mut cpus = CpuSet::default();
                setup.others.iter().for_each(|&cpu| cpus.insert(cpu));
                // Folds the loop's CPU also if it is isolated: that is what is measured.
                let shepherd = Shepherd::new().interval(setup.interval).fold_isolated();
                let running = shepherd.on(cpus).start()?;
                shepherd::watch(&COUNTED)?;
                Folder::Pinfold(Box::new(running))
            }
        })
    }

    /// Returns how many shards it has folded so far.
    fn folds(&self) -> u64 {
        match self {
            Folder::Nobody => 0,
            Folder::Local(worker) => worker.shared.folds.load(Relaxed),
            Folder::Pinfold(running) => running.folds(),
        }
    }

    fn stop(self) {
        match self {
            Folder::Nobody => {}
            Folder::Local(worker) => worker.stop(),
            Folder::Pinfold(running) => {
                shepherd::unwatch(&COUNTED);
                running.stop();
            }
        }
    }
}

/// The kernel's way: a worker on the loop's CPU.
struct LocalWorker {
    shared: &'static Shared,
    worker: JoinHandle<()>,
    /// The thread on another CPU that wakes a worker on demand.
    shepherd: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    folds: AtomicU64,
    /// Whether the shepherd has asked a worker on demand to fold.
    asked: AtomicBool,
}

impl LocalWorker {
    /// Starts a worker that folds every interval, woken by its own CPU's timer.
    fn start(setup: Setup) -> Result<LocalWorker> {
        let interval = setup.interval;
        let (shared, worker) = Self::worker(setup.cpu, move |shared| {
            std::thread::park_timeout(interval);
            shared.fold();
        })?;
        Ok(LocalWorker {
            shared,
            worker,
            shepherd: None,
        })
    }

    /// Starts a worker that folds every interval only while there is something to fold. A thread on
    /// the other CPUs looks every interval whether there is, and wakes the worker then.
    fn start_on_demand(setup: Setup) -> Result<LocalWorker> {
        let interval = setup.interval;
        let (shared, worker) = Self::worker(setup.cpu, move |shared| {
            // Acquire pairs with the release of the shepherd: the worker finds what it has seen.
            if shared.asked.load(Acquire) && shared.fold() > 0 {
                std::thread::park_timeout(interval);
            } else {
                shared.asked.store(false, Release);
                std::thread::park();
            }
        })?;
        let handle = worker.thread().clone();
        let shepherd = std::thread::Builder::new().spawn(move || {
            while !shared.stop.load(Relaxed) {
                std::thread::park_timeout(interval);
                let needs_update = || COUNTED.read() != COUNTED.sum();
                if !shared.asked.load(Acquire) && needs_update() {
                    shared.asked.store(true, Release);
                    handle.unpark();
                }
            }
        });
        let shepherd = shepherd.context("starting the thread that wakes the local worker")?;
        Ok(LocalWorker {
            shared,
            worker,
            shepherd: Some(shepherd),
        })
    }

    /// Starts a thread on `cpu` that calls `step` until it is stopped.
    fn worker(
        cpu: usize,
        step: impl Fn(&Shared) + Send + 'static,
    ) -> Result<(&'static Shared, JoinHandle<()>)> {
        // Leaks a few bytes per slice, so that the threads can share them.
        let shared: &'static Shared = Box::leak(Box::default());
        let worker = std::thread::Builder::new().spawn(move || {
            let _ = cpus::pin(cpu);
            while !shared.stop.load(Relaxed) {
                step(shared);
            }
        });
        Ok((shared, worker.context("starting the local worker")?))
    }

    fn stop(self) {
        self.shared.stop.store(true, Relaxed);
        let threads = [Some(self.worker), self.shepherd];
        for thread in threads.into_iter().flatten() {
            thread.thread().unpark();
            // The threads do not panic, so the results say nothing.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Folds the loop's counter. Returns how many shards had moved.
    fn fold(&self) -> usize {
        let folded = COUNTED.fold();
        self.folds.fetch_add(folded as u64, Relaxed);
        folded
    }
}
