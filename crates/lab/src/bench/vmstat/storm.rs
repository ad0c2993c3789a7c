//! A signal storm: a timer interrupts the measured thread, and the handler makes the same change.

use super::subject::{Measurable, Op};
use anyhow::{Result, ensure};
use std::io;
use std::mem::{MaybeUninit, zeroed};
use std::ptr::null_mut;
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicI64, compiler_fence};

/// Nanoseconds between signals: 20 kHz.
const INTERVAL: i64 = 50_000;

/// The change that the handler makes.
struct Target<'a> {
    subject: &'a dyn Measurable,
    op: Op,
    handled: AtomicI64,
}

/// The current target, or null. Set only during its storm.
static TARGET: AtomicPtr<Target<'static>> = AtomicPtr::new(null_mut());

extern "C" fn handler(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // Signals from other senders may arrive at any thread, so they are ignored.
    // SAFETY: the kernel passes a valid `siginfo_t` to a handler with SA_SIGINFO.
    if unsafe { (*info).si_code } != libc::SI_TIMER {
        return;
    }
    // SAFETY: only the measured thread gets the timer's signals. It clears `TARGET` before the
    // target on its stack ends.
    if let Some(target) = unsafe { TARGET.load(Acquire).as_ref() } {
        target.subject.in_handler(target.op);
        target.handled.fetch_add(1, Relaxed);
    }
}

/// Returns the signal: a real-time one, which other programs are unlikely to send.
fn signal() -> libc::c_int {
    libc::SIGRTMIN()
}

/// A timer that signals the thread that made it.
pub struct Storm {
    timer: libc::timer_t,
}

impl Storm {
    /// Sets up the timer without starting it.
    pub fn new() -> Result<Storm> {
        install_handler()?;
        // SAFETY: `sigevent` holds only integers and pointers, for which zero bytes are valid.
        let mut event: libc::sigevent = unsafe { zeroed() };
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = signal();
        // SAFETY: the call takes no arguments and touches no memory.
        event.sigev_notify_thread_id = unsafe { libc::gettid() };
        let mut timer = MaybeUninit::uninit();
        // SAFETY: `event` is initialised, and `timer` is a live variable that the kernel may write
        // to.
        let made = unsafe {
            libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, timer.as_mut_ptr())
        };
        ensure_ok(made, "making the timer of the signal storm")?;
        // SAFETY: `timer_create` succeeded, so it has written the timer's id.
        let timer = unsafe { timer.assume_init() };
        Ok(Storm { timer })
    }

    /// Calls `work` while signals change `subject` by `op`. Returns the result of `work` and the
    /// number of changes by the handler.
    ///
    /// `phase` moves the first signal, so that short work does not always end before it.
    pub fn over<R>(
        &self,
        subject: &dyn Measurable,
        op: Op,
        phase: u32,
        work: impl FnOnce() -> R,
    ) -> Result<(R, i64)> {
        let target = Target {
            subject,
            op,
            handled: AtomicI64::new(0),
        };
        TARGET.store((&raw const target).cast_mut().cast(), Release);
        // The step and the interval share no factor, so that the phases reach every nanosecond of
        // it.
        let first = 1 + i64::from(phase) * 7919 % INTERVAL;
        let started = self.set(first, INTERVAL);
        let result = started.is_ok().then(work);
        let stopped = self.set(0, 0);
        TARGET.store(null_mut(), Release);
        // The handler runs on this thread, so only the compiler could reorder its writes.
        compiler_fence(Acquire);
        started.and(stopped)?;
        let handled = target.handled.load(Relaxed);
        result
            .map(|result| (result, handled))
            .ok_or_else(|| anyhow::anyhow!("the signal storm did not start"))
    }

    fn set(&self, first: i64, interval: i64) -> Result<()> {
        let time = |nanoseconds| libc::timespec {
            tv_sec: 0,
            tv_nsec: nanoseconds,
        };
        let when = libc::itimerspec {
            it_interval: time(interval),
            it_value: time(first),
        };
        // SAFETY: the timer exists until `self` is dropped, and `when` is initialised.
        let set = unsafe { libc::timer_settime(self.timer, 0, &raw const when, null_mut()) };
        ensure_ok(set, "setting the timer of the signal storm")
    }
}

impl Drop for Storm {
    fn drop(&mut self) {
        // SAFETY: `new` made the timer, and this is its only deletion.
        unsafe { libc::timer_delete(self.timer) };
    }
}

fn install_handler() -> Result<()> {
    // SAFETY: `sigaction` holds only integers and an optional pointer, for which zero bytes are
    // valid.
    let mut action: libc::sigaction = unsafe { zeroed() };
    action.sa_sigaction = handler as *const () as libc::sighandler_t;
    action.sa_flags = libc::SA_RESTART | libc::SA_SIGINFO;
    // SAFETY: the handler only calls `in_handler`, which may interrupt any code, and atomics.
    // It does not allocate.
    let installed = unsafe { libc::sigaction(signal(), &raw const action, null_mut()) };
    ensure_ok(installed, "installing the handler of the signal storm")?;
    // The process that started this one may have blocked the signal.
    // SAFETY: `sigemptyset` initialises the set before `sigaddset` and `pthread_sigmask` use it.
    let unblocked = unsafe {
        let mut set = MaybeUninit::uninit();
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), signal());
        libc::pthread_sigmask(libc::SIG_UNBLOCK, set.as_ptr(), null_mut())
    };
    ensure!(
        unblocked == 0,
        "unblocking signal {} for the signal storm failed",
        signal()
    );
    Ok(())
}

fn ensure_ok(returned: libc::c_int, doing: &str) -> Result<()> {
    ensure!(
        returned == 0,
        "{doing} failed: {}",
        io::Error::last_os_error()
    );
    Ok(())
}
