//! Helpers that the parts of the C API share: they allocate the values behind C handles, and
//! convert the library's errors to errno values.

use core::ffi::{c_int, c_void};
use core::ptr::{NonNull, null_mut};
use pinfold::counter::{CounterError, SharedError};
use pinfold::internal::segment::ShowError;
use pinfold::internal::{heap, set_errno};
use pinfold::mempolicy::{PolicyError, RangeError};
use pinfold::shepherd::ShepherdError;
use pinfold::slab::{CacheError, OutOfMemory};
use pinfold_rseq::FenceError;

/// An error that the C API reports as an errno.
pub(super) trait AsErrno {
    /// Returns the errno: the kernel's own if the kernel refused a call, otherwise the one that
    /// fits the error.
    fn as_errno(&self) -> c_int;
}

impl AsErrno for CounterError {
    fn as_errno(&self) -> c_int {
        match self {
            CounterError::OutOfMemory => libc::ENOMEM,
            CounterError::Fence => libc::ENOTSUP,
            _ => libc::EINVAL,
        }
    }
}

impl AsErrno for SharedError {
    fn as_errno(&self) -> c_int {
        match *self {
            SharedError::File { errno } => errno,
            _ => libc::EINVAL,
        }
    }
}

impl AsErrno for PolicyError {
    fn as_errno(&self) -> c_int {
        match self {
            PolicyError::NeedsRights(_) => libc::EPERM,
            _ => self.errno().unwrap_or(libc::EINVAL),
        }
    }
}

impl AsErrno for RangeError {
    fn as_errno(&self) -> c_int {
        match self {
            RangeError::Busy => libc::EBUSY,
            RangeError::OutOfMemory => libc::ENOMEM,
            _ => libc::EINVAL,
        }
    }
}

impl AsErrno for ShepherdError {
    fn as_errno(&self) -> c_int {
        match *self {
            ShepherdError::OutOfMemory => libc::ENOMEM,
            ShepherdError::Thread { errno } => errno,
            _ => libc::EINVAL,
        }
    }
}

impl AsErrno for ShowError {
    fn as_errno(&self) -> c_int {
        match self {
            ShowError::Name => libc::EINVAL,
            ShowError::Taken => libc::EEXIST,
            ShowError::Full | ShowError::NoDrain => libc::ENOSPC,
            ShowError::Busy => libc::EBUSY,
            _ => libc::ENOTSUP,
        }
    }
}

impl AsErrno for CacheError {
    fn as_errno(&self) -> c_int {
        match self {
            CacheError::TooLarge => libc::E2BIG,
            CacheError::TooMany => libc::ENOSPC,
            CacheError::NoMemory => libc::ENOMEM,
            // `NoNodes`: the policy names no usable node.
            _ => libc::EINVAL,
        }
    }
}

impl AsErrno for OutOfMemory {
    fn as_errno(&self) -> c_int {
        libc::ENOMEM
    }
}

impl AsErrno for FenceError {
    fn as_errno(&self) -> c_int {
        libc::ENOTSUP
    }
}

/// Returns the errno of an operation that holds a lock while it fences: that of the lock, or
/// ENOTSUP if the kernel cannot fence.
pub(super) fn fence_errno(refused: FenceError) -> c_int {
    match refused.errno {
        errno @ (libc::EBUSY | libc::EDEADLK) => errno,
        _ => refused.as_errno(),
    }
}

/// Defines C functions on a handle: the type of the handle, what the caller promises, and for each
/// function the documentation, the name, the arguments after the handle, and the Rust expression.
macro_rules! methods {
    ($handle:ty, $promise:literal: $($(#[doc = $doc:literal])+ $name:ident($($arg:ident: $arg_type:ty),*) $(-> $result:ty)? = |$this:ident| $body:expr;)*) => {$(
        $(#[doc = $doc])+
        ///
        /// # Safety
        ///
        #[doc = $promise]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($this: $handle, $($arg: $arg_type),*) $(-> $result)? {
            $body
        }
    )*};
}
pub(super) use methods;

/// Sets errno, and returns null.
pub(super) fn null_with<T>(errno: c_int) -> *mut T {
    set_errno(errno);
    null_mut()
}

/// Sets errno, and returns −1.
pub(super) fn failed(errno: c_int) -> c_int {
    set_errno(errno);
    -1
}

/// Converts a result to a C return value. Returns 0, or −1 with the error's errno.
pub(super) fn answer<E: AsErrno>(result: Result<(), E>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(error) => failed(error.as_errno()),
    }
}

/// Returns the address of a new object or page, or null with ENOMEM.
pub(super) fn address_or_enomem(memory: Option<NonNull<u8>>) -> *mut c_void {
    match memory {
        Some(memory) => memory.as_ptr().cast(),
        None => null_with(libc::ENOMEM),
    }
}

/// Moves `value` into a new block, and returns the block. Returns null with ENOMEM if there is no
/// memory.
pub(super) fn boxed<T>(value: T) -> *mut T {
    let block = heap::alloc_aligned(size_of::<T>(), align_of::<T>()).cast::<T>();
    if !block.is_null() {
        // SAFETY: the block is new, and has the size and alignment of `T`.
        unsafe { block.write(value) };
    }
    block
}

/// If `made` is `Ok`, moves its value into a new block, and returns the block. Otherwise returns
/// null with the error's errno. Returns null with ENOMEM if there is no memory.
pub(super) fn boxed_or_errno<T, E: AsErrno>(made: Result<T, E>) -> *mut T {
    match made {
        Ok(value) => boxed(value),
        Err(error) => null_with(error.as_errno()),
    }
}

/// Drops the value in a block from [`boxed`], and frees the block. Does nothing if `block` is null.
///
/// # Safety
///
/// `block` is null or came from [`boxed`]. It is not used after the call.
pub(super) unsafe fn unboxed<T>(block: *mut T) {
    if !block.is_null() {
        // SAFETY: the caller passes ownership of a block from `boxed`, which contains an
        // initialized value.
        unsafe {
            block.drop_in_place();
            heap::free(block.cast());
        }
    }
}
