//! Which memory the arenas ask the kernel to back with huge pages.
//!
//! A huge page takes 2 MiB as soon as one byte of it is written. In a small program, such a page
//! can be most of the memory. In a large program, huge pages save page faults and misses of the
//! processor's address caches. So by default an arena asks for small pages first, and for huge
//! pages when it has grown. The arena makes this request for each piece of memory that it maps, so
//! the system's default does not matter.

use crate::sys;
use core::sync::atomic::AtomicU8;
use core::sync::atomic::Ordering::Relaxed;

/// The environment variable that says when the arenas ask for huge pages: `never`, `auto` or
/// `always`.
pub const HUGE_PAGES_VARIABLE: &str = "PINFOLD_THP";

/// Granules that a node maps with small pages before it asks for huge pages: 64 MiB. So a small
/// program stays small, even if the system gives huge pages to all memory.
const HUGE_FROM: u32 = 1024;

/// Blocks of at least this many bytes get huge pages, even if the node has mapped little. The owner
/// of a large block probably uses all of it. Small blocks are less likely to fill a huge page.
const MIN_BLOCK: usize = 4 << 20;

/// When the arenas ask for huge pages.
///
/// ```
/// use pinfold::arena::HugePages;
///
/// assert_eq!(HugePages::parse(b"never"), Some(HugePages::Never));
/// assert_eq!(HugePages::parse(b"sometimes"), None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum HugePages {
    /// For memory that a node maps beyond its first 64 MiB, and for blocks of 4 MiB or more.
    Auto = 0,
    /// For no memory.
    Never = 1,
    /// For all memory.
    Always = 2,
}

impl HugePages {
    /// Reads `never`, `auto` or `always`. Returns `None` for anything else.
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
/// value of `PINFOLD_THP`. Costs one store.
///
/// The kernel gives no huge pages if `/sys/kernel/mm/transparent_hugepage/enabled` is `never`. For
/// a block that is allocated with [`HUGE`](super::HUGE) bytes or more, a mapping of its own, the
/// system's setting decides.
///
/// ```
/// use pinfold::arena::{HugePages, set_huge_pages};
///
/// set_huge_pages(HugePages::Never);
/// ```
pub fn set_huge_pages(mode: HugePages) {
    super::init();
    MODE.store(mode as u8, Relaxed);
}

/// Returns when the arenas ask for huge pages. Costs one load.
///
/// ```
/// use pinfold::arena::{HugePages, huge_pages, set_huge_pages};
///
/// set_huge_pages(HugePages::Always);
/// assert_eq!(huge_pages(), HugePages::Always);
/// ```
pub fn huge_pages() -> HugePages {
    super::init();
    match MODE.load(Relaxed) {
        mode if mode == HugePages::Never as u8 => HugePages::Never,
        mode if mode == HugePages::Always as u8 => HugePages::Always,
        _ => HugePages::Auto,
    }
}

/// Asks for huge pages for a block of `size` bytes at `start` if the block is long enough. Called
/// for a block with memory that has no pages yet. Costs a system call for a long block.
pub(super) fn want_for_block(start: *mut u8, size: usize) {
    if size < MIN_BLOCK || MODE.load(Relaxed) != HugePages::Auto as u8 {
        return;
    }
    // Asks for the whole block, so that the block stays one mapping. The kernel can move only one
    // mapping at a time.
    // SAFETY: the range is the block, which has whole pages. The request changes no content.
    unsafe { sys::prefer_huge(start, size) };
}

/// Reads the user's setting. Called at the start.
pub(super) fn read() {
    if let Some(mode) = pinfold_rseq::env::parsed(HUGE_PAGES_VARIABLE, HugePages::parse) {
        MODE.store(mode as u8, Relaxed);
    }
}

/// Returns whether a node's next memory should have huge pages, if the node has `mapped` granules.
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
