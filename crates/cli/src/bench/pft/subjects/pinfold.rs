//! `pinfold`: pages by the arena's own policies, without reference counts.

use super::table::Table;
use super::{Subject, place, ranges, take};
use crate::bench::pft::Kind;
use anyhow::Result;
use pinfold::pages::Pages;
use std::ops::Range;

pub struct Pinfold {
    table: Table,
    ranges: Vec<Range<u64>>,
    zero: bool,
}

impl Pinfold {
    pub fn new(kind: Kind, pages: usize, zero: bool) -> Pinfold {
        Pinfold {
            table: Table::new(pages),
            ranges: ranges(kind, pages),
            zero,
        }
    }
}

impl Subject for Pinfold {
    fn prepare(&mut self) -> Result<()> {
        self.table.open("pft-pinfold", &self.ranges)
    }

    fn touch(&self, slice: Range<usize>) -> Result<()> {
        let alloc = |arena: &Pages, page| take(arena, place(page), self.zero);
        self.table.fill(slice, alloc)
    }

    fn release(&mut self) {
        self.table.close();
    }
}
