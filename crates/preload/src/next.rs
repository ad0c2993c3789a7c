//! Finds the C library's functions that this library replaces by its own.

use core::ffi::{CStr, c_void};
use core::ptr::null_mut;
use core::sync::atomic::AtomicPtr;
use core::sync::atomic::Ordering::{Acquire, Release};

/// A function of the next library in the search order, found at the first call.
pub(crate) struct Next {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

impl Next {
    pub(crate) const fn new(name: &'static CStr) -> Next {
        Next {
            name,
            address: AtomicPtr::new(null_mut()),
        }
    }

    /// Returns the function's address. Returns null if no library after this one in the search
    /// order has the function.
    pub(crate) fn address(&self) -> *mut c_void {
        // Acquire pairs with the release below: a thread that sees the address also sees the
        // loader's writes before it.
        let known = self.address.load(Acquire);
        if !known.is_null() {
            return known;
        }
        // SAFETY: the name is a C string, and `RTLD_NEXT` is a valid handle.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.address.store(found, Release);
        found
    }
}
