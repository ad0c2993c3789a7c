//! Static probes (USDT) on sampled allocations and their frees, for tracers outside the process.
//!
//! | probe | arguments |
//! |---|---|
//! | `otel_memory:alloc` | address; bytes; how many bytes the sample stands for |
//! | `otel_memory:free` | address of a block that was sampled |
//!
//! A `realloc` of a sampled block is a free. If the block stays in place, an allocation of the new
//! size follows.
//!
//! These are the probes that OpenTelemetry's eBPF profiler attaches to. `perf` and `bpftrace` can
//! attach to them too.
//!
//! A probe is a `nop`. A note in the library's file gives its address. A tracer replaces the `nop`
//! by a breakpoint, and adds 1 to the probe's semaphore while it is attached.

use core::sync::atomic::AtomicU16;
use core::sync::atomic::Ordering::Relaxed;

unsafe extern "C" {
    #[link_name = "pinfold_probe_alloc_semaphore"]
    safe static ALLOC_WATCHERS: AtomicU16;
    #[link_name = "pinfold_probe_free_semaphore"]
    safe static FREE_WATCHERS: AtomicU16;
}

/// Returns whether a tracer is attached to one of the probes.
#[inline]
pub fn is_watched() -> bool {
    ALLOC_WATCHERS.load(Relaxed) | FREE_WATCHERS.load(Relaxed) != 0
}

/// Runs the probe `otel_memory:alloc`. `from` is the frame from which a tracer follows the frame
/// pointers (`sys::frame`).
pub(super) fn alloc(block: *mut u8, size: usize, weighted_bytes: u64, from: usize) {
    if ALLOC_WATCHERS.load(Relaxed) != 0 {
        // SAFETY: the function restores the frame pointer, and does nothing else.
        unsafe { pinfold_probe_alloc(block, size, weighted_bytes, from) };
    }
}

/// Runs the probe `otel_memory:free`. `from` is as in [`alloc`].
pub(super) fn free(block: *mut u8, from: usize) {
    if FREE_WATCHERS.load(Relaxed) != 0 {
        // SAFETY: the function restores the frame pointer, and does nothing else.
        unsafe { pinfold_probe_free(block, from) };
    }
}

unsafe extern "C" {
    fn pinfold_probe_alloc(block: *mut u8, size: usize, weighted_bytes: u64, from: usize);
    fn pinfold_probe_free(block: *mut u8, from: usize);
}

#[cfg(target_arch = "x86_64")]
macro_rules! save_frame_pointer {
    () => {
        "push rbp
        .cfi_def_cfa_offset 16
        .cfi_offset rbp, -16"
    };
}
#[cfg(target_arch = "x86_64")]
macro_rules! restore_frame_pointer {
    () => {
        "pop rbp
        .cfi_def_cfa_offset 8
        .cfi_restore rbp"
    };
}
#[cfg(target_arch = "aarch64")]
macro_rules! save_frame_pointer {
    () => {
        "stp x29, x30, [sp, #-16]!
        .cfi_def_cfa_offset 16
        .cfi_offset x29, -16
        .cfi_offset x30, -8"
    };
}
#[cfg(target_arch = "aarch64")]
macro_rules! restore_frame_pointer {
    () => {
        "ldp x29, x30, [sp], #16
        .cfi_def_cfa_offset 0
        .cfi_restore x29
        .cfi_restore x30"
    };
}

/// Defines a function with a probe, and the note that describes the probe: the addresses of the
/// probe, of a marker and of the semaphore, and how to find the arguments. Readers correct the
/// addresses by the marker's, if the file was prelinked.
///
/// `$load` loads the function's last argument into the frame pointer.
macro_rules! probe {
    ($name:literal, $function:literal, $arguments:literal, $load:literal) => {
        core::arch::global_asm!(
            concat!(".pushsection .text.", $function, ", \"ax\", @progbits"),
            ".balign 4",
            concat!(".hidden ", $function),
            concat!(".globl ", $function),
            concat!(".type ", $function, ", @function"),
            concat!($function, ":"),
            // Unwinders skip a function without this information, or end the stack there.
            ".cfi_startproc",
            save_frame_pointer!(),
            $load,
            concat!(".L", $function, ": nop"),
            restore_frame_pointer!(),
            "ret",
            ".cfi_endproc",
            concat!(".size ", $function, ", . - ", $function),
            ".popsection",
            ".ifndef _.stapsdt.base",
            ".pushsection .stapsdt.base, \"aGR\", @progbits, .stapsdt.base, comdat",
            ".weak _.stapsdt.base",
            ".hidden _.stapsdt.base",
            "_.stapsdt.base:",
            ".space 1",
            ".size _.stapsdt.base, 1",
            ".popsection",
            ".endif",
            ".pushsection .probes, \"aw\", @progbits",
            ".balign 2",
            concat!(".hidden ", $function, "_semaphore"),
            concat!(".globl ", $function, "_semaphore"),
            concat!(".type ", $function, "_semaphore, @object"),
            concat!($function, "_semaphore: .2byte 0"),
            concat!(".size ", $function, "_semaphore, 2"),
            ".popsection",
            ".pushsection .note.stapsdt, \"\", @note",
            ".balign 4",
            ".4byte 3f - 2f, 5f - 4f, 3",
            "2: .asciz \"stapsdt\"",
            "3: .balign 4",
            concat!("4: .8byte .L", $function),
            ".8byte _.stapsdt.base",
            concat!(".8byte ", $function, "_semaphore"),
            ".asciz \"otel_memory\"",
            concat!(".asciz \"", $name, "\""),
            concat!(".asciz \"", $arguments, "\""),
            "5: .balign 4",
            ".popsection",
        );
    };
}

#[cfg(target_arch = "x86_64")]
probe!(
    "alloc",
    "pinfold_probe_alloc",
    "8@%rdi 8@%rsi 8@%rdx",
    "mov rbp, rcx"
);
#[cfg(target_arch = "x86_64")]
probe!("free", "pinfold_probe_free", "8@%rdi", "mov rbp, rsi");
#[cfg(target_arch = "aarch64")]
probe!(
    "alloc",
    "pinfold_probe_alloc",
    "8@x0 8@x1 8@x2",
    "mov x29, x3"
);
#[cfg(target_arch = "aarch64")]
probe!("free", "pinfold_probe_free", "8@x0", "mov x29, x1");

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod elsewhere {
    use super::AtomicU16;

    #[unsafe(no_mangle)]
    static pinfold_probe_alloc_semaphore: AtomicU16 = AtomicU16::new(0);
    #[unsafe(no_mangle)]
    static pinfold_probe_free_semaphore: AtomicU16 = AtomicU16::new(0);
    #[unsafe(no_mangle)]
    extern "C" fn pinfold_probe_alloc(_: *mut u8, _: usize, _: u64, _: usize) {}
    #[unsafe(no_mangle)]
    extern "C" fn pinfold_probe_free(_: *mut u8, _: usize) {}
}
