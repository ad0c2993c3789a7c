//! Models of the protocols between CPUs, explored by loom: `RUSTFLAGS="--cfg loom" cargo test --release --test model`.
//!
//! loom's types cannot stand in statics, so these are the protocols written again, step by step as in `lock.rs`, `slab/node.rs`
//! and `slab/percpu.rs`; each names what it stands for. A per-CPU operation is one step here: the kernel makes it one.
#![cfg(loom)]

use loom::cell::UnsafeCell;
use loom::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use loom::sync::atomic::{AtomicU64, AtomicUsize};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

const WAITED_FOR: u64 = 1;

/// `lock::Lock`, with the kernel's futex as a mutex and a condition.
struct Lock {
    word: AtomicU64,
    kernel: Mutex<()>,
    sleepers: Condvar,
    data: UnsafeCell<usize>,
}

// SAFETY: the lock hands the data to one thread at a time; loom checks that.
unsafe impl Sync for Lock {}
// SAFETY: as above.
unsafe impl Send for Lock {}

impl Lock {
    fn new() -> Self {
        Lock {
            word: AtomicU64::new(0),
            kernel: Mutex::new(()),
            sleepers: Condvar::new(),
            data: UnsafeCell::new(0),
        }
    }

    fn futex_wait(&self, expected: u64) {
        let kernel = self.kernel.lock().unwrap();
        if self.word.load(Relaxed) == expected {
            drop(self.sleepers.wait(kernel).unwrap());
        }
    }

    fn futex_wake(&self) {
        let _kernel = self.kernel.lock().unwrap();
        self.sleepers.notify_one();
    }

    fn lock(&self, me: u64) {
        if self.word.compare_exchange(0, me, Acquire, Relaxed).is_ok() {
            return;
        }
        loop {
            let word = self.word.load(Relaxed);
            if word == 0 {
                if self
                    .word
                    .compare_exchange(0, me | WAITED_FOR, Acquire, Relaxed)
                    .is_ok()
                {
                    return;
                }
                continue;
            }
            let marked = word | WAITED_FOR;
            if word == marked
                || self
                    .word
                    .compare_exchange(word, marked, Relaxed, Relaxed)
                    .is_ok()
            {
                self.futex_wait(marked);
            }
        }
    }

    fn unlock(&self) {
        if self.word.swap(0, Release) & WAITED_FOR != 0 {
            self.futex_wake();
        }
    }
}

/// Nobody is in with another, and nobody sleeps for ever: loom fails a run in which all threads wait.
#[test]
fn the_lock_excludes_and_wakes() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let lock = Arc::new(Lock::new());
        let others: Vec<_> = [2, 4]
            .into_iter()
            .map(|me| {
                let lock = lock.clone();
                thread::spawn(move || enter(&lock, me))
            })
            .collect();
        enter(&lock, 6);
        others.into_iter().for_each(|other| other.join().unwrap());
        lock.lock(8);
        // SAFETY: the lock is held; loom checks it.
        assert_eq!(lock.data.with(|data| unsafe { *data }), 3);
    });
}

fn enter(lock: &Lock, me: u64) {
    lock.lock(me);
    // SAFETY: the lock is held; loom checks it.
    lock.data.with_mut(|data| unsafe { *data += 1 });
    lock.unlock();
}

/// `Node::set_aside` and `Node::take_back`: what two handlers set aside while a holder takes back arrives once.
#[test]
fn things_set_aside_arrive_once() {
    loom::model(|| {
        // links[n] is the first word of object n; 0 ends the list.
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

/// A unit's two words for one cache, and the node's barn. A sheaf is a number; 0 is none.
struct Cpu {
    main: Mutex<usize>,
    spare: Mutex<usize>,
    barn: Mutex<Vec<usize>>,
}

impl Cpu {
    /// The operation `store_if_equal`: one step.
    fn exchange(word: &Mutex<usize>, expected: usize, new: usize) -> bool {
        let mut word = word.lock().unwrap();
        let equal = *word == expected;
        if equal {
            *word = new;
        }
        equal
    }

    /// `Cache::alloc_slow` or `free_slow` as far as sheaves move: take the spare, else one from the barn; install it; keep
    /// what was there.
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

/// However two threads on a CPU interleave, every sheaf is in one place at the end.
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
