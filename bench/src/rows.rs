//! Results: a row for each subject, cell and operation, with the median and the value of every
//! round.

use crate::machine::Machine;
use crate::runner::Cell;
use crate::scenarios::{Op, Scenario, Timing};
use crate::stats;
use crate::subjects::SubjectName;
use anyhow::{Context, Result};
use serde::Serialize;
use std::fs;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

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

    /// Returns whether the rounds differ so much that the median says little: their middle half is
    /// wider than a quarter of the median.
    pub fn is_doubtful(&self) -> bool {
        stats::spread(&self.rounds) > 0.25
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
    let (day, time) = now();
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
fn now() -> (String, String) {
    let seconds = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    let (year, month, day) = civil(seconds / 86_400);
    let second = seconds % 86_400;
    (
        format!("{year:04}-{month:02}-{day:02}"),
        format!(
            "{:02}:{:02}:{:02}",
            second / 3600,
            second / 60 % 60,
            second % 60
        ),
    )
}

/// Returns the Gregorian date of a day counted from 1970-01-01.
fn civil(day: u64) -> (u64, u64, u64) {
    // Counts in years that begin in March, so that a leap day is the last day of its year. 719 468
    // days lie between 0000-03-01 and 1970-01-01. 400 years have 146 097 days.
    let day = day + 719_468;
    let (era, day) = (day / 146_097, day % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 {
        (month + 3, 0)
    } else {
        (month - 9, 1)
    };
    (400 * era + year + next, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_become_dates() {
        assert_eq!(civil(0), (1970, 1, 1));
        assert_eq!(civil(11_016), (2000, 2, 29));
        assert_eq!(civil(11_017), (2000, 3, 1));
        assert_eq!(civil(20_453), (2025, 12, 31));
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
