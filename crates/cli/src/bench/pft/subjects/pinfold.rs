//! `pinfold`: pages by the arena's own policies, which nobody counts.

use super::table::Table;
use super::{Subject, place, ranges};
use crate::bench::pft::Kind;
use anyhow::Result;
use pinfold::mempolicy::Mempolicy;
use std::ops::Range;

pub struct Pinfold(Table);

impl Pinfold {
    pub fn new(kind: Kind, pages: usize) -> Result<Pinfold> {
        let table = Table::new("pft-pinfold", pages)?;
        for range in ranges(kind, pages) {
            table.arena.set_policy(range, Some(&Mempolicy::local()))?;
        }
        Ok(Pinfold(table))
    }
}

impl Subject for Pinfold {
    fn touch(&self, slice: Range<usize>) -> Result<()> {
        let arena = &self.0.arena;
        self.0.fill(slice, |page| arena.alloc_zeroed(place(page)))
    }

    fn release(&mut self) {
        self.0.clear();
    }
}
