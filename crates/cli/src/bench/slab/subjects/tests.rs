//! No subject hands an object out twice, whatever threads and signals do.

use super::*;
use crate::bench::{cpus, settle_index};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

const THREADS: u64 = 4;
const SIZE: usize = 64;

/// More threads than this machine may have CPUs, which move between CPUs, hold objects for a while and look whether anybody
/// else has stamped them meanwhile.
fn hammer(subject: &impl Subject, turns: u64) {
    let cpus = cpus::allowed().unwrap();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let cpus = &cpus;
            scope.spawn(move || {
                let mut held = Vec::new();
                let mut random = thread + 1;
                for turn in 0..turns {
                    if turn % 1024 == 0 {
                        let hop = (turn / 1024 + thread) as usize % cpus.len();
                        cpus::pin(cpus[hop]).unwrap();
                    }
                    random = random.wrapping_mul(6364136223846793005).wrapping_add(1);
                    // Sometimes more objects are held than a CPU keeps, sometimes none.
                    let most = if turn & 4096 == 0 { 300 } else { 3 };
                    if held.len() < most && random >> 63 == 0 {
                        held.push(stamped(subject, turn * THREADS + thread));
                    } else if let Some((object, stamp)) = held.pop() {
                        give_back(subject, object, stamp);
                    }
                }
                for (object, stamp) in held {
                    give_back(subject, object, stamp);
                }
            });
        }
    });
}

/// The second word: the first may be a list's link while the object is free.
fn word(object: *mut u8) -> &'static AtomicU64 {
    // SAFETY: objects have 64 bytes, and their memory stays mapped.
    unsafe { &*object.add(8).cast() }
}

fn stamped(subject: &impl Subject, stamp: u64) -> (*mut u8, u64) {
    let object = subject.alloc();
    assert!(!object.is_null());
    word(object).store(stamp, Relaxed);
    (object, stamp)
}

fn give_back(subject: &impl Subject, object: *mut u8, stamp: u64) {
    assert_eq!(word(object).load(Relaxed), stamp, "handed out twice");
    // SAFETY: from this subject, and not used any more.
    unsafe { subject.free(object) };
}

fn nothing_is_left(cache: &KmemCache) {
    cache.validate().unwrap();
    cache.shrink().unwrap();
    assert_eq!(cache.in_use(), 0);
}

#[test]
fn the_cache_hands_no_object_out_twice() {
    settle_index();
    let subject = Inlined(cache(SIZE).unwrap());
    hammer(&subject, 200_000);
    nothing_is_left(&subject.0);
}

#[test]
fn malloc_hands_no_block_out_twice() {
    settle_index();
    hammer(&Malloc { size: SIZE }, 200_000);
}

#[test]
#[cfg(target_arch = "x86_64")]
fn transaction_ids_hand_no_object_out_twice() {
    settle_index();
    if double_word_missing().is_some() {
        return;
    }
    let mut subject = tid::Tid::new(cache(SIZE).unwrap()).unwrap();
    hammer(&subject, 400_000);
    subject.drain();
    nothing_is_left(&subject.backing);
}

#[test]
fn masked_signals_hand_no_object_out_twice() {
    settle_index();
    let mut subject = MaskedSignals::new(cache(SIZE).unwrap());
    hammer(&subject, 50_000);
    subject.drain();
    nothing_is_left(&subject.backing);
}
