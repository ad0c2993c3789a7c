//! One thread for each CPU. The threads live as long as the pool, so that every allocator keeps its
//! per-thread state. Between jobs they sleep, so that another process can measure in its turn
//! without competing for CPUs.

use crate::{Padded, cpus};
use anyhow::{Context, Result, ensure};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicPtr, AtomicUsize};
use std::sync::{Mutex, mpsc};
use std::thread;

/// A job, which each worker calls with its own number.
type Job = &'static (dyn Fn(usize) + Sync);

/// The workers, and the arrays for objects' addresses. Worker 0 plays slab_test's CPU 0.
pub struct Pool {
    workers: Vec<mpsc::Sender<Job>>,
    /// Gets a message each time that a worker has ended a job.
    ended: mpsc::Receiver<()>,
    desks: Vec<Desk>,
    warmup: u32,
}

/// The arrays for a worker's objects. They are made once, so that no measured loop allocates memory
/// for itself. The slots are atomics so that workers can share them. Relaxed accesses compile to
/// plain loads and stores.
pub struct Desk {
    /// The objects' addresses.
    pub slots: Box<[AtomicPtr<u8>]>,
    /// Number of objects handed over to this worker.
    pub handed_over: Padded<AtomicUsize>,
}

impl Pool {
    /// Starts a thread on each CPU that this process may use, but at most `limit` threads. A
    /// measurement makes `warmup` untimed passes, and each worker holds up to `objects` objects.
    ///
    /// # Errors
    ///
    /// Fails if a thread cannot be started or pinned.
    pub fn new(limit: Option<usize>, objects: usize, warmup: u32) -> Result<Pool> {
        let mut cpus = cpus::allowed()?;
        cpus.truncate(limit.unwrap_or(usize::MAX));
        ensure!(!cpus.is_empty(), "this process may use no CPU");
        let (sender, ended) = mpsc::channel();
        let desk = |_| Desk {
            slots: (0..objects).map(|_| AtomicPtr::default()).collect(),
            handed_over: Padded::default(),
        };
        Ok(Pool {
            desks: cpus.iter().map(desk).collect(),
            workers: (cpus.into_iter().enumerate())
                .map(|(worker, cpu)| start(worker, cpu, sender.clone()))
                .collect::<Result<_>>()?,
            ended,
            warmup,
        })
    }

    /// Returns the number of workers.
    #[expect(
        clippy::len_without_is_empty,
        reason = "a pool has at least one worker"
    )]
    pub fn len(&self) -> usize {
        self.workers.len()
    }

    /// Returns the desks, one for each worker.
    pub fn desks(&self) -> &[Desk] {
        &self.desks
    }

    /// Returns the number of objects per desk.
    pub fn objects(&self) -> usize {
        self.desks[0].slots.len()
    }

    /// Returns the number of passes of a measurement: the untimed passes and the timed one.
    pub fn passes(&self) -> u32 {
        self.warmup + 1
    }

    /// Runs `job` on the first `workers` workers at once, each with its number, and waits for all.
    /// Returns the results in the workers' order.
    ///
    /// # Errors
    ///
    /// Fails if a job panics.
    pub fn run<T: Send>(&self, workers: usize, job: impl Fn(usize) -> T + Sync) -> Result<Vec<T>> {
        let workers = &self.workers[..workers];
        let results: Vec<Mutex<Option<T>>> = workers.iter().map(|_| Mutex::new(None)).collect();
        let work = |worker: usize| {
            let result = job(worker);
            if let Ok(mut place) = results[worker].lock() {
                *place = Some(result);
            }
        };
        let job: &(dyn Fn(usize) + Sync) = &work;
        // SAFETY: only the lifetime changes. A worker sends its message after its last use of the
        // job, and this function waits below for a message of every worker that got the job.
        // Nothing in between unwinds. No other call of `run` takes these messages: a pool with a
        // `Receiver` belongs to one thread, and a job cannot reach it.
        let job = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), Job>(job) };
        let sent = workers.iter().filter(|worker| worker.send(job).is_ok());
        for _ in 0..sent.count() {
            let _ = self.ended.recv();
        }
        let results = results.into_iter().map(|result| {
            let result = result.into_inner().ok().flatten();
            result.context("a measuring thread panicked; please report this")
        });
        results.collect()
    }
}

/// Starts the thread of a worker, and waits until the thread is pinned.
fn start(worker: usize, cpu: usize, ended: mpsc::Sender<()>) -> Result<mpsc::Sender<Job>> {
    let (sender, jobs) = mpsc::channel::<Job>();
    let (pinned, is_pinned) = mpsc::channel();
    let work = move || {
        let _ = pinned.send(cpus::pin(cpu));
        for job in jobs {
            // A job that panics leaves no result, which `run` reports.
            let _ = catch_unwind(AssertUnwindSafe(|| job(worker)));
            if ended.send(()).is_err() {
                break;
            }
        }
    };
    (thread::Builder::new()
        .name(format!("cpu {cpu}"))
        .spawn(work))
    .with_context(|| format!("starting thread {worker}; raise ulimit -u"))?;
    is_pinned
        .recv()
        .context("a thread ended before it was pinned")??;
    Ok(sender)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_worker_runs_on_its_own_cpu() {
        let pool = Pool::new(None, 1, 0).unwrap();
        let allowed = cpus::allowed().unwrap();
        let cpus = pool.run(pool.len(), |_| cpus::current().unwrap()).unwrap();
        assert_eq!(cpus, allowed);
        assert_eq!(pool.run(1, |worker| worker).unwrap(), [0]);
    }

    #[test]
    fn a_job_that_panics_is_an_error_and_leaves_the_pool_usable() {
        let pool = Pool::new(Some(1), 1, 0).unwrap();
        let error = pool.run(1, |_| panic!("on purpose")).unwrap_err();
        assert!(error.to_string().contains("panicked"), "{error}");
        assert_eq!(pool.run(1, |_| 7).unwrap(), [7]);
    }
}
