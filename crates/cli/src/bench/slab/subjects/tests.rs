//! No subject hands an object out twice, whatever threads and signals do.

use super::*;
use crate::bench::{cpus, settle_index};
use std::ptr::null_mut;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64};
use std::time::Duration;

const THREADS: u64 = 4;
const SIZE: usize = 64;

/// What a thread does: objects are held for a while, and then nobody else may have stamped them.
fn use_objects(subject: &dyn Subject, thread: u64, turns: u64, mut hop: impl FnMut(u64)) {
    let mut held = Vec::new();
    let mut random = thread + 1;
    for turn in 0..turns {
        hop(turn);
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1);
        // Sometimes more objects are held than a CPU keeps, sometimes a few.
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
}

/// More threads than some machines have CPUs, which move between CPUs.
fn hammer(subject: &dyn Subject, turns: u64) {
    let cpus = cpus::allowed().unwrap();
    let hop = |thread, turn| {
        if turn % 512 == 0 {
            cpus::pin(cpus[(turn / 512 + thread) as usize % cpus.len()]).unwrap();
        }
    };
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || use_objects(subject, thread, turns, |turn| hop(thread, turn)));
        }
    });
}

/// The second word: the first may be a list's link while the object is free.
fn word(object: *mut u8) -> &'static AtomicU64 {
    // SAFETY: objects have 64 bytes, and their memory stays mapped.
    unsafe { &*object.add(8).cast() }
}

fn stamped(subject: &dyn Subject, stamp: u64) -> (*mut u8, u64) {
    let object = subject.alloc();
    assert!(!object.is_null());
    word(object).store(stamp, Relaxed);
    (object, stamp)
}

fn give_back(subject: &dyn Subject, object: *mut u8, stamp: u64) {
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

/// Who the handler allocates from.
static INTERRUPTED: AtomicPtr<&'static dyn Subject> = AtomicPtr::new(null_mut());
/// What it did.
static HANDLED: AtomicU64 = AtomicU64::new(0);
static FAULTS: AtomicU64 = AtomicU64::new(0);

/// Takes more objects than it finds in the CPU's part, and gives them back.
extern "C" fn handler(_signal: libc::c_int) {
    // SAFETY: set before the first signal, to what lives as long as the process.
    let subject = unsafe { *INTERRUPTED.load(Relaxed) };
    let mut objects = [null_mut(); 8];
    for object in &mut objects {
        *object = subject.alloc();
        word(*object).store(*object as u64, Relaxed);
    }
    for object in objects {
        let is_ours = word(object).load(Relaxed) == object as u64;
        FAULTS.fetch_add(u64::from(!is_ours), Relaxed);
        // SAFETY: from this subject, and not used any more.
        unsafe { subject.free(object) };
    }
    HANDLED.fetch_add(1, Relaxed);
}

/// One thread uses objects while another interrupts it all the time.
fn interrupt(subject: impl Subject + 'static) {
    let subject: &'static dyn Subject = Box::leak(Box::new(subject));
    INTERRUPTED.store(Box::leak(Box::new(subject)), Relaxed);
    HANDLED.store(0, Relaxed);
    // SAFETY: the handler uses only what may be used in one; the thread is not detached before its end.
    let user = unsafe {
        libc::signal(libc::SIGUSR2, handler as *const () as usize);
        libc::pthread_self()
    };
    let over = &AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            // Not for ever, should the other thread fail.
            for _ in 0..100_000 {
                if over.load(Relaxed) {
                    break;
                }
                // SAFETY: the thread waits for this one before it ends.
                unsafe { libc::pthread_kill(user, libc::SIGUSR2) };
                // The handler's turn, and the thread's own.
                std::thread::sleep(Duration::from_micros(20));
            }
        });
        while HANDLED.load(Relaxed) < 300 {
            use_objects(subject, 1, 2000, |_| ());
        }
        over.store(true, Relaxed);
    });
    assert_eq!(
        FAULTS.load(Relaxed),
        0,
        "a handler's object was not its own"
    );
}

#[test]
fn handlers_may_allocate_and_free() {
    settle_index();
    interrupt(Inlined(cache(SIZE).unwrap()));
    interrupt(MaskedSignals::new(cache(SIZE).unwrap()));
    #[cfg(target_arch = "x86_64")]
    if double_word_missing().is_none() {
        interrupt(tid::Tid::new(cache(SIZE).unwrap()).unwrap());
    }
}
