//! Which memory the arenas ask the kernel to back with huge pages.
//!
//! In huge pages, a program takes fewer page faults and fewer misses of the processor's address
//! caches. But a huge page takes 2 MiB as soon as one byte of it is written. A program may touch
//! only one page of a large block: a coroutine's stack, a sparse array, a buffer that stays almost
//! empty. In huge pages, such blocks take up to 512 times as much memory. But the owner of a small
//! object writes to it, so a slab of small objects uses all its pages.
//!
//! So by default, fresh memory for slabs of small objects comes in huge pages, once these slabs are
//! a large part of the program. This memory is in regions of its own, *dense* regions. All other
//! fresh memory is in *plain* regions. A dirty run serves every caller, wherever it lies, because
//! its pages are resident already. The arena asks for the same kind of pages throughout a region,
//! so that the region stays one mapping. The exception is long blocks in plain regions, while the
//! program fills such blocks (`pageblocks`).
//!
//! The arena asks for huge or small pages for each piece of memory that it maps, so the system's
//! default does not matter.

use super::{GRANULE, budget, held, kept, pageblocks};
use core::fmt;
use core::str::FromStr;
use core::sync::atomic::AtomicU8;
use core::sync::atomic::Ordering::Relaxed;

/// The environment variable that says when the arenas ask for huge pages: `never`, `auto` or
/// `always`.
pub const HUGE_PAGES_VARIABLE: &str = "PINFOLD_THP";

/// The granules of a huge page.
pub(super) const HUGE_PAGE: u32 = (2 << 20) / GRANULE as u32;

/// Bytes in use by slabs of small objects, from which on such slabs get huge pages: 32 MiB. A
/// node's last huge page may be almost empty. In a smaller program, that would be a larger part: on
/// a machine with one node, it is at most a sixteenth of the slabs.
const SLABS_FROM: usize = 32 << 20;
/// Slabs get huge pages only while the tightest limit is at least this many times the held memory.
/// A program that is near its limit needs each page.
const FAR: usize = 4;

/// When the arenas ask for huge pages.
///
/// ```
/// use pinfold::memory::HugePages;
///
/// assert_eq!("never".parse(), Ok(HugePages::Never));
/// assert_eq!(HugePages::Never.to_string(), "never");
/// assert!("sometimes".parse::<HugePages>().is_err());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum HugePages {
    /// For slabs of small objects (up to 4 KiB) beyond the first 32 MiB of them, and for blocks of
    /// 4 MiB and more while the program fills such blocks, as long as no memory limit is near.
    /// Never for the slabs of hardened caches, nor for a block that the program wants zeroed.
    Auto = 0,
    /// For no memory.
    Never = 1,
    /// For all memory.
    Always = 2,
}

impl HugePages {
    const ALL: [HugePages; 3] = [HugePages::Auto, HugePages::Never, HugePages::Always];

    const fn name(self) -> &'static str {
        match self {
            HugePages::Auto => "auto",
            HugePages::Never => "never",
            HugePages::Always => "always",
        }
    }

    /// Parses a word, as `from_str` does.
    fn parse(value: &[u8]) -> Option<HugePages> {
        let mut all = HugePages::ALL.into_iter();
        all.find(|mode| mode.name().as_bytes() == value)
    }
}

impl FromStr for HugePages {
    type Err = HugePagesError;

    /// Reads `never`, `auto` or `always`.
    ///
    /// # Errors
    ///
    /// [`HugePagesError`] for anything else.
    fn from_str(value: &str) -> Result<HugePages, HugePagesError> {
        HugePages::parse(value.as_bytes()).ok_or(HugePagesError)
    }
}

impl fmt::Display for HugePages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The error for a text that [`HugePages`] does not know.
///
/// ```
/// use pinfold::memory::{HugePages, HugePagesError};
///
/// assert_eq!("on".parse::<HugePages>(), Err(HugePagesError));
/// assert!(HugePagesError.to_string().contains("always"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HugePagesError;

impl fmt::Display for HugePagesError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not a choice of huge pages: give never, auto or always")
    }
}

impl core::error::Error for HugePagesError {}

static MODE: AtomicU8 = AtomicU8::new(HugePages::Auto as u8);

/// Sets when the arenas ask for huge pages, for memory that they map from now on. Replaces the
/// value of `PINFOLD_THP`. Costs one store.
///
/// The kernel gives no huge pages if `/sys/kernel/mm/transparent_hugepage/enabled` is `never`. A
/// block of [`HUGE`](super::HUGE) bytes or more is a mapping of its own. If `mode` does not ask for
/// huge pages for it, the system's setting decides.
///
/// ```
/// use pinfold::memory::{HugePages, set_huge_pages};
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
/// use pinfold::memory::{HugePages, huge_pages, set_huge_pages};
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

/// Reads the user's setting. Called at the start.
pub(super) fn read() {
    if let Some(mode) = pinfold_rseq::env::parsed(HUGE_PAGES_VARIABLE, HugePages::parse) {
        MODE.store(mode as u8, Relaxed);
    }
}

/// Returns whether memory of a region that is `dense`, or plain, should have huge pages.
pub(super) fn are_wanted(dense: bool) -> bool {
    match MODE.load(Relaxed) {
        mode if mode == HugePages::Auto as u8 => dense,
        mode => mode == HugePages::Always as u8,
    }
}

/// Returns whether the next slab of small objects should be in a dense region. Some loads.
pub(super) fn are_wanted_for_slabs() -> bool {
    kept::small_in_use() >= SLABS_FROM
        && MODE.load(Relaxed) == HugePages::Auto as u8
        && budget::is_far(held() as usize, FAR)
}

/// Returns whether the next long block of a plain region should have huge pages. Some loads.
pub(super) fn are_wanted_for_long_blocks() -> bool {
    MODE.load(Relaxed) == HugePages::Auto as u8
        && pageblocks::are_filled()
        && budget::is_far(held() as usize, FAR)
}

/// Returns whether a block that is a mapping of its own should have huge pages. `zeroed` says
/// whether the program wants it zeroed. Some loads.
pub(super) fn are_wanted_for_mapping(zeroed: bool) -> bool {
    are_wanted(false) || (!zeroed && are_wanted_for_long_blocks())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_dense_memory_gets_them_by_default() {
        assert!(!are_wanted(false) && are_wanted(true));
        set_huge_pages(HugePages::Always);
        assert!(are_wanted(false) && are_wanted(true));
        set_huge_pages(HugePages::Never);
        assert!(!are_wanted(false) && !are_wanted(true));
        set_huge_pages(HugePages::Auto);
    }

    #[test]
    fn only_the_three_words_are_understood() {
        for mode in HugePages::ALL {
            assert_eq!(mode.name().parse(), Ok(mode));
        }
        for text in ["", "Auto", "on", "madvise", "never "] {
            assert_eq!(text.parse::<HugePages>(), Err(HugePagesError), "{text}");
        }
    }
}
