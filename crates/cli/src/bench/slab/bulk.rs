//! The bulk test: objects allocated and freed several by a call, as in slab_bulk_test, beside the same by single calls.

use super::scenarios::{out_of_memory, timed};
use pinfold::slab::KmemCache;
use std::ptr::{NonNull, null_mut};

/// Objects of a call: slab_bulk_test's.
pub const BATCHES: [usize; 10] = [1, 2, 4, 8, 16, 32, 64, 128, 158, 250];
/// Their size.
pub const SIZE: usize = 256;

/// Cycles per object, allocated and freed.
#[derive(Clone, Copy)]
pub struct Cycles {
    pub bulk: f64,
    pub single: f64,
}

/// Measures calls of `batch` objects, about `calls` objects in all. Nothing is written to them.
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

/// Cycles of `work`, so many times, after once more to warm up.
#[inline(always)]
fn cycles_of(loops: usize, mut work: impl FnMut()) -> u64 {
    work();
    timed(|| (0..loops).for_each(|_| work()))
}

#[inline(always)]
fn in_bulk(cache: &KmemCache, objects: &mut [*mut u8]) {
    if cache.alloc_bulk(objects) < objects.len() {
        out_of_memory();
    }
    // SAFETY: allocated just above, and not used.
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
        // SAFETY: allocated just above, hence not null, and not used.
        unsafe { cache.free(NonNull::new_unchecked(object)) };
    }
}
