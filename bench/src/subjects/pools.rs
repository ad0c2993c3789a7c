//! Object pools: what a program would take instead of an object cache.
//!
//! Those in Rust are generic over the size, as in a program that has one type of object. So there
//! are only the sizes [`SIZES`]. None of them clears an object that it hands out again.

use super::{SubjectName, loaded};
use anyhow::{Result, bail};
use crossbeam_queue::ArrayQueue;
use lockfree_object_pool::{LinearObjectPool, LinearReusable};
use pinfold::slab::{Cache, Handle};
use pinfold_lab::{Measurable, Subject};
use sharded_slab::{Clear, Config, Pool as ShardedPool};
use std::alloc::{Layout, alloc, dealloc};
use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ptr::{NonNull, null_mut};

/// The sizes of objects that a pool can have.
pub const SIZES: [usize; 3] = [64, 256, 1024];

/// Makes the pool `name` with objects of `size` bytes, of which at most `objects` are in use at a
/// time by `threads` threads.
pub fn make(
    name: SubjectName,
    size: usize,
    objects: usize,
    threads: usize,
) -> Result<Box<dyn Measurable>> {
    match size {
        64 => of::<64>(name, objects, threads),
        256 => of::<256>(name, objects, threads),
        1024 => of::<1024>(name, objects, threads),
        _ => bail!("there is no pool of objects of {size} bytes"),
    }
}

fn of<const N: usize>(
    name: SubjectName,
    objects: usize,
    threads: usize,
) -> Result<Box<dyn Measurable>> {
    Ok(match name {
        SubjectName::PinfoldTyped => Box::new(Typed::<N>(Cache::new(&format!("typed-{N}"))?)),
        SubjectName::ShardedSlab => Box::new(Sharded::<N>(ShardedPool::new_with_config())),
        SubjectName::LockfreeObjectPool => Box::new(Linear::<N>::new()),
        SubjectName::ArrayQueue => Box::new(Queue::<N>(ArrayQueue::new(objects))),
        SubjectName::ThreadLocal => Box::new(ThreadLists::<N>),
        _ => Box::new(loaded::Loaded::start(name, N, objects, threads)?),
    })
}

/// An object's bytes, aligned as by `malloc`, and what its pool needs to free it.
#[repr(C, align(16))]
struct Object<const N: usize, More = ()> {
    bytes: MaybeUninit<[u8; N]>,
    more: More,
}

/// Pinfold's typed cache, whose handle is given up for the object's address.
struct Typed<const N: usize>(Cache<Object<N>>);

impl<const N: usize> Subject for Typed<N> {
    #[inline(always)]
    fn alloc(&self) -> *mut u8 {
        let object = self.0.alloc_with(|| Object {
            bytes: MaybeUninit::uninit(),
            more: (),
        });
        object.map_or(null_mut(), |object| {
            Handle::into_raw(object).as_ptr().cast()
        })
    }

    #[inline(always)]
    unsafe fn free(&self, object: *mut u8) {
        // SAFETY: the caller promises that `alloc` returned the address, so it is not null, and
        // that nothing uses the object.
        drop(unsafe { Handle::from_raw(NonNull::new_unchecked(object.cast()), &self.0) });
    }
}

/// sharded-slab's `Pool`. An object remembers its key behind its bytes.
struct Sharded<const N: usize>(ShardedPool<Keyed<N>, FewPages>);

/// The default configuration, but with one large first page. A search for a free place visits the
/// pages one by one.
struct FewPages;

impl Config for FewPages {
    const INITIAL_PAGE_SIZE: usize = 16384;
    const MAX_PAGES: usize = 16;
}

struct Keyed<const N: usize>(UnsafeCell<Object<N, usize>>);

// SAFETY: only the thread that holds the object accesses the cell. The pool hands an object to one
// thread at a time.
unsafe impl<const N: usize> Sync for Keyed<N> {}

impl<const N: usize> Default for Keyed<N> {
    fn default() -> Keyed<N> {
        Keyed(UnsafeCell::new(Object {
            bytes: MaybeUninit::uninit(),
            more: 0,
        }))
    }
}

impl<const N: usize> Clear for Keyed<N> {
    fn clear(&mut self) {}
}

impl<const N: usize> Subject for Sharded<N> {
    #[inline(always)]
    fn alloc(&self) -> *mut u8 {
        let Some(mut object) = self.0.create() else {
            return null_mut();
        };
        let key = object.key();
        object.0.get_mut().more = key;
        // The pool keeps the object in use after the guard has gone.
        object.0.get().cast()
    }

    #[inline(always)]
    unsafe fn free(&self, object: *mut u8) {
        // SAFETY: the caller promises that `alloc` returned the address, so an initialised key lies
        // behind the bytes.
        let key = unsafe { (*object.cast::<Object<N, usize>>()).more };
        self.0.clear(key);
    }
}

/// lockfree-object-pool's `LinearObjectPool`. An object holds its own guard behind its bytes. The
/// pool lives until the process ends.
struct Linear<const N: usize>(&'static LinearObjectPool<Guarded<N>>);

struct Guarded<const N: usize>(Object<N, MaybeUninit<LinearReusable<'static, Guarded<N>>>>);

// SAFETY: only the thread that holds the object accesses it. The guard in it refers to the pool,
// which any thread may use.
unsafe impl<const N: usize> Send for Guarded<N> {}
// SAFETY: no thread accesses an object through a shared reference.
unsafe impl<const N: usize> Sync for Guarded<N> {}

impl<const N: usize> Linear<N> {
    fn new() -> Linear<N> {
        let fresh = || {
            Guarded(Object {
                bytes: MaybeUninit::uninit(),
                more: MaybeUninit::uninit(),
            })
        };
        Linear(Box::leak(Box::new(LinearObjectPool::new(fresh, |_| {}))))
    }
}

impl<const N: usize> Subject for Linear<N> {
    #[inline(always)]
    fn alloc(&self) -> *mut u8 {
        let mut guard = self.0.pull();
        let object: *mut Guarded<N> = &raw mut *guard;
        // SAFETY: the guard gives this thread the object alone.
        unsafe { (*object).0.more.write(guard) };
        object.cast()
    }

    #[inline(always)]
    unsafe fn free(&self, object: *mut u8) {
        let object = object.cast::<Guarded<N>>();
        // SAFETY: the caller promises that `alloc` returned the address, and so wrote the guard
        // into the object. Each call of `alloc` is followed by one free, which reads it once.
        drop(unsafe { (*object).0.more.assume_init_read() });
    }
}

/// crossbeam's `ArrayQueue` as a list of free objects. Objects come from the system's allocator,
/// and all of them fit into the queue.
struct Queue<const N: usize>(ArrayQueue<Free>);

/// A free object.
struct Free(*mut u8);

// SAFETY: an object in the queue has no user, and the queue hands it to one thread.
unsafe impl Send for Free {}

impl<const N: usize> Subject for Queue<N> {
    #[inline(always)]
    fn alloc(&self) -> *mut u8 {
        self.0.pop().map_or_else(from_system::<N>, |free| free.0)
    }

    #[inline(always)]
    unsafe fn free(&self, object: *mut u8) {
        if let Err(free) = self.0.push(Free(object)) {
            // SAFETY: the caller promises that `alloc` returned the object, which therefore came
            // from `from_system`.
            unsafe { to_system::<N>(free.0) };
        }
    }
}

/// A vector of free objects in each thread. A thread keeps all objects that it frees, also those
/// that another thread allocated.
struct ThreadLists<const N: usize>;

thread_local! {
    static LISTS: [UnsafeCell<Vec<*mut u8>>; SIZES.len()] = const {
        [const { UnsafeCell::new(Vec::new()) }; SIZES.len()]
    };
}

impl<const N: usize> ThreadLists<N> {
    /// The place of the list of this size.
    const PLACE: usize = match N {
        64 => 0,
        256 => 1,
        _ => 2,
    };

    #[inline(always)]
    fn with<R>(work: impl FnOnce(&mut Vec<*mut u8>) -> R) -> R {
        // SAFETY: only this thread accesses its list, and `work` calls nothing that comes back
        // here.
        LISTS.with(|lists| work(unsafe { &mut *lists[Self::PLACE].get() }))
    }
}

impl<const N: usize> Subject for ThreadLists<N> {
    #[inline(always)]
    fn alloc(&self) -> *mut u8 {
        Self::with(Vec::pop).unwrap_or_else(from_system::<N>)
    }

    #[inline(always)]
    unsafe fn free(&self, object: *mut u8) {
        Self::with(|list| list.push(object));
    }
}

/// The layout of an object of `N` bytes.
const fn layout<const N: usize>() -> Layout {
    Layout::new::<Object<N>>()
}

/// Allocates an object with the system's allocator.
#[cold]
fn from_system<const N: usize>() -> *mut u8 {
    // SAFETY: the layout has more than 0 bytes.
    unsafe { alloc(layout::<N>()) }
}

/// Frees an object with the system's allocator.
///
/// # Safety
///
/// The object came from [`from_system`] with the same size, and nothing uses it.
#[cold]
unsafe fn to_system<const N: usize>(object: *mut u8) {
    // SAFETY: the caller promises that the object came from `alloc` with this layout.
    unsafe { dealloc(object, layout::<N>()) };
}
