//! The clock: the time-stamp counter on x86-64, the virtual counter on aarch64, the monotonic clock
//! elsewhere.
//!
//! The two counters tick at a constant rate, whatever the core's frequency. A "cycle" is one such
//! tick. A read is fenced on both sides, so that no timed instruction moves past it.

#[cfg(target_arch = "x86_64")]
mod arch {
    use core::arch::x86_64::{_mm_lfence, _rdtsc};
    use std::time::{Duration, Instant};

    /// Returns the counter's value.
    #[inline(always)]
    pub fn now() -> u64 {
        // SAFETY: every x86-64 CPU has lfence and the time-stamp counter, and Linux lets programs
        // read that counter.
        unsafe {
            _mm_lfence();
            let now = _rdtsc();
            _mm_lfence();
            now
        }
    }

    /// Returns ticks per second. The counter's rate is not readable everywhere, so this compares
    /// the counter with the system's clock for 50 ms.
    pub fn hertz() -> u64 {
        let (clock, ticks) = (Instant::now(), now());
        while clock.elapsed() < Duration::from_millis(50) {
            core::hint::spin_loop();
        }
        let (nanoseconds, ticks) = (clock.elapsed().as_nanos(), now() - ticks);
        let hertz = u128::from(ticks) * 1_000_000_000 / nanoseconds;
        // Rounded to 1 MHz, which is how exact the comparison is.
        u64::try_from((hertz + 500_000) / 1_000_000 * 1_000_000).unwrap_or(0)
    }
}

#[cfg(target_arch = "aarch64")]
mod arch {
    use core::arch::asm;

    /// Returns the counter's value.
    #[inline(always)]
    pub fn now() -> u64 {
        let now: u64;
        // SAFETY: Linux lets programs read the virtual counter, and `isb` only orders instructions.
        unsafe {
            asm!("isb", "mrs {}, cntvct_el0", "isb", out(reg) now, options(nostack, preserves_flags));
        }
        now
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

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod arch {
    /// Returns nanoseconds.
    #[inline(always)]
    pub fn now() -> u64 {
        let mut now = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: `now` is a live local variable that the kernel may write to.
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
        now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
    }

    /// Returns ticks per second.
    pub fn hertz() -> u64 {
        1_000_000_000
    }
}

pub use arch::{hertz, now};

/// Returns the cycles that `work` takes.
#[inline(always)]
pub fn of(work: impl FnOnce()) -> u64 {
    let before = now();
    work();
    now().saturating_sub(before)
}
