//! The function that initialises a cache's objects when their slab is made.

use core::ffi::c_void;

/// A constructor, in Rust or C.
#[derive(Clone, Copy)]
pub(super) enum Constructor {
    Rust(unsafe fn(*mut u8)),
    C(unsafe extern "C" fn(*mut c_void)),
}

impl Constructor {
    /// Initialises the object at `object`.
    ///
    /// # Safety
    ///
    /// No other thread uses the object, and the object has the layout that the constructor is for.
    pub(super) unsafe fn make(self, object: *mut u8) {
        match self {
            // SAFETY: the caller promises an unused object of the right layout.
            Constructor::Rust(constructor) => unsafe { constructor(object) },
            // SAFETY: the caller promises an unused object of the right layout.
            Constructor::C(constructor) => unsafe { constructor(object.cast()) },
        }
    }
}
