//! `masked-signals`: the difference with all signals masked, which is to a thread what disabled interrupts are to a CPU.
//!
//! Masked signals keep handlers off the difference, but not other threads: unlike the kernel's, this difference can
//! only be the thread's and not the CPU's. One thread is measured, so there is one.

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

// SAFETY: only the measured thread uses `difference`, with signals masked; `total` is called when it has ended.
unsafe impl Sync for MaskedSignals {}

impl MaskedSignals {
    pub fn new(threshold: i8) -> MaskedSignals {
        let mut all = MaybeUninit::uninit();
        // SAFETY: sigfillset initialises the set.
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
        // SAFETY: the first call initialises `before`, which the second one restores; with the signals masked, nothing
        // else of this thread, which is the only one, runs in between.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.all, before.as_mut_ptr());
            increment_plain(&mut *self.difference.get(), self.threshold, &self.zone);
            libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), null_mut());
        }
    }

    fn total(&self) -> Option<i64> {
        // SAFETY: the measured thread has ended.
        let difference = unsafe { *self.difference.get() };
        Some(self.zone.read()? + i64::from(difference))
    }
}
