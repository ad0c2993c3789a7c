//! [`UninitHandle`]: an object that has no value yet, or none any more.

use super::{Cache, Handle};
use core::fmt;
use core::mem::{ManuallyDrop, MaybeUninit};
use core::ptr::NonNull;

/// An object of a [`Cache`] without a value; given back when dropped.
///
/// From [`Cache::alloc_uninit`]. It may be sent to other threads when `T` may.
pub struct UninitHandle<'c, T> {
    at: NonNull<T>,
    cache: &'c Cache<T>,
}

// SAFETY: the handle owns its object; the cache may be used by any thread.
unsafe impl<T: Send> Send for UninitHandle<'_, T> {}
// SAFETY: a shared handle gives access to nothing.
unsafe impl<T: Sync> Sync for UninitHandle<'_, T> {}

impl<'c, T> UninitHandle<'c, T> {
    /// # Safety
    ///
    /// The object at `at` came from `cache` and is the caller's, without a value that is still to be dropped.
    #[inline]
    pub(super) unsafe fn from_object(at: NonNull<T>, cache: &'c Cache<T>) -> Self {
        UninitHandle { at, cache }
    }

    /// Where the object is, and its cache; the caller owns it.
    #[inline]
    pub(super) fn into_object(self) -> (NonNull<T>, &'c Cache<T>) {
        let this = ManuallyDrop::new(self);
        (this.at, this.cache)
    }

    /// Moves `value` into the object.
    #[inline]
    pub fn write(self, value: T) -> Handle<'c, T> {
        // SAFETY: the object is ours and has the layout of `T`.
        unsafe { self.at.write(value) };
        // SAFETY: written just now.
        unsafe { self.assume_init() }
    }

    /// The object's memory, to be written in parts.
    #[inline]
    pub fn as_uninit(&mut self) -> &mut MaybeUninit<T> {
        // SAFETY: the object is ours, has the layout of `T`, and need not have a value for this type.
        unsafe { self.at.cast().as_mut() }
    }

    /// Says that the object has a value now.
    ///
    /// # Safety
    ///
    /// A value of `T` was written through [`as_uninit`](Self::as_uninit).
    #[inline]
    pub unsafe fn assume_init(self) -> Handle<'c, T> {
        let (at, cache) = self.into_object();
        // SAFETY: the object came from this cache; the caller says that it has a value.
        unsafe { Handle::from_raw(at, cache) }
    }
}

impl<T> Drop for UninitHandle<'_, T> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the object is ours and came from this cache.
        unsafe { self.cache.raw.free(self.at.cast()) };
    }
}

impl<T> fmt::Debug for UninitHandle<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("UninitHandle").field(&self.at).finish()
    }
}
