//! One thread pinned to each CPU, alive for the whole run, so that every allocator keeps its per-thread state.
//!
//! Between jobs the threads sleep: whoever else measures (another process in its turn) has the CPUs to itself.

use anyhow::{Context, Result, ensure};
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;

/// Objects that one thread holds at a time, as in slab_test.
pub const OBJECTS: usize = 10_000;

type Job = Box<dyn FnOnce() + Send>;

/// The threads; the first is worker 0, which plays slab_test's CPU 0.
pub struct Pool {
    workers: Vec<mpsc::Sender<Job>>,
    shared: Arc<Shared>,
    warmup: u32,
}

/// What the workers share, made once, so that no measured loop allocates anything of its own.
pub struct Shared {
    /// A place per worker.
    pub desks: Vec<Desk>,
    /// Where workers wait for each other.
    pub barrier: SpinBarrier,
}

/// A worker's objects. Atomics with relaxed order are plain loads and stores; they let the workers share the array.
#[repr(align(128))]
pub struct Desk {
    /// The objects' addresses.
    pub slots: Box<[AtomicPtr<u8>]>,
    /// How many of them were handed over to this worker, on a cache line of its own.
    pub handed_over: Padded,
}

/// A counter that shares no cache line with anything. 128 bytes: x86-64 fetches lines in pairs.
#[repr(align(128))]
#[derive(Default)]
pub struct Padded(pub AtomicUsize);

impl Pool {
    /// Starts a thread on each CPU that this process may run on, at most `limit` of them.
    pub fn new(limit: Option<u32>, warmup: u32) -> Result<Pool> {
        let mut cpus = allowed_cpus()?;
        cpus.truncate(limit.map_or(usize::MAX, |limit| limit as usize));
        ensure!(!cpus.is_empty(), "no CPU to run on");
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

    /// How many workers there are.
    pub fn len(&self) -> usize {
        self.workers.len()
    }

    /// What the workers share.
    pub fn shared(&self) -> Arc<Shared> {
        Arc::clone(&self.shared)
    }

    /// Passes that a measurement makes: the untimed ones and the timed last.
    pub fn passes(&self) -> u32 {
        self.warmup + 1
    }

    /// Runs `job` on worker 0 and waits for it.
    pub fn run_first<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> T {
        let (sender, receiver) = mpsc::channel();
        submit(&self.workers[0], move || {
            let _ = sender.send(job());
        });
        receiver.recv().expect("a worker ended")
    }

    /// Runs `job` on all workers at once, each with its number, and waits for all; results in the workers' order.
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
            .map(|receiver| receiver.recv().expect("a worker ended"))
            .collect()
    }
}

fn submit(worker: &mpsc::Sender<Job>, job: impl FnOnce() + Send + 'static) {
    worker.send(Box::new(job)).expect("a worker ended");
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
        .context("a worker ended")?
        .with_context(|| format!("cannot run on CPU {cpu}"))?;
    Ok(sender)
}

/// The CPUs that this process may run on.
pub fn allowed_cpus() -> Result<Vec<usize>> {
    // SAFETY: all bits zero is the empty set.
    let mut set: libc::cpu_set_t = unsafe { core::mem::zeroed() };
    // SAFETY: `set` is as large as the size says.
    if unsafe { libc::sched_getaffinity(0, size_of_val(&set), &mut set) } != 0 {
        return Err(std::io::Error::last_os_error()).context("sched_getaffinity");
    }
    let size = 8 * size_of_val(&set);
    // SAFETY: `cpu` stays below the set's number of bits.
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
    // SAFETY: all bits zero is the empty set.
    let mut set: libc::cpu_set_t = unsafe { core::mem::zeroed() };
    for &cpu in cpus {
        // SAFETY: the number came out of a set of the same size.
        unsafe { libc::CPU_SET(cpu, &mut set) };
    }
    // SAFETY: `set` is as large as the size says.
    if unsafe { libc::sched_setaffinity(0, size_of_val(&set), &set) } != 0 {
        return Err(std::io::Error::last_os_error());
    }
    Ok(())
}

/// A barrier that spins, so that workers leave it within a few cycles of each other.
pub struct SpinBarrier {
    size: usize,
    arrived: AtomicUsize,
    generation: AtomicUsize,
}

impl SpinBarrier {
    /// For so many workers.
    pub fn new(size: usize) -> SpinBarrier {
        SpinBarrier {
            size,
            arrived: AtomicUsize::new(0),
            generation: AtomicUsize::new(0),
        }
    }

    /// Waits until all workers are here.
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

/// Spins, and after a while lets other programs run: on a busy machine the awaited thread may have no CPU.
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
