//! Measures a cell for a subject: in this process, or in a process of its own that answers over a
//! pipe.

use crate::args::Setup;
use crate::child::Child;
use crate::subjects::{Glibc, Jemalloc, Mimalloc, Rpmalloc, Snmalloc, SubjectName, Tcmalloc};
use anyhow::Result;
use pinfold_lab::{
    CMalloc, MallocApi, PinfoldCache, PinfoldMalloc, Pool, Scenario, Subject, Timing, cache,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::rc::Rc;

/// Number of objects that one thread holds at a time, as in slab_test.
pub const OBJECTS: usize = 10_000;

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
    /// Measures one cell once.
    fn measure(&mut self, cell: Cell) -> Result<Vec<Timing>>;
}

impl Setup {
    /// Starts the threads.
    pub fn pool(self) -> Result<Rc<Pool>> {
        let limit = self.threads.map(|threads| threads as usize);
        Ok(Rc::new(Pool::new(limit, OBJECTS, self.warmup)?))
    }
}

/// A subject in this process.
struct Local<S> {
    pool: Rc<Pool>,
    make: fn(usize) -> Result<S>,
    by_size: BTreeMap<usize, S>,
}

impl<S: Subject> Runner for Local<S> {
    fn measure(&mut self, cell: Cell) -> Result<Vec<Timing>> {
        let subject = match self.by_size.get(&cell.size) {
            Some(subject) => subject,
            None => (self.by_size)
                .entry(cell.size)
                .or_insert((self.make)(cell.size)?),
        };
        cell.scenario.measure(&self.pool, subject, 0)
    }
}

impl Runner for Child {
    fn measure(&mut self, cell: Cell) -> Result<Vec<Timing>> {
        self.ask(cell)
    }
}

/// Makes the runner of a subject that needs no other environment than this process's.
pub fn local(name: SubjectName, pool: &Rc<Pool>) -> Box<dyn Runner> {
    match name {
        SubjectName::PinfoldCache => boxed(pool, |size| Ok(PinfoldCache(cache(size)?))),
        SubjectName::PinfoldMalloc => c::<PinfoldMalloc>(pool),
        SubjectName::Mimalloc => c::<Mimalloc>(pool),
        SubjectName::Jemalloc => c::<Jemalloc>(pool),
        SubjectName::Snmalloc => c::<Snmalloc>(pool),
        SubjectName::Rpmalloc => c::<Rpmalloc>(pool),
        SubjectName::Glibc => c::<Glibc>(pool),
        SubjectName::Tcmalloc | SubjectName::TcmallocPercpu => c::<Tcmalloc>(pool),
    }
}

fn c<A: MallocApi>(pool: &Rc<Pool>) -> Box<dyn Runner> {
    boxed(pool, |size| Ok(CMalloc::<A>::new(size)))
}

fn boxed<S: Subject + 'static>(pool: &Rc<Pool>, make: fn(usize) -> Result<S>) -> Box<dyn Runner> {
    Box::new(Local {
        pool: Rc::clone(pool),
        make,
        by_size: BTreeMap::new(),
    })
}
