//! `masked-signals`: the difference with all signals masked. To a thread, masked signals are what
//! disabled interrupts are to a CPU.
//!
//! Masked signals keep handlers off the difference, but not other threads. So this difference
//! belongs to a thread, unlike the kernel's, which belongs to a CPU. There is only one, because
//! only one thread is measured.

use super::subject::Subject;
use super::zone::{Zone, increment_plain};
use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ptr::null_mut;

pub struct MaskedSignals {
    threshold: i8,
    zone: Zone,
    all: libc::sigset_t,
    difference: UnsafeCell<i8>,
}

// SAFETY: only the measured thread accesses `difference`, with signals masked. `total` is called
// after that thread's last increment.
unsafe impl Sync for MaskedSignals {}

impl MaskedSignals {
    pub fn new(threshold: i8) -> MaskedSignals {
        let mut all = MaybeUninit::uninit();
        // SAFETY: `sigfillset` writes the whole set, and its only argument is valid for that.
        let all = unsafe {
            libc::sigfillset(all.as_mut_ptr());
            all.assume_init()
        };
        MaskedSignals {
            threshold,
            zone: Zone::default(),
            all,
            difference: UnsafeCell::new(0),
        }
    }
}

impl Subject for MaskedSignals {
    #[inline]
    fn inc(&self) {
        let mut before = MaybeUninit::uninit();
        // SAFETY: the first call initialises `before`, and the second call reads it. In between, no
        // handler runs, and the measured thread is the only one that increments.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.all, before.as_mut_ptr());
            increment_plain(&mut *self.difference.get(), self.threshold, &self.zone);
            libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), null_mut());
        }
    }

    fn total(&self) -> Option<i64> {
        // SAFETY: the measuring loops have ended, so nothing increments the difference.
        let difference = unsafe { *self.difference.get() };
        Some(self.zone.read()? + i64::from(difference))
    }
}
