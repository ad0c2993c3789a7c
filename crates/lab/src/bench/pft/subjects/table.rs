//! A region made of an arena's pages: an array of pointers, like a page table.
//!
//! Before the measured time of each round, a new arena is made, and its pages are brought into
//! memory: all are allocated, written and freed. So each subject starts with the same free lists,
//! and with the memory that the previous subject left. Where that memory lies changes a figure by
//! some percent.

use super::{place, take, write_line};
use anyhow::{Context, Result, bail};
use pinfold::mempolicy::Mempolicy;
use pinfold::pages::Pages;
use std::ops::Range;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::Relaxed;

pub struct Table {
    arena: Option<Pages>,
    /// Null for a page that is not allocated.
    entries: Box<[AtomicPtr<u8>]>,
}

impl Table {
    /// Makes a region without an arena.
    pub fn new(pages: usize) -> Table {
        Table {
            arena: None,
            entries: (0..pages).map(|_| AtomicPtr::default()).collect(),
        }
    }

    /// Makes the arena, gives these ranges of places the local policy, and brings the pages in.
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

    /// Stores the page that `alloc` returns for each number of the slice, and writes to it.
    #[inline(always)]
    pub fn fill(
        &self,
        slice: Range<usize>,
        alloc: impl Fn(&Pages, usize) -> Option<NonNull<u8>>,
    ) -> Result<()> {
        let arena = self.arena.as_ref().context("no arena was made")?;
        for (number, entry) in slice.clone().zip(&self.entries[slice]) {
            let Some(page) = alloc(arena, number) else {
                bail!("the system has no more memory; give a smaller --memory");
            };
            // Relaxed: joining the threads at the end of the round publishes the entries.
            entry.store(page.as_ptr(), Relaxed);
            // SAFETY: `alloc` has just returned this page, so this thread owns it. Pages are
            // aligned.
            unsafe { write_line(page.as_ptr()) };
        }
        Ok(())
    }

    /// Fills a slice with pages by the arena's own policies.
    ///
    /// Not inlined, so that subjects without other policies run the same instructions, and so that
    /// the function's size is in the symbol table.
    #[inline(never)]
    pub fn fill_by_arena(&self, slice: Range<usize>, zero: bool) -> Result<()> {
        self.fill(slice, |arena, page| take(arena, place(page), zero))
    }

    /// Frees all pages to the arena.
    fn clear(&mut self) {
        let Some(arena) = &self.arena else { return };
        for entry in &mut self.entries {
            let page = std::mem::replace(entry.get_mut(), null_mut());
            if let Some(page) = NonNull::new(page) {
                // SAFETY: `fill` allocated the page from this arena, and the table's entry is null
                // now, so this is its only free.
                unsafe { arena.free(page) };
            }
        }
    }

    /// Frees the pages and drops the arena.
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
