//! The results for people: the four tables in the form of 2008, and a plot.

use super::measure::Measured;
use super::subjects::{SubjectName, page_size};
use super::{Amount, KINDS, Plan, Row, title};
use crate::figures::{Panels, Plot, Series, rounds};
use anyhow::Result;

/// Formats the notes and the tables.
pub fn text(plan: &Plan, measured: &Measured) -> String {
    let mut text = format!(
        "Faults per CPU second and per wall-clock second, medians of {}. A region of {}, {} pages, divided among N threads, \
         which run where the scheduler puts them.{}\n",
        rounds(plan.rounds),
        Amount(plan.pages * page_size()),
        plan.pages,
        if plan.zero {
            ""
        } else {
            " The kernel's pages are zeroed, the others are not."
        },
    );
    if measured.has(SubjectName::Kernel) {
        text += "The kernel's column is other work: a page fault enters the kernel and edits page tables; \
                 the others pop a page off a list.\n";
    }
    for note in &measured.notes {
        text += note;
        text.push('\n');
    }
    for kind in KINDS {
        let rows = measured.rows.iter().filter(|row| row.kind() == kind);
        let rows: Vec<Row> = rows.cloned().collect();
        text += &format!("\n\t\t{}\n{}", title(kind), table(&rows));
    }
    text
}

/// Formats a line for each number of threads, with two columns for each subject, and a line for
/// each of [`PAIRS`].
fn table(rows: &[Row]) -> String {
    let lines = || rows.chunk_by(|one, next| one.threads == next.threads);
    let mut text = "N   ".to_owned();
    for row in lines().next().unwrap_or_default() {
        text += &format!("{:^24}", row.subject.name());
    }
    text.truncate(text.trim_end().len());
    text.push('\n');
    for line in lines() {
        text += &format!("{:<4}", line[0].threads);
        for row in line {
            text += &format!(
                "{:>11.0}{:>11.0}  ",
                row.faults_per_cpu_second, row.faults_per_wall_second
            );
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
    }
    let (first, last) = (lines().next(), lines().next_back());
    let mut ends: Vec<_> = first.into_iter().chain(last).collect();
    ends.dedup_by_key(|line| line[0].threads);
    for (after, before) in PAIRS {
        text += &comparison(&ends, after, before);
    }
    text
}

/// The pairs that are compared, the later design first: what the kernel changed in 2008, what
/// Pinfold gains over the kernel before that, and over the kernel since.
const PAIRS: [(SubjectName, SubjectName); 3] = [
    (SubjectName::SharedCounted, SubjectName::Counted),
    (SubjectName::Pinfold, SubjectName::Counted),
    (SubjectName::Pinfold, SubjectName::SharedCounted),
];

/// Formats the figures of one subject divided by another's. Says so if both ran the same code.
fn comparison(ends: &[&[Row]], after: SubjectName, before: SubjectName) -> String {
    let of = |line: &[Row], name| line.iter().find(|row| row.subject == name).cloned();
    let pairs = ends
        .iter()
        .filter_map(|line| Some((of(line, after)?, of(line, before)?)));
    let pairs: Vec<_> = pairs.collect();
    let ratios: Vec<_> = pairs.iter().map(|(one, other)| ratio(one, other)).collect();
    let same = pairs.iter().any(|(one, other)| one.runs_the_code_of(other));
    let control = match same {
        true => " (control: both run the same code, so this is noise)",
        false => "",
    };
    let (after, before) = (after.name(), before.name());
    format!("{after} / {before}: {}{control}\n", ratios.join("; "))
}

fn ratio(after: &Row, before: &Row) -> String {
    let plural = if before.threads == 1 { "" } else { "s" };
    format!(
        "{:.3} by CPU second, {:.3} by wall second at {} thread{plural}",
        after.faults_per_cpu_second / before.faults_per_cpu_second,
        after.faults_per_wall_second / before.faults_per_wall_second,
        before.threads,
    )
}

/// Draws a panel for each table, with a line for each subject.
pub fn plot(rows: &[Row]) -> Result<String> {
    let titles = KINDS.map(title);
    let panels = KINDS.iter().zip(&titles).map(|(&kind, title)| {
        let line = |name: SubjectName| Series {
            name: name.name().to_owned(),
            points: rows
                .iter()
                .filter(|row| row.kind() == kind && row.subject == name)
                .map(|row| (row.threads as f64, row.faults_per_wall_second))
                .collect(),
        };
        Plot {
            title,
            x: "threads",
            y: "faults per wall-clock second",
            log_x: false,
            log_y: false,
            series: SubjectName::ALL.map(line).into(),
        }
    });
    Panels {
        columns: 2,
        plots: panels.collect(),
    }
    .svg()
}
