//! Ends critical sections that cannot end by themselves.
//!
//! A section that the kernel aborts starts again. A debugger or tracer that steps through the
//! program enters the kernel after every instruction, and the kernel then aborts the section. So
//! such a section would start again without end.
//!
//! The abort handler ends the operation in this case, in the same way as on an index without a
//! unit. Each caller has a slow path for that, which needs no section, because any unit may be
//! stopped at any moment. The handler recognises this case in two ways:
//!
//! * On x86-64 the processor's trap flag is set in a thread that is stepped. The handler ends the
//!   operation at once.
//! * Everywhere, every [`PATIENCE`]th abort ends the operation, whatever caused it. If the caller
//!   retries, its operation survives the next aborts. So ending an operation without need has one
//!   visible effect: a pop may find nothing.
//!
//! One count serves all threads: a count for each thread would need thread-local storage, and a
//! count of aborts in a row would need a store in the section.

use core::sync::atomic::AtomicU32;

/// Counts this process's aborts. Abort handlers add to it without atomics, so it may miss some.
pub(crate) static ABORTS: AtomicU32 = AtomicU32::new(0);

/// Every abort whose number is a multiple of this ends the operation. A power of two.
pub(crate) const PATIENCE: u32 = if cfg!(target_arch = "x86_64") {
    1024
} else {
    64
};
