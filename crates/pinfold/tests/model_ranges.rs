//! Explores the latch of shared policies in loom:
//! `RUSTFLAGS="--cfg loom" cargo test --release --test model_ranges`.
//!
//! This is `mempolicy/latch.rs` itself, over loom's atomics. An array is modelled with a size that
//! is not atomic, and with one range, whose slot has two words, which a writer sets to the same
//! value. The slot that a change frees is the next one that the writer writes. Each planted fault
//! removes one thing that the file's proof rests on.
//!
//! # What is mirrored
//!
//! `model_mirrors.rs` fails when one of these functions changes.
//!
//! | step | mirrors | fingerprint |
//! |---|---|---|
//! | `Model::set` | `pinfold/src/mempolicy/ranges.rs` `Ranges::open` | `72f1566d1d60318a` |
//! | `Model::set` | `pinfold/src/mempolicy/ranges.rs` `Ranges::set` | `d8f275446fec987e` |
//! | `Model::set` | `pinfold/src/mempolicy/ranges.rs` `Ranges::update` | `9ea246f1eda5c1d0` |
//! | `Model::set` | `pinfold/src/mempolicy/ranges.rs` `Ranges::publish` | `765a4ecef974860a` |
//! | `Model::set` | `pinfold/src/mempolicy/table.rs` `Filling::fill` | `fa1e070f8e35d66f` |
//! | `Model::set` | `pinfold/src/mempolicy/table.rs` `Filling::finish` | `dfd4f0d2dce30b7b` |
//! | `Model::set` | `pinfold/src/mempolicy/table.rs` `Table::retire` | `06b461cb25328dda` |
//! | `Model::grow` | `pinfold/src/mempolicy/ranges.rs` `Ranges::take_table` | `9d52dd26fedf052d` |
//! | `Model::read` | `pinfold/src/mempolicy/ranges.rs` `Ranges::read` | `944432a5719c9735` |
//! | `Model::read` | `pinfold/src/mempolicy/table.rs` `View::at` | `46cdbfdc3e1f2515` |
//! | `Model::read` | `pinfold/src/mempolicy/table.rs` `View::covering` | `77105cd2e1facb3c` |
#![cfg(loom)]

#[macro_use]
#[path = "common/cases.rs"]
mod cases;
#[path = "../src/mempolicy/latch.rs"]
mod latch;

use latch::Latch;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use loom::sync::atomic::{AtomicU64, AtomicUsize};
use loom::thread;
use std::cell::Cell;
use std::ptr::{null, null_mut};
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

/// A table: two arrays of one range, and slots. A change needs a slot besides the active array's.
struct Table {
    arrays: [Array; 2],
    slots: [[AtomicU64; 2]; 2],
}

struct Array {
    /// Written before another thread can see the array.
    size: UnsafeCell<usize>,
    table: *const Table,
    slot: AtomicUsize,
}

struct Model {
    latch: Latch<Array>,
    /// All tables that were made. They stay until the end of the model.
    made: Mutex<Vec<*mut Table>>,
    /// The newest value that a reader has seen, or that a finished change has set.
    known: AtomicU64,
}

// SAFETY: loom checks every access to tables for data races.
unsafe impl Sync for Model {}
// SAFETY: tables are plain memory, which any thread may free.
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

    /// Does what `Ranges::take_table` does: publishes an array of a new table that has `value`, and
    /// makes the table's other array the spare one.
    fn grow(&self, value: u64) {
        let word = || AtomicU64::new(value);
        let array = || Array {
            size: UnsafeCell::new(0),
            table: null(),
            slot: AtomicUsize::new(0),
        };
        let table = Box::into_raw(Box::new(Table {
            arrays: [array(), array()],
            slots: [[word(), word()], [word(), word()]],
        }));
        self.made.lock().unwrap().push(table);
        // SAFETY: `table` is a fresh box that no other thread has yet.
        let [first, second] = unsafe { &mut (*table).arrays }.each_mut().map(|array| {
            array.table = table;
            // SAFETY: as above. loom checks that readers see this write.
            array.size.with_mut(|size| unsafe { *size = 2 });
            &raw mut *array
        });
        self.latch.replace_spare(first);
        self.latch.publish();
        self.latch.replace_spare(second);
    }

    /// Does what `Ranges::set` does. One thread changes the model, to the values 1, 2, 3 and so on.
    /// With `grow`, a new table replaces the old one each time.
    fn set(&self, value: u64, grow: bool) {
        if grow || self.latch.spare().is_null() {
            self.grow(value - 1);
        }
        // SAFETY: no pointer is null, because `grow` has set both, and tables live until the model
        // is dropped.
        let (spare, old) = unsafe { (&*self.latch.open_spare(), &*self.latch.active()) };
        // SAFETY: an array's table lives until the model is dropped.
        let slots = unsafe { &(*spare.table).slots };
        let used = old.slot.load(Relaxed);
        // The active array still holds the previous change.
        assert_eq!(slots[used][0].load(Relaxed), value - 1);
        slots[1 - used]
            .iter()
            .for_each(|word| word.store(value, Relaxed));
        spare.slot.store(1 - used, Relaxed);
        self.latch.publish();
        self.known.fetch_max(value, AcqRel);
    }

    fn read(&self) {
        READS.with(|reads| reads.set(true));
        let known = self.known.load(Acquire);
        let [one, other] = self.latch.read(|array| {
            // SAFETY: the pointer is null or an array, which lives until the model is dropped.
            let Some(array) = (unsafe { array.as_ref() }) else {
                return [0, 0];
            };
            // SAFETY: loom fails the model if this read races with the write in `grow`.
            assert_eq!(array.size.with(|size| unsafe { *size }), 2);
            // SAFETY: an array's table lives until the model is dropped.
            let slots = unsafe { &(*array.table).slots };
            let slot = &slots[array.slot.load(Relaxed)];
            slot.each_ref().map(|word| word.load(Relaxed))
        });
        assert_eq!(one, other, "torn");
        assert!(one >= known, "stale: {one} after {known}");
        self.known.fetch_max(one, AcqRel);
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        for table in self.made.get_mut().unwrap().drain(..) {
            // SAFETY: `Box::into_raw` returned the pointer, which `made` holds once, and all
            // threads of the model have ended.
            drop(unsafe { Box::from_raw(table) });
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

cases! {
    one_reader_sees_complete_values_in_order: explore(Fault::Nothing, 1, 2, 2, 3, false);
    one_reader_sees_complete_values_from_the_first_change_on:
        explore(Fault::Nothing, 1, 2, 0, 2, false);
    one_reader_sees_complete_values_while_tables_are_replaced:
        explore(Fault::Nothing, 1, 2, 1, 2, true);
    two_readers_see_complete_values_in_order: explore(Fault::Nothing, 2, 1, 2, 2, false);
    two_readers_see_complete_values_while_tables_are_replaced:
        explore(Fault::Nothing, 2, 1, 1, 1, true);
    loom_finds_torn_reads_without_the_second_load:
        explore(Fault::NoCheck, 1, 1, 2, 2, false), panics "torn";
    loom_finds_torn_reads_without_the_readers_fence:
        explore(Fault::NoReadersFence, 1, 1, 2, 2, false), panics "torn";
    loom_finds_torn_reads_without_the_writers_fence:
        explore(Fault::NoWritersFence, 1, 1, 2, 2, false), panics "torn";
    loom_finds_stale_reads_if_the_version_is_loaded_relaxed:
        explore(Fault::VersionLoadedRelaxed, 1, 1, 2, 2, false), panics "stale";
    loom_finds_stale_reads_if_the_version_is_stored_relaxed:
        explore(Fault::VersionStoredRelaxed, 1, 1, 2, 2, false), panics "stale";
    loom_finds_uninitialized_arrays_if_the_pointer_is_loaded_relaxed:
        explore(Fault::PointerLoadedRelaxed, 1, 1, 2, 2, true), panics "Causality violation";
    loom_finds_uninitialized_arrays_if_the_pointer_is_stored_relaxed:
        explore(Fault::PointerStoredRelaxed, 1, 1, 2, 2, true), panics "Causality violation";
}
