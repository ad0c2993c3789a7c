//! Functions of the unwinder that load its library when they are first called.
//!
//! Rust's standard library uses the unwinder for panics, and for backtraces in debugging reports.
//! To load the unwinder at the start would cost each process a tenth of a millisecond and 90 KiB,
//! and few processes call the unwinder. So this library defines the unwinder's names itself. Each
//! function jumps to the function of the same name in `libgcc_s.so.1`, with unchanged arguments and
//! return address.
//!
//! The first call of any of these functions finds the addresses of all of them, and keeps them. So
//! a program that has walked its stack once never calls the loader here again. A sampled allocation
//! needs that: it may happen in a thread that holds the loader's lock, or for which the holder of
//! that lock waits.

use core::ffi::{CStr, c_int, c_void};
use core::sync::atomic::AtomicPtr;
use core::sync::atomic::Ordering::{Relaxed, Release};

/// Finds the unwinder's functions, and returns the address of number `nth` of [`NAMES`]. If the
/// library cannot be loaded, returns [`walk_nothing`] in place of the function that walks the
/// stack, and ends the process in place of others.
extern "C" fn find(nth: usize) -> *mut c_void {
    find_all();
    // The address that this thread, or another one, has just stored.
    let found = FOUND[nth].load(Relaxed);
    match found.is_null() {
        false => found,
        true if nth == BACKTRACE => walk_nothing as *mut c_void,
        // SAFETY: `abort` has no preconditions.
        true => unsafe { libc::abort() },
    }
}

/// Stores the addresses of all functions of [`NAMES`]. Changes nothing if the library cannot be
/// loaded.
fn find_all() {
    for (name, place) in NAMES.iter().zip(&FOUND) {
        // The functions that [`found_later`] defines jump to the address. Release keeps the
        // loader's writes before this store.
        place.store(look_up(name), Release);
    }
}

/// Returns the address of the unwinder's function `name`, or null if the library cannot be loaded:
/// because it is missing, or the process may open no more files. Keeps errno, because a free that
/// records its stack may be the caller.
pub(crate) fn look_up(name: &CStr) -> *mut c_void {
    // SAFETY: both names are C strings. No code closes the handle, so the library stays loaded. The
    // thread's errno is always readable and writable.
    unsafe {
        let errno = *libc::__errno_location();
        // With `RTLD_NOW`, the library's own calls are bound now, instead of in the first walk.
        let unwinder = libc::dlopen(c"libgcc_s.so.1".as_ptr(), libc::RTLD_NOW);
        let found = match unwinder.is_null() {
            true => unwinder,
            false => libc::dlsym(unwinder, name.as_ptr()),
        };
        *libc::__errno_location() = errno;
        found
    }
}

type Step = extern "C" fn(*mut c_void, *mut c_void) -> c_int;

/// Walks no frame, and returns the unwinder's code for an error.
extern "C" fn walk_nothing(_: Step, _: *mut c_void) -> c_int {
    const FATAL: c_int = 3;
    FATAL
}

/// Defines hidden functions with these names. They pass at most three arguments on. The number of
/// each is the place of its address in `FOUND`, in bytes.
macro_rules! found_later {
    ($($at:literal $name:literal)*) => {
        const NAMES: &[&CStr] = &[$(
            match CStr::from_bytes_with_nul(concat!($name, "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!("a name contains NUL"),
            }
        ),*];

        $(
        #[cfg(target_arch = "x86_64")]
        core::arch::global_asm!(
            ".pushsection .text.unlikely.pinfold_unwind, \"ax\", @progbits",
            concat!(".hidden ", $name),
            concat!(".globl ", $name),
            concat!(".type ", $name, ", @function"),
            concat!($name, ":"),
            concat!("mov rax, [rip + {found} + ", $at, "]"),
            "test rax, rax",
            "jz 4f",
            "jmp rax",
            "4:",
            "push rdi",
            "push rsi",
            "push rdx",
            concat!("mov edi, ", $at, " / 8"),
            "call {find}",
            "pop rdx",
            "pop rsi",
            "pop rdi",
            "jmp rax",
            concat!(".size ", $name, ", . - ", $name),
            ".popsection",
            find = sym find,
            found = sym FOUND,
        );
        #[cfg(target_arch = "aarch64")]
        core::arch::global_asm!(
            ".pushsection .text.unlikely.pinfold_unwind, \"ax\", @progbits",
            ".balign 4",
            concat!(".hidden ", $name),
            concat!(".globl ", $name),
            concat!(".type ", $name, ", @function"),
            concat!($name, ":"),
            concat!("adrp x16, {found} + ", $at),
            concat!("ldr x16, [x16, :lo12:{found} + ", $at, "]"),
            "cbz x16, 4f",
            "br x16",
            "4:",
            "stp x0, x1, [sp, #-32]!",
            "stp x2, x30, [sp, #16]",
            concat!("mov x0, #(", $at, " / 8)"),
            "bl {find}",
            "mov x16, x0",
            "ldp x2, x30, [sp, #16]",
            "ldp x0, x1, [sp], #32",
            "br x16",
            concat!(".size ", $name, ", . - ", $name),
            ".popsection",
            find = sym find,
            found = sym FOUND,
        );
    )*};
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
found_later! {
    0 "_Unwind_Backtrace"
    8 "_Unwind_DeleteException"
    16 "_Unwind_FindEnclosingFunction"
    24 "_Unwind_GetCFA"
    32 "_Unwind_GetDataRelBase"
    40 "_Unwind_GetIP"
    48 "_Unwind_GetIPInfo"
    56 "_Unwind_GetLanguageSpecificData"
    64 "_Unwind_GetRegionStart"
    72 "_Unwind_GetTextRelBase"
    80 "_Unwind_RaiseException"
    88 "_Unwind_Resume"
    96 "_Unwind_SetGR"
    104 "_Unwind_SetIP"
}

/// The place in [`NAMES`] of the function that walks the stack. The only function that this library
/// can do without.
const BACKTRACE: usize = 0;

/// The address of each function of [`NAMES`], or null before it is found.
static FOUND: [AtomicPtr<c_void>; NAMES.len()] =
    [const { AtomicPtr::new(core::ptr::null_mut()) }; NAMES.len()];
