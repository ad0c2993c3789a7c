//! Explores the latch of shared policies in loom:
//! `RUSTFLAGS="--cfg loom" cargo test --release --test model_ranges`.
//!
//! This is `mempolicy/latch.rs` itself, over loom's atomics. A root is modelled with a size that is
//! not atomic, and a tree as one node of two words, which a writer sets to the same value. The node
//! of the tree that a change replaced is the next one that the writer writes. Each planted fault
//! removes one thing that the file's proof rests on.
//!
//! # What is mirrored
//!
//! `model_mirrors.rs` fails when one of these functions changes.
//!
//! | step | mirrors | fingerprint |
//! |---|---|---|
//! | `Model::set` | `pinfold/src/mempolicy/ranges.rs` `Ranges::open` | `b366be070b3eea24` |
//! | `Model::set` | `pinfold/src/mempolicy/ranges.rs` `Ranges::set` | `b5b00d19130e5f55` |
//! | `Model::set` | `pinfold/src/mempolicy/ranges.rs` `Ranges::update` | `6142fe5fa3ce75a8` |
//! | `Model::set` | `pinfold/src/mempolicy/ranges.rs` `Ranges::publish` | `a66e8c7f065bdb64` |
//! | `Model::set` | `pinfold/src/mempolicy/chunks.rs` `Pool::take` | `5884feafa87b1727` |
//! | `Model::set` | `pinfold/src/mempolicy/chunks.rs` `Pool::recycle` | `1d8350c76f8dc9b6` |
//! | `Model::read` | `pinfold/src/mempolicy/ranges.rs` `Ranges::read` | `896a83d964f49742` |
//! | `Model::read` | `pinfold/src/mempolicy/tree.rs` `Tree::covering` | `b2151b8308e34830` |
//! | `Model::read` | `pinfold/src/mempolicy/tree.rs` `Node::below` | `eec6fec38bc8acb8` |
//! | `Model::set` | `pinfold/src/mempolicy/tree.rs` `Node::put` | `159ccb34ad069234` |
//! | `Model::set` | `pinfold/src/mempolicy/tree.rs` `Root::set` | `9c22d894c06e4705` |
#![cfg(loom)]

#[path = "../src/mempolicy/latch.rs"]
mod latch;

use latch::Latch;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::Ordering::{self, AcqRel, Acquire, Relaxed, Release};
use loom::sync::atomic::{AtomicPtr, AtomicU64};
use loom::thread;
use std::cell::Cell;
use std::ptr::null_mut;
use std::sync::Mutex;

/// What a planted fault removes. The model must find every fault.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    Nothing,
    /// Readers do not load the version a second time.
    NoCheck,
    NoReadersFence,
    NoWritersFence,
    VersionLoadedRelaxed,
    VersionStoredRelaxed,
    PointerLoadedRelaxed,
    PointerStoredRelaxed,
    TopLoadedRelaxed,
    TopStoredRelaxed,
}

std::thread_local! {
    /// A plain thread-local: loom runs all threads of a model on the thread that explores it.
    static FAULT: Cell<Fault> = const { Cell::new(Fault::Nothing) };
}

loom::thread_local! {
    static READS: Cell<bool> = Cell::new(false);
}

fn fault() -> Fault {
    FAULT.with(Cell::get)
}

/// Returns `order`, or a weaker one if that is the planted fault.
fn unless(planted: Fault, order: Ordering) -> Ordering {
    if fault() == planted { Relaxed } else { order }
}

/// The latch's atomics: loom's, with the planted fault.
mod primitive {
    use super::{Fault, fault};
    use core::cell::Cell;
    use loom::sync::atomic;
    use loom::sync::atomic::Ordering::{self, Acquire, Relaxed, Release};

    pub struct AtomicU64 {
        word: atomic::AtomicU64,
        /// The value that was last loaded with acquire. Used by the model of a missing check, which
        /// has one reader.
        first: std::sync::atomic::AtomicU64,
    }

    impl AtomicU64 {
        pub fn new(value: u64) -> Self {
            AtomicU64 {
                word: atomic::AtomicU64::new(value),
                first: std::sync::atomic::AtomicU64::new(0),
            }
        }

        pub fn load(&self, order: Ordering) -> u64 {
            match (order, fault()) {
                (Acquire, Fault::VersionLoadedRelaxed) => self.word.load(Relaxed),
                (Acquire, _) => {
                    let value = self.word.load(Acquire);
                    self.first.store(value, Relaxed);
                    value
                }
                (_, Fault::NoCheck) if super::READS.with(Cell::get) => self.first.load(Relaxed),
                _ => self.word.load(order),
            }
        }

        pub fn store(&self, value: u64, order: Ordering) {
            let weaker = order == Release && fault() == Fault::VersionStoredRelaxed;
            self.word.store(value, if weaker { Relaxed } else { order });
        }
    }

    pub struct AtomicPtr<B>(atomic::AtomicPtr<B>);

    impl<B> AtomicPtr<B> {
        pub fn new(at: *mut B) -> Self {
            AtomicPtr(atomic::AtomicPtr::new(at))
        }

        pub fn load(&self, order: Ordering) -> *mut B {
            let weaker = order == Acquire && fault() == Fault::PointerLoadedRelaxed;
            self.0.load(if weaker { Relaxed } else { order })
        }

        pub fn store(&self, at: *mut B, order: Ordering) {
            let weaker = order == Release && fault() == Fault::PointerStoredRelaxed;
            self.0.store(at, if weaker { Relaxed } else { order });
        }
    }

    pub fn fence(order: Ordering) {
        let none = match order {
            Acquire => Fault::NoReadersFence,
            _ => Fault::NoWritersFence,
        };
        if fault() != none {
            atomic::fence(order);
        }
    }
}

struct Root {
    /// Written before another thread can see the root.
    size: UnsafeCell<usize>,
    top: AtomicPtr<Node>,
}

/// A tree: one node.
#[derive(Default)]
struct Node {
    words: [AtomicU64; 2],
}

struct Model {
    latch: Latch<Root>,
    /// All roots and nodes that were made. They stay until the end of the model.
    made: Mutex<(Vec<*mut Root>, Vec<*mut Node>)>,
    /// The node that the last change took out of the tree. For the writer.
    retired: Mutex<Option<*mut Node>>,
    /// The newest value that a reader has seen, or that a finished change has set.
    known: AtomicU64,
}

// SAFETY: loom checks every access to roots and nodes for data races.
unsafe impl Sync for Model {}
// SAFETY: roots and nodes are plain memory, which any thread may free.
unsafe impl Send for Model {}

impl Model {
    fn new() -> Arc<Model> {
        let none = || primitive::AtomicPtr::new(null_mut());
        Arc::new(Model {
            latch: Latch::new(primitive::AtomicU64::new(0), [none(), none()]),
            made: Mutex::default(),
            retired: Mutex::default(),
            known: AtomicU64::new(0),
        })
    }

    /// Does what `Ranges::set` does. One thread changes the model, to the values 1, 2, 3 and so on.
    /// With `grow`, a new root replaces the spare one each time.
    fn set(&self, value: u64, grow: bool) {
        if grow || self.latch.spare().is_null() {
            let fresh = Box::into_raw(Box::new(Root {
                size: UnsafeCell::new(0),
                top: AtomicPtr::new(null_mut()),
            }));
            self.made.lock().unwrap().0.push(fresh);
            // SAFETY: `fresh` is a fresh box that no other thread has yet. loom checks that
            // readers see this write.
            unsafe { (*fresh).size.with_mut(|size| *size = 2) };
            self.latch.replace_spare(fresh);
        }
        // SAFETY: the spare pointer is not null, because `replace_spare` has set it, and roots live
        // until the model is dropped.
        let spare = unsafe { &*self.latch.open_spare() };
        let recycled = self.retired.lock().unwrap().take();
        let node = recycled.unwrap_or_else(|| {
            let node = Box::into_raw(Box::new(Node::default()));
            self.made.lock().unwrap().1.push(node);
            node
        });
        // SAFETY: nodes live until the model is dropped.
        for word in unsafe { &(*node).words } {
            word.store(value, Relaxed);
        }
        spare
            .top
            .store(node, unless(Fault::TopStoredRelaxed, Release));
        // SAFETY: the pointer is null or a root, which lives until the model is dropped.
        let active = unsafe { self.latch.active().as_ref() };
        let old = active.map(|root| root.top.load(Relaxed));
        // The active tree still holds the previous change.
        // SAFETY: an active root has a node, which lives until the model is dropped.
        let before = old.map_or(0, |old| unsafe { (*old).words[0].load(Relaxed) });
        assert_eq!(before, value - 1);
        self.latch.publish();
        *self.retired.lock().unwrap() = old;
        self.known.fetch_max(value, AcqRel);
    }

    fn read(&self) {
        READS.with(|reads| reads.set(true));
        let known = self.known.load(Acquire);
        let [one, other] = self.latch.read(|root| {
            // SAFETY: the pointer is null or a root, which lives until the model is dropped.
            let Some(root) = (unsafe { root.as_ref() }) else {
                return [0, 0];
            };
            // SAFETY: loom fails the model if this read races with the write in `set`.
            assert_eq!(root.size.with(|size| unsafe { *size }), 2);
            let order = unless(Fault::TopLoadedRelaxed, Acquire);
            // SAFETY: the pointer is null or a node, which lives until the model is dropped.
            match unsafe { root.top.load(order).as_ref() } {
                Some(node) => [0, 1].map(|word| node.words[word].load(Relaxed)),
                // A reader that strayed. The latch refuses this, or the values differ from all.
                None => [u64::MAX, 0],
            }
        });
        assert_eq!(one, other, "torn");
        assert!(one >= known, "stale: {one} after {known}");
        self.known.fetch_max(one, AcqRel);
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        let (roots, nodes) = self.made.get_mut().unwrap();
        for root in roots.drain(..) {
            // SAFETY: `Box::into_raw` returned the pointer, which `made` holds once, and all
            // threads of the model have ended.
            drop(unsafe { Box::from_raw(root) });
        }
        for node in nodes.drain(..) {
            // SAFETY: `Box::into_raw` returned the pointer, which `made` holds once.
            drop(unsafe { Box::from_raw(node) });
        }
    }
}

/// Explores `readers` threads that read `reads` times each, beside a writer that makes `changes`
/// changes. The writer makes `before` more changes before the readers start.
fn explore(fault: Fault, readers: usize, reads: usize, before: u64, changes: u64, grow: bool) {
    FAULT.set(fault);
    let mut builder = loom::model::Builder::new();
    // Two readers have many more steps to explore.
    builder.preemption_bound = Some(if readers == 1 { 3 } else { 2 });
    builder.check(move || {
        let model = Model::new();
        (1..=before).for_each(|value| model.set(value, false));
        let spawned: Vec<_> = (0..readers)
            .map(|_| {
                let model = model.clone();
                thread::spawn(move || (0..reads).for_each(|_| model.read()))
            })
            .collect();
        (before + 1..=before + changes).for_each(|value| model.set(value, grow));
        spawned
            .into_iter()
            .for_each(|reader| reader.join().unwrap());
    });
}

#[test]
fn one_reader_sees_complete_values_in_order() {
    explore(Fault::Nothing, 1, 2, 2, 3, false);
}

#[test]
fn one_reader_sees_complete_values_from_the_first_change_on() {
    explore(Fault::Nothing, 1, 2, 0, 3, false);
}

#[test]
fn one_reader_sees_complete_values_while_roots_are_replaced() {
    explore(Fault::Nothing, 1, 2, 2, 3, true);
}

#[test]
fn two_readers_see_complete_values_in_order() {
    explore(Fault::Nothing, 2, 1, 2, 2, false);
}

#[test]
fn two_readers_see_complete_values_while_roots_are_replaced() {
    explore(Fault::Nothing, 2, 1, 1, 2, true);
}

#[test]
#[should_panic(expected = "torn")]
fn loom_finds_torn_reads_without_the_second_load() {
    explore(Fault::NoCheck, 1, 1, 2, 2, false);
}

#[test]
#[should_panic(expected = "torn")]
fn loom_finds_torn_reads_without_the_readers_fence() {
    explore(Fault::NoReadersFence, 1, 1, 2, 2, false);
}

#[test]
#[should_panic(expected = "torn")]
fn loom_finds_torn_reads_without_the_writers_fence() {
    explore(Fault::NoWritersFence, 1, 1, 2, 2, false);
}

#[test]
#[should_panic(expected = "stale")]
fn loom_finds_stale_reads_if_the_version_is_loaded_relaxed() {
    explore(Fault::VersionLoadedRelaxed, 1, 1, 2, 2, false);
}

#[test]
#[should_panic(expected = "stale")]
fn loom_finds_stale_reads_if_the_version_is_stored_relaxed() {
    explore(Fault::VersionStoredRelaxed, 1, 1, 2, 2, false);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn loom_finds_uninitialized_roots_if_the_pointer_is_loaded_relaxed() {
    explore(Fault::PointerLoadedRelaxed, 1, 1, 2, 2, true);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn loom_finds_uninitialized_roots_if_the_pointer_is_stored_relaxed() {
    explore(Fault::PointerStoredRelaxed, 1, 1, 2, 2, true);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn loom_finds_strays_without_memory_if_a_trees_top_is_loaded_relaxed() {
    explore(Fault::TopLoadedRelaxed, 1, 2, 0, 3, false);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn loom_finds_strays_without_memory_if_a_trees_top_is_stored_relaxed() {
    explore(Fault::TopStoredRelaxed, 1, 2, 0, 3, false);
}
