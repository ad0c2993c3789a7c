//! The results for people: the four tables in the form of 2008, and a plot.

use super::measure::Measured;
use super::subjects::{SubjectName, page_size};
use super::{Amount, KINDS, Plan, Row, title};
use crate::figures::{Machine, Panels, Plot, Series, rounds};
use anyhow::Result;
use std::path::Path;

/// Formats the notes and the tables.
pub fn text(plan: &Plan, measured: &Measured) -> String {
    let mut text = format!(
        "{}\nFaults per CPU second and per wall-clock second, medians of {}. A region of {}, {} pages, divided among N threads, \
         which run where the scheduler puts them.{}\n",
        Machine::read().describe(),
        rounds(plan.rounds),
        Amount(plan.pages * page_size()),
        plan.pages,
        if plan.zero {
            ""
        } else {
            " The pages of pinfold and counted are not zeroed, the kernel's are."
        },
    );
    for note in &measured.notes {
        text += note;
        text.push('\n');
    }
    for kind in KINDS {
        let rows = measured.rows.iter().filter(|row| row.kind() == kind);
        let rows: Vec<&Row> = rows.collect();
        text += &format!("\n\t\t{}\n{}", title(kind), table(&rows));
    }
    text
}

/// Formats a line for each number of threads, with two columns for each subject, and the gain of
/// not counting references.
fn table(rows: &[&Row]) -> String {
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
    let gains = ends.into_iter().filter_map(gain);
    let gains: Vec<String> = gains.collect();
    format!("{text}pinfold / counted: {}\n", gains.join("; "))
}

/// Formats the figures without reference counts divided by those with them.
fn gain(line: &[&Row]) -> Option<String> {
    let of = |name| line.iter().find(|row| row.subject == name);
    let (before, after) = (of(SubjectName::Counted)?, of(SubjectName::Pinfold)?);
    let plural = if before.threads == 1 { "" } else { "s" };
    Some(format!(
        "{:.3} by CPU second, {:.3} by wall second at {} thread{plural}",
        after.faults_per_cpu_second / before.faults_per_cpu_second,
        after.faults_per_wall_second / before.faults_per_wall_second,
        before.threads,
    ))
}

/// Draws a panel for each table, with a line for each subject.
pub fn plot(rows: &[Row], file: &Path) -> Result<()> {
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
    Panels(panels.collect()).write(file)
}
