//! A model of the latch under shared policies, explored by loom: `RUSTFLAGS="--cfg loom" cargo test --release --test model_ranges`.
//!
//! This is `mempolicy/latch.rs` itself, over loom's atomics. What stands in for a buffer of ranges is two words that a writer sets to the
//! same value, and a size that is not atomic, as in a buffer's head. Faults are planted in the atomics: each takes away one
//! thing that the file's proof rests on.
#![cfg(loom)]

#[path = "../src/mempolicy/latch.rs"]
mod latch;

use latch::Latch;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use loom::thread;
use std::sync::atomic::AtomicU8;

/// What the latch is made of: loom's atomics, less the fault.
mod primitive {
    use super::{Fault, fault};
    use loom::sync::atomic;
    use loom::sync::atomic::Ordering::{self, Acquire, Relaxed, Release};

    pub struct AtomicU64 {
        word: atomic::AtomicU64,
        /// What was last loaded with acquire; in the model of a missing check there is one reader.
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
                (_, Fault::NoCheck) if super::is_reader() => self.first.load(Relaxed),
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
