//! Results: a row for each subject, scenario, size and operation.

use super::Test;
use crate::stats::{self, distinct};
use crate::{Name, Op, Timing};
use serde::{Deserialize, Serialize};

/// One result.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Row<N> {
    /// The subject.
    pub subject: N,
    /// What was done with the objects.
    pub scenario: Test,
    /// Bytes of an object.
    pub size: usize,
    /// The timed operation.
    pub op: Op,
    /// Number of threads that took part.
    pub threads: usize,
    /// Number of objects of a bulk call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch: Option<usize>,
    /// Cycles per object: the median of the rounds.
    pub cycles: f64,
    /// Cycles per object by single calls, beside the bulk calls.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub single_cycles: Option<f64>,
    /// The cycles of each round.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rounds: Vec<f64>,
}

impl<N> Row<N> {
    /// Formats the cycles, with a mark if the rounds differ much. slab_test prints whole cycles.
    /// These figures are smaller, so a tenth matters.
    pub fn figure(&self) -> String {
        stats::marked(self.cycles, 1, &self.rounds)
    }
}

/// All results of a run.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(transparent)]
pub struct Rows<N>(pub Vec<Row<N>>);

impl<N> Default for Rows<N> {
    fn default() -> Rows<N> {
        Rows(Vec::new())
    }
}

impl<N: Name> Rows<N> {
    /// Adds the value of a round.
    pub fn add(&mut self, subject: N, test: Test, size: usize, timing: Timing, threads: usize) {
        let key = (subject, test, size, timing.op);
        let known =
            (self.0.iter()).position(|row| (row.subject, row.scenario, row.size, row.op) == key);
        let at = known.unwrap_or_else(|| {
            self.0.push(Row {
                subject,
                scenario: test,
                size,
                op: timing.op,
                threads,
                batch: None,
                cycles: f64::NAN,
                single_cycles: None,
                rounds: Vec::new(),
            });
            self.0.len() - 1
        });
        let row = &mut self.0[at];
        row.rounds.push(timing.cycles);
        row.cycles = stats::median(&row.rounds);
    }

    /// Returns the row of one subject, scenario, size and operation.
    pub fn find(&self, subject: N, test: Test, size: usize, op: Op) -> Option<&Row<N>> {
        let key = (subject, test, size, op);
        (self.0.iter()).find(|row| (row.subject, row.scenario, row.size, row.op) == key)
    }

    /// Returns the subjects, each once, in the order of the rows.
    pub fn subjects(&self) -> Vec<N> {
        distinct(self.0.iter().map(|row| row.subject))
    }

    /// Returns the scenarios and their operations, each pair once, in the order of the rows.
    pub fn operations(&self) -> Vec<(Test, Op)> {
        distinct(self.0.iter().map(|row| (row.scenario, row.op)))
    }

    /// Returns the sizes in ascending order.
    pub fn sizes(&self) -> Vec<usize> {
        let mut sizes = distinct(self.0.iter().map(|row| row.size));
        sizes.sort_unstable();
        sizes
    }
}
