//! How large the block would be that an allocation returns.

use super::blocks::ALIGN;
use super::mode::{self, GUARD};
use super::plain::Ask;
use super::start;
use crate::slab::kmalloc;

/// Returns the largest size for which malloc would make the same block as for `size` bytes at a
/// multiple of `align`, a power of two. Returns 0 if no block is that large.
///
/// A block of this size has this many usable bytes. Between 575 KiB and 62 MiB it may have up to
/// 4032 more, which depends on its address, and just below 62 MiB up to 64 KiB more. Blocks that
/// are debugged or may be guarded end where the program's request ends, so the result is `size` for
/// them. A heap's scope is ignored.
///
/// Costs a few loads. The first call starts the allocator.
pub fn good_size(size: usize, align: usize) -> usize {
    const MOST: usize = isize::MAX as usize;
    let align = align.max(ALIGN);
    if size > MOST || align > MOST {
        return 0;
    }
    start::ready();
    if mode::samples() & GUARD != 0 {
        return size;
    }
    let ask = Ask {
        align,
        ..Ask::of(size)
    };
    if ask.class().is_some_and(kmalloc::ends_with_request) {
        return size;
    }
    ask.room().filter(|&room| room <= MOST).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::{COLOURED_ALIGN, GRANULE, HUGE};
    use crate::heap::{alloc_aligned, free, usable_size};
    use crate::sys;

    #[test]
    fn a_block_has_the_size_that_was_foretold() {
        let steps = |size: &usize| Some(size + 1 + size / 60);
        let sizes = core::iter::successors(Some(0), steps).take_while(|&size| size < 70 << 20);
        let sizes = sizes.chain([1, 4031, 4032, 4033, GRANULE].map(|below| HUGE - below));
        for size in sizes.flat_map(|size| [size, good_size(size, 1)]) {
            for align in [
                1,
                16,
                64,
                128,
                4096,
                GRANULE,
                4 * GRANULE,
                2 << 20,
                32 << 20,
                64 << 20,
            ] {
                let good = good_size(size, align);
                assert!(
                    good >= size && good_size(good, align) == good,
                    "{size} {align}"
                );
                let block = alloc_aligned(good, align);
                assert!(
                    !block.is_null() && (block as usize).is_multiple_of(align),
                    "{good} {align}"
                );
                // SAFETY: the block is new.
                let usable = unsafe { usable_size(block) };
                let more = usable - good;
                let varies =
                    align <= COLOURED_ALIGN && (kmalloc::MAX_CLASS_SIZE..HUGE).contains(&size);
                let at_border = good == HUGE - 1 && more < 2 * GRANULE;
                assert!(
                    more == 0 || varies && more < 4096 || at_border,
                    "{size} {align}: {usable}"
                );
                // SAFETY: the block is new.
                unsafe { free(block) };
                let block = alloc_aligned(size, align);
                // SAFETY: the block is new.
                assert!(unsafe { usable_size(block) } >= good, "{size} {align}");
                // SAFETY: the block is not used any more.
                unsafe { free(block) };
            }
        }
    }

    #[test]
    fn no_block_is_larger_than_half_of_all_addresses() {
        let most = isize::MAX as usize;
        for (size, align) in [(most, 1), (most + 1, 1), (usize::MAX, 1), (1, most + 1)] {
            assert_eq!(good_size(size, align), 0, "{size} {align}");
        }
        let whole = most & !(sys::page_size() - 1);
        assert_eq!(good_size(whole - 1, 1), whole);
    }
}
