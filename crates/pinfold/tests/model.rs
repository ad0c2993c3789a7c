//! Models of the protocols between CPUs, explored by loom:
//! `RUSTFLAGS="--cfg loom" cargo test --release --test model`.
//!
//! The lock is `lock/word.rs` itself, over loom's atomics. loom's types cannot be in statics, so
//! the other protocols are written again here, step by step as in `slab/aside.rs` and
//! `slab/percpu.rs`. Each names the code that it stands for. A per-CPU operation is one step here,
//! because the kernel makes it one.
#![cfg(loom)]

#[path = "../src/lock/word.rs"]
#[allow(dead_code, reason = "the model does not use all of the file")]
mod word;

use loom::cell::UnsafeCell;
use loom::sync::atomic::AtomicUsize;
use loom::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use loom::sync::{Arc, Mutex};
use loom::thread;
use word::{Forks, Word};

/// The lock's primitives: loom's atomics, and the kernel's futex as a mutex and a condition
/// variable.
mod primitive {
    use loom::sync::atomic::Ordering::{self, Relaxed};
    use loom::sync::{Condvar, Mutex};

    pub use loom::hint::spin_loop;
    pub use loom::sync::atomic::fence;

    pub struct AtomicU64 {
        value: loom::sync::atomic::AtomicU64,
        kernel: Mutex<()>,
        sleepers: Condvar,
    }

    impl AtomicU64 {
        pub fn new(value: u64) -> Self {
            AtomicU64 {
                value: loom::sync::atomic::AtomicU64::new(value),
                kernel: Mutex::new(()),
                sleepers: Condvar::new(),
            }
        }

        pub fn load(&self, order: Ordering) -> u64 {
            self.value.load(order)
        }

        pub fn store(&self, value: u64, order: Ordering) {
            self.value.store(value, order);
        }

        pub fn swap(&self, value: u64, order: Ordering) -> u64 {
            self.value.swap(value, order)
        }

        pub fn fetch_or(&self, bits: u64, order: Ordering) -> u64 {
            self.value.fetch_or(bits, order)
        }

        pub fn fetch_and(&self, bits: u64, order: Ordering) -> u64 {
            self.value.fetch_and(bits, order)
        }

        pub fn fetch_add(&self, n: u64, order: Ordering) -> u64 {
            self.value.fetch_add(n, order)
        }

        pub fn fetch_sub(&self, n: u64, order: Ordering) -> u64 {
            self.value.fetch_sub(n, order)
        }

        pub fn compare_exchange(
            &self,
            from: u64,
            to: u64,
            success: Ordering,
            failure: Ordering,
        ) -> Result<u64, u64> {
            self.value.compare_exchange(from, to, success, failure)
        }
    }

    pub fn futex_wait(word: &AtomicU64, expected: u64) {
        let kernel = word.kernel.lock().unwrap();
        if word.value.load(Relaxed) == expected {
            drop(word.sleepers.wait(kernel).unwrap());
        }
    }

    pub fn futex_wake(word: &AtomicU64, count: i32) {
        let _kernel = word.kernel.lock().unwrap();
        match count {
            1 => word.sleepers.notify_one(),
            _ => word.sleepers.notify_all(),
        }
    }
}

/// A lock, its data, and the state of forks.
struct Lock {
    word: Word,
    forks: Forks,
    data: UnsafeCell<usize>,
}

// SAFETY: the lock gives the data to one thread at a time, which loom checks.
unsafe impl Sync for Lock {}
// SAFETY: the lock gives the data to one thread at a time, which loom checks.
unsafe impl Send for Lock {}

impl Lock {
    fn new() -> Arc<Self> {
        Arc::new(Lock {
            word: Word::new(primitive::AtomicU64::new(0)),
            forks: Forks {
                thread: primitive::AtomicU64::new(0),
                waiters: primitive::AtomicU64::new(0),
            },
            data: UnsafeCell::new(0),
        })
    }

    /// Takes the lock as `Lock::take` does, adds one to the data, and releases the lock. Returns
    /// false if the thread diverted instead.
    fn enter(&self, me: u64, diverts: bool) -> bool {
        let taken = self.word.try_lock(me).is_ok()
            || self.word.spin(me)
            || self.word.wait(me, &self.forks, diverts);
        if taken {
            // SAFETY: this thread holds the lock, which loom checks.
            self.data.with_mut(|data| unsafe { *data += 1 });
            self.word.unlock();
        }
        taken
    }
}

/// No two threads hold the lock at once, and every waiting thread wakes up: loom fails a run in
/// which all threads wait.
#[test]
fn the_lock_excludes_and_wakes() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let lock = Lock::new();
        let others: Vec<_> = [8, 16]
            .into_iter()
            .map(|me| {
                let lock = lock.clone();
                thread::spawn(move || assert!(lock.enter(me, false)))
            })
            .collect();
        assert!(lock.enter(24, false));
        others.into_iter().for_each(|other| other.join().unwrap());
        assert_eq!(lock.word.try_lock(32), Ok(()));
        // SAFETY: this thread holds the lock, which loom checks.
        assert_eq!(lock.data.with(|data| unsafe { *data }), 3);
    });
}

/// A forking thread holds the lock and waits for a thread that diverts. It makes progress even if
/// it had to wait for a holder, and beside threads that wait until the fork is over.
#[test]
fn a_fork_does_not_block_a_thread_that_diverts() {
    for (others, bound) in [(&[false][..], 3), (&[true], 3), (&[false, false], 1)] {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(bound);
        model.check(move || {
            const ME: u64 = 24;
            let lock = Lock::new();
            let run = |me, diverts| {
                let lock = lock.clone();
                thread::spawn(move || lock.enter(me, diverts))
            };
            let numbered = others.iter().zip([32, 40]);
            let others: Vec<_> = numbered
                .map(|(&diverts, me)| (run(me, diverts), diverts))
                .collect();
            let diverting = run(8, true);
            lock.forks.thread.store(ME, Relaxed);
            lock.word.lock_for_fork(ME, &lock.forks);
            // The C library's fork waits like this when that thread holds one of the C library's
            // locks.
            let mut entered = usize::from(diverting.join().unwrap());
            lock.word.unlock_after_fork();
            lock.forks.thread.store(0, Relaxed);
            for (other, diverts) in others {
                let taken = other.join().unwrap();
                assert!(taken || diverts);
                entered += usize::from(taken);
            }
            assert_eq!(lock.word.try_lock(ME), Ok(()));
            // SAFETY: this thread holds the lock, which loom checks.
            assert_eq!(lock.data.with(|data| unsafe { *data }), entered);
        });
    }
}

/// The same, if a signal handler forks and interrupted the frame that holds the lock.
#[test]
fn a_fork_in_a_handler_does_not_block_a_thread_that_diverts() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        const ME: u64 = 24;
        let lock = Lock::new();
        assert_eq!(lock.word.try_lock(ME), Ok(()));
        let diverting = {
            let lock = lock.clone();
            thread::spawn(move || lock.enter(8, true))
        };
        lock.forks.thread.store(ME, Relaxed);
        lock.word.lock_for_fork(ME, &lock.forks);
        assert!(!diverting.join().unwrap());
        lock.word.unlock_after_fork();
        lock.forks.thread.store(0, Relaxed);
        assert_eq!(lock.word.holder(), ME);
        lock.word.unlock();
        assert_eq!(lock.word.try_lock(ME), Ok(()));
    });
}

/// `Node::set_aside` and `Node::take_back`: two handlers set objects aside while a holder takes
/// them back. Each object arrives once.
#[test]
fn objects_set_aside_arrive_once() {
    loom::model(|| {
        // `links[n]` is the first word of object n; 0 ends the list.
        let links = Arc::new([
            AtomicUsize::new(0),
            AtomicUsize::new(0),
            AtomicUsize::new(0),
        ]);
        let first = Arc::new(AtomicUsize::new(0));
        let pushers: Vec<_> = [1, 2]
            .into_iter()
            .map(|object| {
                let (links, first) = (links.clone(), first.clone());
                thread::spawn(move || {
                    let mut next = first.load(Relaxed);
                    loop {
                        links[object].store(next, Relaxed);
                        match first.compare_exchange(next, object, Release, Relaxed) {
                            Ok(_) => return,
                            Err(other) => next = other,
                        }
                    }
                })
            })
            .collect();
        let mut seen = take_back(&links, &first);
        pushers
            .into_iter()
            .for_each(|pusher| pusher.join().unwrap());
        seen.extend(take_back(&links, &first));
        seen.sort_unstable();
        assert_eq!(seen, [1, 2]);
    });
}

fn take_back(links: &[AtomicUsize; 3], first: &AtomicUsize) -> Vec<usize> {
    let mut seen = Vec::new();
    let mut next = first.swap(0, Acquire);
    while next != 0 {
        seen.push(next);
        next = links[next].load(Relaxed);
    }
    seen
}

/// A unit's two words for one cache, and the node's barn. A sheaf is a number, and 0 stands for no
/// sheaf.
struct Cpu {
    main: Mutex<usize>,
    spare: Mutex<usize>,
    barn: Mutex<Vec<usize>>,
}

impl Cpu {
    /// The operation `store_if_equal`, which is one step.
    fn exchange(word: &Mutex<usize>, expected: usize, new: usize) -> bool {
        let mut word = word.lock().unwrap();
        let equal = *word == expected;
        if equal {
            *word = new;
        }
        equal
    }

    /// `Cache::alloc_slow` or `free_slow`, as far as they move sheaves: takes the spare or a sheaf
    /// from the barn, installs it, and keeps the old main sheaf.
    fn slow_path(&self) {
        let spare = *self.spare.lock().unwrap();
        let taken = spare != 0 && Cpu::exchange(&self.spare, spare, 0);
        let sheaf = if taken {
            spare
        } else {
            match self.barn.lock().unwrap().pop() {
                Some(sheaf) => sheaf,
                None => return,
            }
        };
        let main = *self.main.lock().unwrap();
        let old = if Cpu::exchange(&self.main, main, sheaf) {
            main
        } else {
            sheaf
        };
        if old != 0 && !Cpu::exchange(&self.spare, 0, old) {
            self.barn.lock().unwrap().push(old);
        }
    }
}

/// However two threads interleave on a CPU, every sheaf is in one place at the end.
#[test]
fn sheaves_are_neither_lost_nor_doubled() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let cpu = Arc::new(Cpu {
            main: Mutex::new(1),
            spare: Mutex::new(2),
            barn: Mutex::new(vec![3]),
        });
        let other = thread::spawn({
            let cpu = cpu.clone();
            move || cpu.slow_path()
        });
        cpu.slow_path();
        other.join().unwrap();
        let mut all = cpu.barn.lock().unwrap().clone();
        all.extend([*cpu.main.lock().unwrap(), *cpu.spare.lock().unwrap()]);
        all.retain(|&sheaf| sheaf != 0);
        all.sort_unstable();
        assert_eq!(all, [1, 2, 3]);
    });
}
