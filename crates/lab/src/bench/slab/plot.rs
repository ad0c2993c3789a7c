//! The figures as a plot.

use super::{Row, Test};
use crate::Scenario;
use crate::figures::{Plot, Series};
use anyhow::Result;

/// Draws lines over the size, or over the batch if only the bulk test was made.
pub fn draw(rows: &[Row]) -> Result<String> {
    let sized = rows.iter().any(|row| row.batch.is_none());
    Plot {
        title: "Allocating and freeing objects",
        x: if sized { "bytes" } else { "objects per call" },
        y: "cycles per operation, median",
        log_x: true,
        log_y: true,
        series: if sized { by_size(rows) } else { by_batch(rows) },
    }
    .svg()
}

/// Returns a line for each subject and operation with one thread, or with several threads if the
/// scenarios with one thread were not measured.
fn by_size(rows: &[Row]) -> Vec<Series> {
    let single = |row: &Row| matches!(row.scenario, Test::Of(Scenario::Single | Scenario::Pair));
    let has_single = rows.iter().any(single);
    let mut lines: Vec<Series> = Vec::new();
    for row in rows.iter().filter(|row| row.batch.is_none()) {
        if has_single && !single(row) {
            continue;
        }
        let name = name(row);
        let point = (row.size as f64, row.cycles);
        match lines.iter_mut().find(|line| line.name == name) {
            Some(line) => line.points.push(point),
            None => lines.push(Series {
                name,
                points: vec![point],
            }),
        }
    }
    lines
}

fn name(row: &Row) -> String {
    let (subject, op) = (row.subject.name(), row.op.name());
    match row.scenario {
        Test::Of(Scenario::Remote) => format!("{subject}, remote {op}"),
        Test::Of(Scenario::OneToN) => format!("{subject}, {op}, 1 to N"),
        Test::Of(Scenario::Concurrent | Scenario::ConcurrentPair) => {
            format!("{subject}, concurrent {op}")
        }
        Test::Of(Scenario::Single | Scenario::Pair) | Test::Bulk => format!("{subject}, {op}"),
    }
}

fn by_batch(rows: &[Row]) -> Vec<Series> {
    let line = |name: &str, cycles: fn(&Row) -> Option<f64>| Series {
        name: name.to_owned(),
        points: (rows.iter())
            .filter_map(|row| Some((row.batch? as f64, cycles(row)?)))
            .collect(),
    };
    vec![
        line("bulk calls", |row| Some(row.cycles)),
        line("single calls", |row| row.single_cycles),
    ]
}
