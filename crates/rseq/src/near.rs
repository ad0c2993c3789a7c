//! Addresses of statics that fast paths use.
//!
//! The compiler loads the address of another crate's static from the global offset table, because
//! the static could lie in another shared library. Not every linker relaxes that load. Fast paths
//! are inlined into other crates, so each static that they name would cost one load.
//! [`near!`](macro@crate::near) computes the address from the program counter instead.

/// Returns a `&'static $type` to the static `$at`, with its address computed from the program
/// counter.
///
/// The static must be part of the same shared library or program as the code that uses the macro:
/// the macro makes the static's symbol hidden.
///
/// The static must have the attribute `#[used]`. Without it, the compiler may merge the static with
/// others on aarch64. Then it has no symbol of its own, and the code does not assemble.
#[doc(hidden)]
#[macro_export]
macro_rules! near {
    ($at:path, $type:ty) => {{
        let at: *const $type;
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the instruction only computes an address; it touches no memory.
        unsafe {
            core::arch::asm!(
                ".hidden {symbol}",
                "lea {at}, [rip + {symbol}]",
                symbol = sym $at,
                at = out(reg) at,
                options(pure, nomem, nostack, preserves_flags),
            );
        }
        #[cfg(target_arch = "aarch64")]
        // SAFETY: the two instructions only compute an address; they touch no memory.
        unsafe {
            core::arch::asm!(
                ".hidden {symbol}",
                "adrp {at}, {symbol}",
                "add {at}, {at}, :lo12:{symbol}",
                symbol = sym $at,
                at = out(reg) at,
                options(pure, nomem, nostack, preserves_flags),
            );
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        {
            at = &raw const $at;
        }
        // Compiles only if the static has the type `$type`.
        let _: fn() -> &'static $type = || &$at;
        // SAFETY: `at` is the address of a static, which is valid for the whole program, and the
        // line above checks that its type is `$type`.
        unsafe { &*at }
    }};
}
