//! [`Handle`], which is to a [`Cache`] what `Box` is to the heap.

use super::forward::forward_to_value;
use super::{Cache, UninitHandle};
use core::borrow::BorrowMut;
use core::mem::ManuallyDrop;
use core::ops::{Deref, DerefMut};
use core::pin::Pin;
use core::ptr::NonNull;

/// Owns a value in a [`Cache`]. Dropping the handle drops the value and frees its object.
///
/// Like a `Box`, a handle may be sent to another thread if `T` may. Its functions are associated
/// functions, because methods would hide those of `T`.
///
/// ```
/// use pinfold::slab::{Cache, Handle};
///
/// let cache = Cache::new("names")?;
/// let name = cache.alloc(String::from("pin")).expect("memory");
/// let sent = std::thread::scope(|scope| scope.spawn(|| Handle::into_inner(name)).join().unwrap());
/// assert_eq!(sent, "pin");
/// # Ok::<(), pinfold::slab::CacheError>(())
/// ```
///
/// A handle cannot outlive its cache:
///
/// ```compile_fail,E0505
/// # use pinfold::slab::Cache;
/// let cache = Cache::new("names").unwrap();
/// let name = cache.alloc(String::from("pin")).unwrap();
/// cache.destroy().unwrap();
/// println!("{name}");
/// ```
///
/// A handle whose value must not leave its thread cannot be sent to another one:
///
/// ```compile_fail,E0277
/// # use pinfold::slab::Cache;
/// let cache = Cache::new("counts").unwrap();
/// let count = cache.alloc(std::rc::Rc::new(1)).unwrap();
/// std::thread::scope(|scope| scope.spawn(move || drop(count)).join().unwrap());
/// ```
///
/// A handle whose value must not be shared between threads cannot be shared either:
///
/// ```compile_fail,E0277
/// # use pinfold::slab::Cache;
/// let cache = Cache::new("cells").unwrap();
/// let cell = cache.alloc(std::cell::Cell::new(1)).unwrap();
/// std::thread::scope(|scope| scope.spawn(|| cell.set(2)).join().unwrap());
/// ```
pub struct Handle<'c, T> {
    at: NonNull<T>,
    cache: &'c Cache<T>,
}

// SAFETY: the handle is the only owner of its value, and `T: Send` allows to send the value. Any
// thread may use the cache.
unsafe impl<T: Send> Send for Handle<'_, T> {}
// SAFETY: a shared handle gives only shared access to the value, and `T: Sync` allows that.
unsafe impl<T: Sync> Sync for Handle<'_, T> {}

impl<'c, T> Handle<'c, T> {
    /// Moves the value out and frees the object. Costs as much as
    /// [`KmemCache::free`](crate::slab::KmemCache::free) and a copy of the value.
    #[inline]
    pub fn into_inner(this: Self) -> T {
        let (at, cache) = Handle::into_object(this);
        // SAFETY: `into_object` gave the object to this function. The value is moved out below, so
        // no value is left to drop when `_object` frees the object.
        let _object = unsafe { UninitHandle::from_object(at, cache) };
        // SAFETY: the handle's object held a value, and after this read the object is only freed.
        unsafe { at.read() }
    }

    /// Gives up the handle, and returns a reference that is valid as long as the cache lives. The
    /// value is never dropped, and [`Cache::destroy`] reports its object as in use.
    ///
    /// ```
    /// # use pinfold::slab::{Cache, Handle};
    /// # use std::sync::LazyLock;
    /// static TABLES: LazyLock<Cache<[u32; 4]>> =
    ///     LazyLock::new(|| Cache::new("tables").expect("memory"));
    /// let table = TABLES.alloc([1, 2, 3, 4]).expect("memory");
    /// let table: &'static mut [u32; 4] = Handle::leak(table);
    /// table[0] = 5;
    /// ```
    #[inline]
    pub fn leak(this: Self) -> &'c mut T {
        let (mut at, _) = Handle::into_object(this);
        // SAFETY: the object holds a value. `into_object` left no owner that could free the object,
        // so it stays in use as long as the cache lives.
        unsafe { at.as_mut() }
    }

    /// Gives up the handle and returns the value's address. The caller then owns the value, and
    /// passes the address to [`from_raw`](Self::from_raw) later.
    ///
    /// ```
    /// # use pinfold::slab::{Cache, Handle};
    /// let cache = Cache::new("contexts")?;
    /// let context = Handle::into_raw(cache.alloc(String::from("context")).expect("memory"));
    /// // … through C and back …
    /// // SAFETY: from `into_raw`, of this cache, once.
    /// let context = unsafe { Handle::from_raw(context, &cache) };
    /// assert_eq!(*context, "context");
    /// # Ok::<(), pinfold::slab::CacheError>(())
    /// ```
    #[inline]
    pub fn into_raw(this: Self) -> NonNull<T> {
        Handle::into_object(this).0
    }

    /// Returns a handle that owns the value at `at`.
    ///
    /// # Safety
    ///
    /// The caller owns the value at `at` and does not use it afterwards, except through the handle.
    /// Either [`into_raw`](Self::into_raw) returned `at` from a handle of `cache`, or `at` is an
    /// object that was allocated from `cache.raw()` and holds a value of `T`.
    ///
    /// # Examples
    ///
    /// ```
    /// # use pinfold::slab::{Cache, Handle};
    /// let cache = Cache::<u64>::new("numbers")?;
    /// let object = cache.raw().alloc_node(0).expect("memory").cast::<u64>();
    /// // SAFETY: the object has the layout of a `u64`, and this thread owns it.
    /// unsafe { object.write(7) };
    /// // SAFETY: the object came from `cache.raw()` and holds a value.
    /// let number = unsafe { Handle::from_raw(object, &cache) };
    /// assert_eq!(*number, 7);
    /// # Ok::<(), pinfold::slab::CacheError>(())
    /// ```
    #[inline]
    pub unsafe fn from_raw(at: NonNull<T>, cache: &'c Cache<T>) -> Self {
        Handle { at, cache }
    }

    /// Pins the value: the value stays at its address until it is dropped. If the handle is
    /// forgotten, the object stays in use, so that its memory is never reused, even after the cache
    /// was dropped.
    ///
    /// ```
    /// # use pinfold::slab::{Cache, Handle};
    /// # use std::task::{Context, Poll, Waker};
    /// let tasks = Cache::new("tasks")?;
    /// let mut task = Handle::into_pin(tasks.alloc(async { 42 }).ok().expect("memory"));
    /// let mut context = Context::from_waker(Waker::noop());
    /// assert_eq!(task.as_mut().poll(&mut context), Poll::Ready(42));
    /// # Ok::<(), pinfold::slab::CacheError>(())
    /// ```
    #[inline]
    pub fn into_pin(this: Self) -> Pin<Self> {
        // SAFETY: moving the handle does not move the value. The object's memory is reused only
        // after `Drop` has run, because an object whose handle is forgotten stays in use.
        unsafe { Pin::new_unchecked(this) }
    }

    /// Gives up the handle without dropping the value. Returns the object, which then belongs to
    /// the caller with its value, and the cache.
    #[inline]
    fn into_object(this: Self) -> (NonNull<T>, &'c Cache<T>) {
        let this = ManuallyDrop::new(this);
        (this.at, this.cache)
    }
}

impl<T> Deref for Handle<'_, T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the handle owns the value at `at`, which is initialised.
        unsafe { self.at.as_ref() }
    }
}

impl<T> DerefMut for Handle<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the handle owns the value at `at`, and is borrowed mutably.
        unsafe { self.at.as_mut() }
    }
}

impl<T> Drop for Handle<'_, T> {
    #[inline]
    fn drop(&mut self) {
        // Dropping `_object` at the end frees the object, even if the value's `drop` panics.
        // SAFETY: the handle owns the object. The value is dropped below, before `_object` is
        // dropped and frees the object.
        let _object = unsafe { UninitHandle::from_object(self.at, self.cache) };
        // SAFETY: the handle owns the value and is never used again.
        unsafe { self.at.drop_in_place() };
    }
}

impl<T> AsMut<T> for Handle<'_, T> {
    fn as_mut(&mut self) -> &mut T {
        self
    }
}

impl<T> BorrowMut<T> for Handle<'_, T> {
    fn borrow_mut(&mut self) -> &mut T {
        self
    }
}

forward_to_value!(Handle);
