//! The C API of isolation on demand: a thread asks that its CPU is left alone.

use super::support::{AsErrno, boxed_or_errno, unboxed};
use core::ffi::c_int;
use pinfold::isolate::{self, IsolateError, Isolation, Report};

/// An isolation behind a C handle.
pub struct CIsolation(Isolation);

/// What disturbed an isolated CPU: the fields of [`Report`].
#[repr(C)]
#[derive(Debug, Default)]
pub struct CReport {
    cpu: usize,
    fences: u64,
    given_back: u64,
    folds: u64,
    drains: u64,
    switches: u64,
    faults: u64,
    interrupts: u64,
    timer: u64,
    calls: u64,
    flushes: u64,
}

impl From<Report> for CReport {
    fn from(report: Report) -> CReport {
        CReport {
            cpu: report.cpu,
            fences: report.fences,
            given_back: report.given_back,
            folds: report.folds,
            drains: report.drains,
            switches: report.switches,
            faults: report.faults,
            interrupts: report.interrupts,
            timer: report.timer,
            calls: report.calls,
            flushes: report.flushes,
        }
    }
}

impl AsErrno for IsolateError {
    fn as_errno(&self) -> c_int {
        match self {
            IsolateError::NotPinned => libc::EINVAL,
            IsolateError::Taken => libc::EBUSY,
            _ => libc::ENOSPC,
        }
    }
}

/// Isolates the CPU to which the calling thread is pinned. Returns null with EINVAL if the thread
/// may run on several CPUs, EBUSY if the CPU is isolated already, ENOSPC if 64 CPUs are, or ENOMEM.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_isolate_enter() -> *mut CIsolation {
    boxed_or_errno(isolate::enter().map(CIsolation))
}

/// Returns what disturbed the CPU so far.
///
/// # Safety
///
/// The calling thread got `this` from [`pinfold_isolate_enter`], and has not left it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_isolate_report(this: &CIsolation) -> CReport {
    this.0.report().into()
}

/// Ends the isolation. Returns what disturbed the CPU. Does nothing if `this` is null.
///
/// # Safety
///
/// `this` is null, or the calling thread got it from [`pinfold_isolate_enter`], and has not left
/// it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_isolate_leave(this: *mut CIsolation) -> CReport {
    // SAFETY: the caller promises null, or an isolation that it has not left.
    let report = unsafe { this.as_ref() }.map(|this| this.0.report().into());
    // SAFETY: the caller gives up null or an isolation of this API, which came from `boxed`.
    unsafe { unboxed(this) };
    report.unwrap_or_default()
}
