//! The call stack and the thread of an allocation or a free.

use crate::profile::{ALL, FRAMES, callers};
use crate::slab::debug::write_frames;
use crate::sys;
use core::fmt::{self, Write};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize};

/// Frames that are kept.
const KEPT: usize = 32;

/// Which frame of a stack is the first that is recorded.
pub(super) enum Innermost {
    /// The caller of the function in which `profile::here` returned this address.
    CallerOf(usize),
    /// The frame at this instruction. All frames are recorded if the instruction is not known, or
    /// is in no frame.
    Instruction(Option<usize>),
}

/// Written by the thread that has taken the slot, and read for reports.
pub(super) struct Stack {
    milliseconds: AtomicU64,
    /// The kernel's id of the thread, or 0 if nothing is recorded.
    thread: AtomicI32,
    frames: [AtomicUsize; KEPT],
}

impl Stack {
    pub(super) const fn empty() -> Stack {
        Stack {
            milliseconds: AtomicU64::new(0),
            thread: AtomicI32::new(0),
            frames: [const { AtomicUsize::new(0) }; KEPT],
        }
    }

    /// Records the calling thread's stack. Records no frames if the stack cannot be walked now.
    #[inline(never)]
    pub(super) fn record(&self, innermost: Innermost) {
        let mut frames = [0; FRAMES];
        let (from, instruction) = match innermost {
            Innermost::CallerOf(from) => (from, None),
            Innermost::Instruction(at) => (ALL, at),
        };
        callers(&mut frames, from);
        let first = instruction.and_then(|at| frames.iter().position(|&frame| frame == at));
        let kept = &mut frames[first.unwrap_or(0)..];
        if first.is_some() {
            // The other frames are return addresses, and a report names the code before each. So 1
            // is added to the address of the instruction.
            kept[0] += 1;
        }
        for (place, &frame) in self.frames.iter().zip(kept.iter().chain([&0; KEPT])) {
            place.store(frame, Relaxed);
        }
        self.milliseconds.store(sys::coarse_milliseconds(), Relaxed);
        let thread = pinfold_rseq::kernel::thread();
        // Release pairs with the acquire in `write`: a reader that sees the thread also
        // sees the frames.
        self.thread.store(thread, Release);
    }

    pub(super) fn forget(&self) {
        self.thread.store(0, Relaxed);
    }

    /// Writes the thread and the frames. `now` is the time of the report. Writes nothing if nothing
    /// is recorded.
    pub(super) fn write(&self, what: &str, now: u64, to: &mut dyn Write) -> fmt::Result {
        // Acquire pairs with the release in `record`.
        let thread = self.thread.load(Acquire);
        if thread == 0 {
            return Ok(());
        }
        let ago = now.saturating_sub(self.milliseconds.load(Relaxed));
        let (seconds, rest) = (ago / 1000, ago % 1000);
        writeln!(
            to,
            "  {what} by thread {thread}, {seconds}.{rest:03} s ago:"
        )?;
        let frames = self.frames.iter().map(|frame| frame.load(Relaxed));
        write_frames(frames.take_while(|&frame| frame != 0), to)
    }
}
