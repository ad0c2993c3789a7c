//! Caches as allocators of collections.

use allocator_api2::alloc::{AllocError, Allocator};
use allocator_api2::boxed::Box;
use allocator_api2::vec::Vec;
use pinfold::slab::{Cache, Kmalloc};
use std::alloc::Layout;
use std::ptr::NonNull;

fn layout(size: usize, align: usize) -> Layout {
    Layout::from_size_align(size, align).unwrap()
}

#[test]
fn vectors_boxes_and_maps_live_in_size_caches() {
    let mut numbers = Vec::new_in(Kmalloc);
    // The vector grows through every class, a run and a mapping, and shrinks back.
    numbers.extend(0..3_000_000u32);
    assert!(numbers.iter().zip(0..).all(|(&number, nth)| number == nth));
    for length in [2_000_000, 300_000, 10_000, 1000, 3, 0] {
        numbers.truncate(length);
        numbers.shrink_to_fit();
        assert!(numbers.iter().zip(0..).all(|(&number, nth)| number == nth));
    }
    let boxed: Box<[u8], _> = Vec::from_iter_in(*b"boxed", Kmalloc).into_boxed_slice();
    assert_eq!(&*boxed, b"boxed");

    let mut map = hashbrown::HashMap::new_in(Kmalloc);
    for n in 0..50_000 {
        map.insert(n, Box::new_in(n.to_string(), Kmalloc));
    }
    for n in (0..50_000).step_by(3) {
        assert_eq!(*map.remove(&n).unwrap(), n.to_string());
    }
    map.shrink_to_fit();
    assert!(map.iter().all(|(n, text)| **text == n.to_string()));
    drop(map);
    std::thread::scope(|scope| scope.spawn(move || drop((numbers, boxed))).join().unwrap());
}

/// Makes vectors from iterators, because `collect` in allocator-api2 takes no allocator.
trait FromIterIn<T>: Sized {
    fn from_iter_in(items: impl IntoIterator<Item = T>, allocator: Kmalloc) -> Self;
}

impl<T> FromIterIn<T> for Vec<T, Kmalloc> {
    fn from_iter_in(items: impl IntoIterator<Item = T>, allocator: Kmalloc) -> Self {
        let mut list = Vec::new_in(allocator);
        list.extend(items);
        list
    }
}

#[test]
fn boxes_live_in_a_cache_of_their_type() {
    let cache = Cache::<[u64; 8]>::new("boxes").unwrap();
    let boxes: std::vec::Vec<_> = (0..1000).map(|n| Box::new_in([n; 8], &cache)).collect();
    assert!(boxes.iter().zip(0..).all(|(held, n)| **held == [n; 8]));
    assert!(cache.raw().in_use() >= 1000);
    assert_eq!(Box::into_inner(Box::new_in(7u8, &cache)), 7);
    let nothing = Box::new_in((), &cache);
    assert!(Box::try_new_in([0u64; 9], &cache).is_err());
    assert!(Box::try_new_in(Aligned(0), &cache).is_err());
    drop((boxes, nothing));
    cache.destroy().unwrap();
}

#[repr(align(16))]
struct Aligned(#[expect(dead_code, reason = "only its layout matters")] u8);

#[test]
fn buffers_grow_within_their_object() {
    let cache = Cache::<[u64; 16]>::new("buffers").unwrap();
    let mut buffer: Vec<u8, _> = Vec::new_in(&cache);
    for n in 0..128 {
        buffer.try_reserve_exact(1).unwrap();
        buffer.push(n);
    }
    assert!(buffer.try_reserve_exact(1).is_err());
    assert!(buffer.iter().copied().eq(0..128));
    buffer.truncate(5);
    buffer.shrink_to_fit();
    assert_eq!(*buffer, [0, 1, 2, 3, 4]);
    buffer.clear();
    buffer.shrink_to_fit();
    drop(buffer);
    cache.destroy().unwrap();
}

/// Checks that the first `known` bytes are `was`, and writes `now` to the whole block.
fn fill(block: NonNull<[u8]>, layout: Layout, known: usize, was: u8, now: u8) {
    assert!(block.len() >= layout.size(), "{layout:?}");
    assert!((block.cast::<u8>().as_ptr() as usize).is_multiple_of(layout.align()));
    // SAFETY: the test owns the block. Its first `known` bytes were written before, and the others
    // are written here.
    let bytes = unsafe {
        let start = block.cast::<u8>().as_ptr();
        start.add(known).write_bytes(now, block.len() - known);
        std::slice::from_raw_parts_mut(start, block.len())
    };
    assert!(bytes[..known].iter().all(|&byte| byte == was), "{layout:?}");
    bytes.fill(now);
}

#[test]
fn blocks_of_every_layout_resize_to_every_other() -> Result<(), AllocError> {
    let sizes = [
        0, 1, 8, 16, 17, 100, 1000, 4096, 32_768, 32_769, 65_536, 500_000, 2_097_151, 2_097_152,
        5_000_000,
    ];
    let layouts: std::vec::Vec<_> = [1, 16, 64, 4096, 32_768, 65_536, 262_144]
        .into_iter()
        .flat_map(|align| sizes.map(|size| layout(size, align)))
        .collect();
    for &old in &layouts {
        // Leaves out two thirds of the pairs, so that the test ends within a second.
        for &new in layouts.iter().skip(old.size() % 3).step_by(3) {
            let block = Kmalloc.allocate(old)?;
            fill(block, old, 0, 0, 0x5a);
            let (from, both) = (block.cast(), old.size().min(new.size()));
            // SAFETY: the test owns the block, which is of layout `old`. The sizes choose the call.
            let resized = unsafe {
                if new.size() >= old.size() {
                    Kmalloc.grow(from, old, new)?
                } else {
                    Kmalloc.shrink(from, old, new)?
                }
            };
            fill(resized, new, both, 0x5a, 0xa5);
            // A block may be freed with any size up to its own.
            let end = layout(resized.len(), new.align());
            // SAFETY: the test owns the block and gives it up; the layout fits it.
            unsafe { Kmalloc.deallocate(resized.cast(), end) };
        }
    }
    Ok(())
}

#[test]
fn zeroed_blocks_are_zero() -> Result<(), AllocError> {
    let cache = Cache::<[u64; 4]>::new("zeroed").unwrap();
    for size in [8, 24, 32, 40_000, 300_000, 3_000_000] {
        let allocators: [&dyn Allocator; 2] = [&Kmalloc, &cache];
        for allocator in &allocators[..if size <= 32 { 2 } else { 1 }] {
            let old = layout(size, 8);
            for _ in 0..3 {
                // Frees a used block, which the next allocation may return.
                let dirty = allocator.allocate(old)?;
                fill(dirty, old, 0, 0, 0xff);
                // SAFETY: the test owns the block and gives it up.
                unsafe { allocator.deallocate(dirty.cast(), old) };
                let block = allocator.allocate_zeroed(old)?;
                fill(block, old, block.len(), 0, 0);
                let new = if size == 8 { layout(32, 8) } else { old };
                fill(block, old, 0, 0, 0x11);
                // SAFETY: the test owns the block, which is of layout `old`.
                let grown = unsafe { allocator.grow_zeroed(block.cast(), old, new)? };
                // SAFETY: the test owns the block, and `fill` and `grow_zeroed` wrote all its
                // bytes.
                let bytes = unsafe { grown.as_ref() };
                assert!(bytes[..size].iter().all(|&byte| byte == 0x11));
                assert!(bytes[size..].iter().all(|&byte| byte == 0));
                // SAFETY: the test owns the block and gives it up.
                unsafe { allocator.deallocate(grown.cast(), new) };
            }
        }
    }
    cache.destroy().unwrap();
    Ok(())
}

#[test]
fn impossible_sizes_are_errors() {
    let endless = layout(isize::MAX as usize - 4095, 4096);
    assert!(Kmalloc.allocate(endless).is_err());
    assert!(Kmalloc.allocate_zeroed(endless).is_err());
    let small = layout(64, 8);
    let block = Kmalloc.allocate(small).unwrap();
    fill(block, small, 0, 0, 3);
    // SAFETY: the test owns the block; since growing fails, it still owns it afterwards.
    unsafe {
        assert!(Kmalloc.grow(block.cast(), small, endless).is_err());
        fill(block, small, 64, 3, 4);
        Kmalloc.deallocate(block.cast(), small);
    }
    let mut list: Vec<u8, _> = Vec::new_in(Kmalloc);
    assert!(list.try_reserve(isize::MAX as usize - 10_000).is_err());
}
