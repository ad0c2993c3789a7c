//! Whether memory is asked to be in huge pages.

use core::sync::atomic::AtomicU8;
use core::sync::atomic::Ordering::Relaxed;

/// Granules that a node has mapped before its further memory gets huge pages: 16 MiB. A small
/// program stays small, also where the system gives huge pages to everybody.
const HUGE_FROM: u32 = 256;

/// When the arenas ask for huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum HugePages {
    /// For what a node maps beyond its first 16 MiB.
    Auto = 0,
    /// For no memory.
    Never = 1,
    /// For all memory.
    Always = 2,
}

static MODE: AtomicU8 = AtomicU8::new(HugePages::Auto as u8);

/// Says when the arenas ask for huge pages, for memory that they map from now on.
///
/// The kernel gives huge pages to who asks unless `/sys/kernel/mm/transparent_hugepage/enabled` is
/// `never`. Blocks that are mappings of their own are left to the system's setting.
pub fn set_huge_pages(mode: HugePages) {
    MODE.store(mode as u8, Relaxed);
}

/// What to ask for a node's next memory, when it has `mapped` granules.
pub(super) fn wanted(mapped: u32) -> Option<bool> {
    let mode = MODE.load(Relaxed);
    Some(mode == HugePages::Always as u8 || (mode == HugePages::Auto as u8 && mapped >= HUGE_FROM))
}
