//! The results for people: a table for each combination, and a plot.

use super::{Args, Row, SubjectName, designs};
use crate::figures::{Bars, Plot, Series, rounds};
use crate::output::{Table, figure};
use anyhow::Result;

/// Formats the tables.
pub fn text(args: &Args, rows: &[Row]) -> String {
    let workers = if args.processes.is_some() {
        "processes"
    } else {
        "threads"
    };
    let mut text = format!(
        "Medians of {} of {} s. ns per add and its subtraction; user and sys are the CPU time, with that of a summing thread.\n",
        rounds(args.rounds),
        args.seconds,
    );
    if rows.iter().any(|row| row.subject == SubjectName::Pinfold) {
        text += &format!(
            "pinfold chooses its batch itself, and may drift by {} pages.\n",
            designs::max_drift()
        );
    }
    for cell in cells(rows) {
        text += &format!(
            "\n{} {workers}, {}\n{}",
            cell[0].threads,
            kind(&cell[0]),
            table(cell)
        );
    }
    text
}

/// Splits the rows by combination. Each combination has one row for every subject.
fn cells(rows: &[Row]) -> impl Iterator<Item = &[Row]> {
    rows.chunks(subjects(rows).count().max(1))
}

fn kind(row: &Row) -> String {
    let mmap = if row.mmap { "mmap" } else { "no mmap" };
    let summing = if row.summing { "summing" } else { "no sums" };
    let hands = if row.hand_over { "hand-over, " } else { "" };
    format!("amount {}, {hands}{mmap}, {summing}", row.amount)
}

fn table(cell: &[Row]) -> Table {
    let baseline = cell
        .iter()
        .find(|row| row.subject == SubjectName::SpinlockBatch);
    let ratio = |row: &Row| Some(row.ns_per_op / baseline?.ns_per_op);
    let dash = || "-".to_owned();
    Table::of(cell)
        .column("subject", |row| row.subject)
        .column("batch", |row| {
            row.batch.map_or_else(dash, |batch| batch.to_string())
        })
        .column("bound", |row| {
            row.error_bound.map_or_else(dash, |bound| bound.to_string())
        })
        .column("ns", |row| format!("{:.1}", row.ns_per_op))
        .column("user ns", |row| format!("{:.1}", row.user_ns_per_op))
        .column("sys ns", |row| format!("{:.1}", row.sys_ns_per_op))
        .column("of spinlock-batch", |row| figure(ratio(row), 2))
        .column("sums", |row| row.sums)
        .column("largest error of a sum", |row| {
            row.sum_error_max
                .map_or_else(dash, |error| error.to_string())
        })
        .table()
}

/// Draws bars by combination, or lines over the number of workers if there are several.
pub fn plot(args: &Args, rows: &[Row]) -> Result<String> {
    let (title, y) = (
        "Add, mmap, munmap, subtract",
        "ns per add and its subtraction, median",
    );
    if args.threads.len() > 1 {
        let plot = Plot {
            title,
            x: if args.processes.is_some() {
                "processes"
            } else {
                "threads"
            },
            y,
            log_x: true,
            log_y: true,
            series: lines(rows),
        };
        return plot.svg();
    }
    let keys: Vec<String> = cells(rows).map(|cell| kind(&cell[0])).collect();
    let series = subjects(rows).map(|subject| Series {
        name: subject.name().to_owned(),
        points: (rows.iter().filter(|row| row.subject == subject).enumerate())
            .map(|(key, row)| (key as f64, row.ns_per_op))
            .collect(),
    });
    let series = series.collect();
    Bars {
        title,
        y,
        log_y: true,
        keys,
        series,
    }
    .svg()
}

/// Returns a line for each subject in each kind of combination.
fn lines(rows: &[Row]) -> Vec<Series> {
    let mut kinds: Vec<String> = rows.iter().map(kind).collect();
    kinds.sort();
    kinds.dedup();
    let each = kinds
        .iter()
        .flat_map(|of| subjects(rows).map(move |subject| (of, subject)));
    each.map(|(of, subject)| {
        let rows = rows
            .iter()
            .filter(|row| row.subject == subject && kind(row) == *of);
        let points = rows.map(|row| (f64::from(row.threads), row.ns_per_op));
        let name = match kinds.len() {
            1 => subject.name().to_owned(),
            _ => format!("{}, {of}", subject.name()),
        };
        Series {
            name,
            points: points.collect(),
        }
    })
    .collect()
}

fn subjects(rows: &[Row]) -> impl Iterator<Item = SubjectName> {
    let measured = |subject: &SubjectName| rows.iter().any(|row| row.subject == *subject);
    SubjectName::ALL.into_iter().filter(measured)
}
