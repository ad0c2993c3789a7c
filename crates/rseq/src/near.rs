//! Statics that fast paths use.
//!
//! The compiler takes the address of a static of another crate from the global offset table, as the
//! static could lie in another library. Not every linker turns that load into an addition. Fast
//! paths are inlined into other crates, so that each of their statics would cost them a load.

/// A shared reference to the static `$at` of type `$type`, computed from the program counter alone.
///
/// The static must be a part of the library or program that uses the macro: its symbol becomes
/// hidden.
#[doc(hidden)]
#[macro_export]
macro_rules! near {
    ($at:path, $type:ty) => {{
        let at: *const $type;
        #[cfg(target_arch = "x86_64")]
        // SAFETY: computes an address.
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
        // SAFETY: computes an address.
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
        // The compiler checks that the type is the static's.
        let _: fn() -> &'static $type = || &$at;
        // SAFETY: the address of a static, which is valid for ever and of that type.
        unsafe { &*at }
    }};
}
