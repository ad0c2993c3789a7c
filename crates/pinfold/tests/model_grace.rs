//! A model of grace periods, explored by loom:
//! `RUSTFLAGS="--cfg loom" cargo test --release --test model_grace`.
//!
//! The phase, the numbers, the step and the counts of spilled readers are `slab/grace/periods.rs`
//! itself. A reader uses the object by `with`, and the writer frees it by `with_mut`. loom fails if
//! a free overlaps a use, or is not ordered after it.
//!
//! The membarrier is modelled by what the kernel makes of it: a point in each reader's program with
//! a full fence. A reader checks between any two of its steps whether the writer asks for the
//! fence. The writer waits until each reader has executed the fence or ended.
//!
//! # What is mirrored
//!
//! `model_mirrors.rs` fails when one of these functions changes.
//!
//! | step | mirrors | fingerprint |
//! |---|---|---|
//! | `Model::enter` | `pinfold/src/slab/grace.rs` `enter` | `a4677cc89ed62b43` |
//! | `Model::enter` | `pinfold/src/slab/grace.rs` `enter_slow` | `2b201e66004df1de` |
//! | `Model::enter` | `pinfold/src/slab/grace.rs` `add` | `bcb042ead1e6f053` |
//! | `Model::enter` | `rseq/src/units.rs` `Units::add` | `d5ecce1c62718792` |
//! | `Model::enter` | `rseq/src/atomic.rs` `add` | `ea16e76c4aff0407` |
//! | `Model::enter` | `rseq/src/arch/x86_64.rs` `add` | `9258a63b8c3c7487` |
//! | `Model::enter` | `rseq/src/arch/aarch64.rs` `add` | `91c79afe6fb0138b` |
//! | `Model::leave` | `pinfold/src/slab/grace.rs` `Guard::drop` | `e381aba39e259535` |
//! | `Model::leave` | `pinfold/src/slab/grace.rs` `leave_slow` | `3449410f26e83997` |
//! | `Model::sum` | `pinfold/src/slab/grace.rs` `sum` | `23786aecb038d37d` |
//! | `Model::fence` | `pinfold/src/slab/grace.rs` `fence` | `7a7510423fd68586` |
//! | `Model::let_readers_fence` | `pinfold/src/slab/grace.rs` `let_readers_fence` | `06e220d21a32dce9` |
//! | `Model::fence` | `rseq/src/fence.rs` `membarrier` | `0db18c39a35d1294` |
//! | `Model::poll` | `pinfold/src/slab/grace.rs` `poll` | `32e34a9139a34327` |
//! | `Model::step` | `pinfold/src/slab/grace.rs` `step` | `3beac4de48b6f5fc` |
//! | `Model::synchronize` | `pinfold/src/slab/grace.rs` `synchronize` | `1381c83ff761246b` |
//! | `Model::synchronize` | `pinfold/src/slab/grace.rs` `wait` | `38c3137b3e314516` |
//! | `Model::free` | `pinfold/src/slab/` `Descriptor::take_sealed` | `1f96398b87ce4291` |
//! | `Model::free` | `pinfold/src/slab/` `Descriptor::advance_held` | `e64bec3138123be9` |
#![cfg(loom)]

#[macro_use]
#[path = "common/cases.rs"]
mod cases;
#[path = "../src/slab/grace/periods.rs"]
#[allow(dead_code, reason = "the model does not use all of the file")]
mod periods;

use loom::cell::UnsafeCell;
use loom::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use loom::sync::atomic::{AtomicU64, AtomicUsize, fence};
use loom::sync::{Arc, Mutex};
use loom::thread;
use periods::{LEFT, PHASE_1, Periods, Spilled};
use std::cell::Cell;
use std::convert::Infallible;

/// The atomics of `periods`: loom's, with the planted fault.
mod primitive {
    pub use loom::sync::atomic::{AtomicU64, AtomicUsize};

    pub fn fence(order: loom::sync::atomic::Ordering) {
        if super::FAULT.get() != super::Fault::NoFenceOfItsOwn {
            loom::sync::atomic::fence(order);
        }
    }
}

const READERS: usize = 2;
/// The number of the fence that changes the process to the heavy way.
const CHANGE: usize = 1000;

/// A planted fault, which the model must find.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    Nothing,
    /// A step executes no fence.
    NoFence,
    /// A grace period changes to the other phase, and waits for the old phase only.
    OnePhase,
    /// The step sums *entered* before it sums *left*.
    Reversed,
    /// A spilled reader enters, and a thread draws a ticket, without a fence.
    NoFenceOfItsOwn,
    /// The change to the heavy way executes no membarrier.
    NoFenceAtTheChange,
    /// A reader does not look again whether the process has changed to the heavy way.
    NoSecondLook,
}

std::thread_local! {
    /// A plain thread-local: loom runs all threads of a model on the thread that explores it.
    static FAULT: Cell<Fault> = const { Cell::new(Fault::Nothing) };
}

/// The way that readers use.
#[derive(Clone, Copy, PartialEq)]
enum Readers {
    Light,
    Heavy,
    Spilled,
    /// Light, until the writer changes the process to the heavy way.
    Changed,
}

/// A reader's thread, as the kernel's membarrier sees it.
#[derive(Default)]
struct Thread {
    asked: AtomicUsize,
    passed: AtomicUsize,
    ended: AtomicUsize,
}

/// State of the grace period in progress. The lock of `Model::period` protects it.
#[derive(Default)]
struct Period {
    waited_for: u8,
    /// The number of fences so far.
    fences: usize,
}

struct Model {
    readers: Readers,
    fault: Fault,
    count: usize,
    periods: Periods,
    period: Mutex<Period>,
    spilled: Spilled,
    /// The block of counts of each CPU.
    cpus: [[AtomicU64; 4]; READERS],
    threads: [Thread; READERS],
    /// 1 once readers are heavy, and 1 while the process changes to that.
    heavy: AtomicUsize,
    changing: AtomicUsize,
    /// 1 while readers can find the object.
    pointer: AtomicUsize,
    object: UnsafeCell<bool>,
}

// SAFETY: loom checks that every use of the object is ordered before it is freed.
unsafe impl Sync for Model {}
// SAFETY: loom checks that every use of the object is ordered before it is freed.
unsafe impl Send for Model {}

impl Model {
    fn new(readers: Readers, fault: Fault, count: usize) -> Arc<Model> {
        Arc::new(Model {
            readers,
            fault,
            count,
            periods: Periods {
                phase: Default::default(),
                started: Default::default(),
                done: Default::default(),
                needed: Default::default(),
            },
            period: Default::default(),
            spilled: Spilled(Default::default()),
            cpus: Default::default(),
            threads: Default::default(),
            heavy: AtomicUsize::new(usize::from(matches!(readers, Readers::Heavy))),
            changing: AtomicUsize::new(0),
            pointer: AtomicUsize::new(1),
            object: UnsafeCell::new(true),
        })
    }

    /// A point between two steps of the reader with index `me`, at which a membarrier's interrupt
    /// may arrive.
    fn point(&self, me: usize) {
        let thread = &self.threads[me];
        // A read-modify-write sees the latest value, because an interrupt is not late.
        let asked = thread.asked.fetch_add(0, Relaxed);
        if matches!(self.readers, Readers::Light | Readers::Changed)
            && asked != thread.passed.load(Relaxed)
        {
            fence(SeqCst);
            thread.passed.store(asked, Release);
        }
    }

    /// Returns whether the reader was heavy.
    fn enter(&self, me: usize, phase: usize) -> bool {
        if self.readers == Readers::Spilled {
            self.spilled.enter(phase);
            return true;
        }
        let first = self.heavy.load(Acquire) == 1;
        self.point(me);
        self.cpus[me][phase / 8].fetch_add(1, Relaxed);
        self.point(me);
        if first || self.looks_again() && self.heavy.load(Acquire) == 1 {
            fence(SeqCst);
        }
        first
    }

    fn looks_again(&self) -> bool {
        self.readers == Readers::Changed && self.fault != Fault::NoSecondLook
    }

    fn leave(&self, me: usize, cpu: usize, phase: usize, heavy: bool) {
        if heavy || self.looks_again() && self.heavy.load(Acquire) == 1 {
            fence(SeqCst);
        }
        self.point(me);
        if self.readers == Readers::Spilled {
            self.spilled.leave(phase + LEFT);
        } else {
            self.cpus[cpu][(phase + LEFT) / 8].fetch_add(1, Relaxed);
        }
    }

    /// Enters on CPU `me`, uses the object, and leaves on CPU `leave_on`.
    fn read(&self, me: usize, leave_on: usize) {
        let phase = self.periods.phase();
        self.point(me);
        let heavy = self.enter(me, phase);
        self.point(me);
        if self.pointer.load(Relaxed) == 1 {
            self.point(me);
            // SAFETY: loom checks that the object is not freed during this use.
            self.object
                .with(|object| assert!(unsafe { *object }, "freed"));
        }
        self.point(me);
        self.leave(me, leave_on, phase, heavy);
        self.point(me);
        self.threads[me].ended.store(1, Release);
    }

    fn sum(&self, word: usize) -> u64 {
        let blocks = self.cpus.iter().map(|block| block[word / 8].load(Acquire));
        match self.readers {
            Readers::Spilled => self.spilled.count(word),
            _ => blocks.sum(),
        }
    }

    fn fence(&self, number: usize) {
        if self.fault == Fault::NoFence {
            return;
        }
        fence(SeqCst);
        if self.heavy.load(Acquire) == 0 && self.readers != Readers::Spilled
            || self.changing.load(Acquire) == 1
        {
            self.membarrier(number);
        }
        fence(SeqCst);
    }

    /// Changes the process to the heavy way.
    fn let_readers_fence(&self) {
        self.changing.store(1, Relaxed);
        self.heavy.fetch_or(1, AcqRel);
        if self.fault != Fault::NoFenceAtTheChange {
            fence(SeqCst);
            self.membarrier(CHANGE);
            fence(SeqCst);
        }
        self.changing.store(0, Release);
    }

    fn membarrier(&self, number: usize) {
        for thread in &self.threads[..self.count] {
            thread.asked.store(number, Relaxed);
        }
        for thread in &self.threads[..self.count] {
            while thread.passed.load(Acquire) != number && thread.ended.load(Acquire) == 0 {
                thread::yield_now();
            }
        }
    }

    fn poll(&self) {
        if self.periods.is_needed()
            && let Ok(mut period) = self.period.try_lock()
            && self.periods.is_needed()
        {
            self.step(&mut period);
        }
    }

    fn step(&self, period: &mut Period) {
        period.fences += 1;
        let (number, reversed) = (period.fences, self.fault == Fault::Reversed);
        if self.fault == Fault::OnePhase && period.waited_for == 0 {
            let current = self.periods.phase();
            self.periods.started.fetch_add(1, Relaxed);
            self.periods.phase.store(PHASE_1 - current, Relaxed);
            period.waited_for = 1 << (current / PHASE_1);
        }
        // The step compares the sums that it asks for before the fence with those that it asks for
        // afterwards. To sum in the reverse order is to fence first and to exchange the sums.
        if reversed {
            self.fence(number);
        }
        let sum = |word| self.sum(if reversed { word ^ LEFT } else { word });
        let fence = || {
            if !reversed {
                self.fence(number);
            }
            Ok::<_, Infallible>(())
        };
        let _ = self.periods.step(&mut period.waited_for, sum, fence);
    }

    /// Waits for a grace period.
    fn synchronize(&self) {
        let ticket = self.periods.ticket();
        while !self.periods.passed(ticket) {
            self.poll();
            if !self.periods.passed(ticket) {
                thread::yield_now();
            }
        }
    }

    /// Unlinks the object, so that readers no longer find it. Waits for a grace period, and frees
    /// the object.
    fn free(&self) {
        self.pointer.store(0, Relaxed);
        self.synchronize();
        // SAFETY: loom checks that every use of the object is ordered before this free.
        self.object.with_mut(|object| unsafe { *object = false });
    }
}

/// One reader leaves on another CPU than it entered on. The writer waits for `waits` grace periods.
/// Only the last of them follows the unlinking of the object. The earlier ones just advance the
/// phase, so that the phase which the reader has loaded may be stale.
fn one_reader(readers: Readers, fault: Fault, waits: usize) {
    explore(3, fault, move || {
        let model = Model::new(readers, fault, 1);
        let reader = thread::spawn({
            let model = model.clone();
            move || model.read(0, 1)
        });
        (1..waits).for_each(|_| model.synchronize());
        model.free();
        reader.join().unwrap();
    });
}

/// The writer changes the process to the heavy way, and then frees the object by its own fences.
fn changed(fault: Fault) {
    explore(3, fault, move || {
        let model = Model::new(Readers::Changed, fault, 1);
        let reader = thread::spawn({
            let model = model.clone();
            move || model.read(0, 1)
        });
        model.let_readers_fence();
        model.free();
        reader.join().unwrap();
    });
}

fn two_readers(readers: Readers, fault: Fault) {
    explore(3, fault, move || {
        let model = Model::new(readers, fault, 2);
        let spawned: Vec<_> = [(0, 0), (1, 1)]
            .into_iter()
            .map(|(me, leave_on)| {
                let model = model.clone();
                thread::spawn(move || model.read(me, leave_on))
            })
            .collect();
        model.free();
        spawned
            .into_iter()
            .for_each(|reader| reader.join().unwrap());
    });
}

/// A second thread waits for a grace period of its own. The writer may draw its ticket while that
/// grace period is under way.
///
/// Readers are heavy. With light readers, one of the two threads could wait in a fence until the
/// reader passes it, while the other thread polls. loom would then switch between these two
/// threads, and never run the reader.
fn two_writers(fault: Fault) {
    explore(2, fault, move || {
        let model = Model::new(Readers::Heavy, fault, 1);
        let reader = thread::spawn({
            let model = model.clone();
            move || model.read(0, 0)
        });
        let other = thread::spawn({
            let model = model.clone();
            move || model.synchronize()
        });
        model.free();
        reader.join().unwrap();
        other.join().unwrap();
    });
}

fn explore(bound: usize, fault: Fault, model: impl Fn() + Sync + Send + 'static) {
    FAULT.set(fault);
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(bound);
    builder.check(model);
}

cases! {
    no_heavy_reader_sees_a_freed_object: one_reader(Readers::Heavy, Fault::Nothing, 2);
    no_light_reader_sees_a_freed_object: one_reader(Readers::Light, Fault::Nothing, 2);
    no_spilled_reader_sees_a_freed_object: one_reader(Readers::Spilled, Fault::Nothing, 2);
    none_of_two_heavy_readers_sees_a_freed_object: two_readers(Readers::Heavy, Fault::Nothing);
    none_of_two_light_readers_sees_a_freed_object: two_readers(Readers::Light, Fault::Nothing);
    no_reader_sees_an_object_freed_beside_another_grace_period: two_writers(Fault::Nothing);
    no_reader_sees_a_freed_object_after_the_change_to_the_heavy_way: changed(Fault::Nothing);
    without_a_fence_at_the_change_a_reader_sees_a_freed_object:
        changed(Fault::NoFenceAtTheChange), panics "Causality violation";
    without_a_second_look_a_reader_sees_a_freed_object:
        changed(Fault::NoSecondLook), panics "Causality violation";
    // This test needs two writers. With a single writer, the fence that it executes when it draws
    // its ticket would be enough, and loom would find no fault.
    without_the_writers_fence_heavy_readers_see_a_freed_object:
        two_writers(Fault::NoFence), panics "Causality violation";
    without_the_writers_fence_light_readers_see_a_freed_object:
        one_reader(Readers::Light, Fault::NoFence, 1), panics "Causality violation";
    without_their_fence_spilled_readers_see_a_freed_object:
        one_reader(Readers::Spilled, Fault::NoFenceOfItsOwn, 1), panics "Causality violation";
    without_the_tickets_fence_a_reader_sees_a_freed_object:
        two_writers(Fault::NoFenceOfItsOwn), panics "Causality violation";
    with_one_phase_heavy_readers_see_a_freed_object:
        one_reader(Readers::Heavy, Fault::OnePhase, 2), panics "Causality violation";
    with_one_phase_light_readers_see_a_freed_object:
        one_reader(Readers::Light, Fault::OnePhase, 2), panics "Causality violation";
    with_sums_in_reverse_order_readers_see_a_freed_object:
        two_readers(Readers::Heavy, Fault::Reversed), panics "Causality violation";
}
