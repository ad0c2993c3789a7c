//! The geometry of a cache's slabs: how large a slab is, and where its objects lie in it.

use crate::arena::{GRANULE, PRIVATE};
use core::mem::size_of;

/// The largest number of objects in a slab: the slab's record has room for this many bits.
pub(crate) const MAX_OBJECTS: usize = 4096;
/// The smallest distance between two colors: a cache line.
pub(crate) const COLOR_STEP: usize = 64;
/// The most colors of a cache.
pub(crate) const MAX_COLORS: usize = 16;

/// Objects above this size have slabs of [`LARGE_SLAB`] granules or more. One granule holds so few
/// of them that making and returning slabs would cost too much for each object. A longer slab
/// wastes little, because its pages take no memory until they are used.
const SMALL_SLAB: usize = 2048;
const LARGE_SLAB: usize = 4;
/// A slab also has [`LARGE_SLAB`] granules or more if its colors and its guard page would take
/// `GRANULE / MAX_UNUSED` bytes or more.
const MAX_UNUSED: usize = 16;
/// An object of this size or more has a slab of its own. So has an object of exactly a granule,
/// and, if slabs end with a guard page, every object of a granule or more.
const MIN_ALONE: usize = GRANULE + GRANULE / 2;
/// When the length of a slab is chosen, the slab's unused part is measured in whole steps. A step
/// is the slab's length divided by this number.
const UNUSED_STEPS: usize = 64;

const _: () = assert!(MAX_OBJECTS * 8 <= GRANULE && MAX_OBJECTS / 64 * size_of::<u64>() < PRIVATE);

/// Where a cache's objects lie in its slabs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Geometry {
    /// Bytes from one object to the next.
    pub(crate) size: usize,
    /// Objects in a slab.
    pub(crate) per_slab: usize,
    /// Bytes of a slab that are objects.
    pub(crate) slab_bytes: usize,
    /// Granules in a slab.
    pub(crate) granules: usize,
    /// ceil(2^40 / size). `nth` multiplies by it instead of dividing by `size`.
    reciprocal: u64,
    /// Bytes between two colors. A slab's color is where its objects begin. With one color, objects
    /// whose size is a power of two would share few sets of the processor's caches.
    color_step: usize,
    colors: usize,
}

impl Geometry {
    /// Returns the geometry of slabs whose objects are `size` bytes apart and aligned to `align`.
    /// The last `guard` bytes of a slab hold no object. With `one_color`, the objects of each slab
    /// begin at a granule's start.
    pub(crate) fn new(size: usize, align: usize, guard: usize, one_color: bool) -> Geometry {
        let color_step = align.max(COLOR_STEP);
        let is_alone = is_alone(size, guard);
        let colors = if one_color {
            1
        } else if is_alone {
            // As many as the rest of the last granule has room for.
            (size.next_multiple_of(GRANULE) - size) / color_step + 1
        } else {
            (size / color_step).max(1)
        };
        let colors = colors.min(MAX_COLORS);
        debug_assert!((colors - 1) * color_step < GRANULE);
        let other = (colors - 1) * color_step + guard;
        let granules = match is_alone {
            true => (size + other).div_ceil(GRANULE),
            false => granules_for(size, other),
        };
        let per_slab = ((granules * GRANULE - other) / size).min(MAX_OBJECTS);
        Geometry {
            size,
            per_slab,
            slab_bytes: per_slab * size,
            granules,
            reciprocal: (1u64 << 40).div_ceil(size as u64),
            color_step,
            colors,
        }
    }

    /// Returns the number of the object that lies `offset` bytes into a slab. Exact for offsets and
    /// sizes below 2^20; slabs are at most twelve granules long. The reciprocal is too large by
    /// less than 1, so the result is too large by less than 2^20 / 2^40 = 1 / 2^20, before it is
    /// rounded down. That is less than 1 / size, the least distance from the exact result to the
    /// next integer.
    #[inline]
    pub(crate) fn nth(&self, offset: usize) -> usize {
        ((offset as u64).wrapping_mul(self.reciprocal) >> 40) as usize
    }

    /// Returns the number of the object that begins `offset` bytes into a slab, if one does.
    #[inline]
    pub(crate) fn begins_at(&self, offset: usize) -> Option<usize> {
        let nth = self.nth(offset);
        (offset < self.slab_bytes && nth * self.size == offset).then_some(nth)
    }

    /// Returns the color of a slab in run `index`: how many bytes into the run its objects begin.
    /// If another slab is made of the same run later, it has the same color. So the processor's
    /// caches may still hold the lines of its objects.
    pub(crate) fn color_of(&self, index: u32) -> usize {
        index as usize / self.granules % self.colors * self.color_step
    }
}

/// Returns whether each object of `size` bytes has a slab of its own. `guard` bytes of a slab are
/// for a guard page.
pub(crate) const fn is_alone(size: usize, guard: usize) -> bool {
    size >= MIN_ALONE || size == GRANULE || (guard > 0 && size > GRANULE)
}

/// Returns how many granules a slab has that holds several objects of `size` bytes. `other` bytes
/// of the slab are for colors and a guard page.
fn granules_for(size: usize, other: usize) -> usize {
    let least = match size <= SMALL_SLAB && other < GRANULE / MAX_UNUSED {
        true => 1,
        false => LARGE_SLAB,
    };
    // The unused part of the slab, in steps of a sixty-fourth of the slab.
    let unused = |&granules: &usize| {
        let bytes = granules * GRANULE;
        (bytes - other) % size * UNUSED_STEPS / bytes
    };
    // Takes the shortest of the lengths that leave the smallest part unused.
    (least..=2 * least).min_by_key(unused).unwrap_or(least)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = 4096;

    /// Calls `check` with the geometry for many sizes, with and without a guard page and colors.
    fn for_many(check: impl Fn(Geometry, usize, usize)) {
        for size in (8usize..4096)
            .step_by(8)
            .chain((4096..=196_608).step_by(1000))
            .chain([GRANULE, GRANULE + 64, 2 * GRANULE - 1024, 2 * GRANULE])
        {
            let align = (1 << size.trailing_zeros()).min(4096);
            let size = usize::next_multiple_of(size, align);
            for (guard, one_color) in [(0, false), (0, true), (PAGE, true)] {
                check(Geometry::new(size, align, guard, one_color), guard, align);
            }
        }
    }

    #[test]
    fn objects_and_guard_fit_into_the_slab_at_every_color() {
        for_many(|geometry, guard, align| {
            let whole = geometry.granules * GRANULE;
            for index in 0..100 * geometry.granules as u32 {
                let color = geometry.color_of(index);
                assert!(color < GRANULE && color.is_multiple_of(align));
                assert!(color + geometry.slab_bytes + guard <= whole, "{geometry:?}");
            }
            assert!((1..=MAX_OBJECTS).contains(&geometry.per_slab));
        });
    }

    #[test]
    fn numbers_of_objects_are_exact() {
        for_many(|geometry, _, _| {
            let step = (geometry.slab_bytes / 1000).max(1);
            for offset in (0..geometry.slab_bytes).step_by(step) {
                assert_eq!(geometry.nth(offset), offset / geometry.size);
                let begins = offset % geometry.size == 0;
                assert_eq!(geometry.begins_at(offset).is_some(), begins);
            }
            let last = geometry.per_slab - 1;
            assert_eq!(geometry.begins_at(last * geometry.size), Some(last));
            assert_eq!(geometry.nth(geometry.slab_bytes - 1), last);
            assert_eq!(geometry.begins_at(geometry.slab_bytes), None);
        });
    }

    #[test]
    fn little_of_a_slab_is_unused() {
        for_many(|geometry, guard, _| {
            let whole = geometry.granules * GRANULE;
            let room = whole - guard - (geometry.colors - 1) * geometry.color_step;
            let unused = room - geometry.slab_bytes;
            if !is_alone(geometry.size, guard) && geometry.per_slab < MAX_OBJECTS {
                assert!(unused * 8 <= whole, "{geometry:?}");
            }
        });
    }
}
