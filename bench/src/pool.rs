//! One thread pinned to each CPU. The threads live for the whole run, so that every allocator keeps
//! its per-thread state.
//!
//! Between jobs the threads sleep, so that another process can measure in its turn without
//! competing for CPUs.

use anyhow::{Context, Result, ensure};
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;

/// Number of objects that one thread holds at a time, as in slab_test.
pub const OBJECTS: usize = 10_000;

type Job = Box<dyn FnOnce() + Send>;

/// The threads. The first is worker 0, which plays slab_test's CPU 0.
pub struct Pool {
    workers: Vec<mpsc::Sender<Job>>,
    shared: Arc<Shared>,
    warmup: u32,
}

/// State that the workers share. Made once, so that no measured loop allocates for itself.
pub struct Shared {
    /// A desk for each worker.
    pub desks: Vec<Desk>,
    /// The barrier at which workers wait for each other.
    pub barrier: SpinBarrier,
}

/// A worker's objects. They are atomics so that workers can share the array. Relaxed accesses
/// compile to plain loads and stores.
#[repr(align(128))]
pub struct Desk {
    /// The objects' addresses.
    pub slots: Box<[AtomicPtr<u8>]>,
    /// Number of objects handed over to this worker, on a cache line of its own.
    pub handed_over: Padded,
}

/// A counter that shares no cache line with other data. 128 bytes, because x86-64 fetches lines in
/// pairs.
#[repr(align(128))]
#[derive(Default)]
pub struct Padded(pub AtomicUsize);

impl Pool {
    /// Starts a thread on each CPU that this process may use, but at most `limit` threads.
    pub fn new(limit: Option<u32>, warmup: u32) -> Result<Pool> {
        let mut cpus = allowed_cpus()?;
        cpus.truncate(limit.map_or(usize::MAX, |limit| limit as usize));
        ensure!(!cpus.is_empty(), "this process may use no CPU");
        let shared = Arc::new(Shared {
            desks: cpus.iter().map(|_| Desk::new()).collect(),
            barrier: SpinBarrier::new(cpus.len()),
        });
        let workers = cpus
            .into_iter()
            .map(start_worker)
            .collect::<Result<Vec<_>>>()?;
        Ok(Pool {
            workers,
            shared,
            warmup,
        })
    }

    /// Returns the number of workers.
    pub fn len(&self) -> usize {
        self.workers.len()
    }

    /// Returns the state that the workers share.
    pub fn shared(&self) -> Arc<Shared> {
        Arc::clone(&self.shared)
    }

    /// Returns the number of passes of a measurement: the untimed passes and the timed one.
    pub fn passes(&self) -> u32 {
        self.warmup + 1
    }

    /// Runs `job` on worker 0 and waits for it.
    pub fn run_first<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> T {
        let (sender, receiver) = mpsc::channel();
        submit(&self.workers[0], move || {
            let _ = sender.send(job());
        });
        receiver.recv().expect("a worker panicked")
    }

    /// Runs `job` on all workers at once, each with its number, and waits for all. Returns the
    /// results in the workers' order.
    pub fn run_all<T, F>(&self, job: F) -> Vec<T>
    where
        T: Send + 'static,
        F: Fn(usize) -> T + Send + Sync + 'static,
    {
        let job = Arc::new(job);
        let receivers: Vec<_> = (self.workers.iter().enumerate())
            .map(|(number, worker)| {
                let (job, (sender, receiver)) = (Arc::clone(&job), mpsc::channel());
                submit(worker, move || {
                    let _ = sender.send(job(number));
                });
                receiver
            })
            .collect();
        (receivers.into_iter())
            .map(|receiver| receiver.recv().expect("a worker panicked"))
            .collect()
    }
}

fn submit(worker: &mpsc::Sender<Job>, job: impl FnOnce() + Send + 'static) {
    worker.send(Box::new(job)).expect("a worker has ended");
}

impl Desk {
    fn new() -> Desk {
        Desk {
            slots: (0..OBJECTS).map(|_| AtomicPtr::default()).collect(),
            handed_over: Padded::default(),
        }
    }
}

fn start_worker(cpu: usize) -> Result<mpsc::Sender<Job>> {
    let (sender, jobs) = mpsc::channel::<Job>();
    let (pinned, is_pinned) = mpsc::channel();
    thread::Builder::new()
        .name(format!("cpu {cpu}"))
        .spawn(move || {
            let _ = pinned.send(pin(cpu));
            for job in jobs {
                job();
            }
        })?;
    is_pinned
        .recv()
        .context("a worker ended before it was pinned")?
        .with_context(|| format!("cannot run on CPU {cpu}"))?;
    Ok(sender)
}

/// Returns the CPUs that this process may use.
pub fn allowed_cpus() -> Result<Vec<usize>> {
    // SAFETY: zero bytes are a valid `cpu_set_t`: the empty set.
    let mut set: libc::cpu_set_t = unsafe { core::mem::zeroed() };
    // SAFETY: the kernel writes at most `size_of_val(&set)` bytes, all of them inside `set`.
    if unsafe { libc::sched_getaffinity(0, size_of_val(&set), &mut set) } != 0 {
        return Err(std::io::Error::last_os_error()).context("sched_getaffinity");
    }
    let size = 8 * size_of_val(&set);
    // SAFETY: `cpu` is below the number of bits in `set`.
    Ok((0..size)
        .filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) })
        .collect())
}

/// Keeps the calling thread on one CPU.
pub fn pin(cpu: usize) -> std::io::Result<()> {
    allow(&[cpu])
}

/// Lets the calling thread run on these CPUs.
pub fn allow(cpus: &[usize]) -> std::io::Result<()> {
    // SAFETY: zero bytes are a valid `cpu_set_t`: the empty set.
    let mut set: libc::cpu_set_t = unsafe { core::mem::zeroed() };
    for &cpu in cpus {
        // SAFETY: `cpu` came from `allowed_cpus`, so it is below the number of bits in `set`.
        unsafe { libc::CPU_SET(cpu, &mut set) };
    }
    // SAFETY: the kernel reads `size_of_val(&set)` bytes, all of them inside `set`.
    if unsafe { libc::sched_setaffinity(0, size_of_val(&set), &set) } != 0 {
        return Err(std::io::Error::last_os_error());
    }
    Ok(())
}

/// A spinning barrier. Workers leave it within a few cycles of each other.
pub struct SpinBarrier {
    size: usize,
    arrived: AtomicUsize,
    generation: AtomicUsize,
}

impl SpinBarrier {
    /// Makes a barrier for `size` workers.
    pub fn new(size: usize) -> SpinBarrier {
        SpinBarrier {
            size,
            arrived: AtomicUsize::new(0),
            generation: AtomicUsize::new(0),
        }
    }

    /// Waits until all workers have called this. What a worker did before is visible to all workers
    /// afterwards: each increment of `arrived` synchronises with the last one, and the last
    /// worker's increment of `generation` with the loads of the others.
    pub fn wait(&self) {
        let generation = self.generation.load(Ordering::Acquire);
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.size {
            self.arrived.store(0, Ordering::Relaxed);
            self.generation.fetch_add(1, Ordering::Release);
            return;
        }
        let mut patience = Patience::default();
        while self.generation.load(Ordering::Acquire) == generation {
            patience.spin();
        }
    }
}

/// Spins, and yields its CPU after a while: on a busy machine, the awaited thread may have no CPU.
#[derive(Default)]
pub struct Patience(u32);

impl Patience {
    /// Waits a moment.
    #[inline]
    pub fn spin(&mut self) {
        self.0 += 1;
        if self.0 < 20_000 {
            core::hint::spin_loop();
        } else {
            self.0 = 0;
            thread::yield_now();
        }
    }
}
