//! A thread that isolates its CPU: what other threads leave out, what the report says of the rest.

mod common;

use common::in_child;
use common::machine::wait_until;
use pinfold::counter::PerCpuCounter;
use pinfold::internal::arena::{self, HUGE};
use pinfold::isolate::{self, IsolateError, Isolation, Report};
use pinfold::shepherd::{self, Shepherd};
use pinfold::slab::{KmemCache, grace};
use pinfold::{memory, topology};
use pinfold_rseq::{Backend, backend};
use std::alloc::Layout;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

/// Waits until no other test of this file runs. Isolated CPUs belong to the whole process.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Returns the CPUs that the process could use when it began.
fn cpus() -> &'static [usize] {
    static CPUS: OnceLock<Vec<usize>> = OnceLock::new();
    CPUS.get_or_init(|| topology::affinity().unwrap().iter().collect())
}

fn pin(cpu: usize) {
    assert!(topology::set_affinity(&[cpu].into_iter().collect()));
}

type Job = Box<dyn FnOnce(&mut Option<Isolation>) + Send>;

/// A thread on a CPU of its own, which does what it is told and can isolate the CPU.
struct Worker {
    jobs: Sender<Job>,
    thread: JoinHandle<()>,
}

impl Worker {
    /// Starts the thread on the last CPU, and moves this one to the first. Returns `None` on a
    /// machine with one CPU.
    fn start() -> Option<Worker> {
        let cpus = cpus();
        let (&first, &last) = (cpus.first()?, cpus.last()?);
        if first == last {
            return None;
        }
        pin(first);
        let (jobs, todo) = channel::<Job>();
        let thread = std::thread::spawn(move || {
            pin(last);
            let mut isolation = None;
            todo.iter().for_each(|job| job(&mut isolation));
        });
        Some(Worker { jobs, thread })
    }

    fn run<R: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Option<Isolation>) -> R + Send + 'static,
    ) -> R {
        let (done, result): (_, Receiver<R>) = channel();
        let job = move |isolation: &mut _| done.send(job(isolation)).unwrap();
        self.jobs.send(Box::new(job)).unwrap();
        result.recv().unwrap()
    }

    fn enter(&self) {
        self.run(|isolation| *isolation = Some(isolate::enter().unwrap()));
    }

    fn report(&self) -> Report {
        self.run(|isolation| isolation.as_ref().unwrap().report())
    }

    fn leave(&self) -> Report {
        self.run(|isolation| isolation.take().unwrap().leave())
    }

    fn end(self) {
        drop(self.jobs);
        self.thread.join().unwrap();
    }
}

fn has_rseq() -> bool {
    backend() != Backend::Atomic
}

/// A shepherd does not fold an isolated CPU, whose counts were folded on entry. A fold that the
/// program asks for is done, and reported.
#[test]
fn counts_of_an_isolated_cpu_are_left_alone() {
    let _alone = alone();
    let Some(worker) = Worker::start() else {
        return;
    };
    let counter: &'static PerCpuCounter =
        Box::leak(Box::new(PerCpuCounter::new().with_batch(1 << 20)));
    shepherd::watch(counter).unwrap();
    worker.run(|_| counter.add(5));
    worker.enter();
    assert_eq!(counter.read(), 5);
    worker.run(|_| counter.add(3));
    for shepherd in [Shepherd::new(), Shepherd::new().fold_isolated()] {
        shepherd.tick();
        assert_eq!((counter.read(), counter.sum()), (5, 8));
    }
    assert_eq!(worker.report().folds, 0);
    counter.fold();
    let mut reports = Vec::new();
    isolate::for_each(|report| reports.push((report.cpu, report.folds)));
    assert_eq!(reports, [(*cpus().last().unwrap(), 1)]);
    assert_eq!(counter.read(), 8);
    worker.run(|_| counter.add(1));
    assert_eq!(worker.leave().folds, 1);
    Shepherd::new().tick();
    assert_eq!(counter.read(), 9);
    shepherd::unwatch(counter);
    worker.end();
}

/// Grace periods go on without interrupting an isolated CPU, although readers were light before.
#[test]
fn grace_periods_interrupt_no_isolated_cpu() {
    let _alone = alone();
    let Some(worker) = Worker::start() else {
        return;
    };
    worker.run(|_| drop(grace::enter()));
    grace::synchronize().unwrap();
    worker.enter();
    let reader = grace::enter();
    worker.run(|_| drop(grace::enter()));
    drop(reader);
    for _ in 0..10 {
        grace::synchronize().unwrap();
    }
    assert_eq!(worker.leave().fences, 0);
    worker.end();
}

/// The shepherd takes no objects from an isolated CPU. A shrink that the program asks for does, and
/// is reported.
#[test]
fn objects_of_an_isolated_cpu_are_left_alone() {
    let _alone = alone();
    let Some(worker) = Worker::start() else {
        return;
    };
    let layout = Layout::from_size_align(4096, 8).unwrap();
    let cache: &'static KmemCache = Box::leak(Box::new(KmemCache::new("apart", layout).unwrap()));
    let fill = || {
        let objects: Vec<_> = (0..200).map(|_| cache.alloc().unwrap()).collect();
        // SAFETY: the objects came from this cache just now.
        objects
            .iter()
            .for_each(|&object| unsafe { cache.free(object) });
    };
    worker.enter();
    worker.run(move |_| fill());
    for _ in 0..12 {
        Shepherd::new().tick();
    }
    let report = worker.report();
    assert_eq!((report.drains, report.fences), (0, 0));
    let _ = cache.shrink();
    let report = worker.leave();
    assert_eq!(report.drains, 1);
    assert_eq!(report.fences, u64::from(has_rseq()));
    worker.end();
}

/// Free memory stays while a CPU is isolated, unless the program asks for it, and goes back after.
#[test]
fn free_memory_waits_until_the_isolation_ends() {
    let _alone = alone();
    let Some(worker) = Worker::start() else {
        return;
    };
    let layout = Layout::from_size_align(1 << 16, 8).unwrap();
    let cache = KmemCache::new("waits", layout).unwrap();
    let (time, shepherd) = (memory::dirty_time(), Shepherd::new());
    memory::set_dirty_time(Duration::ZERO);
    worker.enter();
    let free_some = || {
        let objects: Vec<_> = (0..400).map(|_| cache.alloc().unwrap()).collect();
        for &object in &objects {
            // SAFETY: the block has this size, and this thread holds it.
            unsafe { object.as_ptr().write_bytes(1, 1 << 16) };
        }
        // SAFETY: the objects came from this cache, and are not used any more.
        objects
            .iter()
            .for_each(|&object| unsafe { cache.free(object) });
    };
    free_some();
    for _ in 0..5 {
        std::thread::sleep(Duration::from_millis(600));
        shepherd.tick();
    }
    let report = worker.report();
    assert_eq!(report.given_back, 0, "{report:?}");
    let before = memory::returned();
    assert!(memory::dirty() > 1 << 20);
    memory::trim();
    assert!(memory::returned() > before);
    let reported = worker.report().given_back;
    assert!(reported > 0);
    free_some();
    worker.leave();
    let before = memory::returned();
    wait_until("memory to go back", || {
        shepherd.tick();
        memory::returned() > before
    });
    memory::set_dirty_time(time);
    worker.end();
}

/// Freed blocks with mappings of their own wait too, up to a bound.
#[test]
fn freed_mappings_wait_until_the_isolation_ends() {
    let _alone = alone();
    let Some(worker) = Worker::start() else {
        return;
    };
    // A shepherd works for the arena once the process has a cache.
    let _cache = KmemCache::new("any", Layout::new::<u64>()).unwrap();
    let take = || arena::alloc_huge(HUGE, 4096).unwrap().as_ptr();
    // SAFETY: the test owns the block, and does not use it any more.
    let give = |block| assert!(unsafe { arena::free_huge(block) });
    let blocks: Vec<_> = (0..3).map(|_| take()).collect();
    worker.enter();
    let (held, huge) = (memory::held(), memory::huge_total());
    blocks.into_iter().for_each(give);
    assert_eq!((memory::held(), memory::huge_total()), (held, huge));
    assert_eq!(worker.report().given_back, 0);
    memory::trim();
    assert_eq!(memory::huge_total(), huge - 3 * HUGE);
    let trimmed = worker.report().given_back;
    assert!(trimmed >= 3);
    // As many as fit into 1 GiB wait. The others go back at once.
    let fit = (1 << 30) / HUGE;
    let blocks: Vec<_> = (0..fit + 2).map(|_| take()).collect();
    let before = memory::huge_total();
    blocks.into_iter().for_each(give);
    assert_eq!(memory::huge_total(), before - 2 * HUGE);
    assert_eq!(worker.report().given_back, trimmed + 2);
    // No shepherd need tick.
    worker.leave();
    assert_eq!(memory::huge_total(), before - (fit + 2) * HUGE);
    let left = memory::huge_total();
    give(take());
    assert_eq!(memory::huge_total(), left);
    // A limit on free memory holds for what waits too.
    worker.enter();
    let (first, second) = (take(), take());
    give(first);
    assert_eq!(memory::huge_total(), left + 2 * HUGE);
    memory::set_dirty_limit(Some(1 << 30));
    give(second);
    assert_eq!(memory::huge_total(), left);
    memory::set_dirty_limit(None);
    give(take());
    Shepherd::new().tick();
    assert_eq!(memory::huge_total(), left + HUGE);
    memory::set_dirty_limit(Some(1 << 30));
    Shepherd::new().tick();
    assert_eq!(memory::huge_total(), left);
    memory::set_dirty_limit(None);
    // In a child no CPU is isolated, and a tick unmaps what waited.
    give(take());
    in_child(60, || {
        Shepherd::new().tick();
        memory::huge_total() == left
    });
    assert_eq!(memory::huge_total(), left + HUGE);
    worker.leave();
    assert_eq!(memory::huge_total(), left);
    worker.end();
}

/// The shepherd's thread leaves the CPU: before `enter` returns, or after a tick that takes longer
/// than `enter` waits.
#[test]
fn shepherds_leave_an_isolated_cpu() {
    let _alone = alone();
    let Some(worker) = Worker::start() else {
        return;
    };
    let all: topology::CpuSet = cpus().iter().copied().collect();
    let hour = Duration::from_secs(3600);
    let running = Shepherd::new().interval(hour).on(all).start().unwrap();
    let isolated = *cpus().last().unwrap();
    let may_run_there = move || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let shepherds = tasks.filter_map(|task| {
            let path = task.ok()?.path();
            let name = std::fs::read_to_string(path.join("comm")).ok()?;
            (name.trim() == "pinfold").then_some(path)
        });
        let lists = shepherds.map(|path| {
            let status = std::fs::read_to_string(path.join("status")).unwrap();
            let line = status
                .lines()
                .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
            let list: topology::CpuSet = line.unwrap().trim().parse().unwrap();
            list
        });
        lists.into_iter().any(|list| list.contains(isolated))
    };
    wait_until("the thread", may_run_there);
    worker.enter();
    wait_until("the thread's leaving", || !may_run_there());
    worker.leave();
    wait_until("the thread's return", may_run_there);
    running.stop();
    worker.end();
}

#[test]
fn only_one_pinned_thread_isolates_a_cpu() {
    let _alone = alone();
    let Some(worker) = Worker::start() else {
        return;
    };
    let all: topology::CpuSet = cpus().iter().copied().collect();
    assert!(topology::set_affinity(&all));
    assert_eq!(isolate::enter().unwrap_err(), IsolateError::NotPinned);
    worker.enter();
    let second = worker.run(|_| isolate::enter().map(drop));
    assert_eq!(second, Err(IsolateError::Taken));
    let report = worker.leave();
    assert_eq!(report.cpu, *cpus().last().unwrap());
    worker.enter();
    worker.leave();
    worker.end();
}

/// In the child of a fork, no CPU is isolated: memory goes back, and the thread may enter again.
#[test]
fn a_child_after_fork_has_no_isolated_cpu() {
    let _alone = alone();
    let Some(worker) = Worker::start() else {
        return;
    };
    worker.enter();
    worker.run(|isolation| {
        let held = isolation.as_ref().unwrap();
        in_child(60, || {
            let again = isolate::enter().unwrap();
            let second = isolate::enter().map(drop);
            drop(again);
            second == Err(IsolateError::Taken) && held.report().switches == 0
        });
    });
    worker.leave();
    worker.end();
}

/// The report counts what the kernel tells of the thread.
#[test]
fn the_report_has_the_kernels_counts() {
    let _alone = alone();
    let Some(worker) = Worker::start() else {
        return;
    };
    worker.enter();
    let before = worker.report();
    worker.run(|_| std::thread::sleep(Duration::from_millis(5)));
    let after = worker.leave();
    assert!(after.switches > before.switches);
    assert!(after.interrupts >= before.interrupts && after.timer <= after.interrupts);
    worker.end();
}
