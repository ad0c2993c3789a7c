//! The figures as a plot.

use super::{Row, Rows, Test};
use crate::figures::{Panels, Plot, Series};
use crate::{Name, Op, Scenario};
use anyhow::Result;

/// Draws cycles over the size: a panel for each operation with one thread, or with several threads
/// if the scenarios with one thread were not measured. Draws cycles over the batch if only the bulk
/// test was made.
///
/// # Errors
///
/// Fails if nothing was measured.
pub fn draw<N: Name>(rows: &Rows<N>) -> Result<String> {
    let plot = |title, x, series| Plot {
        title,
        x,
        y: "cycles per operation, median",
        log_x: true,
        log_y: true,
        series,
    };
    let is_sized = |&(test, _): &(Test, Op)| test != Test::Bulk;
    let is_single =
        |&(test, _): &(Test, Op)| matches!(test, Test::Of(Scenario::Single | Scenario::Pair));
    let mut operations = rows.operations();
    if !operations.iter().any(is_sized) {
        let title = "Allocating and freeing objects";
        return plot(title, "objects per call", by_batch(rows)).svg();
    }
    let has_single = operations.iter().any(is_single);
    operations.retain(|of| is_sized(of) && (!has_single || is_single(of)));
    let title = |(test, op): &(Test, Op)| format!("{}, {}", test.name(), op.name());
    let titles: Vec<_> = operations.iter().map(title).collect();
    let panels = operations.iter().zip(&titles);
    let plots = panels.map(|(&of, title)| plot(title, "bytes", by_size(rows, of)));
    Panels {
        columns: 3.min(titles.len()),
        plots: plots.collect(),
    }
    .svg()
}

/// Returns a line for each subject.
fn by_size<N: Name>(rows: &Rows<N>, of: (Test, Op)) -> Vec<Series> {
    let line = |subject: N| Series {
        name: subject.name().to_owned(),
        points: (rows.0.iter())
            .filter(|row| row.subject == subject && (row.scenario, row.op) == of)
            .map(|row| (row.size as f64, row.cycles))
            .collect(),
    };
    rows.subjects().into_iter().map(line).collect()
}

fn by_batch<N>(rows: &Rows<N>) -> Vec<Series> {
    let line = |name: &str, cycles: fn(&Row<N>) -> Option<f64>| Series {
        name: name.to_owned(),
        points: (rows.0.iter())
            .filter_map(|row| Some((row.batch? as f64, cycles(row)?)))
            .collect(),
    };
    vec![
        line("bulk calls", |row| Some(row.cycles)),
        line("single calls", |row| row.single_cycles),
    ]
}
