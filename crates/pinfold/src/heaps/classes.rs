//! The size classes of a heap: those of malloc up to 1 KiB, and a quarter of the power of two below
//! apart from there on, up to 64 KiB. With fewer classes, a small heap has fewer slabs that are
//! mostly empty.

use crate::slab::kmalloc::{self, SIZES};

/// The number of malloc's classes up to 1 KiB, all of which a heap has.
const ALL_UP_TO: usize = 20;
/// The number of size classes of a heap.
pub const CLASSES: usize = ALL_UP_TO + 24;
/// The size of the largest class in bytes.
pub(super) const MAX_SIZE: usize = size(CLASSES - 1);

const _: () = assert!(SIZES[ALL_UP_TO - 1] == 1024 && MAX_SIZE == 64 << 10);

/// Returns the size of a class in bytes.
pub(super) const fn size(class: usize) -> usize {
    if class < ALL_UP_TO {
        return SIZES[class];
    }
    let nth = class - ALL_UP_TO;
    (1024 << (nth / 4)) / 4 * (5 + nth % 4)
}

/// Returns the smallest class for `size` bytes, at most [`MAX_SIZE`].
#[inline]
pub(super) fn of(size: usize) -> usize {
    if size <= 1024 {
        return kmalloc::class_of(size);
    }
    // The power of two below, and the number of whole quarters of it above.
    let power = (size - 1).ilog2();
    let quarters = (size - 1) >> (power - 2) & 3;
    ALL_UP_TO + (power as usize - 10) * 4 + quarters
}

/// Returns the smallest class for `size` bytes whose blocks all lie at multiples of `align`, a
/// power of two. Returns `None` if no class fits. A slab begins at a multiple of 64 KiB, so the
/// blocks of a class lie at multiples of each power of two that divides the class's size.
pub(super) fn of_aligned(wanted: usize, align: usize) -> Option<usize> {
    if wanted > MAX_SIZE || align > MAX_SIZE {
        return None;
    }
    (of(wanted)..CLASSES).find(|&class| size(class).is_multiple_of(align))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_has_the_smallest_class_that_fits() {
        for wanted in 0..=MAX_SIZE {
            let class = of(wanted);
            assert!(size(class) >= wanted, "{wanted}");
            assert!(class == 0 || size(class - 1) < wanted, "{wanted}");
        }
        assert_eq!(of_aligned(100, 64), Some(of(128)));
        assert_eq!(of_aligned(1, 64 << 10), Some(CLASSES - 1));
        assert_eq!(of_aligned(1, 128 << 10), None);
    }
}
