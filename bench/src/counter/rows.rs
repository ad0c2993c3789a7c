//! Results: a row for each subject and operation.

use super::subjects::Name;
use pinfold_lab::stats;
use serde::Serialize;

/// The operation of a row.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Op {
    /// Adding 1.
    #[default]
    Add,
    /// Summing the shards.
    Sum,
    /// The memory of counters.
    Memory,
    /// A ratio compared with its limit.
    Goal,
}

/// One result. Fields that do not apply to the operation are absent.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Row {
    pub subject: &'static str,
    pub op: Op,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// Whether another thread summed all the time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub summing: Option<bool>,
    /// Number of shards summed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shards: Option<usize>,
    /// Number of counters: added to in turn, summed one after the other, or made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub counters: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ns_per_op: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cycles: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// `measured`, or `computed` from a formula.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub how: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub goal: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub met: Option<bool>,
    /// The result of each round: nanoseconds per add, or cycles per sum.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rounds: Vec<f64>,
}

impl Row {
    pub fn new(subject: &'static str, op: Op) -> Row {
        Row {
            subject,
            op,
            ..Row::default()
        }
    }

    /// Computes nanoseconds and cycles from the rounds, rounded to a hundredth.
    pub fn settle(&mut self, hertz: f64) {
        let cycles_per_ns = hertz / 1e9;
        let median = stats::median(&self.rounds);
        let (ns, cycles) = match self.op {
            Op::Sum => (median / cycles_per_ns, median),
            _ => (median, median * cycles_per_ns),
        };
        let round = |value: f64| (value * 100.0).round() / 100.0;
        (self.ns_per_op, self.cycles) = (Some(round(ns)), Some(round(cycles)));
    }

    /// Formats the cycles and the nanoseconds, with a mark if they are doubtful.
    pub fn figure(&self) -> String {
        match (self.cycles, self.ns_per_op) {
            (Some(cycles), Some(ns)) => {
                format!("{} ({ns:.2})", stats::marked(cycles, 1, &self.rounds))
            }
            _ => "-".to_owned(),
        }
    }

    /// Returns whether the rounds differ so much that the median says little.
    pub fn is_doubtful(&self) -> bool {
        stats::is_doubtful(&self.rounds)
    }
}

/// Returns the row of a subject's adds to `counters` counters in turn, without a summing thread.
pub fn adds(rows: &[Row], subject: Name, threads: usize, counters: usize) -> Option<&Row> {
    rows.iter().find(|row| {
        (row.subject, row.op, row.summing) == (subject.name(), Op::Add, None)
            && (row.threads, row.counters) == (Some(threads), Some(counters))
    })
}

/// Returns the cycles of a subject's adds to one counter.
pub fn add(rows: &[Row], subject: Name, threads: usize) -> Option<f64> {
    adds(rows, subject, threads, 1)?.cycles
}

pub fn sum(rows: &[Row], subject: &str) -> Option<f64> {
    let row = rows
        .iter()
        .find(|row| (row.subject, row.op) == (subject, Op::Sum));
    row?.cycles
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_rows_have_only_the_fields_that_apply() {
        let mut row = Row::new(Name::PinfoldEvent.name(), Op::Add);
        (row.threads, row.counters) = (Some(2), Some(1));
        row.rounds = vec![2.0, 1.0, 3.0];
        row.settle(2.5e9);
        assert_eq!(
            serde_json::to_string(&row).unwrap(),
            r#"{"subject":"pinfold-event","op":"add","threads":2,"counters":1,"ns_per_op":2.0,"cycles":5.0,"rounds":[2.0,1.0,3.0]}"#
        );
        assert_eq!(add(&[row], Name::PinfoldEvent, 2), Some(5.0));
    }
}
