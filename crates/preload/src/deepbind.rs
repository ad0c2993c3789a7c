//! Replaces `dlopen`, to leave out the flag `RTLD_DEEPBIND`.
//!
//! A library that is loaded with this flag looks for each function among its own dependencies
//! first. So it finds the C library's `malloc` and `free`, while the rest of the program uses this
//! library's. The first block that one part allocates and the other frees then ends the process.
//! PHP and Samba load their modules with this flag.
//!
//! The C library's `dlopen` reads its own return address, to search the folders that the caller's
//! `RUNPATH` names. So the function here changes the flags and jumps. It makes no call, and the
//! return address stays the caller's.

use core::ffi::{c_char, c_int, c_void};
use core::sync::atomic::Ordering::{Relaxed, Release};
use core::sync::atomic::{AtomicI32, AtomicPtr};
use pinfold_malloc::settings::keeps_deepbind;

/// From glibc's dlfcn.h. musl ignores the flag, and libc has no name for it there.
const RTLD_DEEPBIND: c_int = 8;

/// The C library's `dlopen`. Null before the first call.
static NEXT: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());
/// A mask of the flags that `dlopen` keeps. Written before [`NEXT`], and the same at each write.
static KEPT: AtomicI32 = AtomicI32::new(0);

/// Finds the C library's `dlopen`, and reads which flags stay. If there is no such function,
/// returns one that fails.
extern "C" fn find() -> *mut c_void {
    let kept = match keeps_deepbind() {
        true => !0,
        false => !RTLD_DEEPBIND,
    };
    KEPT.store(kept, Relaxed);
    // SAFETY: the name is a C string, and `RTLD_NEXT` is a valid handle.
    let mut next = unsafe { libc::dlsym(libc::RTLD_NEXT, c"dlopen".as_ptr()) };
    if next.is_null() {
        next = open_nothing as *mut c_void;
    }
    // Release pairs with the load in `dlopen`: a thread that sees the address also sees the flags.
    NEXT.store(next, Release);
    next
}

extern "C" fn open_nothing(_: *const c_char, _: c_int) -> *mut c_void {
    core::ptr::null_mut()
}

/// Does what the C library's `dlopen` does, without the flag `RTLD_DEEPBIND`, unless the user wants
/// to keep the flag.
///
/// # Safety
///
/// The arguments are valid for the C library's function.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void {
    // Loads of this architecture are acquire loads.
    core::arch::naked_asm!(
        "mov rax, [rip + {next}]",
        "test rax, rax",
        "jz 2f",
        "3:",
        "and esi, [rip + {kept}]",
        "jmp rax",
        "2:",
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {find}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "jmp 3b",
        next = sym NEXT,
        kept = sym KEPT,
        find = sym find,
    )
}

/// Does what the C library's `dlopen` does, without the flag `RTLD_DEEPBIND`, unless the user wants
/// to keep the flag.
///
/// # Safety
///
/// The arguments are valid for the C library's function.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void {
    core::arch::naked_asm!(
        "adrp x16, {next}",
        "add x16, x16, :lo12:{next}",
        "ldar x16, [x16]",
        "cbz x16, 2f",
        "3:",
        "adrp x17, {kept}",
        "ldr w17, [x17, :lo12:{kept}]",
        "and w1, w1, w17",
        "br x16",
        "2:",
        "stp x0, x1, [sp, #-32]!",
        "str x30, [sp, #16]",
        "bl {find}",
        "mov x16, x0",
        "ldr x30, [sp, #16]",
        "ldp x0, x1, [sp], #32",
        "b 3b",
        next = sym NEXT,
        kept = sym KEPT,
        find = sym find,
    )
}
