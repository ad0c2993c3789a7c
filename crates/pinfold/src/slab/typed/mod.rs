//! Caches of one type, whose handles give their objects back when they are dropped.
//!
//! | cache | handle | like | the object holds |
//! |---|---|---|---|
//! | [`Cache<T>`] | [`Handle`] | `Box` | a value while it is in use |
//! | [`SharedCache<T>`](super::SharedCache) | [`Shared`](super::Shared) | `Arc` | a value and its count while they are in use |
//! | [`ObjectCache<T>`](super::ObjectCache) | [`Kept`](super::Kept) | a pool's | a value always |
//!
//! # Who owns an object
//!
//! An object from [`KmemCache::alloc`] becomes an [`UninitHandle`]'s at once, and is given back by exactly one of the things
//! it turns into:
//!
//! ```text
//! KmemCache ──► UninitHandle ── write, assume_init ──► Handle ──► drop, into_inner ──► UninitHandle ──► KmemCache
//!                     └── dropped, by a constructor's error or panic too ──► KmemCache
//!                                              leak, into_raw, mem::forget ──► in use until the process ends, or from_raw
//! ```
//!
//! A handle borrows its cache, so that no cache ends before its handles. An object whose handle was forgotten counts as in use,
//! and memory of objects in use is never given back: what is pinned stays where it is.
//!
//! # Caches that live for ever
//!
//! Handles without a lifetime to name come from a cache in a `static`, or from one that `Box::leak` made `&'static`:
//! `Handle<'static, T>` can be stored in any struct. There is no handle that counts references to its cache: every allocation
//! on every CPU would write the one count, which is what a cache per CPU is there to avoid.

mod forward;
mod handle;
mod kept;
mod shared;
mod uninit;

pub use handle::Handle;
pub use kept::{Kept, ObjectCache, Reusable};
pub use shared::{Shared, SharedCache};
pub use uninit::UninitHandle;

use super::{CacheError, KmemCache, Leak};
use core::alloc::Layout;
use core::fmt;
use core::marker::PhantomData;
use core::panic::{RefUnwindSafe, UnwindSafe};

/// A cache of `T`: values that are made when they are allocated and dropped when they are freed.
///
/// ```
/// use pinfold::slab::Cache;
///
/// let cache = Cache::<Vec<u32>>::new("lists")?;
/// let mut list = cache.alloc(vec![1, 2]).expect("memory");
/// list.push(3);
/// assert_eq!(list.iter().sum::<u32>(), 6);
/// drop(list);
/// cache.destroy().expect("every value came back");
/// # Ok::<(), pinfold::slab::CacheError>(())
/// ```
///
/// In a `static`, its handles need no lifetime:
///
/// ```
/// use pinfold::slab::{Cache, Handle};
/// use std::sync::LazyLock;
///
/// static PACKETS: LazyLock<Cache<[u8; 1500]>> = LazyLock::new(|| Cache::new("packets").expect("memory"));
///
/// struct Connection {
///     last: Handle<'static, [u8; 1500]>,
/// }
///
/// let connection = Connection { last: PACKETS.alloc_with(|| [0; 1500]).expect("memory") };
/// assert_eq!(connection.last.len(), 1500);
/// ```
///
/// # Threads
///
/// A cache is `Send` and `Sync` whatever `T` is: it holds no values, and one that is allocated belongs to the thread that
/// allocated it. Handles go to other threads only if `T` may.
pub struct Cache<T> {
    raw: KmemCache,
    /// Makes values, holds none: `Send`, `Sync` and covariant.
    _values: PhantomData<fn() -> T>,
}

impl<T> Cache<T> {
    /// Makes a cache for values of `T`.
    ///
    /// # Errors
    ///
    /// As for [`KmemCache::new`].
    pub fn new(name: &str) -> Result<Cache<T>, CacheError> {
        Ok(Cache {
            raw: KmemCache::new(name, Layout::new::<T>())?,
            _values: PhantomData,
        })
    }

    /// Moves `value` into an object of the cache; gives it back when the system has no memory. Costs as
    /// [`KmemCache::alloc`] does.
    ///
    /// # Errors
    ///
    /// The value itself.
    #[inline]
    pub fn alloc(&self, value: T) -> Result<Handle<'_, T>, T> {
        match self.alloc_uninit() {
            Some(object) => Ok(object.write(value)),
            None => Err(value),
        }
    }

    /// Has `constructor` make a value in an object of the cache; `None`, without calling it, when the system has no memory.
    /// Costs as [`KmemCache::alloc`] does.
    ///
    /// The object is there before the value, so that the compiler can make the value in place: it does for small values and
    /// for cleared ones; others may be made on the stack and copied, as with `Box::new`. What must not be on the stack is
    /// made with [`alloc_uninit`](Self::alloc_uninit). When the constructor panics, the object goes back to the cache.
    ///
    /// ```
    /// # use pinfold::slab::Cache;
    /// let cache = Cache::new("pages")?;
    /// let page = cache.alloc_with(|| [0u8; 4096]).expect("memory");
    /// assert_eq!(page[4095], 0);
    /// # Ok::<(), pinfold::slab::CacheError>(())
    /// ```
    #[inline]
    pub fn alloc_with(&self, constructor: impl FnOnce() -> T) -> Option<Handle<'_, T>> {
        let object = self.alloc_uninit()?;
        Some(object.write(constructor()))
    }

    /// As [`alloc_with`](Self::alloc_with), for a constructor that may fail; then the object goes back to the cache.
    ///
    /// # Errors
    ///
    /// [`TryAllocError`]: the system has no memory, or what the constructor says.
    ///
    /// ```
    /// # use pinfold::slab::{Cache, TryAllocError};
    /// let cache = Cache::<u16>::new("ports")?;
    /// let port = cache.try_alloc_with(|| "443".parse()).expect("a number");
    /// assert_eq!(*port, 443);
    /// let error = cache.try_alloc_with(|| "https".parse()).unwrap_err();
    /// assert!(matches!(error, TryAllocError::Constructor(_)));
    /// # Ok::<(), pinfold::slab::CacheError>(())
    /// ```
    #[inline]
    pub fn try_alloc_with<E>(
        &self,
        constructor: impl FnOnce() -> Result<T, E>,
    ) -> Result<Handle<'_, T>, TryAllocError<E>> {
        let object = self.alloc_uninit().ok_or(TryAllocError::NoMemory)?;
        Ok(object.write(constructor().map_err(TryAllocError::Constructor)?))
    }

    /// An object for a value that is yet to be written; `None` when the system has no memory. Costs as
    /// [`KmemCache::alloc`] does.
    ///
    /// ```
    /// # use pinfold::slab::Cache;
    /// let cache = Cache::<[u32; 1024]>::new("tables")?;
    /// let mut table = cache.alloc_uninit().expect("memory");
    /// let first = table.as_uninit().as_mut_ptr().cast::<u32>();
    /// for n in 0..1024 {
    ///     // SAFETY: an element of the array.
    ///     unsafe { first.add(n).write(n as u32) };
    /// }
    /// // SAFETY: all elements were written.
    /// let table = unsafe { table.assume_init() };
    /// assert_eq!(table[1023], 1023);
    /// # Ok::<(), pinfold::slab::CacheError>(())
    /// ```
    #[inline]
    pub fn alloc_uninit(&self) -> Option<UninitHandle<'_, T>> {
        let object = self.raw.alloc()?;
        // SAFETY: the object is ours, and came from this cache.
        Some(unsafe { UninitHandle::from_object(object.cast(), self) })
    }

    /// The cache behind it, for `shrink`, `statistics` and the like.
    pub fn raw(&self) -> &KmemCache {
        &self.raw
    }

    /// Ends the cache.
    ///
    /// # Errors
    ///
    /// As for [`KmemCache::destroy`]: values were leaked, or forgotten by `core::mem::forget` on their handles.
    pub fn destroy(self) -> Result<(), Leak> {
        self.raw.destroy()
    }
}

impl<T> fmt::Debug for Cache<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.raw.fmt(f)
    }
}

// A panic leaves no cache half changed: no code of the user's runs while one changes.
impl<T> UnwindSafe for Cache<T> {}
impl<T> RefUnwindSafe for Cache<T> {}

/// Why [`try_alloc_with`](Cache::try_alloc_with) has no value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TryAllocError<E> {
    /// The system has no memory; the constructor was not called.
    NoMemory,
    /// The constructor failed; the object went back to the cache.
    Constructor(E),
}

impl<E: fmt::Display> fmt::Display for TryAllocError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TryAllocError::NoMemory => f.write_str("the system has no memory for an object"),
            TryAllocError::Constructor(error) => write!(f, "the constructor failed: {error}"),
        }
    }
}

impl<E: core::error::Error + 'static> core::error::Error for TryAllocError<E> {
    fn source(&self) -> Option<&(dyn core::error::Error + 'static)> {
        match self {
            TryAllocError::NoMemory => None,
            TryAllocError::Constructor(error) => Some(error),
        }
    }
}
