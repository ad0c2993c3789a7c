//! The bulk test, after the kernel's slab_bulk_test: allocates and frees several objects per call,
//! and the same number by single calls.

use crate::{cycles, out_of_memory};
use pinfold::slab::KmemCache;
use std::ptr::{NonNull, null_mut};

/// Objects per call, as in slab_bulk_test.
pub const BATCHES: [usize; 10] = [1, 2, 4, 8, 16, 32, 64, 128, 158, 250];
/// Bytes of an object.
pub const SIZE: usize = 256;

/// Cycles to allocate and free one object.
#[derive(Clone, Copy)]
pub struct Cycles {
    pub bulk: f64,
    pub single: f64,
}

/// Measures calls of `batch` objects, about `calls` objects in all. Nothing is written to the
/// objects.
pub fn measure(cache: &KmemCache, batch: usize, calls: usize) -> Cycles {
    let loops = calls.div_ceil(batch);
    let objects = &mut vec![null_mut(); batch][..];
    let bulk = cycles_of(loops, || in_bulk(cache, objects));
    let single = cycles_of(loops, || one_by_one(cache, objects));
    let per_object = |cycles| cycles as f64 / (loops * batch) as f64;
    Cycles {
        bulk: per_object(bulk),
        single: per_object(single),
    }
}

/// Returns the cycles of `loops` runs of `work`, after one more to warm up.
#[inline(always)]
fn cycles_of(loops: usize, mut work: impl FnMut()) -> u64 {
    work();
    cycles::of(|| (0..loops).for_each(|_| work()))
}

#[inline(always)]
fn in_bulk(cache: &KmemCache, objects: &mut [*mut u8]) {
    if cache.alloc_bulk(objects) < objects.len() {
        out_of_memory();
    }
    // SAFETY: the call above allocated all of these objects, and nothing uses them.
    unsafe { cache.free_bulk(objects) };
}

#[inline(always)]
fn one_by_one(cache: &KmemCache, objects: &mut [*mut u8]) {
    for object in &mut *objects {
        *object = cache
            .alloc()
            .map_or_else(|| out_of_memory(), NonNull::as_ptr);
    }
    for &object in &*objects {
        // SAFETY: the loop above allocated the object, so it is not null, and nothing uses it.
        unsafe { cache.free(NonNull::new_unchecked(object)) };
    }
}
