//! `masked-signals`: the difference with all signals masked. To a thread, masked signals are what
//! disabled interrupts are to a CPU.
//!
//! Masked signals keep handlers off the difference, but not other threads. So this difference
//! belongs to a thread, unlike the kernel's, which belongs to a CPU. There is only one, because
//! only one thread is measured.

use super::subject::Subject;
use super::zone::{Zone, change_plain};
use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ptr::null_mut;

#[derive(Default)]
struct Counts {
    difference: i8,
    events: i64,
}

pub struct MaskedSignals {
    threshold: i8,
    zone: Zone,
    all: libc::sigset_t,
    counts: UnsafeCell<Counts>,
}

// SAFETY: only the measured thread accesses `counts`, with signals masked. `total` and `events` are
// called after that thread's last change.
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
            counts: UnsafeCell::default(),
        }
    }

    #[inline(always)]
    fn masked(&self, change: impl FnOnce(&mut Counts)) {
        let mut before = MaybeUninit::uninit();
        // SAFETY: the first call initialises `before`, and the second call reads it. In between, no
        // handler runs, and the measured thread is the only one that changes the counts.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.all, before.as_mut_ptr());
            change(&mut *self.counts.get());
            libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), null_mut());
        }
    }
}

impl Subject for MaskedSignals {
    #[inline]
    fn inc(&self) {
        self.masked(|counts| {
            change_plain::<1>(&mut counts.difference, self.threshold, &self.zone);
        });
    }

    #[inline]
    fn dec(&self) {
        self.masked(|counts| {
            change_plain::<-1>(&mut counts.difference, self.threshold, &self.zone);
        });
    }

    #[inline]
    fn event(&self) {
        self.masked(|counts| counts.events += 1);
    }

    fn total(&self) -> Option<i64> {
        // SAFETY: the measuring loops have ended, so nothing changes the difference.
        let difference = unsafe { (*self.counts.get()).difference };
        Some(self.zone.read()? + i64::from(difference))
    }

    fn events(&self) -> i64 {
        // SAFETY: the measuring loops have ended, so nothing counts events.
        unsafe { (*self.counts.get()).events }
    }
}
