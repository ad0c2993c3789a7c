//! Tests that no subject hands an object out twice, whatever threads and signals do.

use super::*;
use crate::machine::settle_index;
use crate::{Subject, cpus};
use array::Protection;
use pinfold::slab::KmemCache;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64};
use std::time::Duration;

const THREADS: u64 = 4;
const SIZE: usize = 64;

/// One thread's work: it holds objects for a while, and meanwhile no other thread may stamp them.
fn use_objects(subject: &dyn Subject, thread: u64, turns: u64, mut hop: impl FnMut(u64)) {
    let mut held = Vec::new();
    let mut random = thread + 1;
    for turn in 0..turns {
        hop(turn);
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1);
        // The thread holds many objects at times, more than a CPU keeps, and a few at other times.
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

/// Runs several threads that move between the CPUs: more threads than some machines have CPUs.
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

/// Returns the object's second word. The first may be a list's link while the object is free.
fn word(object: *mut u8) -> &'static AtomicU64 {
    // SAFETY: objects have 64 bytes, are aligned for a `u64`, and their memory stays mapped.
    unsafe { &*object.add(8).cast() }
}

fn stamped(subject: &dyn Subject, stamp: u64) -> (*mut u8, u64) {
    let object = subject.alloc();
    assert!(!object.is_null());
    word(object).store(stamp, Relaxed);
    (object, stamp)
}

fn give_back(subject: &dyn Subject, object: *mut u8, stamp: u64) {
    assert_eq!(
        word(object).load(Relaxed),
        stamp,
        "object {object:p} was handed out twice"
    );
    // SAFETY: `stamped` allocated the object from this subject, and this thread gives it up here.
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
    let subject = PinfoldCache(cache(SIZE).unwrap());
    hammer(&subject, 200_000);
    nothing_is_left(&subject.0);
}

#[test]
fn malloc_hands_no_block_out_twice() {
    settle_index();
    hammer(&CMalloc::<PinfoldMalloc>::new(SIZE), 200_000);
}

#[test]
fn transaction_ids_hand_no_object_out_twice() {
    settle_index();
    if double_word::missing().is_some() {
        return;
    }
    let mut subject = tid::Tid::new(cache(SIZE).unwrap()).unwrap();
    hammer(&subject, 400_000);
    subject.drain();
    nothing_is_left(&subject.backing);
}

#[test]
fn masking_signals_hands_no_object_out_twice() {
    settle_index();
    let mut subject = Array::<MaskedSignals>::new(cache(SIZE).unwrap());
    hammer(&subject, 50_000);
    subject.drain();
    nothing_is_left(&subject.backing);
}

#[test]
fn locking_hands_no_object_out_twice() {
    settle_index();
    let mut subject = Array::<Locked>::new(cache(SIZE).unwrap());
    hammer(&subject, 400_000);
    subject.drain();
    nothing_is_left(&subject.backing);
}

#[test]
fn an_array_belongs_to_one_thread_at_a_time() {
    settle_index();
    belongs_to_one_thread(&Array::<Locked>::new(cache(SIZE).unwrap()));
    belongs_to_one_thread(&Array::<MaskedSignals>::new(cache(SIZE).unwrap()));
}

fn belongs_to_one_thread<P: Protection>(subject: &Array<P>) {
    let cpu = cpus::current().unwrap();
    // All threads run on one CPU, and each yields while it has the CPU's array.
    let work = || {
        cpus::pin(cpu).unwrap();
        for _ in 0..500 {
            let is_empty = subject.held(|sheaves| {
                let is_empty = sheaves.main.is_empty();
                sheaves.main.push(NonNull::dangling().as_ptr());
                std::thread::yield_now();
                sheaves.main.pop();
                is_empty
            });
            assert!(is_empty);
        }
    };
    std::thread::scope(|scope| (0..THREADS).for_each(|_| drop(scope.spawn(work))));
}

/// The subject that the handler allocates from, or null.
static INTERRUPTED: AtomicPtr<&'static dyn Subject> = AtomicPtr::new(null_mut());
/// How often the handler ran.
static HANDLED: AtomicU64 = AtomicU64::new(0);
static FAULTS: AtomicU64 = AtomicU64::new(0);

/// Allocates some objects and frees them, the first one last. A list then begins with the same
/// object as before, but continues differently.
extern "C" fn handler(_signal: libc::c_int) {
    HANDLED.fetch_add(1, Relaxed);
    // SAFETY: the pointer is null or points to a leaked box, which lives as long as the process.
    let Some(subject) = (unsafe { INTERRUPTED.load(Relaxed).as_ref() }) else {
        return;
    };
    let mut objects = [null_mut(); 4];
    for object in &mut objects {
        *object = subject.alloc();
        if !object.is_null() {
            word(*object).store(*object as u64, Relaxed);
        }
    }
    objects.rotate_left(1);
    // An object is null if the handler interrupted the cache's own slow path, which holds a lock.
    for object in objects.into_iter().filter(|object| !object.is_null()) {
        let is_ours = word(object).load(Relaxed) == object as u64;
        FAULTS.fetch_add(u64::from(!is_ours), Relaxed);
        // SAFETY: the handler allocated the object from this subject above, and frees it once.
        unsafe { subject.free(object) };
    }
}

/// Lets one thread use objects while another interrupts it all the time.
fn interrupt<S: Subject + 'static>(subject: S) -> Box<S> {
    let subject = Box::into_raw(Box::new(subject));
    // SAFETY: the pointer came from `Box::into_raw`. The box is recreated below, after the last
    // use.
    let shared: &'static dyn Subject = unsafe { &*subject };
    INTERRUPTED.store(Box::leak(Box::new(shared)), Relaxed);
    HANDLED.store(0, Relaxed);
    // SAFETY: the call takes no arguments and touches no memory.
    let user = unsafe { libc::pthread_self() };
    let over = &AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            // A bounded loop, in case the other thread fails.
            for _ in 0..100_000 {
                if over.load(Relaxed) {
                    break;
                }
                // SAFETY: the thread `user` waits for this one in the scope, so it is still alive.
                unsafe { libc::pthread_kill(user, libc::SIGUSR2) };
                // Leaves time for the handler, and for the thread's own work.
                std::thread::sleep(Duration::from_micros(5));
            }
        });
        while HANDLED.load(Relaxed) < 2000 {
            use_objects(shared, 1, 5000, |_| ());
        }
        over.store(true, Relaxed);
    });
    assert_eq!(
        FAULTS.load(Relaxed),
        0,
        "an object of the handler was changed by the interrupted thread"
    );
    INTERRUPTED.store(null_mut(), Relaxed);
    // SAFETY: the pointer came from `Box::into_raw`. The signalling thread has ended, and the
    // handler no longer finds the subject.
    unsafe { Box::from_raw(subject) }
}

/// Checks that a handler that wants the array does not run while the array's lock is held.
fn masks_handlers(subject: &Array<MaskedSignals>) {
    let before = HANDLED.load(Relaxed);
    let within = subject.held(|_| {
        // SAFETY: the handler uses only atomics and the subject, which may be used in handlers.
        unsafe { libc::raise(libc::SIGUSR2) };
        HANDLED.load(Relaxed)
    });
    assert_eq!((within, HANDLED.load(Relaxed)), (before, before + 1));
}

#[test]
fn handlers_may_allocate_and_free() {
    settle_index();
    // SAFETY: the handler uses only atomics and the subject, which may be used in handlers.
    unsafe { libc::signal(libc::SIGUSR2, handler as *const () as usize) };
    nothing_is_left(&interrupt(PinfoldCache(cache(SIZE).unwrap())).0);
    let masked = Array::<MaskedSignals>::new(cache(SIZE).unwrap());
    masks_handlers(&masked);
    let mut masked = interrupt(masked);
    masked.drain();
    nothing_is_left(&masked.backing);
    if double_word::missing().is_none() {
        let mut tid = interrupt(tid::Tid::new(cache(SIZE).unwrap()).unwrap());
        tid.drain();
        nothing_is_left(&tid.backing);
    }
}
