//! A timer that interrupts one thread with signals.

use std::cell::Cell;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

/// Interrupts the calling thread until it is dropped.
pub struct Timer(libc::timer_t);

#[derive(Clone, Copy)]
struct Running {
    timer: libc::timer_t,
    every: Duration,
    handler: extern "C" fn(libc::c_int),
}

thread_local! {
    static RUNNING: Cell<Option<Running>> = const { Cell::new(None) };
}

/// Runs the thread's handler, and then sets the timer again.
///
/// On a slow machine, a handler may take longer than the time between two signals. If the timer
/// went on during the handler, the next signal would come at once, and the interrupted code would
/// never go on. So the next signal does not come before this code has had as much time as the
/// handler took.
extern "C" fn on_signal(signal: libc::c_int) {
    // A signal may arrive late, after the timer was dropped.
    if let Some(running) = RUNNING.get() {
        let begin = Instant::now();
        (running.handler)(signal);
        set(running.timer, running.every.max(begin.elapsed()));
    }
}

/// Makes `timer` send one signal after this time, or none if the time is 0.
fn set(timer: libc::timer_t, after: Duration) {
    // SAFETY: the structure lives through the call, and zeroes are valid for it. The thread whose
    // timer this is has not deleted it.
    unsafe {
        let mut times: libc::itimerspec = std::mem::zeroed();
        times.it_value.tv_sec = after.as_secs() as _;
        times.it_value.tv_nsec = libc::c_long::from(after.subsec_nanos() as i32);
        libc::timer_settime(timer, 0, &raw const times, null_mut());
    }
}

impl Timer {
    /// Sends a signal `microseconds` after the start, and after the end of each handler; 0 sends
    /// none. After a slow handler, the next signal comes later. The timer is bound to the thread,
    /// because the kernel sends the signals of a process's timer mostly to the first thread.
    pub fn start(signal: i32, handler: extern "C" fn(libc::c_int), microseconds: u64) -> Timer {
        // SAFETY: the structures live through the calls, and zeroes are valid for them. The tests'
        // handlers call only what is meant to work in handlers.
        let timer = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_signal as *const () as usize;
            action.sa_flags = libc::SA_RESTART;
            libc::sigaction(signal, &raw const action, null_mut());
            let mut event: libc::sigevent = std::mem::zeroed();
            event.sigev_notify = libc::SIGEV_THREAD_ID;
            event.sigev_signo = signal;
            event.sigev_notify_thread_id = libc::gettid();
            let mut timer: libc::timer_t = std::mem::zeroed();
            let made = libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer);
            assert_eq!(made, 0);
            timer
        };
        let every = Duration::from_micros(microseconds);
        RUNNING.set(Some(Running {
            timer,
            every,
            handler,
        }));
        set(timer, every);
        Timer(timer)
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        RUNNING.set(None);
        // SAFETY: `start` made the timer, and it is deleted once. No later handler uses it, because
        // `RUNNING` is empty.
        unsafe { libc::timer_delete(self.0) };
    }
}
