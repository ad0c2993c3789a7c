//! A model of the freed huge blocks that wait while a CPU is isolated, explored by loom:
//! `RUSTFLAGS="--cfg loom" cargo test --release --test model_waiting`.
//!
//! The table is `arena/waiting.rs` itself, with two places. A mapping is a number, and unmapping it
//! sets a flag, which must not be set before.
#![cfg(loom)]

#[path = "../src/arena/waiting.rs"]
#[allow(dead_code, reason = "the model does not use all of the file")]
mod waiting;

use loom::sync::Arc;
use loom::thread;
use primitive::{AtomicUsize, PLACES};
use std::array::from_fn;
use std::sync::atomic::Ordering::Relaxed;
use waiting::{Place, Waiting};

mod primitive {
    pub use loom::sync::atomic::{AtomicUsize, fence};

    pub const PLACES: usize = 2;
}

/// The first mapping's address. The others follow.
const FIRST: usize = 4096;

struct Model {
    waiting: Waiting,
    /// Isolated CPUs.
    isolated: AtomicUsize,
    /// How many bytes were unmapped of each mapping.
    unmapped: [AtomicUsize; 3],
}

impl Model {
    fn new() -> Arc<Model> {
        Arc::new(Model {
            waiting: Waiting {
                places: from_fn(|_| Place {
                    address: AtomicUsize::new(0),
                    size: AtomicUsize::new(0),
                }),
                bytes: AtomicUsize::new(0),
            },
            isolated: AtomicUsize::new(1),
            unmapped: from_fn(|_| AtomicUsize::new(0)),
        })
    }

    fn unmap(&self, address: usize, size: usize) {
        let before = self.unmapped[address - FIRST].fetch_add(size, Relaxed);
        assert_eq!(before, 0, "unmapped twice");
        assert_eq!(size, address - FIRST + 1, "the size of another mapping");
    }

    fn unmap_waiting(&self) {
        self.waiting
            .take_all(|address, size| self.unmap(address, size));
    }

    /// Frees the mapping `nth`, as `huge::free` does. Its size is its number plus 1.
    fn free(&self, nth: usize) {
        let (address, size) = (FIRST + nth, nth + 1);
        if self.isolated.load(Relaxed) != 0 && self.waiting.put(address, size) {
            if self.isolated.load(Relaxed) == 0 {
                self.unmap_waiting();
            }
            return;
        }
        self.unmap(address, size);
    }

    fn leave(&self) {
        self.isolated.fetch_sub(1, Relaxed);
        self.unmap_waiting();
    }

    fn assert_unmapped(&self, mappings: usize) {
        for nth in 0..mappings {
            assert_eq!(self.unmapped[nth].load(Relaxed), nth + 1, "still mapped");
        }
        assert_eq!(self.waiting.bytes.load(Relaxed), 0);
    }
}

/// A block that is freed while the isolation ends is unmapped once, by one of the two threads.
#[test]
fn nothing_waits_after_the_isolation() {
    loom::model(|| {
        let model = Model::new();
        let freeing = thread::spawn({
            let model = model.clone();
            move || model.free(0)
        });
        model.leave();
        freeing.join().unwrap();
        model.assert_unmapped(1);
    });
}

/// Two threads free while a third one unmaps what waits.
#[test]
fn each_block_is_unmapped_once() {
    loom::model(|| {
        let model = Model::new();
        let frees = [0, 1].map(|nth| {
            let model = model.clone();
            thread::spawn(move || model.free(nth))
        });
        model.unmap_waiting();
        frees.map(|thread| thread.join().unwrap());
        model.leave();
        model.assert_unmapped(2);
    });
}

/// A place that was emptied is used again, while another thread takes out what waits. A block that
/// finds no place is unmapped at once.
#[test]
fn places_are_used_again() {
    loom::model(|| {
        let model = Model::new();
        assert_eq!(PLACES, 2);
        model.free(0);
        let taking = thread::spawn({
            let model = model.clone();
            move || model.unmap_waiting()
        });
        model.free(1);
        model.free(2);
        taking.join().unwrap();
        model.leave();
        model.assert_unmapped(3);
    });
}
