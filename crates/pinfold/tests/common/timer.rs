//! A timer that interrupts one thread with signals.

use std::ptr::null_mut;

/// Interrupts the calling thread until it is dropped.
pub struct Timer(libc::timer_t);

impl Timer {
    /// Sends a signal every `microseconds`, which are less than a second; 0 sends none. The timer
    /// is bound to the thread, because the kernel sends the signals of a process's timer mostly to
    /// the first thread.
    pub fn start(signal: i32, handler: extern "C" fn(libc::c_int), microseconds: u64) -> Timer {
        // SAFETY: the structures live through the calls, and zeroes are valid for them. The tests'
        // handlers call only what is meant to work in handlers.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as *const () as usize;
            action.sa_flags = libc::SA_RESTART;
            libc::sigaction(signal, &raw const action, null_mut());
            let mut event: libc::sigevent = std::mem::zeroed();
            event.sigev_notify = libc::SIGEV_THREAD_ID;
            event.sigev_signo = signal;
            event.sigev_notify_thread_id = libc::gettid();
            let mut timer: libc::timer_t = std::mem::zeroed();
            let made = libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer);
            assert_eq!(made, 0);
            let every = libc::timespec {
                tv_sec: 0,
                tv_nsec: 1000 * microseconds as i64,
            };
            let times = libc::itimerspec {
                it_interval: every,
                it_value: every,
            };
            libc::timer_settime(timer, 0, &raw const times, null_mut());
            Timer(timer)
        }
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        // SAFETY: `start` made the timer, and it is deleted once.
        unsafe { libc::timer_delete(self.0) };
    }
}
