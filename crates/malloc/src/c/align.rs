//! The alignment of objects of C's caches.

use core::ffi::c_uint;

/// `PINFOLD_SLAB_HWCACHE_ALIGN`.
pub(super) const HWCACHE_ALIGN: c_uint = 1 << 10;

/// The largest alignment, as in `pinfold::slab`.
const MAX_ALIGN: usize = 64 << 10;
/// The largest fundamental alignment. For a C type with a larger alignment, the caller gives
/// `align`.
const ALIGN_NATURAL: usize = 16;
pub(super) const CACHE_LINE: usize = 64;

/// Returns the alignment that `align` and `flags` select for objects of `size` bytes, which is not
/// 0. Returns `None` if `align` is invalid.
pub(super) fn align_of_objects(size: usize, align: usize, flags: c_uint) -> Option<usize> {
    // A type's size is a multiple of its alignment, so this alignment suits all types of this size.
    let natural = (1 << size.trailing_zeros()).min(ALIGN_NATURAL);
    let mut align = if align == 0 { natural } else { align };
    if !align.is_power_of_two() || align > MAX_ALIGN {
        return None;
    }
    if flags & HWCACHE_ALIGN != 0 {
        // As in the kernel, small objects share a cache line, and no small object crosses the
        // border of a line.
        let mut line = CACHE_LINE;
        while size <= line / 2 {
            line /= 2;
        }
        align = align.max(line);
    }
    Some(align)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alignments_for_sizes_and_flags() {
        for (size, align, flags, found) in [
            (1, 0, 0, Some(1)),
            (24, 0, 0, Some(8)),
            (48, 0, 0, Some(16)),
            (4096, 0, 0, Some(16)),
            (40, 32, 0, Some(32)),
            (40, 24, 0, None),
            (8, 128 << 10, 0, None),
            (100, 0, HWCACHE_ALIGN, Some(64)),
            (20, 0, HWCACHE_ALIGN, Some(32)),
            (3, 0, HWCACHE_ALIGN, Some(4)),
            (1, 256, HWCACHE_ALIGN, Some(256)),
        ] {
            let aligned = align_of_objects(size, align, flags);
            assert_eq!(aligned, found, "{size} {align}");
        }
    }
}
