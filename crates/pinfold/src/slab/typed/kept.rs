//! [`ObjectCache`]: objects that hold a value even while they are free.
//!
//! The kernel's slab constructors serve this purpose: a value is made once, together with its slab.
//! Each user leaves an object as the next user needs it. This pays for values that are large and
//! change little.
//!
//! # Why the constructor is a constant, and values have no drop
//!
//! * Slabs are made under a node's lock, in any thread that needs one, and so are values that must
//!   be made again. A constructor that ran the user's code there could wait for a lock in the wrong
//!   order, panic halfway through a slab, or use the cache that is waiting for it. Copying a
//!   constant does none of this.
//! * Slabs go back to the system without a look at their objects, and an object that a signal
//!   handler freed may be made again from the constant. Both forget a value. So values must not own
//!   anything: [`ObjectCache::new`] refuses at compile time a type that has something to drop. For
//!   values that own memory, use a [`Cache`](super::Cache) of them and a list of handles.

use crate::slab::{CacheError, KmemCache, Leak};
use core::alloc::Layout;
use core::fmt;
use core::marker::PhantomData;
use core::ops::{Deref, DerefMut};
use core::ptr::NonNull;

/// A type whose values an [`ObjectCache`] can hold.
pub trait Reusable: Sized {
    /// The value of an object before its first use.
    const NEW: Self;

    /// Prepares the value for the next user, when it goes back to the cache. Does nothing by
    /// default, so the next user finds the value as the last one left it.
    ///
    /// If it panics, the object still goes back to the cache, with the value as it is then.
    fn reset(&mut self) {}
}

/// A cache whose objects always hold a value. A value is made once, from [`Reusable::NEW`], and
/// then reused.
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
///     /// Keeps the bytes, because users read only `length` of them.
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
/// A type that has something to drop is refused:
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
/// The cache is `Send` and `Sync` if `T` is `Send`, because a thread may receive a value that
/// another thread left in the cache.
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
/// A value that is left in the cache may be read as long as the cache lives. So what it borrows
/// must live that long:
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
    /// The cache holds values that users write and read again: neither `Send` nor `Sync` by itself,
    /// and invariant.
    _values: PhantomData<*mut T>,
}

// SAFETY: the owner of the cache may receive values that other threads left in it. `T: Send` allows
// that.
unsafe impl<T: Reusable + Send> Send for ObjectCache<T> {}
// SAFETY: a thread that shares the cache may receive values that other threads left in it, which
// `T: Send` allows. Only one handle at a time has a value.
unsafe impl<T: Reusable + Send> Sync for ObjectCache<T> {}

impl<T: Reusable> ObjectCache<T> {
    /// Makes a cache of values of `T`. Fails to compile if `T` has something to drop.
    ///
    /// # Errors
    ///
    /// [`CacheError`]: the type is too large, there are too many caches, or the system has no
    /// memory.
    pub fn new(name: &str) -> Result<ObjectCache<T>, CacheError> {
        const {
            assert!(
                !core::mem::needs_drop::<T>(),
                "values of an ObjectCache are forgotten, so they must not need to be dropped"
            );
        }
        // SAFETY: `construct` initialises an object of this layout, calls nothing, and cannot
        // unwind.
        let raw = unsafe { KmemCache::with_constructor(name, Layout::new::<T>(), construct::<T>) }?;
        Ok(ObjectCache {
            raw,
            _values: PhantomData,
        })
    }

    /// Allocates an object with its value: new, or as its last user and [`Reusable::reset`] left
    /// it. Returns `None` if the system has no memory.
    ///
    /// Costs as much as [`KmemCache::alloc`]. Does not touch the value.
    #[inline]
    pub fn alloc(&self) -> Option<Kept<'_, T>> {
        let object = self.raw.alloc()?;
        Some(Kept {
            at: object.cast(),
            cache: self,
        })
    }

    /// Returns the untyped cache, which has `shrink`, `statistics` and the like.
    pub fn raw(&self) -> &KmemCache {
        &self.raw
    }

    /// Ends the cache and gives its memory back.
    ///
    /// # Errors
    ///
    /// [`Leak`] if handles were forgotten, or if the kernel cannot fence. It holds the untyped
    /// cache, which works as before.
    pub fn destroy(self) -> Result<(), Leak> {
        self.raw.destroy()
    }
}

/// Writes a value into an object.
///
/// # Safety
///
/// `object` has the layout of `T`, and the caller owns it.
unsafe fn construct<T: Reusable>(object: *mut u8) {
    // SAFETY: the caller owns the object, which has the layout of `T`. An older value there has
    // nothing to drop.
    unsafe { object.cast::<T>().write(T::NEW) };
}

impl<T: Reusable> fmt::Debug for ObjectCache<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.raw.fmt(f)
    }
}

/// Owns a value of an [`ObjectCache`]. Dropping it resets the value and gives the object back. May
/// be sent to another thread if `T` may.
///
/// See [`ObjectCache`] for an example.
pub struct Kept<'c, T: Reusable> {
    at: NonNull<T>,
    cache: &'c ObjectCache<T>,
}

// SAFETY: the handle has exclusive access to its value, which may be sent, and the cache may be
// shared if `T` is `Send`.
unsafe impl<T: Reusable + Send> Send for Kept<'_, T> {}
// SAFETY: a shared handle gives only shared access to the value, which may be shared.
unsafe impl<T: Reusable + Sync> Sync for Kept<'_, T> {}

impl<T: Reusable> Deref for Kept<'_, T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: objects of the cache always hold a value, and the handle has exclusive access to
        // this one.
        unsafe { self.at.as_ref() }
    }
}

impl<T: Reusable> DerefMut for Kept<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: objects of the cache always hold a value, and the handle, borrowed mutably, has
        // exclusive access to this one.
        unsafe { self.at.as_mut() }
    }
}

impl<T: Reusable> Drop for Kept<'_, T> {
    #[inline]
    fn drop(&mut self) {
        /// Gives the object back even if `reset` panics.
        struct GiveBack<'k>(&'k KmemCache, NonNull<u8>);
        impl Drop for GiveBack<'_> {
            #[inline]
            fn drop(&mut self) {
                // SAFETY: the object came from this cache, the handle gives it up, and it still
                // holds a value, as the next user needs.
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
