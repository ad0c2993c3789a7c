//! A model of the table of isolated CPUs, explored by loom:
//! `RUSTFLAGS="--cfg loom" cargo test --release --test model_spared`.
//!
//! The table is `spared/table.rs` itself, with two places.
#![cfg(loom)]

#[path = "../src/spared/table.rs"]
#[allow(dead_code, reason = "the model does not use all of the file")]
mod table;

use loom::sync::Arc;
use loom::thread;
use primitive::{AtomicU32, AtomicU64, AtomicUsize};
use std::array::from_fn;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use table::{Kind, Place, Refused, Table};

mod primitive {
    pub use loom::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, fence};

    pub const PLACES: usize = 2;
}

const CPU: usize = 3;
const OTHER: usize = 4;

fn table() -> Arc<Table> {
    Arc::new(Table {
        places: from_fn(|_| Place {
            cpu: AtomicU32::new(0),
            unit: AtomicU32::new(0),
            thread: AtomicUsize::new(0),
            counts: from_fn(|_| AtomicU64::new(0)),
        }),
        taken: AtomicU32::new(0),
        changes: AtomicU32::new(0),
    })
}

fn assert_empty(table: &Table) {
    assert!(!table.any());
    let is_free = |place: &Place| place.cpu.load(Relaxed) == 0;
    assert!(table.places.iter().all(is_free), "a place is lost");
}

#[test]
fn one_of_two_threads_isolates_a_cpu() {
    loom::model(|| {
        let table = table();
        let isolated = Arc::new(AtomicU32::new(0));
        let isolate = || {
            let (table, isolated) = (table.clone(), isolated.clone());
            move || {
                let claimed = table.claim(CPU, CPU, 1);
                match claimed {
                    Ok(place) => {
                        assert_eq!(isolated.fetch_add(1, Relaxed), 0, "isolated twice");
                        isolated.fetch_sub(1, Relaxed);
                        table.release(place);
                    }
                    Err(why) => assert_eq!(why, Refused::Taken),
                }
            }
        };
        let other = thread::spawn(isolate());
        isolate()();
        other.join().unwrap();
        assert_empty(&table);
        assert_eq!(table.claim(CPU, CPU, 1), Ok(0));
    });
}

/// The two threads find different places free, because another CPU's isolation ends meanwhile.
#[test]
fn one_of_two_threads_isolates_a_cpu_while_a_place_becomes_free() {
    loom::model(|| {
        let table = table();
        let other = table.claim(OTHER, OTHER, 2).unwrap();
        let claim = || {
            let table = table.clone();
            move || table.claim(CPU, CPU, 1).is_ok()
        };
        let threads = [thread::spawn(claim()), thread::spawn(claim())];
        table.release(other);
        let claimed = threads.map(|thread| u32::from(thread.join().unwrap()));
        assert!(claimed.iter().sum::<u32>() <= 1, "isolated twice");
    });
}

/// Two CPUs beside each other, and a third one that finds no place.
#[test]
fn each_cpu_has_a_place_of_its_own() {
    loom::model(|| {
        let table = table();
        let first = thread::spawn({
            let table = table.clone();
            move || table.claim(CPU, CPU, 1)
        });
        let second = table.claim(OTHER, OTHER, 2).unwrap();
        let first = first.join().unwrap().unwrap();
        assert_ne!(first, second);
        assert_eq!(table.claim(OTHER + 1, 0, 3), Err(Refused::Full));
        let cpus = |(_, cpu, _)| cpu;
        assert_eq!(table.taken().map(cpus).sum::<usize>(), CPU + OTHER);
        table.release(first);
        table.release(second);
        assert_empty(&table);
    });
}

/// A thread that knows of the isolation notes each act exactly once, and only on the CPU that it
/// disturbs. A thread that does not know may note its act, or not.
#[test]
fn acts_are_noted_between_claim_and_release() {
    loom::model(|| {
        let table = table();
        let is_known = Arc::new(AtomicU32::new(0));
        let knows = thread::spawn({
            let (table, is_known) = (table.clone(), is_known.clone());
            move || {
                // Acquire pairs with the release of the isolating thread.
                let is_known = is_known.load(Acquire) == 1;
                table.note(Kind::GiveBack, |cpu, thread| cpu == CPU && thread == 1);
                is_known
            }
        });
        let other = table.claim(OTHER, OTHER, 2).unwrap();
        let place = table.claim(CPU, CPU, 1).unwrap();
        is_known.store(1, Release);
        let is_known = knows.join().unwrap();
        let [_, given_back, ..] = table.counts(place);
        assert!(given_back == 1 || given_back == 0 && !is_known);
        assert_eq!(table.counts(other), [0; 4]);
        table.release(place);
        table.note(Kind::Drain, |cpu, _| cpu == CPU);
        // The next CPU in this place begins without the notes of the last one.
        let again = table.claim(CPU + 2, CPU, 1).unwrap();
        assert_eq!((again, table.counts(again)), (place, [0; 4]));
        table.release(again);
        table.release(other);
        assert_empty(&table);
    });
}
