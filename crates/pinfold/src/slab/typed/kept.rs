//! [`ObjectCache`]: objects that have a value always, also while they are free.
//!
//! This is what the kernel's slab constructors are for: a value is made once, with its slab, and whoever frees an object leaves
//! it as the next user needs it. That saves making and unmaking values that are large and change little.
//!
//! # Why the constructor is a constant, and values have no drop
//!
//! * Slabs are made, and free objects made again, under a node's lock, in whatever thread needs one. A constructor that
//!   ran code of the user's there could wait for a lock in the wrong order, panic half way through a slab, or use the
//!   cache that waits for it. Copying a constant does none of this.
//! * Slabs go back to the system without their objects being looked at, and an object that a signal handler freed may be
//!   made again from the constant. Values are forgotten then, so they must not own anything: [`ObjectCache::new`]
//!   refuses, at compile time, types that have something to drop. A pool of values that own memory is a [`Cache`](super::Cache) of
//!   them and a list of handles.

use crate::slab::{CacheError, KmemCache, Leak};
use core::alloc::Layout;
use core::fmt;
use core::marker::PhantomData;
use core::ops::{Deref, DerefMut};
use core::ptr::NonNull;

/// A type whose values an [`ObjectCache`] can keep.
pub trait Reusable: Sized {
    /// What a value is before its first use.
    const NEW: Self;

    /// Called when a value goes back to the cache, for the next user. Does nothing by default: then the next user finds the
    /// value as the last one left it.
    ///
    /// When it panics, the object goes back with the value as it is then.
    fn reset(&mut self) {}
}

/// A cache whose objects have values always: made once, from [`Reusable::NEW`], and used again as they are.
///
/// ```
/// use pinfold::slab::{ObjectCache, Reusable};
///
/// struct Message {
///     length: usize,
///     bytes: [u8; 4000],
/// }
///
/// impl Reusable for Message {
///     const NEW: Message = Message { length: 0, bytes: [0; 4000] };
///
///     /// The bytes may stay: nobody reads beyond the length.
///     fn reset(&mut self) {
///         self.length = 0;
///     }
/// }
///
/// let messages = ObjectCache::<Message>::new("messages")?;
/// let mut message = messages.alloc().expect("memory");
/// message.bytes[..5].copy_from_slice(b"hello");
/// message.length = 5;
/// drop(message);
/// assert_eq!(messages.alloc().expect("memory").length, 0);
/// # Ok::<(), pinfold::slab::CacheError>(())
/// ```
///
/// Values that have something to drop are refused:
///
/// ```compile_fail,E0080
/// # use pinfold::slab::{ObjectCache, Reusable};
/// struct Names(Vec<String>);
/// impl Reusable for Names {
///     const NEW: Names = Names(Vec::new());
/// }
/// let cache = ObjectCache::<Names>::new("names");
/// ```
///
/// # Threads
///
/// The cache is `Send` and `Sync` when `T` is `Send`: a value that one thread left there is another's next.
///
/// ```compile_fail,E0277
/// # use pinfold::slab::{ObjectCache, Reusable};
/// struct Last(*const u8);
/// impl Reusable for Last {
///     const NEW: Last = Last(std::ptr::null());
/// }
/// fn shares<T: Sync>(_: &T) {}
/// shares(&ObjectCache::<Last>::new("last").unwrap());
/// ```
///
/// # Lifetimes
///
/// A value that is left in the cache may be read as long as the cache lives, so what it borrows must live that long:
///
/// ```compile_fail
/// # use pinfold::slab::{ObjectCache, Reusable};
/// struct Line<'a>(&'a str);
/// impl Reusable for Line<'_> {
///     const NEW: Self = Line("");
/// }
/// fn shorter<'a>(cache: &'a ObjectCache<Line<'static>>) -> &'a ObjectCache<Line<'a>> {
///     cache
/// }
/// ```
pub struct ObjectCache<T: Reusable> {
    raw: KmemCache,
    /// Holds values that users write and read again: neither `Send` nor `Sync` by itself, and invariant.
    _values: PhantomData<*mut T>,
}

// SAFETY: who has the cache can get values that another thread has left in it, and they may be sent.
unsafe impl<T: Reusable + Send> Send for ObjectCache<T> {}
// SAFETY: as above; a value is one handle's at a time.
unsafe impl<T: Reusable + Send> Sync for ObjectCache<T> {}

impl<T: Reusable> ObjectCache<T> {
    /// Makes a cache of values of `T`.
    ///
    /// # Errors
    ///
    /// As for [`KmemCache::new`].
    pub fn new(name: &str) -> Result<ObjectCache<T>, CacheError> {
        const {
            assert!(
                !core::mem::needs_drop::<T>(),
                "values of an ObjectCache are forgotten, so they must not need to be dropped"
            );
        }
        // SAFETY: `construct` writes an object of this layout, and calls nothing.
        let raw = unsafe { KmemCache::with_constructor(name, Layout::new::<T>(), construct::<T>) }?;
        Ok(ObjectCache {
            raw,
            _values: PhantomData,
        })
    }

    /// A value: new, or as its last user and [`Reusable::reset`] left it; `None` when the system has no memory.
    ///
    /// Costs as [`KmemCache::alloc`] does. The value is not touched.
    #[inline]
    pub fn alloc(&self) -> Option<Kept<'_, T>> {
        let object = self.raw.alloc()?;
        Some(Kept {
            at: object.cast(),
            cache: self,
        })
    }

    /// The cache behind it, for `shrink`, `statistics` and the like.
    pub fn raw(&self) -> &KmemCache {
        &self.raw
    }

    /// Ends the cache.
    ///
    /// # Errors
    ///
    /// As for [`KmemCache::destroy`]: handles were forgotten.
    pub fn destroy(self) -> Result<(), Leak> {
        self.raw.destroy()
    }
}

/// Makes a value in an object.
///
/// # Safety
///
/// `object` is writable, with the layout of `T`.
unsafe fn construct<T: Reusable>(object: *mut u8) {
    // SAFETY: the caller's promise. What was there has nothing to drop.
    unsafe { object.cast::<T>().write(T::NEW) };
}

impl<T: Reusable> fmt::Debug for ObjectCache<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.raw.fmt(f)
    }
}

/// A value of an [`ObjectCache`], reset and given back with the handle. It may be sent to other threads when `T` may.
pub struct Kept<'c, T: Reusable> {
    at: NonNull<T>,
    cache: &'c ObjectCache<T>,
}

// SAFETY: the handle has its value to itself, and the cache may be shared when `T` may be sent.
unsafe impl<T: Reusable + Send> Send for Kept<'_, T> {}
// SAFETY: a shared handle gives shared access to the value only.
unsafe impl<T: Reusable + Sync> Sync for Kept<'_, T> {}

impl<T: Reusable> Deref for Kept<'_, T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: objects of the cache have values always, and this one is the handle's.
        unsafe { self.at.as_ref() }
    }
}

impl<T: Reusable> DerefMut for Kept<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above, borrowed mutably.
        unsafe { self.at.as_mut() }
    }
}

impl<T: Reusable> Drop for Kept<'_, T> {
    #[inline]
    fn drop(&mut self) {
        /// Gives the object back, also when `reset` panics.
        struct GiveBack<'k>(&'k KmemCache, NonNull<u8>);
        impl Drop for GiveBack<'_> {
            #[inline]
            fn drop(&mut self) {
                // SAFETY: the object came from this cache and is given up; it has a value, as the constructor's users promise.
                unsafe { self.0.free(self.1) };
            }
        }
        let _object = GiveBack(&self.cache.raw, self.at.cast());
        T::reset(self);
    }
}

impl<T: Reusable + fmt::Debug> fmt::Debug for Kept<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}
