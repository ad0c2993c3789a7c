//! Explores the latch of shared policies in loom:
//! `RUSTFLAGS="--cfg loom" cargo test --release --test model_ranges`.
//!
//! This is `mempolicy/latch.rs` itself, over loom's atomics. A buffer of ranges is modelled as two
//! words, which a writer sets to the same value, and a size that is not atomic, like the head of a
//! real buffer. Each planted fault removes one thing that the file's proof rests on.
//!
//! # What is mirrored
//!
//! `model_mirrors.rs` fails when one of these functions changes.
//!
//! | step | mirrors | fingerprint |
//! |---|---|---|
//! | `Model::set` | `pinfold/src/mempolicy/ranges.rs` `Ranges::draft` | `b1ccd4fcb593e8db` |
//! | `Model::set` | `pinfold/src/mempolicy/ranges.rs` `Ranges::set` | `cfa3b90933d81a10` |
//! | `Model::set` | `pinfold/src/mempolicy/ranges.rs` `Ranges::update` | `fbbc28096d06fb07` |
//! | `Model::set` | `pinfold/src/mempolicy/buffer.rs` `Buffer::map` | `4be93575f1577f9a` |
//! | `Model::set` | `pinfold/src/mempolicy/buffer.rs` `Draft::push` | `6a15ad0a138aec8b` |
//! | `Model::set` | `pinfold/src/mempolicy/buffer.rs` `Draft::copy` | `4b7d199b8199244a` |
//! | `Model::set` | `pinfold/src/mempolicy/buffer.rs` `Draft::finish` | `ff95abd84289808f` |
//! | `Model::read` | `pinfold/src/mempolicy/ranges.rs` `Ranges::look` | `b2dae3e027452a9f` |
#![cfg(loom)]

#[path = "../src/mempolicy/latch.rs"]
mod latch;

use latch::Latch;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::AtomicU64;
use loom::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
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

struct Buffer {
    /// Written before another thread can see the buffer.
    size: UnsafeCell<usize>,
    words: [AtomicU64; 2],
}

struct Model {
    latch: Latch<Buffer>,
    /// All buffers that were made. They stay until the end of the model.
    made: Mutex<Vec<*mut Buffer>>,
    /// The newest value that a reader has seen, or that a finished change has set.
    known: AtomicU64,
}

// SAFETY: loom checks every access to the buffers for data races.
unsafe impl Sync for Model {}
// SAFETY: buffers are plain memory, which any thread may free.
unsafe impl Send for Model {}

impl Model {
    fn new() -> Arc<Model> {
        let none = || primitive::AtomicPtr::new(null_mut());
        Arc::new(Model {
            latch: Latch::new(primitive::AtomicU64::new(0), [none(), none()]),
            made: Mutex::default(),
            known: AtomicU64::new(0),
        })
    }

    /// Does what `Ranges::draft` and its callers do. One thread changes the model, to the values 1,
    /// 2, 3 and so on.
    fn set(&self, value: u64, grow: bool) {
        if grow || self.latch.spare().is_null() {
            let larger = Box::into_raw(Box::new(Buffer {
                size: UnsafeCell::new(0),
                words: Default::default(),
            }));
            self.made.lock().unwrap().push(larger);
            // SAFETY: `larger` is a fresh box that no other thread has yet. loom checks that
            // readers see this write.
            unsafe { (*larger).size.with_mut(|size| *size = 2) };
            self.latch.replace_spare(larger);
        }
        // SAFETY: the spare pointer is not null, because `replace_spare` has set it, and buffers
        // live until the model is dropped.
        let spare = unsafe { &*self.latch.open_spare() };
        for word in &spare.words {
            word.store(value, Relaxed);
        }
        // The active buffer still holds the previous change.
        // SAFETY: the pointer is null or a buffer, which lives until the model is dropped.
        let active = unsafe { self.latch.active().as_ref() };
        assert_eq!(
            active.map_or(0, |buffer| buffer.words[0].load(Relaxed)),
            value - 1
        );
        self.latch.publish();
        self.known.fetch_max(value, AcqRel);
    }

    fn read(&self) {
        READS.with(|reads| reads.set(true));
        let known = self.known.load(Acquire);
        let [one, other] = self.latch.read(|buffer| {
            // SAFETY: the pointer is null or a buffer, which lives until the model is dropped.
            let Some(buffer) = (unsafe { buffer.as_ref() }) else {
                return [0, 0];
            };
            // SAFETY: loom fails the model if this read races with the write in `set`.
            assert_eq!(buffer.size.with(|size| unsafe { *size }), 2);
            [0, 1].map(|word| buffer.words[word].load(Relaxed))
        });
        assert_eq!(one, other, "torn");
        assert!(one >= known, "stale: {one} after {known}");
        self.known.fetch_max(one, AcqRel);
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        for buffer in self.made.get_mut().unwrap().drain(..) {
            // SAFETY: `Box::into_raw` returned the pointer, which `made` holds once, and all
            // threads of the model have ended.
            drop(unsafe { Box::from_raw(buffer) });
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
fn one_reader_sees_complete_values_while_buffers_grow() {
    explore(Fault::Nothing, 1, 2, 2, 3, true);
}

#[test]
fn two_readers_see_complete_values_in_order() {
    explore(Fault::Nothing, 2, 1, 2, 2, false);
}

#[test]
fn two_readers_see_complete_values_while_buffers_grow() {
    explore(Fault::Nothing, 2, 1, 1, 2, true);
}

#[test]
#[should_panic(expected = "torn")]
fn reads_are_torn_without_the_second_load() {
    explore(Fault::NoCheck, 1, 1, 2, 2, false);
}

#[test]
#[should_panic(expected = "torn")]
fn reads_are_torn_without_the_readers_fence() {
    explore(Fault::NoReadersFence, 1, 1, 2, 2, false);
}

#[test]
#[should_panic(expected = "torn")]
fn reads_are_torn_without_the_writers_fence() {
    explore(Fault::NoWritersFence, 1, 1, 2, 2, false);
}

#[test]
#[should_panic(expected = "stale")]
fn reads_are_stale_if_the_version_is_loaded_relaxed() {
    explore(Fault::VersionLoadedRelaxed, 1, 1, 2, 2, false);
}

#[test]
#[should_panic(expected = "stale")]
fn reads_are_stale_if_the_version_is_stored_relaxed() {
    explore(Fault::VersionStoredRelaxed, 1, 1, 2, 2, false);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn buffers_are_not_initialized_if_the_pointer_is_loaded_relaxed() {
    explore(Fault::PointerLoadedRelaxed, 1, 1, 2, 2, true);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn buffers_are_not_initialized_if_the_pointer_is_stored_relaxed() {
    explore(Fault::PointerStoredRelaxed, 1, 1, 2, 2, true);
}
