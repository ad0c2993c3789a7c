//! [`Handle`]: the `Box` of a [`Cache`].

use super::forward::forward_to_value;
use super::{Cache, UninitHandle};
use core::borrow::BorrowMut;
use core::mem::ManuallyDrop;
use core::ops::{Deref, DerefMut};
use core::pin::Pin;
use core::ptr::NonNull;

/// A value in a [`Cache`], dropped and freed with the handle. As a `Box`, it may be sent to another thread when `T` may, and
/// has associated functions in place of methods, which would hide those of `T`.
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
/// It cannot outlive its cache:
///
/// ```compile_fail,E0505
/// # use pinfold::slab::Cache;
/// let cache = Cache::new("names").unwrap();
/// let name = cache.alloc(String::from("pin")).unwrap();
/// cache.destroy().unwrap();
/// println!("{name}");
/// ```
///
/// nor leave the thread with a value that must not:
///
/// ```compile_fail,E0277
/// # use pinfold::slab::Cache;
/// let cache = Cache::new("counts").unwrap();
/// let count = cache.alloc(std::rc::Rc::new(1)).unwrap();
/// std::thread::scope(|scope| scope.spawn(move || drop(count)).join().unwrap());
/// ```
///
/// nor be shared with other threads when the value must not:
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

// SAFETY: the handle owns its value as a `Box` does; the cache may be used by any thread.
unsafe impl<T: Send> Send for Handle<'_, T> {}
// SAFETY: a shared handle gives shared access to the value only.
unsafe impl<T: Sync> Sync for Handle<'_, T> {}

impl<'c, T> Handle<'c, T> {
    /// Moves the value out and frees the object.
    #[inline]
    pub fn into_inner(this: Self) -> T {
        let (at, cache) = Handle::into_object(this);
        // SAFETY: the object is ours; its value is moved out, so that it has none to drop.
        let _object = unsafe { UninitHandle::from_object(at, cache) };
        // SAFETY: the object has a value, which nobody uses afterwards.
        unsafe { at.read() }
    }

    /// Lets the value live as long as the cache. It is not dropped, and [`Cache::destroy`] reports its object.
    ///
    /// ```
    /// # use pinfold::slab::{Cache, Handle};
    /// # use std::sync::LazyLock;
    /// static TABLES: LazyLock<Cache<[u32; 4]>> = LazyLock::new(|| Cache::new("tables").expect("memory"));
    /// let table: &'static mut [u32; 4] = Handle::leak(TABLES.alloc([1, 2, 3, 4]).expect("memory"));
    /// table[0] = 5;
    /// ```
    #[inline]
    pub fn leak(this: Self) -> &'c mut T {
        let (mut at, _) = Handle::into_object(this);
        // SAFETY: the object has a value, is given up by the handle, and stays in use as long as the cache lives.
        unsafe { at.as_mut() }
    }

    /// Where the value is. It is the caller's now, to be given to [`from_raw`](Self::from_raw) again.
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

    /// The handle of the value at `at`.
    ///
    /// # Safety
    ///
    /// `at` came from [`into_raw`](Self::into_raw) on a handle of `cache` and belongs to the caller, who does not use
    /// it otherwise any more; or it is an object of `cache.raw()`, allocated there, with a value of `T` in it.
    #[inline]
    pub unsafe fn from_raw(at: NonNull<T>, cache: &'c Cache<T>) -> Self {
        Handle { at, cache }
    }

    /// The handle, its value pinned: it stays at its address until it is dropped. A handle that is forgotten keeps the object
    /// in use for good, so that its memory is not given out again even when the cache ends.
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
        // SAFETY: moving the handle does not move the value; nothing but drop ends its object, see above.
        unsafe { Pin::new_unchecked(this) }
    }

    /// Where the object is, and its cache; the caller owns it with its value.
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
        // SAFETY: the handle owns an initialised value.
        unsafe { self.at.as_ref() }
    }
}

impl<T> DerefMut for Handle<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above, borrowed mutably.
        unsafe { self.at.as_mut() }
    }
}

impl<T> Drop for Handle<'_, T> {
    #[inline]
    fn drop(&mut self) {
        // Gives the object back also when the value's drop panics.
        // SAFETY: the object is the handle's, and its value is dropped before it is given back.
        let _object = unsafe { UninitHandle::from_object(self.at, self.cache) };
        // SAFETY: the handle owns the value.
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
