//! Memory that a process shares with those that it forks.

use anyhow::{Context, Result, bail};
use std::io;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::{NonNull, null_mut};

/// A type of which all zeroes is a valid value, which has nothing to drop, and which works at any address.
///
/// # Safety
///
/// What the first sentence says.
pub unsafe trait Zeroed {}

/// Zeroed values in memory that stays shared after a fork. Pages that nobody touches cost nothing.
pub struct SharedSlice<T> {
    at: NonNull<T>,
    length: usize,
    owns: PhantomData<T>,
}

// SAFETY: a slice of `T`, owned.
unsafe impl<T: Sync> Sync for SharedSlice<T> {}

impl<T: Zeroed> SharedSlice<T> {
    pub fn new(length: usize) -> Result<SharedSlice<T>> {
        let bytes = bytes::<T>(length).context("more memory than there are addresses")?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice.
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

/// At least one: there are no empty mappings.
fn bytes<T>(length: usize) -> Option<usize> {
    Some(size_of::<T>().checked_mul(length)?.max(1))
}

impl<T> Deref for SharedSlice<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the mapping holds `length` values, which zeroes made valid; pages are aligned enough for them.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.length) }
    }
}

impl<T> DerefMut for SharedSlice<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`; the borrow is the only one in this process, and no other process has been forked while
        // it lasts.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.length) }
    }
}

impl<T> Drop for SharedSlice<T> {
    fn drop(&mut self) {
        if let Some(bytes) = bytes::<T>(self.length) {
            // SAFETY: the mapping is this one's, and nothing borrows from it any more.
            unsafe { libc::munmap(self.at.as_ptr().cast(), bytes) };
        }
    }
}
