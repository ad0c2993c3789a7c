//! The subjects: the ways to allocate the region's pages.

mod in_arena;
mod kernel;
mod table;

use super::{Kind, Memory, Policy};
use anyhow::Result;
use pinfold::pages::Pages;
use std::ops::Range;
use std::ptr::NonNull;

/// A region whose pages are allocated when they are first touched.
pub trait Subject: Sync {
    /// Makes the region, without pages.
    fn prepare(&mut self) -> Result<()>;

    /// Touches every page of a slice. Slices of different threads do not overlap.
    fn touch(&self, slice: Range<usize>) -> Result<()>;

    /// Frees all pages.
    fn release(&mut self);
}

crate::names! {
    /// The measured subjects, in the order of the tables.
    pub enum SubjectName {
        Kernel = "kernel",
        Counted = "counted",
        SharedCounted = "shared-counted",
        Pinfold = "pinfold",
    }
}

impl SubjectName {
    /// Returns the first subject of the table that runs the same instructions as this one, if that
    /// is another subject.
    ///
    /// Without a policy there is nothing to look up or to count. For shared memory, `counted` and
    /// `shared-counted` both count.
    pub fn same_code_as(self, (memory, policy): Kind) -> Option<SubjectName> {
        match (self, policy, memory) {
            (SubjectName::SharedCounted | SubjectName::Pinfold, Policy::System, _)
            | (SubjectName::SharedCounted, Policy::Range, Memory::Shmem) => {
                Some(SubjectName::Counted)
            }
            _ => None,
        }
    }
}

/// The subjects of a table.
pub type Contenders = Vec<(SubjectName, Box<dyn Subject>)>;

/// Number of regions in memory at once: the kernel's, and one that the other subjects use in turns.
pub const REGIONS: usize = 2;

/// Makes the subjects that this machine can run. `notes` gets a line for each one left out.
pub fn contenders(kind: Kind, pages: usize, zero: bool, notes: &mut Vec<String>) -> Contenders {
    let mut all: Contenders = Vec::new();
    match kernel::missing(kind) {
        None => {
            let kernel = kernel::Kernel::new(kind, pages);
            all.push((SubjectName::Kernel, Box::new(kernel)));
        }
        Some(why) => {
            let title = super::title(kind);
            notes.push(format!("{title}: kernel is left out: {why}."));
        }
    }
    for name in SubjectName::ALL.into_iter().skip(1) {
        let subject = in_arena::InArena::new(name, kind, pages, zero);
        all.push((name, Box::new(subject)));
    }
    all
}

/// Returns the bytes of a page.
pub fn page_size() -> usize {
    // SAFETY: sysconf takes an integer and touches no memory of this process.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).unwrap_or(4096)
}

/// Allocates a page of an arena: zeroed as the kernel's are, or with any content.
#[inline(always)]
fn take(arena: &Pages, place: u64, zero: bool) -> Option<NonNull<u8>> {
    if zero {
        arena.alloc_zeroed(place)
    } else {
        arena.alloc(place)
    }
}

/// Writes the first cache line of a page, as the program that touched it would.
///
/// # Safety
///
/// The caller owns the page, and `page` is aligned for a `u64`.
#[inline(always)]
unsafe fn write_line(page: *mut u8) {
    // SAFETY: the caller owns the page. The write is volatile so that the compiler does not drop
    // it.
    unsafe { page.cast::<u64>().write_volatile(u64::MAX) };
}

/// Number of ranges with a policy in shared memory.
const RANGES: usize = 16;

/// Returns the place of a page: twice its number, so that a range can end before the next one
/// begins and adjacent ranges are not joined.
#[inline(always)]
fn place(page: usize) -> u64 {
    2 * page as u64
}

/// Returns the places of each range that has a policy: one range for anonymous memory, several for
/// shared memory, none if the region has no policy.
fn ranges((memory, policy): Kind, pages: usize) -> Vec<Range<u64>> {
    let parts = match (policy, memory) {
        (Policy::System, _) => 0,
        (Policy::Range, Memory::Anon) => 1,
        (Policy::Range, Memory::Shmem) => RANGES,
    };
    let range = |part| place(part * pages / parts)..place((part + 1) * pages / parts);
    let ranges = (0..parts).map(range).filter(|range| !range.is_empty());
    ranges.map(|range| range.start..range.end - 1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_lies_in_one_range_and_ranges_do_not_touch() {
        for (memory, parts) in [(Memory::Anon, 1), (Memory::Shmem, RANGES)] {
            for pages in [1, 15, 16, 1000] {
                let ranges = ranges((memory, Policy::Range), pages);
                assert_eq!(ranges.len(), parts.min(pages));
                for page in 0..pages {
                    let has = |range: &&Range<u64>| range.contains(&place(page));
                    assert_eq!(ranges.iter().filter(has).count(), 1);
                }
                assert!(ranges.windows(2).all(|pair| pair[0].end < pair[1].start));
            }
            assert!(ranges((memory, Policy::System), 9).is_empty());
        }
    }
}
