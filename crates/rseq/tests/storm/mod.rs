//! A storm of signals, and moves between CPUs.
#![allow(dead_code, reason = "each test uses a part")]

use pinfold_rseq::{Index, current, decided, init};
use std::ptr::null_mut;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

/// Chooses the backend. Waits while another test's thread chooses. Registers the thread if the C
/// library does not.
pub fn choose() {
    init(Index::Cid);
    while !decided() {
        std::thread::yield_now();
    }
    current();
}

pub fn cpus() -> usize {
    // SAFETY: `sysconf` has no preconditions. The affinity would not do, because `pin` changes it.
    unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) as usize }
}

/// Moves the thread to the `nth` CPU. Does nothing if the system does not allow it. Then does what
/// [`choose`] does.
pub fn pin(nth: usize) {
    // SAFETY: `cpu_set_t` consists of integers, so zeroes are valid, and the call gets its size.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(nth, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set);
    }
    choose();
}

/// Sends SIGUSR1 to the process every 100 microseconds until `stop`. The kernel delivers each
/// signal to another running thread. `handler` must be async-signal-safe.
pub fn storm(handler: extern "C" fn(libc::c_int), stop: &AtomicBool) {
    // SAFETY: zeroes are valid for both structures, and the caller promises the handler. The signal
    // is blocked for this thread only.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags = libc::SA_RESTART;
        libc::sigaction(libc::SIGUSR1, &raw const action, null_mut());
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigaddset(&raw mut set, libc::SIGUSR1);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, null_mut());
    }
    while !stop.load(Relaxed) {
        let next = Instant::now() + Duration::from_micros(100);
        // SAFETY: the process has a handler for the signal.
        unsafe { libc::kill(libc::getpid(), libc::SIGUSR1) };
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
}

/// Waits for two seconds, and on a busy machine that emulates the CPUs for up to a minute, until
/// the handler has counted more than 100 signals in `handled`.
pub fn wait(handled: &AtomicU64) {
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(2)
        || handled.load(SeqCst) <= 100 && begin.elapsed() < Duration::from_secs(60)
    {
        std::thread::sleep(Duration::from_millis(50));
    }
}
