//! The sanitizers of the compilers: whether one is in the process.
//!
//! A sanitizer's library is in the program, or is loaded before the program starts. So its
//! functions are weak symbols here: null where there is no sanitizer.

/// The addresses of functions that the libraries of sanitizers define, or null.
#[repr(C)]
struct Functions {
    inits: [*const (); 4],
}

core::arch::global_asm!(
    ".weak __asan_init",
    ".weak __hwasan_init",
    ".weak __msan_init",
    ".weak __tsan_init",
    ".pushsection .data.rel.ro.pinfold_sanitizer, \"aw\"",
    ".balign 8",
    ".globl pinfold_sanitizer",
    ".hidden pinfold_sanitizer",
    "pinfold_sanitizer:",
    ".quad __asan_init, __hwasan_init, __msan_init, __tsan_init",
    ".popsection",
);

unsafe extern "C" {
    static pinfold_sanitizer: Functions;
}

fn functions() -> &'static Functions {
    // SAFETY: the table above has the fields of `Functions` in the same order. The loader fills it
    // in before code of this library runs.
    unsafe { &pinfold_sanitizer }
}

/// Returns whether a sanitizer that keeps ranges of addresses for itself is in this process.
pub(crate) fn is_there() -> bool {
    functions().inits.iter().any(|init| !init.is_null())
}
