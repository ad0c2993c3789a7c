//! Reports of what guarded blocks find.

use super::stack::{Innermost, Stack};
use super::{BUSY, FREED, LIVE, SLOTS, page_number, slot};
use crate::profile::{run_on_stack, without_signals};
use crate::slab::debug::StandardError;
use crate::sys;
use core::fmt::{self, Display, Write};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicBool, AtomicUsize};
use pinfold_rseq::syscall;

/// Bytes of the stack on which reports are written, because the program's stack may have little
/// room left, and a signal handler's has little. Finding the names of callers takes the most.
const STACK: usize = 1 << 20;
/// The end of that stack. 0 before [`prepare`].
static STACK_TOP: AtomicUsize = AtomicUsize::new(0);
/// Whether a thread is writing a report.
static WRITING: AtomicBool = AtomicBool::new(false);
/// Attempts, 0.1 ms apart, to take the stack of reports: two seconds in all.
const PATIENCE: u32 = 20_000;

/// The signals that are blocked during a report: all but SIGSYS. A sandbox may carry out the system
/// calls of a report in a handler of SIGSYS, and the kernel ends a process that blocks this signal.
const MASKED: u64 = !(1 << (libc::SIGSYS - 1));

/// What the program did.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum What {
    #[cfg(target_arch = "x86_64")]
    Read,
    #[cfg(target_arch = "x86_64")]
    Write,
    /// Read or wrote.
    #[cfg(not(target_arch = "x86_64"))]
    Access,
    /// Freed the address.
    Free,
    /// Passed the address to another call of the malloc family.
    Use,
    /// Wrote beside the block, into the same page.
    Overwritten,
}

impl Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            #[cfg(target_arch = "x86_64")]
            What::Read => "read",
            #[cfg(target_arch = "x86_64")]
            What::Write => "write",
            #[cfg(not(target_arch = "x86_64"))]
            What::Access => "access",
            What::Free => "free",
            What::Use => "realloc or size",
            What::Overwritten => "earlier write",
        })
    }
}

/// Returns the slot whose block an access to `address`, an address in the pool, most likely meant:
/// the nearest block that was ever there. Returns `None` for an address in a block in use. Such an
/// access faults only if the program itself has forbidden it.
pub(super) fn meant(address: usize) -> Option<usize> {
    let page = page_number(address)?;
    let candidates = [page.saturating_sub(1) / 2, page / 2];
    let was_used = |nth: &usize| *nth < SLOTS && slot(*nth).block.load(Relaxed) != 0;
    candidates
        .into_iter()
        .filter(was_used)
        .min_by_key(|&nth| distance(nth, address).unsigned_abs())
        .filter(|&nth| distance(nth, address) != 0 || slot(nth).state.load(Acquire) != LIVE)
}

/// Returns how many bytes an address is before the block (below 0) or behind it (above 0). Returns
/// 0 for an address in the block.
fn distance(nth: usize, address: usize) -> isize {
    let (block, size) = (slot(nth).block.load(Relaxed), slot(nth).size.load(Relaxed));
    if address < block {
        return -((block - address) as isize);
    }
    (address + 1).saturating_sub(block + size) as isize
}

struct Bytes(isize);

impl Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = if self.0 == 1 { "" } else { "s" };
        write!(f, "{} byte{s}", self.0)
    }
}

/// A report about a slot's block.
struct Report<'s> {
    nth: usize,
    what: What,
    address: usize,
    by: &'s Stack,
}

impl Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let now = sys::coarse_milliseconds();
        let slot = slot(self.nth);
        let (block, size) = (slot.block.load(Relaxed), slot.size.load(Relaxed));
        let state = slot.state.load(Acquire);
        let (what, address) = (self.what, self.address);
        write!(f, "pinfold: guarded block: {what} ")?;
        match distance(self.nth, address) {
            0 if state == FREED || state == BUSY => write!(f, "after the block was freed")?,
            0 if address == block => write!(f, "of the block")?,
            0 => write!(f, "at offset {} of the block", address - block)?,
            before @ ..0 => write!(f, "{} before the block", Bytes(-before))?,
            past => write!(f, "{} past the end of the block", Bytes(past))?,
        }
        let state = if state == LIVE { "in use" } else { "free" };
        writeln!(
            f,
            "\n  address {address:#x}; block {block:#x} of {size} bytes, {state}"
        )?;
        let done = match self.what {
            What::Overwritten => "found by the free",
            _ => "done",
        };
        self.by.write(done, now, f)?;
        slot.allocated_by.write("allocated", now, f)?;
        slot.freed_by.write("freed", now, f)
    }
}

/// Writes a report on standard error, unless one was written for this block. `from` is the address
/// of the instruction that made the access, if it is known.
pub(super) fn write(nth: usize, what: What, address: usize, from: Option<usize>) {
    if !slot(nth).is_reported.swap(true, Relaxed) {
        write_now(nth, what, address, from);
    }
}

#[inline(never)]
fn write_now(nth: usize, what: What, address: usize, from: Option<usize>) {
    let by = Stack::empty();
    by.record(Innermost::Instruction(from));
    let report = Report {
        nth,
        what,
        address,
        by: &by,
    };
    let mut print = || {
        if write!(StandardError, "{report}").is_err() {
            discard_pipe_signal();
        }
    };
    // Acquire and the release below pair: the last report no longer uses the stack.
    let take = || {
        WRITING
            .compare_exchange(false, true, Acquire, Relaxed)
            .is_ok()
    };
    let take_or_wait = |_| {
        let taken = take();
        if !taken {
            sys::sleep_microseconds(100);
        }
        taken
    };
    let mut print_alone = || {
        if (0..PATIENCE).any(take_or_wait) {
            let top = STACK_TOP.load(Relaxed);
            // SAFETY: the stack was made before the first guarded block, and this thread has taken
            // it.
            sys::keep_errno(|| unsafe { run_on_stack(top, &mut print) });
            WRITING.store(false, Release);
        }
    };
    // A handler that ran meanwhile could leave by a jump, and the stack would stay taken. If the
    // system refuses to block signals, a report is worth that risk.
    if !without_signals(MASKED, &mut print_alone) {
        print_alone();
    }
}

/// Discards the SIGPIPE that a write of this thread has raised, if it is pending. Otherwise it
/// would end the process when signals are unblocked, and hide the signal of the fault.
fn discard_pipe_signal() {
    let (set, at_once) = (1u64 << (libc::SIGPIPE - 1), [0i64; 2]);
    let (set, at_once) = ((&raw const set) as usize, (&raw const at_once) as usize);
    // SAFETY: the set has 64 signals, which are 8 bytes. `at_once` has the layout of the kernel's
    // `timespec`.
    let _ = unsafe { syscall(libc::SYS_rt_sigtimedwait, [set, 0, at_once, 8]) };
}

/// Makes the stack. Returns false if the system has no memory.
pub(super) fn prepare() -> bool {
    let made = STACK_TOP.load(Relaxed) != 0;
    let stack = if made { None } else { sys::map_sparse(STACK) };
    if let Some(stack) = stack {
        STACK_TOP.store(stack.as_ptr() as usize + STACK, Relaxed);
    }
    made || stack.is_some()
}

/// Lets the child of a fork write reports, whatever the parent's other threads were doing.
pub(super) fn in_child() {
    WRITING.store(false, Relaxed);
}

/// Writes a report and ends the process: its memory can no longer be trusted.
#[cold]
pub(super) fn end(nth: usize, what: What, address: usize) -> ! {
    // Another report may have been written for this block, or be in the making. This is another
    // fault, and the last, so it is reported in any case.
    slot(nth).is_reported.store(true, Relaxed);
    write_now(nth, what, address, None);
    // SAFETY: `abort` has no preconditions.
    unsafe { libc::abort() }
}
