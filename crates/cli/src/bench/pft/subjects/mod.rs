//! Who finds the pages.

mod counted;
mod kernel;
mod pinfold;
mod table;

use super::{Kind, Memory, Policy};
use ::pinfold::pages::Pages;
use anyhow::Result;
use serde::Serialize;
use std::ops::Range;
use std::ptr::NonNull;

/// A region of pages that are found when they are touched first.
pub trait Subject: Sync {
    /// Makes the region, of whose pages none is there.
    fn prepare(&mut self) -> Result<()>;

    /// Touches every page of a slice; slices of different threads do not overlap.
    fn touch(&self, slice: Range<usize>) -> Result<()>;

    /// Gives all pages back.
    fn release(&mut self);
}

/// What is measured, in the order of the tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SubjectName {
    Kernel,
    Counted,
    Pinfold,
}

impl SubjectName {
    pub const ALL: [SubjectName; 3] = [
        SubjectName::Kernel,
        SubjectName::Counted,
        SubjectName::Pinfold,
    ];

    pub fn name(self) -> &'static str {
        match self {
            SubjectName::Kernel => "kernel",
            SubjectName::Counted => "counted",
            SubjectName::Pinfold => "pinfold",
        }
    }
}

/// The subjects of a table.
pub struct Contenders(pub Vec<(SubjectName, Box<dyn Subject>)>);

impl Contenders {
    /// How many regions are in memory at once: the kernel's, and the one that the arenas have in turns.
    pub const REGIONS: usize = 2;

    /// Those that can be had; `notes` says who is left out, and why.
    pub fn new(kind: Kind, pages: usize, zero: bool, notes: &mut Vec<String>) -> Contenders {
        let mut all: Vec<(_, Box<dyn Subject>)> = vec![
            (
                SubjectName::Counted,
                Box::new(counted::Counted::new(kind, pages, zero)),
            ),
            (
                SubjectName::Pinfold,
                Box::new(pinfold::Pinfold::new(kind, pages, zero)),
            ),
        ];
        match kernel::missing(kind) {
            None => {
                let kernel = Box::new(kernel::Kernel::new(kind, pages));
                all.insert(0, (SubjectName::Kernel, kernel));
            }
            Some(why) => notes.push(format!(
                "{}: kernel is left out: {why}.",
                super::title(kind)
            )),
        }
        Contenders(all)
    }
}

/// Bytes in a page.
pub fn page_size() -> usize {
    // SAFETY: no preconditions.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).unwrap_or(4096)
}

/// A page of an arena, zeroed as the kernel's are, or as it comes.
#[inline(always)]
fn take(arena: &Pages, place: u64, zero: bool) -> Option<NonNull<u8>> {
    if zero {
        arena.alloc_zeroed(place)
    } else {
        arena.alloc(place)
    }
}

/// Writes the first cache line of a page, as whoever touched it wanted to.
///
/// # Safety
///
/// The page is the caller's.
#[inline(always)]
unsafe fn write_line(page: *mut u8) {
    // SAFETY: the caller's promise; volatile, so that it is not left out.
    unsafe { page.cast::<u64>().write_volatile(u64::MAX) };
}

/// Where the policies of shared memory hold: so many ranges.
const RANGES: usize = 16;

/// The place of a page: its number doubled, so that ranges can end before the next one begins and do not become one.
#[inline(always)]
fn place(page: usize) -> u64 {
    2 * page as u64
}

/// The places of each range that has a policy: one for all anonymous memory, several in shared memory, none without a policy.
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
    fn every_page_is_in_a_range_and_ranges_stay_apart() {
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
