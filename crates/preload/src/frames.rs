//! Notices when the program registers unwinding tables of its own, as a just-in-time compiler does.
//!
//! While the unwinder keeps such tables, it holds a lock of its own, and allocates and frees memory
//! under that lock. An allocation that walks its stack, for a heap profile or a guarded block,
//! would take the lock again, and wait for itself forever. So the first table ends all walks of
//! this process. Each function here calls the unwinder's function of the same name: that of the
//! library that the program would call without this one, or else that of `libgcc_s.so.1`.

use crate::next::Next;
use crate::unwind::look_up;
use core::ffi::c_void;
use core::mem::transmute;

macro_rules! noticed {
    ($($name:ident: $text:literal ($($argument:ident),*);)*) => {$(
        /// Registers a table with the unwinder.
        ///
        /// # Safety
        ///
        /// The arguments are valid for the unwinder's function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: *mut c_void),*) {
            type Function = unsafe extern "C" fn($(noticed!(@type $argument)),*);
            pinfold_malloc::heap_profile::forbid_walks();
            static NEXT: Next = Next::new($text);
            let mut found = NEXT.address();
            if found.is_null() {
                found = look_up($text);
            }
            if !found.is_null() {
                // SAFETY: the unwinder's function of this name has this type, and the caller's
                // arguments are valid for it.
                unsafe { transmute::<*mut c_void, Function>(found)($($argument),*) };
            }
        }
    )*};
    (@type $argument:ident) => { *mut c_void };
}

noticed! {
    __register_frame: c"__register_frame" (begin);
    __register_frame_info: c"__register_frame_info" (begin, object);
    __register_frame_info_bases: c"__register_frame_info_bases" (begin, object, text, data);
    __register_frame_table: c"__register_frame_table" (begin);
    __register_frame_info_table: c"__register_frame_info_table" (begin, object);
    __register_frame_info_table_bases: c"__register_frame_info_table_bases" (begin, object, text, data);
}
