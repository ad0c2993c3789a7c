//! A region made of an arena's pages: an array of pointers, as page tables are.
//!
//! The arena is made anew for each round, before the measured time, and its pages are brought in: all taken, written and given back. So
//! each subject's lists are alike, and each has the memory that the one before has left: the same, whose place is worth some percent.

use super::{place, write_line};
use anyhow::{Context, Result, bail};
use pinfold::mempolicy::Mempolicy;
use pinfold::pages::Pages;
use std::ops::Range;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::Relaxed;

pub struct Table {
    arena: Option<Pages>,
    /// Null where no page is.
    entries: Box<[AtomicPtr<u8>]>,
}

impl Table {
    /// A region without an arena.
    pub fn new(pages: usize) -> Table {
        Table {
            arena: None,
            entries: (0..pages).map(|_| AtomicPtr::default()).collect(),
        }
    }

    /// Makes the arena, in which these ranges of places have the local policy.
    pub fn open(&mut self, name: &str, ranges: &[Range<u64>]) -> Result<()> {
        let arena = Pages::new(name)?;
        for range in ranges {
            arena.set_policy(range.clone(), Some(&Mempolicy::local()))?;
        }
        self.arena = Some(arena);
        self.fill(0..self.entries.len(), |arena, page| {
            arena.alloc(place(page))
        })?;
        self.clear();
        Ok(())
    }

    /// Finds and writes the pages of a slice: those of the arena that `alloc` gives for their numbers.
    #[inline(always)]
    pub fn fill(
        &self,
        slice: Range<usize>,
        alloc: impl Fn(&Pages, usize) -> Option<NonNull<u8>>,
    ) -> Result<()> {
        let arena = self.arena.as_ref().context("no arena was made")?;
        for (number, entry) in slice.clone().zip(&self.entries[slice]) {
            let Some(page) = alloc(arena, number) else {
                bail!("the system gives no more memory; give a smaller --memory");
            };
            // The end of the round publishes it.
            entry.store(page.as_ptr(), Relaxed);
            // SAFETY: nobody else has it.
            unsafe { write_line(page.as_ptr()) };
        }
        Ok(())
    }

    /// Gives all pages back to the arena.
    fn clear(&mut self) {
        let Some(arena) = &self.arena else { return };
        for entry in &mut self.entries {
            let page = std::mem::replace(entry.get_mut(), null_mut());
            if let Some(page) = NonNull::new(page) {
                // SAFETY: of this arena, by `fill`, and no longer in the table.
                unsafe { arena.free(page) };
            }
        }
    }

    /// Gives the pages and the arena back.
    pub fn close(&mut self) {
        self.clear();
        self.arena = None;
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        self.close();
    }
}
