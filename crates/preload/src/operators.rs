//! Exports C++'s operators. `pinfold-names` defines them as weak symbols in assembly. But a Rust
//! shared library exports only symbols that Rust code defines, so this module defines them again.

use core::cell::Cell;
use core::ffi::c_void;
use core::ptr::null;
use libc::{Elf64_Ehdr, Elf64_Phdr};
use pinfold_malloc::c::SizedBlock;
use pinfold_names::{for_each_operator, operators};

macro_rules! exported {
    ($($name:ident = $function:ident($($arg:ident: $type:ty),*) $(-> $result:ty)?;)*) => {$(
        #[unsafe(no_mangle)]
        #[allow(non_snake_case, reason = "C++'s names")]
        unsafe extern "C-unwind" fn $name($($arg: $type),*) $(-> $result)? {
            #[allow(unused_unsafe, reason = "some of the operators are safe")]
            // SAFETY: the compiler of C++ calls this operator with the arguments that it requires.
            unsafe { operators::$function($($arg),*) }
        }
    )*};
}

for_each_operator!(exported);
exported! {
    _ZnwmRKSt9nothrow_t = new_nothrow(size: usize, tag: *const c_void) -> *mut c_void;
    _ZnamRKSt9nothrow_t = new_array_nothrow(size: usize, tag: *const c_void) -> *mut c_void;
    _ZnwmSt11align_val_tRKSt9nothrow_t =
        new_aligned_nothrow(size: usize, align: usize, tag: *const c_void) -> *mut c_void;
    _ZnamSt11align_val_tRKSt9nothrow_t =
        new_array_aligned_nothrow(size: usize, align: usize, tag: *const c_void) -> *mut c_void;
}

/// Opens the operators' fast paths if the program has not replaced a function that they skip.
/// Returns the first function that the program has replaced: `malloc`, if it has. Returns null if
/// it has replaced none.
pub(crate) fn open_fast_paths() -> *const c_void {
    let replaced = Cell::new(null());
    operators::open_fast_paths(|function| {
        let is_own = lies_here(function);
        if !is_own {
            replaced.set(function);
        }
        is_own
    });
    replaced.get()
}

unsafe extern "C" {
    /// The first byte of this library's file as it is mapped. Each linker defines this hidden name.
    static __ehdr_start: Elf64_Ehdr;
}

/// Returns whether this library's code contains `address`.
///
/// Reads the library's own program headers. `dladdr` would search the symbol table of the library
/// at `address`, on pages that a small program never touches.
fn lies_here(address: *const c_void) -> bool {
    // SAFETY: the loader mapped the header and the program headers behind it. They stay mapped and
    // do not change.
    let (base, segments) = unsafe {
        let header = &raw const __ehdr_start;
        let first = header
            .byte_add((*header).e_phoff as usize)
            .cast::<Elf64_Phdr>();
        let count = usize::from((*header).e_phnum);
        (header.addr(), core::slice::from_raw_parts(first, count))
    };
    let mut code = segments
        .iter()
        .filter(|segment| segment.p_type == libc::PT_LOAD && segment.p_flags & libc::PF_X != 0);
    code.any(|segment| {
        let from = base + segment.p_vaddr as usize;
        (from..from + segment.p_memsz as usize).contains(&address.addr())
    })
}
