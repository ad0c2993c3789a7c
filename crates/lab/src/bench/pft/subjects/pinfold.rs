//! `pinfold`: pages by the arena's own policies, without reference counts.

use super::table::Table;
use super::{Subject, ranges};
use crate::bench::pft::Kind;
use anyhow::Result;
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
        self.table.fill_by_arena(slice, self.zero)
    }

    fn release(&mut self) {
        self.table.close();
    }
}
