//! Measures a cell for a subject: in this process, or in a process of its own that answers over a
//! pipe.

use crate::child::Child;
use crate::pool::Pool;
use crate::scenarios::{Scenario, Timing};
use crate::subjects::{
    CMalloc, Glibc, Jemalloc, Mimalloc, PinfoldCache, PinfoldMalloc, Rpmalloc, Snmalloc, Subject,
    SubjectName, Tcmalloc,
};
use anyhow::Result;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

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

/// A subject in this process.
struct Local<S> {
    pool: Rc<Pool>,
    by_size: BTreeMap<usize, Arc<S>>,
}

impl<S: Subject> Local<S> {
    fn boxed(pool: &Rc<Pool>) -> Box<dyn Runner> {
        Box::new(Local::<S> {
            pool: Rc::clone(pool),
            by_size: BTreeMap::new(),
        })
    }
}

impl<S: Subject> Runner for Local<S> {
    fn measure(&mut self, cell: Cell) -> Result<Vec<Timing>> {
        let subject = match self.by_size.get(&cell.size) {
            Some(subject) => subject,
            None => (self.by_size)
                .entry(cell.size)
                .or_insert(Arc::new(S::new(cell.size)?)),
        };
        Ok(cell.scenario.measure(&self.pool, subject))
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
        SubjectName::PinfoldCache => Local::<PinfoldCache>::boxed(pool),
        SubjectName::PinfoldMalloc => Local::<CMalloc<PinfoldMalloc>>::boxed(pool),
        SubjectName::Mimalloc => Local::<CMalloc<Mimalloc>>::boxed(pool),
        SubjectName::Jemalloc => Local::<CMalloc<Jemalloc>>::boxed(pool),
        SubjectName::Snmalloc => Local::<CMalloc<Snmalloc>>::boxed(pool),
        SubjectName::Rpmalloc => Local::<CMalloc<Rpmalloc>>::boxed(pool),
        SubjectName::Glibc => Local::<CMalloc<Glibc>>::boxed(pool),
        SubjectName::Tcmalloc | SubjectName::TcmallocPercpu => {
            Local::<CMalloc<Tcmalloc>>::boxed(pool)
        }
    }
}
