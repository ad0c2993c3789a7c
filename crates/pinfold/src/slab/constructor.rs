//! What initialises a cache's objects when their slab is made.

use core::ffi::c_void;

/// A constructor, of either language.
#[derive(Clone, Copy)]
pub(super) enum Constructor {
    Rust(unsafe fn(*mut u8)),
    C(unsafe extern "C" fn(*mut c_void)),
}

impl Constructor {
    /// Initialises the object.
    ///
    /// # Safety
    ///
    /// The object is the caller's, of the layout that the constructor is for.
    pub(super) unsafe fn make(self, object: *mut u8) {
        match self {
            // SAFETY: the caller's promise.
            Constructor::Rust(constructor) => unsafe { constructor(object) },
            // SAFETY: as above.
            Constructor::C(constructor) => unsafe { constructor(object.cast()) },
        }
    }
}
