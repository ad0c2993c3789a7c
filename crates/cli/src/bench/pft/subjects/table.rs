//! A region made of an arena's pages: an array of pointers, as page tables are.

use super::write_line;
use anyhow::{Result, bail};
use pinfold::pages::Pages;
use std::ops::Range;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::Relaxed;

pub struct Table {
    pub arena: Pages,
    /// Null where no page is.
    entries: Box<[AtomicPtr<u8>]>,
}

impl Table {
    pub fn new(name: &str, pages: usize) -> Result<Table> {
        Ok(Table {
            arena: Pages::new(name)?,
            entries: (0..pages).map(|_| AtomicPtr::default()).collect(),
        })
    }

    /// Finds and writes the pages of a slice: those that `alloc` gives for their numbers, zeroed, from this table's arena.
    #[inline(always)]
    pub fn fill(
        &self,
        slice: Range<usize>,
        alloc: impl Fn(usize) -> Option<NonNull<u8>>,
    ) -> Result<()> {
        for (number, entry) in slice.clone().zip(&self.entries[slice]) {
            let Some(page) = alloc(number) else {
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
    pub fn clear(&mut self) {
        for entry in &mut self.entries {
            let page = std::mem::replace(entry.get_mut(), null_mut());
            if let Some(page) = NonNull::new(page) {
                // SAFETY: of this arena, by `fill`, and no longer in the table.
                unsafe { self.arena.free(page) };
            }
        }
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        self.clear();
    }
}
