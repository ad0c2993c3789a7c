//! Memory that a process shares with the processes that it forks.

use anyhow::{Context, Result, bail};
use std::io;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::{NonNull, null_mut};

/// A type that zero bytes initialise.
///
/// # Safety
///
/// All zero bytes must be a valid value of the type, the value must need no drop, and it must work
/// at any address.
pub unsafe trait Zeroed {}

/// Zeroed values in memory that stays shared after a fork. Untouched pages cost nothing.
pub struct SharedSlice<T> {
    at: NonNull<T>,
    length: usize,
    owns: PhantomData<T>,
}

// SAFETY: a `SharedSlice` owns its values and gives out only `&[T]` through a shared reference, so
// it is `Sync` if `T` is.
unsafe impl<T: Sync> Sync for SharedSlice<T> {}

impl<T: Zeroed> SharedSlice<T> {
    pub fn new(length: usize) -> Result<SharedSlice<T>> {
        let bytes = bytes::<T>(length).context("more memory than there are addresses")?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: maps new memory at an address that the kernel chooses, so no existing memory
        // changes.
        let at = unsafe { libc::mmap(null_mut(), bytes, protection, flags, -1, 0) };
        let mapped = NonNull::new(at.cast()).filter(|_| at != libc::MAP_FAILED);
        let Some(at) = mapped else {
            let error = io::Error::last_os_error();
            bail!("mapping {bytes} bytes of shared memory: {error}");
        };
        Ok(SharedSlice {
            at,
            length,
            owns: PhantomData,
        })
    }
}

/// Returns the size of the mapping: at least 1, because an empty mapping is an error.
fn bytes<T>(length: usize) -> Option<usize> {
    Some(size_of::<T>().checked_mul(length)?.max(1))
}

impl<T> Deref for SharedSlice<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the mapping holds `length` values, for which zero bytes are valid (`T: Zeroed`).
        // A page-aligned address is aligned for `T`.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.length) }
    }
}

impl<T> DerefMut for SharedSlice<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: the mapping holds `length` values, for which zero bytes are valid (`T: Zeroed`).
        // `&mut self` is the only reference in this process, and the callers fork only after the
        // borrow has ended.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.length) }
    }
}

impl<T> Drop for SharedSlice<T> {
    fn drop(&mut self) {
        if let Some(bytes) = bytes::<T>(self.length) {
            // SAFETY: `new` mapped these bytes, and `&mut self` shows that no reference into them
            // is left.
            unsafe { libc::munmap(self.at.as_ptr().cast(), bytes) };
        }
    }
}
