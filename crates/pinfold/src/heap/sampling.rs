//! What samples of the allocations are taken for, and when.
//!
//! Samples are taken for a heap profile ([`start`], [`stop`]), for guarded blocks
//! ([`start_guarding`]), and while a tracer outside is attached to the probes of `profile`. The
//! module `sampled` has the blocks.

use super::mode::{self, GUARD, PROFILE, TRACER};
use crate::profile::{self, DEFAULT_INTERVAL, MAX_INTERVAL, Memory};
use crate::segment::{self, PROFILE_FILE};
use crate::sys::{coarse_milliseconds, keep_errno};
use crate::{guarded, shepherd, show};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU8, AtomicU64};
use core::time::Duration;

/// The environment variable that turns the profile on at the start: `on`, or the mean bytes from
/// one sample to the next.
pub const VARIABLE: &str = "PINFOLD_HEAP";

/// Returns the interval that the variable's value means, or `None` for an invalid value.
pub fn parse(value: &[u8]) -> Option<u64> {
    if value == b"on" {
        return Some(DEFAULT_INTERVAL);
    }
    let (digits, unit) = match value.split_last()? {
        (b'k' | b'K', digits) => (digits, 1 << 10),
        (b'm' | b'M', digits) => (digits, 1 << 20),
        (b'g' | b'G', digits) => (digits, 1 << 30),
        _ => (value, 1),
    };
    let is_number = !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
    let number: u64 = is_number.then(|| core::str::from_utf8(digits).ok()?.parse().ok())??;
    let bytes = number.checked_mul(unit)?;
    (1..=MAX_INTERVAL).contains(&bytes).then_some(bytes)
}

/// The mean bytes from one sample to the next, for guarded blocks while there is no heap profile.
static GUARD_INTERVAL: AtomicU64 = AtomicU64::new(DEFAULT_INTERVAL);

/// Returns whether there is a heap profile that is on.
pub fn is_profiling() -> bool {
    mode::samples() & PROFILE != 0
}

/// Returns whether some samples become guarded blocks.
pub fn is_guarding() -> bool {
    mode::samples() & GUARD != 0
}

/// Turns the profile on, or changes the interval. Returns false if the system has no memory, or if
/// another thread is starting or stopping samples. The first start may load the unwinder's library,
/// so the thread must not be inside the loader. The allocator has been started.
pub fn start(interval: u64) -> bool {
    mode::exclusively(|| {
        let memory = || shared_memory().or_else(profile::private_memory);
        // SAFETY: both functions return zeroed memory that no other code knows.
        let started = unsafe { profile::start(interval, memory) };
        if started {
            show();
            mode::sample_for(PROFILE);
        }
        started
    })
}

/// Does what [`start`] does, for a shepherd, which must not wait for the loader's lock: a thread
/// that holds this lock may wait for the shepherd. Returns false if the profile has not started
/// within a second. In that case it may still start later.
#[cold]
#[inline(never)]
pub fn start_apart(interval: u64) -> bool {
    let last = APART.load(Relaxed);
    // Acquire pairs with the release below, which the last thread does after it has read the
    // interval. So the interval may be replaced.
    let claimed = APART.compare_exchange(last, UNDER_WAY, Acquire, Relaxed);
    if last == UNDER_WAY || claimed.is_err() {
        return false;
    }
    APART_INTERVAL.store(interval, Relaxed);
    let in_thread = || {
        let done = match start(APART_INTERVAL.load(Relaxed)) {
            true => STARTED,
            false => REFUSED,
        };
        APART.store(done, Release);
    };
    if !shepherd::run_apart(in_thread) {
        APART.store(REFUSED, Relaxed);
    }
    let begin = coarse_milliseconds();
    // Acquire pairs with the release in the thread: this one sees the profile.
    while APART.load(Acquire) == UNDER_WAY && coarse_milliseconds() - begin < 1000 {
        shepherd::nap(Duration::from_millis(1));
    }
    APART.load(Acquire) == STARTED
}

/// What became of the last [`start_apart`].
static APART: AtomicU8 = AtomicU8::new(REFUSED);
const REFUSED: u8 = 0;
const UNDER_WAY: u8 = 1;
const STARTED: u8 = 2;
/// The interval for [`start_apart`]'s thread.
static APART_INTERVAL: AtomicU64 = AtomicU64::new(0);

/// Turns the profile off. Keeps the samples: their frees still count. Returns false if another
/// thread is starting or stopping samples.
pub fn stop() -> bool {
    mode::exclusively(|| {
        profile::stop();
        mode::sample_no_more_for(PROFILE);
        if is_guarding() {
            profile::start_samples(GUARD_INTERVAL.load(Relaxed));
        } else if mode::is_sampling() {
            profile::start_samples(DEFAULT_INTERVAL);
        }
        true
    })
}

/// Has some samples become guarded blocks. If there is no heap profile, `interval` is the mean
/// bytes from one sample to the next. Returns false if the system has no memory, or if another
/// thread is starting or stopping samples. The first start may load the unwinder's library, so the
/// thread must not be inside the loader. The allocator has been started.
pub fn start_guarding(interval: u64) -> bool {
    mode::exclusively(|| {
        GUARD_INTERVAL.store(interval, Relaxed);
        let started = start_samples_for(GUARD, interval) && guarded::prepare();
        if started {
            mode::sample_for(GUARD);
        }
        started
    })
}

/// Guards no further blocks. Returns false if another thread is starting or stopping samples.
pub fn stop_guarding() -> bool {
    mode::exclusively(|| {
        mode::sample_no_more_for(GUARD);
        true
    })
}

/// Takes samples while a tracer is attached to the probes. The shepherd's ticks call it.
pub(super) fn look(_: shepherd::Reach) {
    let is_traced = mode::samples() & TRACER != 0;
    if profile::is_watched() == is_traced {
        return;
    }
    keep_errno(|| {
        mode::exclusively(|| {
            if is_traced {
                mode::sample_no_more_for(TRACER);
            } else if start_samples_for(TRACER, DEFAULT_INTERVAL) {
                mode::sample_for(TRACER);
            }
            true
        })
    });
}

/// Prepares samples for guarded blocks or for a tracer. The interval of a heap profile has
/// precedence over that of guarded blocks, which has precedence over that of a tracer. Returns
/// false if the system has no memory.
fn start_samples_for(what: u8, interval: u64) -> bool {
    let has_interval = what == TRACER && is_guarding();
    profile::start_samples(match has_interval {
        true => GUARD_INTERVAL.load(Relaxed),
        false => interval,
    })
}

/// Returns memory that `pinfold heap` can read.
fn shared_memory() -> Option<Memory> {
    let start = show::shared_memory(PROFILE_FILE, profile::BYTES)?;
    Some(Memory {
        start,
        is_shared: true,
    })
}

/// Shows in the segment where the profile's records are.
fn show() {
    if let (Some(segment), Some((records, _))) = (segment::current(), profile::bytes()) {
        // Release pairs with the acquire of a process that reads the segment.
        segment.profile.store(records.addr() as u64, Release);
    }
}

/// Gives the child of a fork a profile of its own.
pub(super) fn in_child() {
    mode::in_child();
    APART.store(REFUSED, Relaxed);
    profile::in_child(show::process());
    show();
    guarded::in_child();
}
