//! Which memory the arenas ask the kernel to back with huge pages.
//!
//! A huge page takes 2 MiB as soon as one byte of it is written. In a small program that is most of
//! its memory. In a large one it saves page faults and misses of the processor's address caches. So
//! by default an arena asks for ordinary pages first, and for huge pages when it has grown. It asks
//! for one or the other each time it maps a step, so that the system's default does not matter.

use crate::sys;
use core::sync::atomic::AtomicU8;
use core::sync::atomic::Ordering::Relaxed;

/// The environment variable that says when: `never`, `auto` or `always`.
pub const HUGE_PAGES_VARIABLE: &str = "PINFOLD_THP";

/// Granules that a node has mapped before its further memory gets huge pages: 64 MiB. A small
/// program stays small, also where the system gives huge pages to all memory.
const HUGE_FROM: u32 = 1024;

/// A block of at least so many bytes gets huge pages, whatever the node has mapped: its owner is
/// likelier to use all of it than the owners of small blocks are to fill a huge page.
const BLOCK_LEAST: usize = 4 << 20;

/// When the arenas ask for huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum HugePages {
    /// For what a node maps beyond its first 64 MiB, and for blocks of 4 MiB and more.
    Auto = 0,
    /// For no memory.
    Never = 1,
    /// For all memory.
    Always = 2,
}

impl HugePages {
    /// Reads `never`, `auto` or `always`; nothing else is understood.
    pub fn parse(value: &[u8]) -> Option<HugePages> {
        match value {
            b"auto" => Some(HugePages::Auto),
            b"never" => Some(HugePages::Never),
            b"always" => Some(HugePages::Always),
            _ => None,
        }
    }
}

static MODE: AtomicU8 = AtomicU8::new(HugePages::Auto as u8);

/// Sets when the arenas ask for huge pages, for memory that they map from now on. Replaces the
/// value of `PINFOLD_THP`.
///
/// The kernel gives the huge pages that it is asked for, unless
/// `/sys/kernel/mm/transparent_hugepage/enabled` is `never`. Blocks that are mappings of their own,
/// from [`HUGE`](super::HUGE) bytes on, are left to the system's setting.
///
/// ```
/// use pinfold::page::{HugePages, set_huge_pages};
///
/// set_huge_pages(HugePages::Never);
/// ```
pub fn set_huge_pages(mode: HugePages) {
    super::init();
    MODE.store(mode as u8, Relaxed);
}

/// Asks for huge pages for a block of `size` bytes at `start`, some of it fresh, if the block is
/// long enough to fill some. A system call for a long block.
pub(super) fn want_for_block(start: *mut u8, size: usize) {
    if size < BLOCK_LEAST || MODE.load(Relaxed) != HugePages::Auto as u8 {
        return;
    }
    // All of it, so that the block stays one mapping, which the kernel can move.
    // SAFETY: whole pages of the block.
    unsafe { sys::prefer_huge(start, size) };
}

/// Reads the user's setting. For the start.
pub(super) fn read() {
    let mut value = [0; 8];
    let value = pinfold_rseq::env::read(HUGE_PAGES_VARIABLE, &mut value);
    if let Some(mode) = value.and_then(HugePages::parse) {
        MODE.store(mode as u8, Relaxed);
    }
}

/// Whether a node's next memory is to be in huge pages, when the node has `mapped` granules.
pub(super) fn are_wanted(mapped: u32) -> bool {
    match MODE.load(Relaxed) {
        mode if mode == HugePages::Auto as u8 => mapped >= HUGE_FROM,
        mode => mode == HugePages::Always as u8,
    }
}

#[cfg(test)]
mod tests {
    use super::{HugePages, are_wanted, set_huge_pages};

    #[test]
    fn small_programs_get_none() {
        assert!(!are_wanted(0) && !are_wanted(1023) && are_wanted(1024));
        set_huge_pages(HugePages::Always);
        assert!(are_wanted(0));
        set_huge_pages(HugePages::Never);
        assert!(!are_wanted(100_000));
        set_huge_pages(HugePages::Auto);
    }

    #[test]
    fn only_the_three_words_are_understood() {
        assert_eq!(HugePages::parse(b"always"), Some(HugePages::Always));
        for text in ["", "Auto", "on", "madvise", "never "] {
            assert_eq!(HugePages::parse(text.as_bytes()), None, "{text}");
        }
    }
}
