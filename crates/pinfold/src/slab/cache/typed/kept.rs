//! [`ObjectCache`]: objects that hold a value even while they are free.
//!
//! A value is made once, together with its slab, as by the kernel's slab constructors. Each user
//! leaves the value in the state that the next user needs. This pays for values that are large, and
//! of which each user changes little.
//!
//! # Why the constructor is a constant, and values have no drop
//!
//! * A thread that needs a slab makes the slab, and its values, under a node's lock. It also makes
//!   a value again under that lock, if a link has overwritten the old value
//!   (`handler_frees`). A constructor with the user's code could take a lock in the wrong order
//!   there, panic halfway through a slab, or use the cache whose lock is held. Copying a constant
//!   does none of these.
//! * A slab goes back to the system without its objects being read. An object that a signal handler
//!   freed may be made again from the constant. In both cases the old value is forgotten, not
//!   dropped. So values must not own anything: [`ObjectCache::new`] refuses at compile time a type
//!   that has something to drop. For values that own memory, use a [`Cache`](super::Cache) of them
//!   and a list of handles.

use crate::slab::cache::builder::sealed::FromRaw;
use crate::slab::{Builder, CacheError, KmemCache, Leak};
use core::alloc::Layout;
use core::fmt;
use core::marker::PhantomData;
use core::ops::{Deref, DerefMut};
use core::ptr::NonNull;

/// A type whose values an [`ObjectCache`] can hold.
///
/// ```
/// use pinfold::slab::{ObjectCache, Reusable};
///
/// /// Users undo their changes, so it needs no `reset`.
/// struct Visited([bool; 1024]);
/// impl Reusable for Visited {
///     const NEW: Visited = Visited([false; 1024]);
/// }
///
/// let cache = ObjectCache::<Visited>::new("visited")?;
/// assert!(!cache.alloc().expect("memory").0[7]);
/// # Ok::<(), pinfold::slab::CacheError>(())
/// ```
pub trait Reusable: Sized {
    /// The value of an object before its first use.
    const NEW: Self;

    /// Prepares the value for the next user. The cache calls this when the value goes back to it.
    /// By default this does nothing, so the next user finds the value as the last user left it.
    ///
    /// If this panics, the object still goes back to the cache, with the value as it is then.
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
/// The cache is `Send` and `Sync` only if `T` is `Send`, because a thread may receive a value that
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
/// A later user may read a value as long as the cache lives. So what the value borrows must live
/// that long:
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
    /// Makes the cache invariant in `T`, because it holds values that users write and read again.
    /// Also makes it neither `Send` nor `Sync`, except as implemented below.
    _values: PhantomData<*mut T>,
}

// SAFETY: a thread that receives the cache may receive values that other threads left in the cache.
// `T: Send` allows that.
unsafe impl<T: Reusable + Send> Send for ObjectCache<T> {}
// SAFETY: a thread that shares the cache may receive values that other threads left in the cache.
// `T: Send` allows that. Threads never share a value through the cache, because only one handle at
// a time has a value.
unsafe impl<T: Reusable + Send> Sync for ObjectCache<T> {}

impl<T: Reusable> ObjectCache<T> {
    /// Makes a cache of values of `T`. Fails to compile if `T` has something to drop.
    ///
    /// # Errors
    ///
    /// [`CacheError`]: the type is too large, there are too many caches, or the system has no
    /// memory.
    ///
    /// # Examples
    ///
    /// `new` makes no values yet. The values of a slab are made with the slab:
    ///
    /// ```
    /// # use pinfold::slab::{ObjectCache, Reusable};
    /// # struct Line([u8; 80]);
    /// # impl Reusable for Line { const NEW: Line = Line([b' '; 80]); }
    /// let lines = ObjectCache::<Line>::new("lines")?;
    /// assert_eq!(lines.raw().usage().total, 0);
    /// assert_eq!(lines.alloc().expect("memory").0, [b' '; 80]);
    /// assert_ne!(lines.raw().usage().total, 0);
    /// # Ok::<(), pinfold::slab::CacheError>(())
    /// ```
    pub fn new(name: &str) -> Result<ObjectCache<T>, CacheError> {
        Self::builder(name).build()
    }

    /// Returns a builder for a cache with settings of its own, as [`Cache::builder`] does. Fails to
    /// compile if `T` has something to drop.
    ///
    /// [`Cache::builder`]: super::Cache::builder
    pub const fn builder(name: &str) -> Builder<'_, ObjectCache<T>> {
        const {
            assert!(
                !core::mem::needs_drop::<T>(),
                "values of an ObjectCache are forgotten, so they must not need to be dropped"
            );
        }
        let builder = Builder::new(name, Layout::new::<T>());
        // SAFETY: `construct` initialises an object of this layout, calls nothing, and cannot
        // unwind.
        unsafe { builder.constructed_by(construct::<T>) }
    }

    /// Allocates an object with its value. The value is new, or as its last user and
    /// [`Reusable::reset`] left it. Returns `None` if the system has no memory.
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

    /// Returns the untyped cache, which has more methods, such as `shrink` and `statistics`.
    pub fn raw(&self) -> &KmemCache {
        &self.raw
    }

    /// Destroys the cache and gives its memory back.
    ///
    /// # Errors
    ///
    /// [`Leak`] if handles were forgotten, or if the kernel cannot fence. The error holds the
    /// untyped cache, which works as before.
    pub fn destroy(self) -> Result<(), Leak> {
        self.raw.destroy()
    }
}

impl<T: Reusable> FromRaw for ObjectCache<T> {
    fn from_raw(raw: KmemCache) -> Self {
        ObjectCache {
            raw,
            _values: PhantomData,
        }
    }
}

/// Writes the value [`Reusable::NEW`] into an object.
///
/// # Safety
///
/// `object` has the layout of `T`, and the caller owns it.
unsafe fn construct<T: Reusable>(object: *mut u8) {
    // SAFETY: the caller promises that it owns the object, which has the layout of `T`. `write`
    // does not drop an older value there, and `new` refuses types that need a drop.
    unsafe { object.cast::<T>().write(T::NEW) };
}

impl<T: Reusable> fmt::Debug for ObjectCache<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.raw.fmt(f)
    }
}

/// Owns a value of an [`ObjectCache`]. Dropping the handle resets the value and gives the object
/// back. The handle may be sent to another thread if `T` may.
///
/// ```
/// # use pinfold::slab::{Kept, ObjectCache, Reusable};
/// # struct Line([u8; 80]);
/// # impl Reusable for Line { const NEW: Line = Line([b' '; 80]); }
/// let lines = ObjectCache::<Line>::new("lines")?;
/// let mut line: Kept<'_, Line> = lines.alloc().expect("memory");
/// line.0[0] = b'#';
/// let print = move || println!("{}", String::from_utf8_lossy(&line.0));
/// std::thread::scope(|scope| scope.spawn(print).join().unwrap());
/// lines.destroy().expect("every value came back");
/// # Ok::<(), pinfold::slab::CacheError>(())
/// ```
pub struct Kept<'c, T: Reusable> {
    at: NonNull<T>,
    cache: &'c ObjectCache<T>,
}

// SAFETY: the handle has exclusive access to its value. `T: Send` allows to send the value, and to
// share the cache.
unsafe impl<T: Reusable + Send> Send for Kept<'_, T> {}
// SAFETY: a shared handle gives only shared access to the value, and `T: Sync` allows that.
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
                // SAFETY: the object came from this cache, and the handle gives it up. The object
                // still holds a value, as the cache requires.
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
