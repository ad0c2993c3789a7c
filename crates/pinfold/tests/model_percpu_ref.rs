//! A model of reference counts per CPU, explored by loom:
//! `RUSTFLAGS="--cfg loom" cargo test --release --test model_percpu_ref`.
//!
//! The count is `percpu/ref_count.rs` itself. A thread uses the object by `with` while it has a
//! reference, and the thread that takes the last one away frees the object by `with_mut`. loom
//! fails if the free overlaps a use, or is not ordered after it.
//!
//! The module `counter_units` below stands for the machine: the words of each CPU, the critical
//! section, and the fence. A critical section marks its CPU as running it. The fence waits until it
//! has seen each CPU outside of a section. The kernel aborts a section instead, and a section that
//! is aborted is one that begins later.
//!
//! # What is mirrored
//!
//! `model_mirrors.rs` fails when one of these functions changes.
//!
//! | step | mirrors | fingerprint |
//! |---|---|---|
//! | `LazyBlock::load` | `pinfold/src/counter_units/lazy.rs` `LazyBlock::load` | `ed659e13c484a1f2`
//! |
//! | `LazyBlock::get_or_alloc` | `pinfold/src/counter_units/lazy.rs` `LazyBlock::get_or_alloc` |
//! `002085beff0a245d` |
//! | `LazyBlock::get_or_alloc` | `pinfold/src/counter_units/lazy.rs` `LazyBlock::publish` |
//! `d3d87ceeb1d6f32c` |
//! | `for_each_used` | `pinfold/src/counter_units.rs` `for_each_used` | `2606b1127739193f` |
//! | `install_here` | `pinfold/src/counter_units.rs` `install_here` | `3e7c1e0c5d517fc8` |
//! | `Units::add_gated` | `rseq/src/units.rs` `Units::add_gated` | `d1a795ab17efacd4` |
//! | `Units::add_gated` | `rseq/src/atomic.rs` `add_gated` | `b596940c4724a624` |
//! | `Units::add_gated` | `rseq/src/arch/x86_64.rs` `add_gated` | `3f2567536c339a46` |
//! | `Units::add_gated` | `rseq/src/arch/aarch64.rs` `add_gated` | `bcf7cfe9215df33e` |
//! | `Units::quiesce` | `rseq/src/units.rs` `Units::quiesce` | `4d242a11bc5a7504` |
//! | `Units::quiesce` | `rseq/src/fence.rs` `membarrier` | `0db18c39a35d1294` |
#![cfg(loom)]

#[macro_use]
#[path = "common/cases.rs"]
mod cases;
#[path = "../src/percpu/ref_count.rs"]
#[allow(dead_code, reason = "the model does not use all of the file")]
mod ref_count;

use counter_units::{LazyBlock, NOWHERE, move_to};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::AtomicU64;
use loom::thread;
use ref_count::{FRESH, Killed, RefCount};
use std::cell::Cell;

/// What `ref_count` takes from its folder.
mod primitive {
    pub use super::counter_units::possible;
    pub use loom::sync::atomic::{AtomicU64, fence};

    pub const MOVES: usize = 1;

    pub fn register() -> bool {
        true
    }
}

/// A planted fault, which the model must find.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    Nothing,
    /// The kill does not wait for the sections that have begun.
    NoFence,
    /// A section looks at the gate before it begins, and not inside.
    GateBefore,
}

std::thread_local! {
    /// The planted fault. A plain thread-local: loom runs all threads of a model on the thread that
    /// explores it.
    static FAULT: Cell<Fault> = const { Cell::new(Fault::Nothing) };
}

/// The machine: two CPUs, a block of one word.
mod counter_units {
    use super::{FAULT, Fault};
    use loom::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
    use loom::sync::atomic::{AtomicU64, AtomicUsize};
    use loom::thread;
    use pinfold_rseq::FenceError;
    use std::cell::Cell;

    const CPUS: usize = 2;
    /// A CPU that has no unit.
    pub const NOWHERE: usize = CPUS;
    /// The offset of the block.
    const BLOCK: usize = 64;

    #[derive(Default)]
    struct Unit {
        words: [AtomicU64; 1],
        /// Only its own CPU writes the word. This copy spares the section a load, which would hide
        /// from loom that the store conflicts with other threads' loads.
        own_word: std::sync::atomic::AtomicU64,
        /// 1 while the CPU is in a critical section.
        running: AtomicUsize,
    }

    loom::lazy_static! {
        static ref UNITS: [Unit; CPUS] = Default::default();
    }

    loom::thread_local! {
        static HERE: Cell<usize> = Cell::new(NOWHERE);
    }

    /// Moves the calling thread to `cpu`.
    pub fn move_to(cpu: usize) {
        HERE.with(|here| here.set(cpu));
    }

    pub fn possible() -> usize {
        CPUS
    }

    pub fn install_here() -> Option<usize> {
        Some(HERE.with(Cell::get)).filter(|&cpu| cpu < CPUS)
    }

    pub fn for_each_used<const N: usize>(offset: usize, mut f: impl FnMut(&[AtomicU64; N])) {
        assert_eq!(offset, BLOCK);
        UNITS
            .iter()
            .for_each(|unit| f(unit.words[..N].try_into().unwrap()));
    }

    #[derive(Debug)]
    pub struct LazyBlock<const UNSET: usize>(AtomicUsize);

    impl<const UNSET: usize> LazyBlock<UNSET> {
        pub fn new() -> Self {
            LazyBlock(AtomicUsize::new(UNSET))
        }

        pub fn load(&self) -> usize {
            self.0.load(Acquire)
        }

        pub fn word(&self) -> &AtomicUsize {
            &self.0
        }

        pub fn get_or_alloc(
            &self,
            _size: usize,
            register: impl FnOnce() -> bool,
            prepare: impl FnOnce(usize) -> usize,
        ) -> Option<usize> {
            let word = self.load();
            if word != UNSET {
                return Some(word);
            }
            let mine = register().then(|| prepare(BLOCK))?;
            match self.0.compare_exchange(UNSET, mine, AcqRel, Acquire) {
                Ok(_) => Some(mine),
                Err(theirs) => Some(theirs),
            }
        }

        /// # Safety
        ///
        /// None is needed. The function is unsafe because the one that it stands for is.
        pub unsafe fn free(&mut self, _size: usize) {}
    }

    pub struct Units;

    pub static COUNTER_UNITS: Units = Units;

    pub fn units() -> &'static Units {
        &COUNTER_UNITS
    }

    impl Units {
        /// Runs one critical section: adds `n` to the word if the gate is open.
        ///
        /// # Safety
        ///
        /// None is needed. The function is unsafe because the one that it stands for is.
        pub unsafe fn add_gated(&self, offset: usize, n: u64, gate: &AtomicUsize) -> bool {
            let Some(unit) = install_here().map(|cpu| &UNITS[cpu]) else {
                return false;
            };
            let before = FAULT.get() == Fault::GateBefore;
            let mut is_open = before && gate.load(Acquire) == offset;
            // An exchange, so that a fence that came before is seen with everything that came
            // before the fence. If another thread's section is under way, this one comes later: the
            // kernel aborts a section before it lets another thread run on the CPU.
            while unit.running.swap(1, AcqRel) != 0 {
                thread::yield_now();
            }
            // The machine orders this load before the store, which depends on it. The language
            // needs an acquire for that.
            is_open = is_open || (!before && gate.load(Acquire) == offset);
            if is_open {
                let after = unit.own_word.load(Relaxed).wrapping_add(n);
                unit.own_word.store(after, Relaxed);
                unit.words[0].store(after, Release);
            }
            unit.running.swap(0, AcqRel);
            is_open
        }

        /// Waits until each CPU was seen outside of a section. A section that begins later finds
        /// the closed gate.
        pub fn quiesce(&self, cpus: usize) -> Result<(), FenceError> {
            if FAULT.get() == Fault::NoFence {
                return Ok(());
            }
            for unit in &UNITS[..cpus] {
                while unit.running.fetch_add(0, AcqRel) != 0 {
                    thread::yield_now();
                }
            }
            Ok(())
        }
    }
}

/// An object with its count.
struct Object {
    count: RefCount,
    /// Whether the object is freed.
    freed: UnsafeCell<bool>,
}

impl Object {
    fn new() -> Arc<Object> {
        Arc::new(Object {
            count: RefCount {
                gate: LazyBlock::new(),
                shared: AtomicU64::new(FRESH),
            },
            freed: UnsafeCell::new(false),
        })
    }

    /// Uses the object. The caller has a reference.
    fn use_it(&self) {
        // SAFETY: loom checks that no free overlaps this use.
        assert!(
            !self.freed.with(|freed| unsafe { *freed }),
            "used after the free"
        );
    }

    fn free_if(&self, last: bool) {
        if last {
            // SAFETY: loom checks that every use comes before this free.
            self.freed.with_mut(|freed| unsafe {
                assert!(!*freed, "freed twice");
                *freed = true;
            });
        }
    }

    fn put_on(&self, cpu: usize) {
        move_to(cpu);
        self.use_it();
        self.free_if(self.count.put());
    }

    fn kill(&self) {
        self.use_it();
        let killed = self.count.kill().expect("a fence");
        assert_ne!(killed, Killed::Before);
        self.free_if(killed == Killed::Last);
    }
}

/// Explores `model` with a fault. `begin` runs before the thread starts, and `end` after both.
fn explore(fault: Fault, begin: fn(&Object), threads: &'static [fn(&Object)], main: fn(&Object)) {
    FAULT.set(fault);
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let object = Object::new();
        begin(&object);
        let spawned: Vec<_> = (threads.iter())
            .map(|thread| {
                let object = object.clone();
                thread::spawn(move || thread(&object))
            })
            .collect();
        move_to(NOWHERE);
        main(&object);
        spawned
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
        // SAFETY: no other thread is left.
        let freed = object.freed.with(|freed| unsafe { *freed });
        assert!(freed && object.count.is_zero(), "never freed");
    });
}

/// Gets the references of the threads, on CPU 0.
fn share(object: &Object) {
    move_to(0);
    object.count.get();
}

fn share_twice(object: &Object) {
    share(object);
    object.count.get();
}

/// Clones a reference on one CPU, and drops both elsewhere.
fn clone_and_drop(object: &Object) {
    move_to(0);
    object.count.get();
    object.put_on(1);
    object.put_on(0);
}

/// Drops a reference on a CPU without a unit, after one on a CPU.
fn drop_nowhere(object: &Object) {
    object.put_on(NOWHERE);
}

/// Uses the object if the count is live.
fn try_live(object: &Object) {
    move_to(1);
    if object.count.try_get_live() {
        object.put_on(1);
    }
}

fn kill(object: &Object) {
    object.kill();
}

/// Kills the count, revives it, and kills it again, with a second reference of this thread.
fn kill_twice(object: &Object) {
    assert_eq!(object.count.kill(), Ok(Killed::Left));
    assert!(object.count.revive(false));
    assert_eq!(object.count.kill(), Ok(Killed::Left));
    object.put_on(1);
}

cases! {
    the_last_reference_frees: explore(Fault::Nothing, share, &[clone_and_drop], kill);
    two_threads_put: explore(Fault::Nothing, share_twice, &[|o| o.put_on(0), |o| o.put_on(1)], kill);
    a_cpu_without_a_unit: explore(Fault::Nothing, share, &[drop_nowhere], kill);
    a_first_use_beside_a_kill: explore(Fault::Nothing, |_| (), &[try_live], kill);
    a_live_reference_beside_a_kill: explore(Fault::Nothing, share, &[try_live, |o| o.put_on(0)], kill);
    a_count_lives_again: explore(Fault::Nothing, share_twice, &[|o| o.put_on(0)], kill_twice);
    without_the_fence_a_reference_is_lost:
        explore(Fault::NoFence, share, &[clone_and_drop], kill), panics "never freed";
    with_the_gate_outside_a_reference_is_lost:
        explore(Fault::GateBefore, share, &[clone_and_drop], kill), panics "used after the free";
}
