//! Measures a cell for a subject: in this process, or in a process of its own that answers over a
//! pipe.

use crate::args::Setup;
use crate::child::Child;
use crate::subjects::{
    Glibc, Jemalloc, Mimalloc, Rpmalloc, Snmalloc, SubjectName, Tcmalloc, pools,
};
use anyhow::Result;
use pinfold_lab::{
    CMalloc, Measurable, PinfoldCache, PinfoldMalloc, Pool, Scenario, Timing, cache,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::rc::Rc;

/// Number of objects that one thread holds at a time, as in slab_test.
pub const OBJECTS: usize = 10_000;

/// The largest objects, in bytes, of which a thread holds [`OBJECTS`] at a time.
pub const LARGEST_OF_MANY: usize = 64 << 10;

/// A measurement: a scenario at a size.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
pub struct Cell {
    /// What is done with the objects.
    pub scenario: Scenario,
    /// Bytes of an object.
    pub size: usize,
}

/// A subject ready to be measured. A whole cell is one dynamic call, and nothing inside its loop
/// is.
pub trait Runner {
    fn measure(&mut self, cell: Cell) -> Result<Vec<Timing>>;
}

impl Setup {
    pub fn pool(self) -> Result<Rc<Pool>> {
        let limit = self.threads.map(|threads| threads as usize);
        Ok(Rc::new(Pool::new(limit, OBJECTS, self.warmup)?))
    }
}

pub struct Local {
    name: SubjectName,
    pool: Rc<Pool>,
    by_size: BTreeMap<usize, Box<dyn Measurable>>,
}

impl Local {
    /// `name` is a subject that needs no other environment than this process's.
    pub fn new(name: SubjectName, pool: &Rc<Pool>) -> Local {
        Local {
            name,
            pool: Rc::clone(pool),
            by_size: BTreeMap::new(),
        }
    }
}

impl Runner for Local {
    fn measure(&mut self, cell: Cell) -> Result<Vec<Timing>> {
        let subject = match self.by_size.entry(cell.size) {
            Entry::Occupied(made) => made.into_mut(),
            Entry::Vacant(place) => place.insert(make(self.name, cell.size, self.pool.len())?),
        };
        subject.measure(cell.scenario, &self.pool, 0)
    }
}

impl Runner for Child {
    fn measure(&mut self, cell: Cell) -> Result<Vec<Timing>> {
        self.ask(cell)
    }
}

/// Makes the subject for objects of `size` bytes, for this many threads.
fn make(name: SubjectName, size: usize, threads: usize) -> Result<Box<dyn Measurable>> {
    Ok(match name {
        SubjectName::PinfoldCache => Box::new(PinfoldCache(cache(size)?)),
        SubjectName::PinfoldMalloc => Box::new(CMalloc::<PinfoldMalloc>::new(size)),
        SubjectName::Mimalloc => Box::new(CMalloc::<Mimalloc>::new(size)),
        SubjectName::Jemalloc => Box::new(CMalloc::<Jemalloc>::new(size)),
        SubjectName::Snmalloc => Box::new(CMalloc::<Snmalloc>::new(size)),
        SubjectName::Rpmalloc => Box::new(CMalloc::<Rpmalloc>::new(size)),
        SubjectName::Glibc => Box::new(CMalloc::<Glibc>::new(size)),
        SubjectName::Tcmalloc | SubjectName::TcmallocPercpu => {
            Box::new(CMalloc::<Tcmalloc>::new(size))
        }
        // One thread holds the objects of all others in `one_to_n`, and seven more in pairs.
        _ => pools::make(name, size, (OBJECTS + 8) * threads, threads)?,
    })
}
