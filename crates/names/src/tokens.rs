//! The functions that a program calls in place of `malloc`, `operator new` and their relatives if
//! Clang has compiled it with `-fsanitize=alloc-token`.
//!
//! Clang gives each call a *token*, which it derives from the type of the object. The lower half of
//! the tokens is for types without pointers, and the upper half for types with pointers. Blocks
//! without pointers come from slabs of their own (`pinfold_malloc::c::data`).
//!
//! With `-fsanitize-alloc-token-fast-abi`, the token is in the function's name, as in
//! `__alloc_token_0_malloc`. Names for the tokens 0 and 1 are defined, which
//! `-falloc-token-max=2` needs. Without the flag, the token is a last argument, as in
//! `__alloc_token_malloc`.
//!
//! The operators have no effect on where a block lies if the program has replaced a function that
//! they would skip, and never in `libpinfold.a` (`operators::DIRECT`).

use crate::operators as cpp;
use core::ffi::{c_int, c_void};
use pinfold_malloc::c;

type Block = *mut c_void;

/// Returns whether a token that a call passes means a type without pointers.
///
/// Without `-falloc-token-max`, the tokens are all numbers up to `usize::MAX`, so the upper half
/// begins in the middle. The function cannot know a smaller maximum. It takes any small token other
/// than 0 for the upper half: then a maximum of 2 works, and with a greater one some types without
/// pointers lie among those with pointers, but none with pointers among those without.
#[inline(always)]
fn is_data(token: usize) -> bool {
    const MIDDLE: usize = usize::MAX / 2;
    const LEAST_WITHOUT_MAXIMUM: usize = 1 << 32;
    token == 0 || (LEAST_WITHOUT_MAXIMUM..MIDDLE).contains(&token)
}

/// Defines each function three times: for the tokens 0 and 1, and with a token as last argument.
///
/// The functions have a section of their own. Otherwise the compiler would merge `malloc` with
/// `__alloc_token_1_malloc`, and could place both away from the other code that each process runs.
macro_rules! tokens {
    ($($abi:literal $name:ident($($arg:ident: $type:ty),*) -> $result:ty |$data:ident| $body:expr;)*) => {$(
        #[allow(non_snake_case, reason = "C++'s names")]
        mod $name {
            use super::*;

            #[inline(always)]
            unsafe fn alloc($($arg: $type,)* $data: bool) -> $result {
                $body
            }

            #[unsafe(link_section = ".text.alloc_token")]
            #[unsafe(export_name = concat!("__alloc_token_0_", stringify!($name)))]
            unsafe extern $abi fn data($($arg: $type),*) -> $result {
                // SAFETY: the caller promises what the function without a token requires.
                unsafe { alloc($($arg,)* true) }
            }

            #[unsafe(link_section = ".text.alloc_token")]
            #[unsafe(export_name = concat!("__alloc_token_1_", stringify!($name)))]
            unsafe extern $abi fn pointers($($arg: $type),*) -> $result {
                // SAFETY: the caller promises what the function without a token requires.
                unsafe { alloc($($arg,)* false) }
            }

            #[unsafe(link_section = ".text.alloc_token")]
            #[unsafe(export_name = concat!("__alloc_token_", stringify!($name)))]
            unsafe extern $abi fn by_token($($arg: $type,)* token: usize) -> $result {
                // SAFETY: the caller promises what the function without a token requires.
                unsafe { alloc($($arg,)* is_data(token)) }
            }
        }
    )*};
}

tokens! {
    "C" malloc(size: usize) -> Block |data| match data {
        true => c::data::malloc(size),
        false => crate::malloc(size),
    };
    "C" calloc(count: usize, size: usize) -> Block |data| match data {
        true => c::data::calloc(count, size),
        false => c::pinfold_calloc(count, size),
    };
    // SAFETY: the caller promises what `realloc` requires.
    "C" realloc(block: Block, size: usize) -> Block |data| unsafe {
        c::data::realloc(block, size, data)
    };
    // SAFETY: the caller promises what `reallocarray` requires.
    "C" reallocarray(block: Block, count: usize, size: usize) -> Block |data| unsafe {
        c::data::reallocarray(block, count, size, data)
    };
    "C" aligned_alloc(align: usize, size: usize) -> Block |data| match data {
        true => c::data::aligned_alloc(align, size),
        false => c::pinfold_aligned_alloc(align, size),
    };
    "C" memalign(align: usize, size: usize) -> Block |data| match data {
        true => c::data::memalign(align, size),
        false => c::pinfold_memalign(align, size),
    };
    "C" posix_memalign(to: *mut Block, align: usize, size: usize) -> c_int |data| match data {
        // SAFETY: the caller promises what `posix_memalign` requires.
        true => unsafe { c::data::posix_memalign(to, align, size) },
        // SAFETY: the caller promises what `posix_memalign` requires.
        false => unsafe { c::pinfold_posix_memalign(to, align, size) },
    };
    "C" valloc(size: usize) -> Block |data| match data {
        true => c::data::valloc(size),
        false => c::pinfold_valloc(size),
    };
    "C" pvalloc(size: usize) -> Block |data| match data {
        true => c::data::pvalloc(size),
        false => c::pinfold_pvalloc(size),
    };
    "C-unwind" _Znwm(size: usize) -> Block |data| cpp::typed_new(size, data);
    "C-unwind" _Znam(size: usize) -> Block |data| cpp::typed_new_array(size, data);
    "C-unwind" _ZnwmSt11align_val_t(size: usize, align: usize) -> Block |data|
        cpp::typed_new_aligned(size, align, data);
    "C-unwind" _ZnamSt11align_val_t(size: usize, align: usize) -> Block |data|
        cpp::typed_new_array_aligned(size, align, data);
    "C-unwind" _ZnwmRKSt9nothrow_t(size: usize, tag: *const c_void) -> Block |data|
        cpp::typed_new_nothrow(size, data).unwrap_or_else(|| cpp::new_nothrow(size, tag));
    "C-unwind" _ZnamRKSt9nothrow_t(size: usize, tag: *const c_void) -> Block |data|
        cpp::typed_new_nothrow(size, data).unwrap_or_else(|| cpp::new_array_nothrow(size, tag));
    "C-unwind" _ZnwmSt11align_val_tRKSt9nothrow_t(
        size: usize, align: usize, tag: *const c_void
    ) -> Block |data| cpp::typed_new_aligned_nothrow(size, align, data)
        .unwrap_or_else(|| cpp::new_aligned_nothrow(size, align, tag));
    "C-unwind" _ZnamSt11align_val_tRKSt9nothrow_t(
        size: usize, align: usize, tag: *const c_void
    ) -> Block |data| cpp::typed_new_aligned_nothrow(size, align, data)
        .unwrap_or_else(|| cpp::new_array_aligned_nothrow(size, align, tag));
}
