//! A value that many threads share by handles, with a count of handles for each CPU.
//!
//! Every clone and every drop of an `Arc` writes one cache line. If many threads clone and drop
//! handles of one value, the line moves from CPU to CPU, and each clone waits for it. The handles
//! here count on the CPU's own word instead ([`PerCpuRef`](crate::percpu::PerCpuRef)).
//!
//! The price is that no drop can see whether it was the last one, until the *owner* says that the
//! value is going out of use. So a value has one [`PerCpuArcOwner`], from which all handles come.
//! When the owner is dropped, the count becomes atomic. From then on the last handle drops the
//! value, as the last `Arc` does.

use crate::percpu::{Killed, RefCount, kill};
use crate::slab::kmalloc;
use core::alloc::Layout;
use core::fmt;
use core::marker::PhantomData;
use core::mem::ManuallyDrop;
use core::ops::Deref;
use core::ptr::NonNull;
use pinfold_rseq::FenceError;

/// The count. It has a cache line of its own, so that a value that changes does not slow down the
/// clones, which read the count's first word.
#[repr(align(64))]
struct Line(RefCount);

struct Counted<T> {
    count: Line,
    value: T,
}

/// Shares a value by [`PerCpuArc`] handles. Holds the value's initial reference.
///
/// Dropping the owner ends the cheap counting: it interrupts each CPU that runs a thread of this
/// process, once, and waits as [`PerCpuRef::kill`](crate::percpu::PerCpuRef::kill) does. The value
/// itself lives until its last handle is dropped. So use this type for values that live long. If
/// the kernel no longer allows the fence, dropping the owner leaks the value; [`kill`](Self::kill)
/// returns the error instead.
///
/// The value and its count are one block of a size class of [`slab`](crate::slab), of at most 512
/// KiB. The count takes a cache line of it, and 8 bytes on each CPU that clones or drops handles.
///
/// ```
/// use pinfold::arc::PerCpuArcOwner;
/// use std::thread;
///
/// let routes = PerCpuArcOwner::new(vec!["10.0.0.0/8"]).expect("memory");
/// let workers: Vec<_> = (0..4)
///     .map(|_| {
///         let routes = routes.share();
///         // Each clone and each drop is one critical section on the CPU's own word.
///         thread::spawn(move || (0..1000).all(|_| routes.clone()[0] == "10.0.0.0/8"))
///     })
///     .collect();
/// // The routes go out of use. Each worker keeps them until it drops its handle.
/// drop(routes);
/// assert!(workers.into_iter().all(|worker| worker.join().unwrap()));
/// ```
pub struct PerCpuArcOwner<T> {
    initial: ManuallyDrop<PerCpuArc<T>>,
}

impl<T> PerCpuArcOwner<T> {
    /// Moves `value` into a new block. Costs an allocation of a size class: one critical section on
    /// the common path. Not for signal handlers.
    ///
    /// # Errors
    ///
    /// The value itself, if the system has no memory, or if the value is too large.
    pub fn new(value: T) -> Result<Self, T> {
        let class = PerCpuArc::<T>::class();
        let Some(at) = class.and_then(kmalloc::alloc_of_class) else {
            return Err(value);
        };
        let at = at.cast::<Counted<T>>();
        let count = Line(RefCount::new());
        // SAFETY: the block is new, and has the size and the alignment of the type.
        unsafe { at.write(Counted { count, value }) };
        let initial = ManuallyDrop::new(PerCpuArc {
            at,
            values: PhantomData,
        });
        Ok(PerCpuArcOwner { initial })
    }

    /// Returns a handle. Costs one critical section.
    #[inline]
    pub fn share(&self) -> PerCpuArc<T> {
        (*self.initial).clone()
    }

    /// Ends the owner as dropping it does, but returns the owner if that fails.
    ///
    /// # Errors
    ///
    /// Returns the owner, with the error of [`PerCpuRef::kill`](crate::percpu::PerCpuRef::kill).
    /// All handles work as before.
    pub fn kill(self) -> Result<(), (Self, FenceError)> {
        let this = ManuallyDrop::new(self);
        // SAFETY: `ManuallyDrop` keeps the owner's drop from running, so the initial reference is
        // taken away once.
        match unsafe { this.end() } {
            Ok(()) => Ok(()),
            Err(refused) => Err((ManuallyDrop::into_inner(this), refused)),
        }
    }

    /// Takes the initial reference away. On an error, the owner still has it.
    ///
    /// # Safety
    ///
    /// If this returns `Ok`, the caller does not use the owner any more.
    unsafe fn end(&self) -> Result<(), FenceError> {
        if kill(self.initial.count())? == Killed::Last {
            // SAFETY: the initial reference was the last one.
            unsafe { self.initial.free() };
        }
        Ok(())
    }
}

impl<T> Drop for PerCpuArcOwner<T> {
    fn drop(&mut self) {
        // SAFETY: `drop` runs once, and the owner is not used afterwards. After an
        // error the initial reference is never given back, so the value is never dropped.
        let _ = unsafe { self.end() };
    }
}

impl<T> Deref for PerCpuArcOwner<T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        &self.initial
    }
}

impl<T: fmt::Debug> fmt::Debug for PerCpuArcOwner<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

/// A handle that shares a value with other handles, like an `Arc`.
///
/// Cloning and dropping a handle cost one critical section each, on a word of the CPU. After the
/// [owner](PerCpuArcOwner) is gone, each costs one atomic add. The last handle drops the value.
///
/// Like an `Arc`, a handle may be sent to other threads and shared with them if `T` may be both.
/// Any thread and any signal handler may clone and drop handles, if it may drop the value.
///
/// ```
/// use pinfold::arc::{PerCpuArc, PerCpuArcOwner};
///
/// let owner = PerCpuArcOwner::new(String::from("pin")).expect("memory");
/// let handle = owner.share();
/// let other = handle.clone();
/// assert!(PerCpuArc::ptr_eq(&handle, &other));
/// drop(owner);
/// assert_eq!(*other, "pin");
/// ```
///
/// ```compile_fail,E0277
/// use pinfold::arc::PerCpuArcOwner;
///
/// let cell = PerCpuArcOwner::new(std::cell::Cell::new(1)).unwrap().share();
/// std::thread::spawn(move || cell.set(2)).join().unwrap();
/// ```
pub struct PerCpuArc<T> {
    at: NonNull<Counted<T>>,
    /// The last handle drops a value.
    values: PhantomData<Counted<T>>,
}

// SAFETY: handles in several threads give shared access to the value, which `T: Sync` allows. The
// last handle drops the value in its thread, which `T: Send` allows.
unsafe impl<T: Send + Sync> Send for PerCpuArc<T> {}
// SAFETY: a thread that has a shared handle can clone the handle. The clone may be the last handle,
// and drops the value in that thread. `T: Send + Sync` allows that.
unsafe impl<T: Send + Sync> Sync for PerCpuArc<T> {}

impl<T> PerCpuArc<T> {
    /// Returns whether both handles share the same value.
    pub fn ptr_eq(this: &Self, other: &Self) -> bool {
        this.at == other.at
    }

    /// Returns the size class of the blocks, or `None` if they are too large for one.
    fn class() -> Option<usize> {
        kmalloc::class_of_layout(Layout::new::<Counted<T>>())
    }

    #[inline(always)]
    fn count(&self) -> &RefCount {
        // SAFETY: the block holds the count as long as a reference exists, and `self` has one.
        unsafe { &(*self.at.as_ptr()).count.0 }
    }

    /// Drops the value and frees the block.
    ///
    /// # Safety
    ///
    /// The caller has taken the last reference away.
    #[cold]
    unsafe fn free(&self) {
        /// Frees the block even if the value's drop panics.
        struct Block(*mut u8, usize);
        impl Drop for Block {
            fn drop(&mut self) {
                // SAFETY: `new` got the block from this class, and no handle is left.
                unsafe { kmalloc::free_class(self.0, self.1) };
            }
        }
        // A handle exists, so its block has a class.
        let _block = Self::class().map(|class| Block(self.at.as_ptr().cast(), class));
        // SAFETY: no handle is left, so no other thread uses the value or its count.
        unsafe { self.at.as_ptr().drop_in_place() };
    }
}

impl<T> Clone for PerCpuArc<T> {
    #[inline]
    fn clone(&self) -> Self {
        self.count().get();
        PerCpuArc {
            at: self.at,
            values: PhantomData,
        }
    }
}

impl<T> Drop for PerCpuArc<T> {
    #[inline]
    fn drop(&mut self) {
        if self.count().put() {
            // SAFETY: `put` took the last reference away.
            unsafe { self.free() };
        }
    }
}

impl<T> Deref for PerCpuArc<T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the block holds the value as long as a reference exists, and `self` has one.
        unsafe { &(*self.at.as_ptr()).value }
    }
}

impl<T> AsRef<T> for PerCpuArc<T> {
    fn as_ref(&self) -> &T {
        self
    }
}

impl<T: fmt::Debug> fmt::Debug for PerCpuArc<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}
