//! Tables for people, and the plot.

use super::rows::Row;
use crate::whole::rows::Cost;
use crate::whole::table::panels;
use anyhow::Result;
use pinfold_lab::output::{Table, figure};
use pinfold_lab::stats;
use serde::Deserialize;

const MIB: f64 = (1 << 20) as f64;
/// The goal for the time of real programs, as a multiple of the floor.
const TIME_GOAL: f64 = 1.02;
/// The goal for the heap's memory, as a multiple of live bytes, of programs with more than
/// [`SMALL`] live.
const MEMORY_GOAL: f64 = 1.08;
const SMALL: u64 = 10 << 20;

pub fn text(rows: &[Row], rounds: u32) -> String {
    let mut text = format!(
        "Medians of {rounds} round(s).\n\nTime over the floor: seconds / seconds of the same program under the oracle\n"
    );
    text += &time(rows);
    text += "\nMemory over live: the heap's resident memory at the peak / the peak of live bytes\n";
    text += &memory(rows);
    text += &means(rows);
    for line in notes(rows).into_iter().chain(verdicts(rows)) {
        text += &(line + "\n");
    }
    text
}

fn programs(rows: &[Row]) -> Vec<&str> {
    stats::distinct(rows.iter().map(|row| row.program))
}

fn subjects(rows: &[Row]) -> Vec<&str> {
    stats::distinct(rows.iter().map(|row| row.subject.as_str()))
}

fn find<'a>(rows: &'a [Row], program: &str, subject: &str) -> Option<&'a Row> {
    rows.iter()
        .find(|row| row.program == program && row.subject == subject)
}

fn first<'a>(rows: &'a [Row], program: &str) -> Option<&'a Row> {
    rows.iter().find(|row| row.program == program)
}

fn time(rows: &[Row]) -> String {
    let mut table = Table::of(programs(rows))
        .column("program", |program| program)
        .column("floor s", |program| {
            figure(first(rows, program).and_then(|row| row.floor_seconds), 3)
        })
        .column("by", |program| {
            first(rows, program)
                .and_then(|row| row.floor_plan)
                .unwrap_or("-")
        })
        .column("served %", |program| {
            let share = first(rows, program).and_then(|row| row.planned_share);
            figure(share.map(|share| share * 100.0), 1)
        });
    for subject in subjects(rows) {
        table = table.column(subject, |program| {
            figure(
                find(rows, program, subject).and_then(|row| row.over_floor),
                3,
            )
        });
    }
    table.table().to_string()
}

fn memory(rows: &[Row]) -> String {
    let mut table = Table::of(programs(rows))
        .column("program", |program| program)
        .column("live MiB", |program| {
            let live = first(rows, program).and_then(|row| row.live_bytes);
            figure(live.map(|live| live as f64 / MIB), 1)
        });
    for subject in subjects(rows) {
        table = table.column(subject, |program| {
            figure(
                find(rows, program, subject).and_then(|row| row.over_live),
                3,
            )
        });
    }
    table.table().to_string()
}

/// Returns the ratios that count for a mean: times over the floor, and the memory of programs with
/// more than [`SMALL`] live. Attacks do not count.
fn counted(rows: &[Row], subject: &str, cost: Cost) -> Vec<f64> {
    let of = rows
        .iter()
        .filter(|row| row.subject == subject && row.kind != "attack");
    let ratio = |row: &Row| match cost {
        Cost::Time => row.over_floor,
        Cost::Memory => row.over_live.filter(|_| row.live_bytes > Some(SMALL)),
    };
    of.filter_map(ratio).collect()
}

/// Returns the times over the floor of real programs.
fn real_times(rows: &[Row], subject: &str) -> Vec<f64> {
    let of = rows
        .iter()
        .filter(|row| row.subject == subject && row.kind == "real");
    of.filter_map(|row| row.over_floor).collect()
}

fn mean(ratios: &[f64]) -> Option<f64> {
    (!ratios.is_empty()).then(|| stats::geometric_mean(ratios))
}

fn means(rows: &[Row]) -> String {
    let cells = |ratios: Vec<f64>| (figure(mean(&ratios), 3), ratios.len());
    let time = |subject| cells(counted(rows, subject, Cost::Time));
    let real = |subject| cells(real_times(rows, subject));
    let memory = |subject| cells(counted(rows, subject, Cost::Memory));
    let table = Table::of(subjects(rows))
        .column("subject", |subject| subject)
        .column("time / floor", |subject| time(subject).0)
        .column("programs", |subject| time(subject).1)
        .column("real programs only", |subject| real(subject).0)
        .column("programs", |subject| real(subject).1)
        .column("heap / live", |subject| memory(subject).0)
        .column("programs", |subject| memory(subject).1)
        .table();
    format!(
        "\nGeometric means without attacks; heap / live of programs with more than {} MiB live\n{table}",
        SMALL >> 20
    )
}

/// Returns a line for each program without a floor, and for each subject that failed.
fn notes(rows: &[Row]) -> Vec<String> {
    let mut lines = Vec::new();
    for program in programs(rows) {
        if let Some(note) = first(rows, program).and_then(|row| row.note.as_ref()) {
            lines.push(format!("note: {program}: {note}"));
        }
    }
    for row in rows {
        if let Some(error) = &row.error {
            lines.push(format!(
                "ERROR: {} under {}: {error}",
                row.program, row.subject
            ));
        }
    }
    lines
}

/// Returns for each build of Pinfold whether it meets the goals, and the programs that miss them.
fn verdicts(rows: &[Row]) -> Vec<String> {
    let mut lines = Vec::new();
    let is_pinfold = |subject: &&str| {
        rows.iter()
            .any(|row| row.subject == *subject && row.is_pinfold)
    };
    for subject in subjects(rows).into_iter().filter(is_pinfold) {
        for (what, ratios, most) in [
            (
                "time / floor of real programs",
                real_times(rows, subject),
                TIME_GOAL,
            ),
            (
                "heap / live",
                counted(rows, subject, Cost::Memory),
                MEMORY_GOAL,
            ),
        ] {
            if let Some(mean) = mean(&ratios) {
                let (count, verdict) = (ratios.len(), if mean <= most { "met" } else { "missed" });
                lines.push(format!(
                    "goal {subject}: {what} {mean:.3} over {count} programs, at most {most}: {verdict}"
                ));
            }
        }
        for row in rows.iter().filter(|row| row.subject == subject) {
            let program = row.program;
            if let Some(ratio) = row.over_floor.filter(|&ratio| ratio > TIME_GOAL)
                && row.kind == "real"
            {
                lines.push(format!(
                    "miss {subject}: {program} takes {ratio:.3} x the floor's time"
                ));
            }
            if let Some(ratio) = row.over_live.filter(|&ratio| ratio > MEMORY_GOAL)
                && row.live_bytes > Some(SMALL)
            {
                lines.push(format!(
                    "miss {subject}: {program} needs {ratio:.3} x its live bytes"
                ));
            }
        }
    }
    lines
}

/// Draws the figures of a saved file, whose text is `run`: time over the floor against memory over
/// live.
pub fn plot_saved(run: &str) -> Result<String> {
    #[derive(Deserialize)]
    struct Saved {
        rows: Vec<SavedRow>,
    }
    #[derive(Deserialize)]
    struct SavedRow {
        subject: String,
        program: String,
        over_floor: Option<f64>,
        over_live: Option<f64>,
    }
    let rows = serde_json::from_str::<Saved>(run)?.rows;
    let is_whole = |row: &&SavedRow| row.over_floor.is_some() && row.over_live.is_some();
    let programs: Vec<_> = rows
        .iter()
        .filter(is_whole)
        .map(|row| row.program.as_str())
        .collect();
    let subjects = stats::distinct(rows.iter().map(|row| row.subject.as_str()));
    panels(
        ["time / floor", "heap / live bytes"],
        &stats::distinct(programs),
        &subjects,
        &|program, subject, cost| {
            let is_it = |row: &&SavedRow| row.program == program && row.subject == subject;
            let row = rows.iter().find(is_it)?;
            match cost {
                Cost::Time => row.over_floor,
                Cost::Memory => row.over_live,
            }
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a row of a real program that takes `over_floor` times the floor's time.
    fn row(subject: &str, over_floor: Option<f64>, live: u64) -> Row {
        Row {
            subject: subject.to_owned(),
            program: "lua",
            kind: "real",
            over_floor,
            live_bytes: Some(live),
            over_live: Some(1.5),
            is_pinfold: subject.starts_with("pinfold"),
            ..Row::default()
        }
    }

    #[test]
    fn goals_cover_builds_of_pinfold_and_name_the_programs_that_miss() {
        let rows = [
            row("pinfold", Some(1.01), SMALL + 1),
            row("glibc", Some(2.0), 1),
        ];
        let lines = verdicts(&rows).join("\n");
        assert!(lines.contains("floor of real programs 1.010 over 1 programs, at most 1.02: met"));
        assert!(lines.contains("miss pinfold: lua needs 1.500 x its live bytes"));
        assert!(
            !lines.contains("glibc") && !lines.contains("takes"),
            "{lines}"
        );
    }

    #[test]
    fn the_plot_leaves_out_programs_without_a_floor() {
        let rows = [row("pinfold", Some(1.1), 1), row("glibc", None, 1)];
        let run = serde_json::json!({ "rows": rows }).to_string();
        // The mean, and the program.
        assert_eq!(plot_saved(&run).unwrap().matches("<circle").count(), 2);
    }
}
