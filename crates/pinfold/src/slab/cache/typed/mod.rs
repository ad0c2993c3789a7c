//! Caches of one type. Their handles own objects, and free them when the handles are dropped.
//!
//! | cache | handle | like | the object holds |
//! |---|---|---|---|
//! | [`Cache<T>`] | [`Handle`] | `Box` | a value while it is in use |
//! | [`SharedCache<T>`] | [`Shared`] | `Arc` | a value and its count while they are in use |
//! | [`ObjectCache<T>`] | [`Kept`] | a pool's handle | always a value |
//!
//! # Who owns an object
//!
//! An object of a [`Cache<T>`] first belongs to an [`UninitHandle`]. Ownership then moves as shown,
//! and the last owner frees the object:
//!
//! ```text
//! KmemCache ─► UninitHandle ── write, assume_init ─► Handle ─ drop, into_inner ─► UninitHandle
//!                   │                                   │                               │
//!                   │ drop; error or panic              │ leak, into_raw,               │ drop
//!                   │ of a constructor                  │ mem::forget                   │
//!                   ▼                                   ▼                               ▼
//!               KmemCache                 in use until from_raw, or the             KmemCache
//!                                         process ends
//! ```
//!
//! A handle borrows its cache, so a program cannot destroy a cache before its handles. An object
//! whose handle was forgotten counts as in use. The memory of an object in use is never given back,
//! so a pinned value stays where it is.
//!
//! # Handles without a lifetime
//!
//! A handle of a cache in a `static` needs no lifetime parameter: any struct can store a
//! `Handle<'static, T>`. The same is true if `Box::leak` made a reference to the cache `&'static`.
//! There is no handle that counts references to its cache. With such a count, every allocation on
//! every CPU would write the same word. Caches per CPU exist to avoid that.

mod forward;
mod handle;
mod kept;
mod shared;
mod uninit;

pub use handle::Handle;
pub use kept::{Kept, ObjectCache, Reusable};
pub use shared::{Shared, SharedCache};
pub use uninit::UninitHandle;

use super::builder::sealed::FromRaw;
use crate::slab::{Builder, CacheError, KmemCache, Leak};
use core::alloc::Layout;
use core::fmt;
use core::marker::PhantomData;
use core::panic::{RefUnwindSafe, UnwindSafe};

/// A cache of values of `T`. A value is made when its object is allocated, and dropped when its
/// handle is dropped.
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
/// Handles of a cache in a `static` need no lifetime parameter:
///
/// ```
/// use pinfold::slab::{Cache, Handle};
/// use std::sync::LazyLock;
///
/// static PACKETS: LazyLock<Cache<[u8; 1500]>> =
///     LazyLock::new(|| Cache::new("packets").expect("memory"));
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
/// A cache is `Send` and `Sync` for every `T`, because it holds no values: a value belongs to its
/// handle. Handles may go to other threads only if `T` may.
pub struct Cache<T> {
    raw: KmemCache,
    /// Makes the cache `Send`, `Sync` and covariant in `T`, because it makes values but holds none.
    _values: PhantomData<fn() -> T>,
}

impl<T> Cache<T> {
    /// Makes a cache for values of `T`.
    ///
    /// # Errors
    ///
    /// [`CacheError`]: the type is too large, there are too many caches, or the system has no
    /// memory.
    ///
    /// # Examples
    ///
    /// ```
    /// # use pinfold::slab::{Cache, CacheError, MAX_OBJECT_SIZE};
    /// assert!(Cache::<[u8; MAX_OBJECT_SIZE]>::new("buffers").is_ok());
    /// let larger = Cache::<[u8; MAX_OBJECT_SIZE + 1]>::new("larger");
    /// assert_eq!(larger.err(), Some(CacheError::TooLarge));
    /// ```
    pub fn new(name: &str) -> Result<Cache<T>, CacheError> {
        Self::builder(name).build()
    }

    /// Returns a builder for a cache with settings of its own.
    ///
    /// ```
    /// use pinfold::mempolicy::Mempolicy;
    /// use pinfold::slab::Cache;
    ///
    /// let everywhere = Mempolicy::parse("interleave")?;
    /// let tables = Cache::<[u64; 512]>::builder("table")
    ///     .policy(&everywhere)
    ///     .sheaf_capacity(8)
    ///     .build()?;
    /// assert_eq!(tables.alloc([0; 512]).expect("memory")[511], 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub const fn builder(name: &str) -> Builder<'_, Cache<T>> {
        Builder::new(name, Layout::new::<T>())
    }

    /// Moves `value` into an object of the cache. Costs as much as [`KmemCache::alloc`] and a copy
    /// of the value.
    ///
    /// # Errors
    ///
    /// The value itself, if the system has no memory.
    #[inline]
    pub fn alloc(&self, value: T) -> Result<Handle<'_, T>, T> {
        match self.alloc_uninit() {
            Some(object) => Ok(object.write(value)),
            None => Err(value),
        }
    }

    /// Allocates an object and lets `constructor` make its value. Returns `None` without calling
    /// `constructor` if the system has no memory.
    ///
    /// Costs as much as [`KmemCache::alloc`].
    ///
    /// The object is allocated before the value is made, so the compiler may make the value in
    /// place. It does so for small values and for zeroed values. It may make another value on the
    /// stack and copy it, as with `Box::new`. For a value that must not be on the stack, use
    /// [`alloc_uninit`](Self::alloc_uninit). If the constructor panics, the object goes back to the
    /// cache.
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

    /// Allocates an object and lets a constructor that may fail make its value. If the constructor
    /// fails, the object goes back to the cache.
    ///
    /// Costs as much as [`KmemCache::alloc`]. The documentation of [`alloc_with`](Self::alloc_with)
    /// says where the value is made.
    ///
    /// # Errors
    ///
    /// [`TryAllocError`]: the system has no memory, or the constructor failed.
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

    /// Allocates an object without a value, which the caller writes later. Returns `None` if the
    /// system has no memory.
    ///
    /// Costs as much as [`KmemCache::alloc`].
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
        // SAFETY: `alloc` returned the object from this cache, and it holds no value yet.
        Some(unsafe { UninitHandle::from_object(object.cast(), self) })
    }

    /// Returns the untyped cache, which has more methods, such as `shrink` and `statistics`.
    pub fn raw(&self) -> &KmemCache {
        &self.raw
    }

    /// Destroys the cache and gives its memory back.
    ///
    /// # Errors
    ///
    /// [`Leak`] if values were leaked, if handles were forgotten, or if the kernel cannot fence.
    /// The error holds the untyped cache, which works as before.
    pub fn destroy(self) -> Result<(), Leak> {
        self.raw.destroy()
    }
}

impl<T> FromRaw for Cache<T> {
    fn from_raw(raw: KmemCache) -> Self {
        Cache {
            raw,
            _values: PhantomData,
        }
    }
}

impl<T> fmt::Debug for Cache<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.raw.fmt(f)
    }
}

// A panic cannot leave a cache half changed, because no user code runs while a cache changes.
impl<T> UnwindSafe for Cache<T> {}
impl<T> RefUnwindSafe for Cache<T> {}

/// The reason that [`try_alloc_with`](Cache::try_alloc_with) returned no handle.
///
/// ```
/// use pinfold::slab::{Cache, TryAllocError};
///
/// let ports = Cache::<u16>::new("ports")?;
/// match ports.try_alloc_with(|| "https".parse()) {
///     Ok(port) => println!("port {port}"),
///     Err(TryAllocError::Constructor(error)) => println!("not a port: {error}"),
///     Err(TryAllocError::NoMemory) => println!("no memory"),
/// }
/// # Ok::<(), pinfold::slab::CacheError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TryAllocError<E> {
    /// The system has no memory. The constructor was not called.
    NoMemory,
    /// The constructor failed. The object went back to the cache.
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
