//! Memory for the units of one map: the nodes of its tree and the words of its ranges.
//!
//! The problem: a lookup takes no lock, so it may read a unit that the writer has recycled. It must
//! then find mapped memory of the same kind, never an unmapped page, and never a policy's words
//! where it expects an address. So:
//!
//! * Memory is mapped in chunks, each as large as all before it together, and stays mapped until
//!   the map is dropped.
//! * A unit keeps its kind for good: each kind has a [`Pool`], which gets its own units back.
//! * A unit that a published change took out of the tree is *retired*. It becomes free when the
//!   change is published, and the next change may write it. The latch (`latch`) then tells the
//!   readers that still read it.
//!
//! Only the holder of the writer's lock uses chunks and pools.

use crate::sys;
use core::mem::size_of;
use core::ptr::{NonNull, null_mut};

/// The mappings of a map, and the rest of the newest one.
pub(super) struct Chunks {
    newest: *mut Chunk,
    /// Bytes in all mappings.
    bytes: usize,
    /// Bytes at the end of the newest mapping that no unit has yet.
    left: usize,
}

/// The beginning of a mapping.
#[repr(C, align(64))]
struct Chunk {
    older: *mut Chunk,
    bytes: usize,
}

/// Bytes of the first mapping: room for a small map, so that it takes one mapping.
const FIRST: usize = 16 << 10;

impl Chunks {
    pub(super) const fn new() -> Self {
        Chunks {
            newest: null_mut(),
            bytes: 0,
            left: 0,
        }
    }

    /// Returns zeroed memory for a `T`, or `None` if there is no memory. At most one system call.
    ///
    /// `T` must be aligned to at most 64 bytes.
    fn take<T>(&mut self) -> Option<NonNull<T>> {
        const { assert!(align_of::<T>() <= align_of::<Chunk>()) };
        let bytes = size_of::<T>().next_multiple_of(align_of::<Chunk>());
        if self.left < bytes {
            self.map(bytes)?;
        }
        // SAFETY: `newest` is the mapping that `left` belongs to, because `left` is not 0. The last
        // `left` bytes of the mapping are unused, and `left` is at least `bytes`.
        let at = unsafe {
            let end = self.newest.cast::<u8>().add((*self.newest).bytes);
            end.sub(self.left)
        };
        self.left -= bytes;
        NonNull::new(at.cast())
    }

    fn map(&mut self, needed: usize) -> Option<()> {
        let bytes = (needed + size_of::<Chunk>()).max(self.bytes).max(FIRST);
        let bytes = bytes.checked_next_multiple_of(sys::page_size())?;
        let at = sys::map_memory(bytes)?.cast::<Chunk>();
        let older = self.newest;
        // SAFETY: the mapping is fresh, page-aligned and larger than a `Chunk`.
        unsafe { at.write(Chunk { older, bytes }) };
        self.newest = at.as_ptr();
        self.bytes += bytes;
        // What is left of the older mapping stays unused: less than one unit.
        self.left = bytes - size_of::<Chunk>();
        Some(())
    }

    /// Calls `visit` with the address and the bytes of each mapping.
    pub(super) fn for_each(&self, mut visit: impl FnMut(*mut u8, usize)) {
        let mut chunk = self.newest;
        // SAFETY: `chunk` is null or the beginning of a mapping that `map` made. `visit` may unmap
        // it, but both fields are copied before.
        while let Some(head) = unsafe { chunk.as_ref() } {
            let (at, bytes, older) = (chunk.cast(), head.bytes, head.older);
            visit(at, bytes);
            chunk = older;
        }
    }
}

impl Drop for Chunks {
    fn drop(&mut self) {
        // SAFETY: `map` mapped exactly these bytes. The owner of the chunks drops them when no
        // thread uses a unit any more.
        self.for_each(|at, bytes| unsafe { sys::unmap(at, bytes) });
    }
}

/// The units of one kind that are not in use. A `T` of zero bytes must be valid.
pub(super) struct Pool<T> {
    free: *mut Unit<T>,
    count: usize,
    retired: *mut Unit<T>,
    /// Units that were taken and have not come back. For tests.
    #[cfg(test)]
    pub(super) in_use: usize,
}

#[repr(C)]
struct Unit<T> {
    /// What readers may read, also while the unit is free.
    value: T,
    /// The next unit of a pool's list. Only the writer reads and writes this field.
    next: *mut Unit<T>,
}

impl<T> Pool<T> {
    pub(super) const fn new() -> Self {
        Pool {
            free: null_mut(),
            count: 0,
            retired: null_mut(),
            #[cfg(test)]
            in_use: 0,
        }
    }

    /// Makes sure that `count` units are free. Returns `None` if there is no memory.
    pub(super) fn reserve(&mut self, count: usize, chunks: &mut Chunks) -> Option<()> {
        while self.count < count {
            let unit = chunks.take::<Unit<T>>()?;
            push(&mut self.free, unit.as_ptr());
            self.count += 1;
        }
        Some(())
    }

    /// Returns a free unit. The caller has reserved it: without a free unit the process aborts.
    pub(super) fn take(&mut self) -> *mut T {
        let unit = self.free;
        if unit.is_null() {
            sys::die(format_args!(
                "a map of ranges used more units than it had reserved"
            ));
        }
        // SAFETY: `unit` is in the list, so `push` got it as a unit of this map's chunks.
        self.free = unsafe { (*unit).next };
        self.count -= 1;
        #[cfg(test)]
        {
            self.in_use += 1;
        }
        unit.cast()
    }

    /// Takes back a unit that the new tree does not use. Readers of the published tree may use it.
    ///
    /// # Safety
    ///
    /// [`take`](Self::take) of this pool returned `unit`, and it was not retired since.
    pub(super) unsafe fn retire(&mut self, unit: *mut T) {
        push(&mut self.retired, unit.cast());
    }

    /// Frees the retired units. Called when no published tree contains them.
    pub(super) fn recycle(&mut self) {
        while let Some(unit) = NonNull::new(self.retired) {
            // SAFETY: `unit` is in the list, so it is a unit of this map's chunks.
            self.retired = unsafe { (*unit.as_ptr()).next };
            push(&mut self.free, unit.as_ptr());
            self.count += 1;
            #[cfg(test)]
            {
                self.in_use -= 1;
            }
        }
    }
}

/// Puts a unit at the beginning of a list.
fn push<T>(list: &mut *mut Unit<T>, unit: *mut Unit<T>) {
    // SAFETY: `unit` is a unit of the map's chunks, which stay mapped. Only the writer, which calls
    // this function, accesses `next`.
    unsafe { (*unit).next = *list };
    *list = unit;
}
