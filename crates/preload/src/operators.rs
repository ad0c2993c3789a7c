//! C++'s operators under their own names, exported: a shared library exports only what has a Rust
//! definition in it or below.

use core::ffi::c_void;
use pinfold_names::{for_each_operator, operators};

macro_rules! exported {
    ($($name:ident = $function:ident($($arg:ident: $type:ty),*) $(-> $result:ty)?;)*) => {$(
        #[unsafe(no_mangle)]
        #[allow(non_snake_case, reason = "C++'s names")]
        unsafe extern "C-unwind" fn $name($($arg: $type),*) $(-> $result)? {
            #[allow(unused_unsafe, reason = "some of the operators are safe")]
            // SAFETY: the caller's promise: it is C++'s operator of this name.
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

/// Opens the operators' fast paths unless the program has replaced `malloc` or an operator.
pub(crate) fn open_fast_paths() {
    let here = library_of(open_fast_paths as *const c_void);
    operators::open_fast_paths(|function| library_of(function) == here);
}

/// Where the library or program that `address` lies in is mapped.
fn library_of(address: *const c_void) -> *mut c_void {
    // SAFETY: null pointers are an answer, and it is writable.
    unsafe {
        let mut answer: libc::Dl_info = core::mem::zeroed();
        libc::dladdr(address, &raw mut answer);
        answer.dli_fbase
    }
}
