//! Functions of the unwinder that load its library when they are first called.
//!
//! Rust's standard library uses the unwinder for panics, and for backtraces in debugging reports.
//! To load the unwinder at the start would cost each process a tenth of a millisecond and 90 KiB,
//! and few processes call the unwinder. So this library defines the unwinder's names itself. Each
//! function finds the function of the same name in `libgcc_s.so.1` and jumps to it, with unchanged
//! arguments and return address. Each function keeps the address, so later calls load no library
//! and take no lock of the loader.

use core::ffi::{CStr, c_char, c_int, c_void};

/// The function that walks the stack. The only one that this library can do without.
const BACKTRACE: &CStr = c"_Unwind_Backtrace";

/// Returns the address of the unwinder's function `name`. If the library cannot be loaded, returns
/// [`walk_nothing`] in place of the function that walks the stack, and ends the process in place of
/// others.
extern "C" fn find(name: *const c_char) -> *mut c_void {
    // SAFETY: the functions above pass C strings.
    let name = unsafe { CStr::from_ptr(name) };
    let found = look_up(name);
    match found.is_null() {
        false => found,
        true if name == BACKTRACE => walk_nothing as *mut c_void,
        // SAFETY: `abort` has no preconditions.
        true => unsafe { libc::abort() },
    }
}

/// Returns the address of the unwinder's function `name`, or null if the library cannot be loaded:
/// because it is missing, or the process may open no more files.
pub(crate) fn look_up(name: &CStr) -> *mut c_void {
    // SAFETY: both names are C strings. No code closes the handle, so the library stays loaded.
    unsafe {
        let unwinder = libc::dlopen(c"libgcc_s.so.1".as_ptr(), libc::RTLD_LAZY);
        match unwinder.is_null() {
            true => unwinder,
            false => libc::dlsym(unwinder, name.as_ptr()),
        }
    }
}

type Step = extern "C" fn(*mut c_void, *mut c_void) -> c_int;

/// Walks the stack if the library can be loaded by now. Otherwise walks no frame, and returns the
/// unwinder's code for an error.
extern "C" fn walk_nothing(step: Step, argument: *mut c_void) -> c_int {
    const FATAL: c_int = 3;
    let found = look_up(BACKTRACE);
    if found.is_null() {
        return FATAL;
    }
    // SAFETY: the unwinder's function of this name has this type.
    let walk = unsafe {
        core::mem::transmute::<*mut c_void, extern "C" fn(Step, *mut c_void) -> c_int>(found)
    };
    walk(step, argument)
}

/// Defines hidden functions with these names. They pass at most three arguments on.
macro_rules! found_later {
    ($($name:literal)*) => {$(
        #[cfg(target_arch = "x86_64")]
        core::arch::global_asm!(
            ".pushsection .text.unlikely.pinfold_unwind, \"ax\", @progbits",
            concat!(".hidden ", $name),
            concat!(".globl ", $name),
            concat!(".type ", $name, ", @function"),
            concat!($name, ":"),
            "mov rax, [rip + 3f]",
            "test rax, rax",
            "jz 4f",
            "jmp rax",
            "4:",
            "push rdi",
            "push rsi",
            "push rdx",
            "lea rdi, [rip + 2f]",
            "call {find}",
            "mov [rip + 3f], rax",
            "pop rdx",
            "pop rsi",
            "pop rdi",
            "jmp rax",
            concat!(".size ", $name, ", . - ", $name),
            concat!("2: .asciz \"", $name, "\""),
            ".popsection",
            ".pushsection .bss.pinfold_unwind, \"aw\", @nobits",
            ".balign 8",
            "3: .skip 8",
            ".popsection",
            find = sym find,
        );
        #[cfg(target_arch = "aarch64")]
        core::arch::global_asm!(
            ".pushsection .text.unlikely.pinfold_unwind, \"ax\", @progbits",
            ".balign 4",
            concat!(".hidden ", $name),
            concat!(".globl ", $name),
            concat!(".type ", $name, ", @function"),
            concat!($name, ":"),
            "adrp x16, 3f",
            "ldr x16, [x16, :lo12:3f]",
            "cbz x16, 4f",
            "br x16",
            "4:",
            "stp x0, x1, [sp, #-32]!",
            "stp x2, x30, [sp, #16]",
            "adr x0, 2f",
            "bl {find}",
            "adrp x1, 3f",
            "str x0, [x1, :lo12:3f]",
            "mov x16, x0",
            "ldp x2, x30, [sp, #16]",
            "ldp x0, x1, [sp], #32",
            "br x16",
            concat!(".size ", $name, ", . - ", $name),
            concat!("2: .asciz \"", $name, "\""),
            ".balign 4",
            ".popsection",
            ".pushsection .bss.pinfold_unwind, \"aw\", @nobits",
            ".balign 8",
            "3: .skip 8",
            ".popsection",
            find = sym find,
        );
    )*};
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
found_later! {
    "_Unwind_Backtrace"
    "_Unwind_DeleteException"
    "_Unwind_FindEnclosingFunction"
    "_Unwind_GetCFA"
    "_Unwind_GetDataRelBase"
    "_Unwind_GetIP"
    "_Unwind_GetIPInfo"
    "_Unwind_GetLanguageSpecificData"
    "_Unwind_GetRegionStart"
    "_Unwind_GetTextRelBase"
    "_Unwind_RaiseException"
    "_Unwind_Resume"
    "_Unwind_SetGR"
    "_Unwind_SetIP"
}
