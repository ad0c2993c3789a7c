//! Models of the protocols between CPUs, explored by loom:
//! `RUSTFLAGS="--cfg loom" cargo test --release --test model`.
//!
//! The lock is `lock/word.rs` itself, and the list of what is set aside is `lock/llist.rs` itself,
//! over loom's atomics. The moves of sheaves work on memory that loom cannot watch, so they are
//! written again here. An operation on a CPU's word is one step, because the kernel makes it one.
//! Each planted fault breaks a protocol.
//!
//! Not shown: forks that give up, nested forks, and how a thread learns that a fork was the reason
//! of a refusal.
//!
//! A sleeping thread looks again after a while. The model lets that time pass for all sleepers once
//! a fork has its lock, and once the fork is over.
//!
//! # What is mirrored
//!
//! `model_mirrors.rs` fails when one of these functions changes.
//!
//! | step | mirrors | fingerprint |
//! |---|---|---|
//! | `Lock::enter` | `pinfold/src/lock/mod.rs` `Lock::take` | `53b0a6a9d3864408` |
//! | `futex_wait` | `pinfold/src/lock/mod.rs` `futex_wait` | `0185930c3e2c5886` |
//! | `futex_wake` | `pinfold/src/lock/mod.rs` `futex_wake` | `f6bfe28b3e28f79b` |
//! | `Lock::fork` | `pinfold/src/fork.rs` `prepare` | `70f3a5c6bed257db` |
//! | `Lock::fork` | `pinfold/src/fork.rs` `take_all` | `317c579aa1108717` |
//! | `Lock::end_fork` | `pinfold/src/fork.rs` `parent` | `1fe7bb7f07c48a36` |
//! | `Lock::end_fork` | `pinfold/src/fork.rs` `give_back` | `403991065cacc30a` |
//! | `Cpu::exchange` | `rseq/src/units.rs` `Units::store_if_equal` | `22c66f9592d42889` |
//! | `Cpu::exchange` | `rseq/src/atomic.rs` `store_if_equal` | `d11d1e8305109e1d` |
//! | `Cpu::exchange` | `rseq/src/arch/x86_64.rs` `store_if_equal` | `04d9064c4538822c` |
//! | `Cpu::exchange` | `rseq/src/arch/aarch64.rs` `store_if_equal` | `ed3e0ec2f43a4cc7` |
//! | `Cpu::take_spare` | `pinfold/src/slab/` `Descriptor::take_spare` | `fb3b3a9b647996a0` |
//! | `Cpu::install` | `pinfold/src/slab/` `Descriptor::install` | `f47fd15e8c584add` |
//! | `Cpu::slow_path` | `pinfold/src/slab/` `Descriptor::alloc_slow` | `0cfcea45f04d49df` |
//! | `Cpu::slow_path` | `pinfold/src/slab/` `Descriptor::free_slow` | `79a2b3c6d596c709` |
//! | `Cpu::slow_path` | `pinfold/src/slab/` `Node::exchange_for_full` | `0bcc47aef23c5834` |
//! | `Cpu::slow_path` | `pinfold/src/slab/` `Node::exchange_for_empty` | `05f1c461d5090b18` |
//! | `Parts::exchange_for_empty` | `pinfold/src/slab/` `Descriptor::exchange_for_empty` |
//! `ba32e57c8200db66` |
//! | `Parts::exchange_for_empty` | `pinfold/src/slab/` `Node::flush_oldest` | `88fc8e3f1fcd1f4a` |
//! | `Parts::hand_over` | `pinfold/src/slab/` `Descriptor::hand_over` | `22111b4621a2a6e4` |
//! | `Parts::take_in` | `pinfold/src/slab/` `Node::take_in` | `5db22a551ccb78d7` |
//! | `Parts::empty` | `pinfold/src/slab/` `Node::empty` | `ce5f18289156b98a` |
//! | `Parts::twice` | `pinfold/src/slab/` `Descriptor::twice_if_split` | `a0ee86ce6122225b` |
//! | `Part::give` | `pinfold/src/slab/` `Slabs::give` | `4a64254eb7099605` |
#![cfg(loom)]

#[macro_use]
#[path = "common/cases.rs"]
mod cases;
#[path = "../src/lock/llist.rs"]
mod llist;
#[path = "../src/lock/word.rs"]
#[allow(dead_code, reason = "the model does not use all of the file")]
mod word;

use llist::{Llist, chain};
use loom::cell::UnsafeCell;
use loom::sync::Mutex;
use loom::thread;
use std::cell::Cell;
// loom's would panic while it unwinds from a model in which all threads wait.
use std::sync::Arc;
use word::{Patience, Word};

/// A planted fault, which the model must find.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    Nothing,
    /// The lock is given back without release order.
    UnlockRelaxed,
    /// The lock wakes no thread.
    NoWake,
    /// A sleeping thread does not look again after a while.
    NoSecondLook,
    /// An item is added to a list without release order.
    AddRelaxed,
    /// A list is taken without acquire order.
    TakeRelaxed,
    /// An operation on a CPU's word stores without comparing.
    NoCompare,
    /// A part gives objects of another part to its own slabs.
    NotHome,
}

std::thread_local! {
    /// A plain thread-local: loom runs all threads of a model on the thread that explores it.
    static FAULT: Cell<Fault> = const { Cell::new(Fault::Nothing) };
}

/// Explores `model` with at most `bound` preemptions and a fault.
fn explore(bound: usize, fault: Fault, model: impl Fn() + Sync + Send + 'static) {
    FAULT.set(fault);
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(bound);
    builder.check(model);
}

/// The lock's primitives: loom's atomics, and the kernel's futex as a mutex and a condition
/// variable.
mod primitive {
    use super::{FAULT, Fault};
    use loom::sync::atomic::Ordering::{self, Relaxed};
    use loom::sync::{Condvar, Mutex};
    use std::sync::Arc;
    use std::time::Duration;

    pub use loom::hint::spin_loop;

    /// The kernel's part of a word.
    pub struct Kernel {
        mutex: Mutex<()>,
        sleepers: Condvar,
    }

    impl Kernel {
        /// Ends the sleep of all threads, as the time of their sleep does.
        pub fn let_time_pass(&self) {
            if FAULT.get() != Fault::NoSecondLook {
                let _guard = self.mutex.lock().unwrap();
                self.sleepers.notify_all();
            }
        }
    }

    pub struct AtomicU64 {
        value: loom::sync::atomic::AtomicU64,
        pub kernel: Arc<Kernel>,
    }

    impl AtomicU64 {
        pub fn new(value: u64) -> Self {
            AtomicU64 {
                value: loom::sync::atomic::AtomicU64::new(value),
                kernel: Arc::new(Kernel {
                    mutex: Mutex::new(()),
                    sleepers: Condvar::new(),
                }),
            }
        }

        pub fn load(&self, order: Ordering) -> u64 {
            self.value.load(order)
        }

        pub fn swap(&self, value: u64, order: Ordering) -> u64 {
            let weaker = matches!(FAULT.get(), Fault::UnlockRelaxed | Fault::TakeRelaxed);
            self.value.swap(value, if weaker { Relaxed } else { order })
        }

        pub fn fetch_or(&self, bits: u64, order: Ordering) -> u64 {
            self.value.fetch_or(bits, order)
        }

        pub fn fetch_and(&self, bits: u64, order: Ordering) -> u64 {
            self.value.fetch_and(bits, order)
        }

        pub fn compare_exchange(
            &self,
            from: u64,
            to: u64,
            success: Ordering,
            failure: Ordering,
        ) -> Result<u64, u64> {
            let weaker = FAULT.get() == Fault::AddRelaxed;
            let success = if weaker { Relaxed } else { success };
            self.value.compare_exchange(from, to, success, failure)
        }
    }

    /// Time stands still, so no thread gives up.
    pub fn milliseconds() -> u64 {
        0
    }

    pub fn futex_wait(word: &AtomicU64, expected: u64, _: Duration) {
        let guard = word.kernel.mutex.lock().unwrap();
        if word.value.load(Relaxed) == expected {
            drop(word.kernel.sleepers.wait(guard).unwrap());
        }
    }

    pub fn futex_wake(word: &AtomicU64) {
        if FAULT.get() != Fault::NoWake {
            let _guard = word.kernel.mutex.lock().unwrap();
            word.kernel.sleepers.notify_one();
        }
    }
}

/// A lock and its data.
struct Lock {
    word: Word,
    kernel: Arc<primitive::Kernel>,
    data: UnsafeCell<usize>,
}

// SAFETY: the lock gives the data to one thread at a time, which loom checks.
unsafe impl Sync for Lock {}
// SAFETY: the lock gives the data to one thread at a time, which loom checks.
unsafe impl Send for Lock {}

impl Lock {
    fn new() -> Arc<Self> {
        let word = primitive::AtomicU64::new(0);
        let kernel = word.kernel.clone();
        Arc::new(Lock {
            word: Word::new(word),
            kernel,
            data: UnsafeCell::new(0),
        })
    }

    /// Takes the lock as `Lock::take` does, adds one to the data, and releases the lock. Returns
    /// false if the thread diverted instead.
    fn enter(&self, me: u64, diverts: bool) -> bool {
        let patience = match diverts {
            true => Patience::UntilFork,
            false => Patience::Endless,
        };
        let taken = self.word.try_lock(me).is_ok()
            || self.word.spin(me)
            || self.word.wait(me, patience, || true);
        if taken {
            // SAFETY: this thread holds the lock, which loom checks.
            self.data.with_mut(|data| unsafe { *data += 1 });
            self.word.unlock();
        }
        taken
    }

    /// Takes the lock for a fork, as `fork::prepare` does.
    fn fork(&self, me: u64) {
        if self.word.holder() == me {
            self.word.mark_below_fork();
        }
        assert!(self.word.lock_for_fork(me, Patience::Endless));
        self.kernel.let_time_pass();
    }

    /// Gives the lock back, as `fork::parent` does.
    fn end_fork(&self, me: u64) {
        self.word.unlock_after_fork();
        if self.word.holder() == me {
            self.word.unmark_below_fork();
        }
        self.kernel.let_time_pass();
    }
}

/// No two threads hold the lock at once, and every waiting thread wakes up: loom fails a run in
/// which all threads wait.
fn three_threads(fault: Fault) {
    explore(3, fault, || {
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
fn a_fork(fault: Fault) {
    for (others, bound) in [(&[false][..], 3), (&[true], 3), (&[false, false], 1)] {
        explore(bound, fault, move || {
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
            lock.fork(ME);
            // The C library's fork waits like this when that thread holds one of the C library's
            // locks.
            let mut entered = usize::from(diverting.join().unwrap());
            lock.end_fork(ME);
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
    explore(3, Fault::Nothing, || {
        const ME: u64 = 24;
        let lock = Lock::new();
        assert_eq!(lock.word.try_lock(ME), Ok(()));
        let diverting = {
            let lock = lock.clone();
            thread::spawn(move || lock.enter(8, true))
        };
        lock.fork(ME);
        assert!(!diverting.join().unwrap());
        lock.end_fork(ME);
        assert_eq!(lock.word.holder(), ME);
        lock.word.unlock();
        assert_eq!(lock.word.try_lock(ME), Ok(()));
    });
}

/// A list, and the links of the items 1 to 3.
struct Items {
    list: Llist,
    links: [UnsafeCell<u64>; 4],
}

// SAFETY: the list gives an item to one thread at a time, which loom checks.
unsafe impl Sync for Items {}
// SAFETY: the list gives an item to one thread at a time, which loom checks.
unsafe impl Send for Items {}

impl Items {
    fn new() -> Arc<Self> {
        Arc::new(Items {
            list: Llist::new(primitive::AtomicU64::new(0)),
            links: Default::default(),
        })
    }

    fn add(&self, item: u64) {
        // SAFETY: the caller owns the item, which loom checks.
        let link = |next| self.links[item as usize].with_mut(|link| unsafe { *link = next });
        self.list.add(item, link);
    }

    fn link(&self, item: u64) -> u64 {
        // SAFETY: the caller has taken the item, which loom checks.
        self.links[item as usize].with(|link| unsafe { *link })
    }

    fn take(&self) -> impl Iterator<Item = u64> {
        chain(self.list.del_all(), |item| self.link(item))
    }
}

/// Two threads add items while a third takes all, keeps the first, and puts the rest back. Each
/// item arrives once.
fn two_add(fault: Fault) {
    explore(3, fault, || {
        let items = Items::new();
        items.add(3);
        let threads: Vec<_> = [1, 2]
            .into_iter()
            .map(|item| {
                let items = items.clone();
                thread::spawn(move || items.add(item))
            })
            .collect();
        let first = items.list.del_all();
        let mut seen = vec![first];
        let rest = items.link(first);
        if rest != 0 && !items.list.restore(rest) {
            let rest: Vec<_> = chain(rest, |item| items.link(item)).collect();
            rest.into_iter().for_each(|item| items.add(item));
        }
        threads.into_iter().for_each(|one| one.join().unwrap());
        seen.extend(items.take());
        seen.sort_unstable();
        assert_eq!(seen, [1, 2, 3], "items were lost or doubled");
        assert!(items.list.is_empty());
    });
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
        let equal = *word == expected || FAULT.get() == Fault::NoCompare;
        if equal {
            *word = new;
        }
        equal
    }

    fn take_spare(&self) -> Option<usize> {
        let spare = *self.spare.lock().unwrap();
        (spare != 0 && Cpu::exchange(&self.spare, spare, 0)).then_some(spare)
    }

    /// Installs `sheaf`. The old main sheaf, or `sheaf`, becomes the spare or goes to the barn.
    fn install(&self, sheaf: usize) {
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

    /// Moves sheaves as an allocation or a free does: takes the spare or a sheaf from the barn, and
    /// installs it.
    fn slow_path(&self) {
        let sheaf = match self.take_spare() {
            Some(spare) => Some(spare),
            None => self.barn.lock().unwrap().pop(),
        };
        if let Some(sheaf) = sheaf {
            self.install(sheaf);
        }
    }
}

/// However two threads interleave on a CPU, every sheaf is in one place at the end.
fn two_slow_paths(fault: Fault) {
    explore(3, fault, || {
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
        assert_eq!(all, [1, 2, 3], "sheaves were lost or doubled");
    });
}

/// The two parts of a split cache. An object is a number, and of the part that the number's
/// remainder says.
#[derive(Default)]
struct Parts {
    /// Each under its lock.
    parts: [Mutex<Part>; 2],
    /// The objects that were set aside for each part. A list that needs no lock.
    aside: [Mutex<Vec<usize>>; 2],
}

#[derive(Default)]
struct Part {
    barn: Vec<Vec<usize>>,
    /// The free objects of the slabs.
    slabs: Vec<usize>,
}

impl Part {
    /// How many full sheaves the barn holds.
    const MOST: usize = 1;

    /// Gives the objects of part `number` to the slabs of this one, and returns the others.
    fn give(&mut self, number: usize, sheaf: Vec<usize>) -> Vec<usize> {
        let is_own = |object: &usize| object % 2 == number || FAULT.get() == Fault::NotHome;
        let (own, others) = sheaf.into_iter().partition(is_own);
        self.slabs.extend::<Vec<_>>(own);
        others
    }
}

impl Parts {
    /// Puts a full sheaf into the barn of part `here`. Flushes the oldest if the barn is too full.
    fn exchange_for_empty(&self, here: usize, sheaf: Vec<usize>) {
        let others = {
            let mut part = self.parts[here].lock().unwrap();
            part.barn.push(sheaf);
            let surplus = part.barn.len() > Part::MOST;
            let oldest = surplus.then(|| part.barn.remove(0)).unwrap_or_default();
            part.give(here, oldest)
        };
        self.hand_over(others);
    }

    fn hand_over(&self, mut sheaf: Vec<usize>) {
        while let Some(&first) = sheaf.first() {
            sheaf = self.take_in(first % 2, sheaf);
        }
    }

    fn take_in(&self, home: usize, sheaf: Vec<usize>) -> Vec<usize> {
        let mut part = self.parts[home].lock().unwrap();
        if sheaf.len() > 1 && part.barn.len() < Part::MOST {
            part.barn.push(sheaf);
            return Vec::new();
        }
        part.give(home, sheaf)
    }

    /// Gives the objects that were set aside, and those of the barn, to slabs. Sets those of the
    /// other part aside.
    fn empty(&self, number: usize) {
        let mut part = self.parts[number].lock().unwrap();
        let back = std::mem::take(&mut *self.aside[number].lock().unwrap());
        assert!(part.give(number, back).is_empty());
        for sheaf in std::mem::take(&mut part.barn) {
            for object in part.give(number, sheaf) {
                self.aside[object % 2].lock().unwrap().push(object);
            }
        }
    }

    /// Empties all parts twice, as the end of a cache does.
    fn twice(&self) {
        for number in [0, 1, 0, 1] {
            self.empty(number);
        }
    }
}

/// Two CPUs free objects of both parts while a tick empties a barn. Then the cache is destroyed
/// while another tick empties a barn. All objects are then in the slabs of their parts.
fn two_parts(fault: Fault) {
    explore(2, fault, || {
        let parts = Arc::new(Parts::default());
        parts.parts[1].lock().unwrap().barn.push(vec![8, 9]);
        let tick = |number| {
            let parts = parts.clone();
            thread::spawn(move || parts.empty(number))
        };
        let first_tick = tick(1);
        let freeing = thread::spawn({
            let parts = parts.clone();
            move || {
                parts.exchange_for_empty(1, vec![2, 4]);
                parts.exchange_for_empty(1, vec![6, 7]);
            }
        });
        parts.exchange_for_empty(0, vec![0, 1]);
        parts.exchange_for_empty(0, vec![3, 5]);
        freeing.join().unwrap();
        first_tick.join().unwrap();
        let second_tick = tick(1);
        parts.twice();
        for (number, part) in parts.parts.iter().enumerate() {
            let mut slabs = part.lock().unwrap().slabs.clone();
            slabs.sort_unstable();
            let own: Vec<_> = (0..10).filter(|object| object % 2 == number).collect();
            assert_eq!(slabs, own, "objects are not in the slabs of their part");
        }
        second_tick.join().unwrap();
    });
}

cases! {
    the_lock_excludes_and_wakes: three_threads(Fault::Nothing);
    the_lock_does_not_exclude_if_it_is_given_back_relaxed:
        three_threads(Fault::UnlockRelaxed), panics "Causality violation";
    threads_wait_for_ever_if_the_lock_wakes_none: three_threads(Fault::NoWake), panics "deadlock";
    a_fork_does_not_block_a_thread_that_diverts: a_fork(Fault::Nothing);
    a_fork_blocks_a_thread_that_diverts_if_it_does_not_look_again:
        a_fork(Fault::NoSecondLook), panics "deadlock";
    items_of_a_list_arrive_once: two_add(Fault::Nothing);
    items_added_relaxed_are_taken_before_their_links:
        two_add(Fault::AddRelaxed), panics "Causality violation";
    items_taken_relaxed_are_taken_before_their_links:
        two_add(Fault::TakeRelaxed), panics "Causality violation";
    sheaves_are_neither_lost_nor_doubled: two_slow_paths(Fault::Nothing);
    sheaves_are_lost_or_doubled_if_operations_do_not_compare:
        two_slow_paths(Fault::NoCompare), panics "sheaves were lost or doubled";
    each_object_ends_in_its_part: two_parts(Fault::Nothing);
    objects_end_in_a_wrong_part_if_parts_do_not_compare:
        two_parts(Fault::NotHome), panics "objects are not in the slabs of their part";
}
