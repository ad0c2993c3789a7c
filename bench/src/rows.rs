//! Results: a row for each subject, cell and operation, with the median and the value of every
//! round.

use crate::machine::Machine;
use crate::runner::Cell;
use crate::subjects::SubjectName;
use anyhow::{Context, Result};
use jiff::Timestamp;
use pinfold_lab::{Op, Scenario, Timing, stats};
use serde::Serialize;
use std::fs;
use std::path::PathBuf;

/// One result.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub subject: SubjectName,
    pub scenario: Scenario,
    pub size: usize,
    pub op: Op,
    pub threads: usize,
    /// The median over the rounds.
    pub cycles: f64,
    /// The value of each round.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rounds: Vec<f64>,
}

impl Row {
    /// Returns the row as printed by `--json`.
    pub fn without_rounds(&self) -> Row {
        Row {
            rounds: Vec::new(),
            ..self.clone()
        }
    }

    /// Returns whether the rounds differ so much that the median says little.
    pub fn is_doubtful(&self) -> bool {
        stats::is_doubtful(&self.rounds)
    }
}

/// All results of a run.
#[derive(Debug)]
pub struct Rows(Vec<Row>);

impl Rows {
    /// Makes an empty set of results.
    pub fn new() -> Rows {
        Rows(Vec::new())
    }

    /// Adds the value of a round.
    pub fn add(&mut self, subject: SubjectName, cell: Cell, timing: Timing, threads: usize) {
        let known = (self.0.iter()).position(|row| {
            (row.subject, row.scenario, row.size, row.op)
                == (subject, cell.scenario, cell.size, timing.op)
        });
        let index = known.unwrap_or_else(|| {
            self.0.push(Row {
                subject,
                scenario: cell.scenario,
                size: cell.size,
                op: timing.op,
                threads,
                cycles: f64::NAN,
                rounds: Vec::new(),
            });
            self.0.len() - 1
        });
        let row = &mut self.0[index];
        row.rounds.push(timing.cycles);
        row.cycles = round_to_hundredth(stats::median(&row.rounds));
    }

    /// Returns all rows.
    pub fn rows(&self) -> &[Row] {
        &self.0
    }

    /// Returns the row of one subject, scenario, size and operation.
    pub fn find(
        &self,
        subject: SubjectName,
        scenario: Scenario,
        size: usize,
        op: Op,
    ) -> Option<&Row> {
        (self.0.iter()).find(|row| {
            (row.subject, row.scenario, row.size, row.op) == (subject, scenario, size, op)
        })
    }

    /// Returns the subjects, in the order of their declaration.
    pub fn subjects(&self) -> Vec<SubjectName> {
        let mut subjects: Vec<_> = self.0.iter().map(|row| row.subject).collect();
        subjects.sort_unstable();
        subjects.dedup();
        subjects
    }

    /// Returns the sizes in ascending order.
    pub fn sizes(&self) -> Vec<usize> {
        let mut sizes: Vec<_> = self.0.iter().map(|row| row.size).collect();
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }
}

fn round_to_hundredth(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

/// The object that `--json` prints.
#[derive(Serialize)]
struct Output<'a, R> {
    bench: &'a str,
    machine: &'a Machine,
    rows: &'a [R],
}

/// The content of a saved file.
#[derive(Serialize)]
struct Saved<'a, R> {
    /// The command line, without the program's path.
    command: String,
    /// Date and time in UTC.
    date: String,
    #[serde(flatten)]
    output: Output<'a, R>,
}

/// Prints one JSON object.
pub fn print_json<R: Serialize>(bench: &str, machine: &Machine, rows: &[R]) -> Result<()> {
    let output = Output {
        bench,
        machine,
        rows,
    };
    println!("{}", serde_json::to_string(&output)?);
    Ok(())
}

/// Writes `rows` to a file in `bench/runs/<date>-<kind>/`, named by the time of day. Returns its
/// path.
pub fn save<R: Serialize>(kind: &str, machine: &Machine, rows: &[R]) -> Result<PathBuf> {
    let (day, time) = date_and_time(Timestamp::now());
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let saved = Saved {
        command: format!("pinfold-bench {}", arguments.join(" ")),
        date: format!("{day} {time}"),
        output: Output {
            bench: kind,
            machine,
            rows,
        },
    };
    // `cargo run` sets the package's folder. Otherwise the file goes below the current folder.
    let package = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| "bench".into());
    let directory = PathBuf::from(package)
        .join("runs")
        .join(format!("{day}-{kind}"));
    fs::create_dir_all(&directory).with_context(|| format!("cannot make {directory:?}"))?;
    let path = directory.join(format!("{}.json", time.replace(':', "")));
    // One row per line, so that the files of two runs can be compared.
    let text = serde_json::to_string(&saved)?.replace("{\"subject\"", "\n{\"subject\"");
    fs::write(&path, text + "\n").with_context(|| format!("cannot write {path:?}"))?;
    Ok(path)
}

/// Returns the date and the time of day, in UTC.
fn date_and_time(now: Timestamp) -> (String, String) {
    (
        now.strftime("%F").to_string(),
        now.strftime("%T").to_string(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_become_dates_and_times() {
        let text = |second| {
            let (date, time) = date_and_time(Timestamp::from_second(second).unwrap());
            format!("{date} {time}")
        };
        assert_eq!(text(0), "1970-01-01 00:00:00");
        assert_eq!(text(11_017 * 86_400 - 1), "2000-02-29 23:59:59");
        assert_eq!(text(11_017 * 86_400), "2000-03-01 00:00:00");
        assert_eq!(text(20_453 * 86_400 + 3_661), "2025-12-31 01:01:01");
    }

    #[test]
    fn json_rows_have_the_documented_fields() {
        let mut rows = Rows::new();
        let cell = Cell {
            scenario: Scenario::OneToN,
            size: 64,
        };
        for cycles in [5.0, 7.0, 6.0] {
            let op = Op::Alloc;
            rows.add(SubjectName::TcmallocPercpu, cell, Timing { op, cycles }, 2);
        }
        assert_eq!(
            serde_json::to_string(&rows.rows()[0].without_rounds()).unwrap(),
            r#"{"subject":"tcmalloc-percpu","scenario":"one_to_n","size":64,"op":"alloc","threads":2,"cycles":6.0}"#
        );
    }
}
