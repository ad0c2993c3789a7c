//! The bell: a word in shared memory by which another process wakes this process's shepherds, so
//! that they look for its requests at once.
//!
//! A shepherd's thread sleeps on one futex. The process itself must be able to wake it too, when
//! its owner stops it or its interval changes. So without a bell, the thread sleeps on a word of
//! this process ([`INNER`]). With a bell, it sleeps on the bell, and this process rings too. A
//! thread at rest makes the same system calls in both cases.
//!
//! Another process can store anything to the bell. It can wake the thread as often as it likes. In
//! the worst case, it undoes a change of the word by this process, which the thread then does not
//! see before it wakes up. So a thread sleeps on the bell for at most [`LONGEST`] at a time.

use crate::sys;
use core::ptr::null_mut;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicPtr, AtomicU32};
use core::time::Duration;

/// The longest sleep on the bell.
const LONGEST: Duration = Duration::from_secs(2);

static BELL: AtomicPtr<AtomicU32> = AtomicPtr::new(null_mut());

/// The word on which shepherds sleep while there is no bell. Only this process writes it.
static INNER: AtomicU32 = AtomicU32::new(0);

/// Makes the shepherds of this process sleep on `bell`, a word that other processes may write. With
/// `None`, they sleep on a word of this process. Wakes the shepherds that sleep on that word.
pub fn sleep_on(bell: Option<&'static AtomicU32>) {
    let bell = bell.map_or(null_mut(), |bell| core::ptr::from_ref(bell).cast_mut());
    // Release pairs with the acquire in `bell`.
    BELL.store(bell, Release);
    ring_inner();
}

fn bell() -> Option<&'static AtomicU32> {
    // SAFETY: the address is null, or came from the `&'static` that `sleep_on` was given. Acquire
    // pairs with the release there.
    unsafe { BELL.load(Acquire).as_ref() }
}

/// What a shepherd's thread reads before a tick, to notice a ring during the tick.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Rings(u32);

/// Returns the present number of rings.
pub(super) fn rings() -> Rings {
    // Acquire pairs with the release of the ringing process: the tick that follows sees its
    // request. It also pairs with the release in `ring`: this thread then sees the new interval.
    Rings(bell().unwrap_or(&INNER).load(Acquire))
}

/// Wakes all shepherds of this process, so that they see what the calling thread has stored before.
pub(super) fn ring() {
    ring_inner();
    if let Some(bell) = bell() {
        bell.fetch_add(1, Release);
        sys::wake_shared(bell);
    }
}

fn ring_inner() {
    // Release pairs with the acquire in `rings`.
    INNER.fetch_add(1, Release);
    sys::wake(&INNER);
}

/// The number of rings at the last tick in passing.
static SEEN: AtomicU32 = AtomicU32::new(0);

/// Returns whether another process has rung since [`note_rings`]. Three loads.
pub(super) fn has_rung() -> bool {
    bell().is_some_and(|bell| bell.load(Relaxed) != SEEN.load(Relaxed))
}

/// Notes the present number of rings, before a tick in passing.
pub(super) fn note_rings() {
    SEEN.store(rings().0, Relaxed);
}

/// The least time from a tick to a next one that a ring causes, so that a process that rings all
/// the time costs this one little.
const PAUSE: Duration = Duration::from_millis(10);

/// Sleeps until the owner wakes the thread, until a ring after `before`, or until `time` has
/// passed. May return sooner, and with a bell returns after [`LONGEST`] at the latest. A ring ends
/// it after [`PAUSE`] at the earliest. Returns at once if `state` is not `run`.
pub(super) fn sleep(state: &AtomicU32, run: u32, before: Rings, time: Duration) {
    // The owner wakes this word too.
    let pause = time.min(PAUSE);
    sys::wait_for_change(state, run, pause);
    let time = time - pause;
    if time.is_zero() {
        return;
    }
    // Acquire pairs with the release in `stop`. A stop before this load is seen here. A stop after
    // it changes the word, which the kernel compares with `before`.
    if state.load(Acquire) != run {
        return;
    }
    match bell() {
        Some(bell) => sys::wait_for_shared_change(bell, before.0, time.min(LONGEST)),
        None => sys::wait_for_change(&INNER, before.0, time),
    }
}

/// Stores `stop` to a thread's state, and wakes the thread wherever it sleeps.
pub(super) fn stop(state: &AtomicU32, stop: u32) {
    // Release pairs with the acquires of the thread, which sees `stop` and ends.
    state.store(stop, Release);
    sys::wake(state);
    ring();
}
