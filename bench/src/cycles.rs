//! The clock: the time-stamp counter on x86-64, the virtual counter on aarch64.
//!
//! Both tick at a constant rate, whatever the core's frequency. A "cycle" here is a tick of that
//! counter. Reads are fenced, so that no timed instruction begins before [`start`] or ends after
//! [`stop`].

#[cfg(target_arch = "x86_64")]
mod arch {
    use core::arch::x86_64::{__rdtscp, _mm_lfence, _rdtsc};
    use std::time::{Duration, Instant};

    #[inline(always)]
    pub fn start() -> u64 {
        // SAFETY: every x86-64 CPU has SSE2's lfence and the time-stamp counter, and Linux lets
        // programs read that counter.
        unsafe {
            _mm_lfence();
            let now = _rdtsc();
            _mm_lfence();
            now
        }
    }

    #[inline(always)]
    pub fn stop() -> u64 {
        let mut processor = 0;
        // SAFETY: x86-64 CPUs have had rdtscp since 2007, Linux lets programs read the counter, and
        // rdtscp writes only `processor`.
        unsafe {
            let now = __rdtscp(&mut processor);
            _mm_lfence();
            now
        }
    }

    /// Returns ticks per second. The counter's rate is not readable everywhere, so this compares
    /// the counter with the system's clock for 50 ms.
    pub fn hertz() -> u64 {
        let (clock, ticks) = (Instant::now(), start());
        while clock.elapsed() < Duration::from_millis(50) {
            core::hint::spin_loop();
        }
        let (nanoseconds, ticks) = (clock.elapsed().as_nanos(), stop() - ticks);
        let hertz = u128::from(ticks) * 1_000_000_000 / nanoseconds;
        // Rounded to 1 MHz, which is how exact the comparison is.
        u64::try_from((hertz + 500_000) / 1_000_000 * 1_000_000).unwrap_or(0)
    }
}

#[cfg(target_arch = "aarch64")]
mod arch {
    use core::arch::asm;

    #[inline(always)]
    pub fn start() -> u64 {
        let now: u64;
        // SAFETY: Linux lets programs read the virtual counter, and `isb` only orders instructions.
        unsafe {
            asm!("isb", "mrs {}, cntvct_el0", "isb", out(reg) now, options(nostack, preserves_flags));
        }
        now
    }

    #[inline(always)]
    pub fn stop() -> u64 {
        start()
    }

    /// Returns ticks per second, which the counter states itself.
    pub fn hertz() -> u64 {
        let hertz: u64;
        // SAFETY: Linux lets programs read this register.
        unsafe {
            asm!("mrs {}, cntfrq_el0", out(reg) hertz, options(nomem, nostack, preserves_flags));
        }
        hertz
    }
}

pub use arch::{hertz, start, stop};

/// Returns the cycles that `work` takes.
#[inline(always)]
pub fn of(work: impl FnOnce()) -> u64 {
    let before = start();
    work();
    stop().saturating_sub(before)
}
