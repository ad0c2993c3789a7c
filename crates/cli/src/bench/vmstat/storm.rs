//! A storm of signals: a timer interrupts the measured thread, and the handler increments the same item.

use super::subject::Measurable;
use anyhow::{Result, ensure};
use std::io;
use std::mem::{MaybeUninit, zeroed};
use std::ptr::null_mut;
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicI64, compiler_fence};

/// Nanoseconds between signals: 20 kHz.
const INTERVAL: i64 = 50_000;

/// What the handler increments.
struct Target<'a> {
    subject: &'a dyn Measurable,
    handled: AtomicI64,
}

/// The target of the moment, or null. It is only set while its storm lasts.
static TARGET: AtomicPtr<Target<'static>> = AtomicPtr::new(null_mut());

extern "C" fn handler(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // Signals from elsewhere may come to any thread.
    // SAFETY: the kernel gives a handler with SA_SIGINFO a valid one.
    if unsafe { (*info).si_code } != libc::SI_TIMER {
        return;
    }
    // SAFETY: only the measured thread gets the timer's signals, and it takes a target away before the target's end.
    if let Some(target) = unsafe { TARGET.load(Acquire).as_ref() } {
        target.subject.inc_in_handler();
        target.handled.fetch_add(1, Relaxed);
    }
}

/// A real-time signal, which nobody sends by chance.
fn signal() -> libc::c_int {
    libc::SIGRTMIN()
}

/// A timer for the thread that made it.
pub struct Storm {
    timer: libc::timer_t,
}

impl Storm {
    /// Sets up the timer, not yet running.
    pub fn new() -> Result<Storm> {
        install_handler()?;
        // SAFETY: an all-zero sigevent is valid.
        let mut event: libc::sigevent = unsafe { zeroed() };
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = signal();
        // SAFETY: no preconditions.
        event.sigev_notify_thread_id = unsafe { libc::gettid() };
        let mut timer = MaybeUninit::uninit();
        // SAFETY: `event` is filled in, `timer` is writable.
        let made = unsafe {
            libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, timer.as_mut_ptr())
        };
        ensure_ok(made, "making the timer of the signal storm")?;
        // SAFETY: timer_create has filled it in.
        let timer = unsafe { timer.assume_init() };
        Ok(Storm { timer })
    }

    /// Calls `work` while signals rain on `subject`; returns its result and how often the handler incremented. `phase`
    /// moves the first signal, so that short work is not always over before it.
    pub fn over<R>(
        &self,
        subject: &dyn Measurable,
        phase: u32,
        work: impl FnOnce() -> R,
    ) -> Result<(R, i64)> {
        let target = Target {
            subject,
            handled: AtomicI64::new(0),
        };
        TARGET.store((&raw const target).cast_mut().cast(), Release);
        // A step that shares no factor with the interval reaches every place in it.
        let first = 1 + i64::from(phase) * 7919 % INTERVAL;
        let started = self.set(first, INTERVAL);
        let result = started.is_ok().then(work);
        let stopped = self.set(0, 0);
        TARGET.store(null_mut(), Release);
        // The handler runs on this thread, so the compiler is all that has to keep the order.
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
        // SAFETY: the timer is this one's until it is dropped.
        let set = unsafe { libc::timer_settime(self.timer, 0, &raw const when, null_mut()) };
        ensure_ok(set, "setting the timer of the signal storm")
    }
}

impl Drop for Storm {
    fn drop(&mut self) {
        // SAFETY: the timer is this one's.
        unsafe { libc::timer_delete(self.timer) };
    }
}

fn install_handler() -> Result<()> {
    // SAFETY: an all-zero sigaction is valid.
    let mut action: libc::sigaction = unsafe { zeroed() };
    action.sa_sigaction = handler as *const () as libc::sighandler_t;
    action.sa_flags = libc::SA_RESTART | libc::SA_SIGINFO;
    // SAFETY: the handler only increments, which subjects allow at any point, and allocates nothing.
    let installed = unsafe { libc::sigaction(signal(), &raw const action, null_mut()) };
    ensure_ok(installed, "installing the handler of the signal storm")?;
    // Whoever started this process may have blocked the signal.
    // SAFETY: sigemptyset initialises the set before it is used.
    let unblocked = unsafe {
        let mut set = MaybeUninit::uninit();
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), signal());
        libc::pthread_sigmask(libc::SIG_UNBLOCK, set.as_ptr(), null_mut())
    };
    ensure!(unblocked == 0, "unblocking the signal of the storm failed");
    Ok(())
}

fn ensure_ok(returned: libc::c_int, doing: &str) -> Result<()> {
    ensure!(returned == 0, "{doing}: {}", io::Error::last_os_error());
    Ok(())
}
