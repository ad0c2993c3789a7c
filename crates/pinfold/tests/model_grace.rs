//! A model of grace periods, explored by loom:
//! `RUSTFLAGS="--cfg loom" cargo test --release --test model_grace`.
//!
//! loom's types cannot be in statics, so the protocol of `slab/grace.rs` is written again here,
//! step by step. A reader uses the object by `with`, and the writer frees it by `with_mut`. loom
//! fails if a free overlaps a use, or is not ordered after it.
//!
//! The membarrier is modelled by what the kernel makes of it: a point in each reader's program with
//! a full fence. A reader checks between any two of its steps whether the writer asks for the
//! fence. The writer waits until each reader has executed the fence or ended.
#![cfg(loom)]

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use loom::sync::atomic::{AtomicUsize, fence};
use loom::thread;

const READERS: usize = 2;

/// A planted fault, which the model must find.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    Nothing,
    /// The writer executes no fence.
    NoFence,
    /// A grace period changes to the other phase, and waits for the old phase only.
    OnePhase,
    /// The step sums *entered* before it sums *left*.
    Reversed,
}

/// The way that readers use.
#[derive(Clone, Copy, PartialEq)]
enum Readers {
    Light,
    Heavy,
}

#[derive(Default)]
struct Cpu {
    entered: [AtomicUsize; 2],
    left: [AtomicUsize; 2],
}

/// A reader's thread, as the kernel's membarrier sees it.
#[derive(Default)]
struct Thread {
    asked: AtomicUsize,
    passed: AtomicUsize,
    ended: AtomicUsize,
}

struct Model {
    readers: Readers,
    fault: Fault,
    count: usize,
    phase: AtomicUsize,
    cpus: [Cpu; READERS],
    threads: [Thread; READERS],
    /// 1 while readers can find the object.
    pointer: AtomicUsize,
    object: UnsafeCell<bool>,
}

// SAFETY: loom checks that uses and the free of the object are ordered.
unsafe impl Sync for Model {}
// SAFETY: loom checks that uses and the free of the object are ordered.
unsafe impl Send for Model {}

impl Model {
    fn new(readers: Readers, fault: Fault, count: usize) -> Arc<Model> {
        Arc::new(Model {
            readers,
            fault,
            count,
            phase: AtomicUsize::new(0),
            cpus: Default::default(),
            threads: Default::default(),
            pointer: AtomicUsize::new(1),
            object: UnsafeCell::new(true),
        })
    }

    /// A place between two steps of reader `me`, where the kernel may interrupt it for a
    /// membarrier.
    fn point(&self, me: usize) {
        let thread = &self.threads[me];
        // A read-modify-write sees the latest value, because an interrupt is not late.
        let asked = thread.asked.fetch_add(0, Relaxed);
        if self.readers == Readers::Light && asked != thread.passed.load(Relaxed) {
            fence(SeqCst);
            thread.passed.store(asked, Release);
        }
    }

    fn reader_fence(&self) {
        if self.readers == Readers::Heavy {
            fence(SeqCst);
        }
    }

    /// Enters on CPU `me`, uses the object, and leaves on CPU `leave_on`.
    fn read(&self, me: usize, leave_on: usize) {
        let phase = self.phase.load(Relaxed);
        self.point(me);
        self.cpus[me].entered[phase].fetch_add(1, Relaxed);
        self.reader_fence();
        self.point(me);
        if self.pointer.load(Relaxed) == 1 {
            self.point(me);
            // SAFETY: loom checks that the object is not freed meanwhile.
            self.object
                .with(|object| assert!(unsafe { *object }, "freed"));
        }
        self.point(me);
        self.reader_fence();
        self.cpus[leave_on].left[phase].fetch_add(1, Relaxed);
        self.point(me);
        self.threads[me].ended.store(1, Release);
    }

    fn sum(&self, words: impl Fn(&Cpu) -> &AtomicUsize) -> usize {
        self.cpus.iter().map(|cpu| words(cpu).load(Acquire)).sum()
    }

    fn fence(&self, number: usize) {
        if self.fault == Fault::NoFence {
            return;
        }
        fence(SeqCst);
        if self.readers == Readers::Light {
            for thread in &self.threads[..self.count] {
                thread.asked.store(number, Relaxed);
            }
            for thread in &self.threads[..self.count] {
                while thread.passed.load(Acquire) != number && thread.ended.load(Acquire) == 0 {
                    thread::yield_now();
                }
            }
        }
        fence(SeqCst);
    }

    /// Stands for `grace::step`.
    fn step(&self, waited_for: &mut u8, number: usize) {
        let left = || [0, 1].map(|phase| self.sum(|cpu| &cpu.left[phase]));
        let entered = || [0, 1].map(|phase| self.sum(|cpu| &cpu.entered[phase]));
        let (left, entered) = if self.fault == Fault::Reversed {
            let entered = {
                self.fence(number);
                entered()
            };
            (left(), entered)
        } else {
            let left = left();
            self.fence(number);
            (left, entered())
        };
        for phase in 0..2 {
            if left[phase] == entered[phase] {
                *waited_for &= !(1 << phase);
            }
        }
        let current = self.phase.load(Relaxed);
        if *waited_for == 1 << current {
            self.phase.store(1 - current, Relaxed);
        }
    }

    /// Waits for a grace period. `number` counts the fences.
    fn synchronize(&self, number: &mut usize) {
        let mut waited_for = 0b11;
        if self.fault == Fault::OnePhase {
            let current = self.phase.load(Relaxed);
            self.phase.store(1 - current, Relaxed);
            waited_for = 1 << current;
        }
        while waited_for != 0 {
            *number += 1;
            self.step(&mut waited_for, *number);
            if waited_for != 0 {
                thread::yield_now();
            }
        }
    }

    fn free(&self) {
        // SAFETY: loom checks that no reader uses the object any more.
        self.object.with_mut(|object| unsafe { *object = false });
    }
}

/// One reader leaves on another CPU than it entered on. The writer waits `waits` times: the last
/// time after it took the object out of sight, and before that without a reason, so that the phase
/// that the reader has loaded may be old.
fn one_reader(readers: Readers, fault: Fault, waits: usize) {
    explore(move || {
        let model = Model::new(readers, fault, 1);
        let reader = thread::spawn({
            let model = model.clone();
            move || model.read(0, 1)
        });
        let mut number = 0;
        for _ in 1..waits {
            model.synchronize(&mut number);
        }
        model.pointer.store(0, Relaxed);
        model.synchronize(&mut number);
        model.free();
        reader.join().unwrap();
    });
}

fn two_readers(readers: Readers, fault: Fault) {
    explore(move || {
        let model = Model::new(readers, fault, 2);
        let spawned: Vec<_> = [(0, 0), (1, 1)]
            .into_iter()
            .map(|(me, leave_on)| {
                let model = model.clone();
                thread::spawn(move || model.read(me, leave_on))
            })
            .collect();
        model.pointer.store(0, Relaxed);
        model.synchronize(&mut 0);
        model.free();
        spawned
            .into_iter()
            .for_each(|reader| reader.join().unwrap());
    });
}

fn explore(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

#[test]
fn no_heavy_reader_sees_a_freed_object() {
    one_reader(Readers::Heavy, Fault::Nothing, 2);
}

#[test]
fn no_light_reader_sees_a_freed_object() {
    one_reader(Readers::Light, Fault::Nothing, 2);
}

#[test]
fn none_of_two_heavy_readers_sees_a_freed_object() {
    two_readers(Readers::Heavy, Fault::Nothing);
}

#[test]
fn none_of_two_light_readers_sees_a_freed_object() {
    two_readers(Readers::Light, Fault::Nothing);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn without_the_writers_fence_heavy_readers_see_a_freed_object() {
    one_reader(Readers::Heavy, Fault::NoFence, 1);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn without_the_writers_fence_light_readers_see_a_freed_object() {
    one_reader(Readers::Light, Fault::NoFence, 1);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn with_one_phase_heavy_readers_see_a_freed_object() {
    one_reader(Readers::Heavy, Fault::OnePhase, 2);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn with_one_phase_light_readers_see_a_freed_object() {
    one_reader(Readers::Light, Fault::OnePhase, 2);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn with_sums_in_reverse_order_readers_see_a_freed_object() {
    two_readers(Readers::Heavy, Fault::Reversed);
}
