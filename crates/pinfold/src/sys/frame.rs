//! Frame pointers on the way from a call of the allocator to a probe.
//!
//! Tracers like `perf record --call-graph fp` and `bpftrace` walk the stack by frame pointers. A
//! frame pointer points to two words: the caller's frame pointer and the return address. The
//! compiler keeps no frame pointers here by default, and uses the register for other values. So a
//! walk that begins at a probe would find no function of the program.
//!
//! A flag of the compiler would have every function keep them, which makes the fast paths longer.
//! Instead:
//!
//! 1. The outermost function of the allocator calls [`here`] for the address of its own frame. This
//!    frame has the program's frame pointer and the return address in the program.
//! 2. The probe loads this address into the frame pointer (`profile::probes`).
//! 3. A function that may lie between the program and the function that calls [`here`] calls
//!    [`keep_frame`].

/// Returns the address of the calling function's frame, which the frame pointer holds. No frame of
/// a function that the calling function calls lies above this address.
#[inline(always)]
pub fn here() -> usize {
    /// No stack has this alignment at a call. So the compiler aligns the stack pointer in the
    /// calling function, and addresses the frame by the frame pointer.
    #[repr(align(32))]
    struct Aligned;

    let place = Aligned;
    frame_pointer((&raw const place).cast())
}

/// Has the calling function keep a frame pointer.
#[inline(always)]
pub fn keep_frame() {
    here();
}

#[cfg(target_arch = "x86_64")]
macro_rules! register {
    () => {
        "rbp"
    };
}
#[cfg(target_arch = "aarch64")]
macro_rules! register {
    () => {
        "x29"
    };
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[inline(always)]
fn frame_pointer(local: *const u8) -> usize {
    let frame;
    // SAFETY: reads a register. The operand `local` keeps the aligned variable in the frame, so
    // that the register holds the frame pointer here.
    unsafe {
        core::arch::asm!(
            concat!("mov {frame}, ", register!()),
            "/* {local} */",
            frame = out(reg) frame,
            local = in(reg) local,
            options(nostack, preserves_flags, readonly),
        );
    }
    frame
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
#[inline(always)]
fn frame_pointer(local: *const u8) -> usize {
    local as usize
}
