//! The tables of transfers, and the list of what causes Pinfold's.

use super::counts::{Counts, Row};
use std::fmt::Write;

/// Pinfold's goal: at most so many transfers in so many operations.
const GOAL: (f64, f64) = (2.0, 125.0);
/// The sites of a row that are shown.
const SHOWN: usize = 10;

/// Writes the cell of a row.
type Cell<'a> = &'a dyn Fn(&Row) -> String;

/// Returns all tables.
pub fn text(rows: &[Row]) -> String {
    let mut text = String::new();
    let mut cpus: Vec<_> = rows.iter().map(|row| row.cpus).collect();
    cpus.dedup();
    let each = |one: Counts, count: u64| number(GOAL.1 * one.each(count));
    let transfers = |row: &Row| {
        let both = [row.alloc, row.free];
        both.map(|one| number(GOAL.1 * one.each(one.transfers())))
            .join(", ")
    };
    let causes_of = |row: &Row| {
        let both = row.both();
        let counts = [both.locked, both.handovers, both.fences, both.syscalls];
        counts.map(|count| each(both, count)).join(", ")
    };
    let elsewhere = |row: &Row| {
        let both = row.both();
        let counts = [row.program.touches, both.kernel];
        counts.map(|count| each(both, count)).join(", ")
    };
    let tables: [(&str, Cell<'_>); 3] = [
        ("transfers (alloc, free)", &transfers),
        ("locked, handed over, fences, system calls", &causes_of),
        (
            "transfers by the program's first write, and by the kernel",
            &elsewhere,
        ),
    ];
    for (title, cell) in tables {
        for &cpus in &cpus {
            let title = format!("{title} for {} operations, {cpus} CPUs", GOAL.1);
            one(&mut text, rows, cpus, &title, cell);
        }
    }
    causes(&mut text, rows);
    text
}

/// Writes a table: a row for each load, a column for each subject.
fn one(text: &mut String, rows: &[Row], cpus: u32, title: &str, cell: impl Fn(&Row) -> String) {
    let rows: Vec<_> = rows.iter().filter(|row| row.cpus == cpus).collect();
    let mut subjects: Vec<&str> = Vec::new();
    let mut loads: Vec<(&str, Option<u32>)> = Vec::new();
    for row in &rows {
        if !subjects.contains(&&*row.subject) {
            subjects.push(&row.subject);
        }
        if !loads.contains(&(row.load, row.size)) {
            loads.push((row.load, row.size));
        }
    }
    let _ = writeln!(text, "\n{title}\n\n| load | {} |", subjects.join(" | "));
    let _ = writeln!(text, "|---|{}", "---|".repeat(subjects.len()));
    for (load, size) in loads {
        let size = size.map(|size| format!(" {size}")).unwrap_or_default();
        let _ = write!(text, "| {load}{size} |");
        for subject in &subjects {
            let name = |row: &&&Row| {
                let its = row.size.map(|size| format!(" {size}")).unwrap_or_default();
                row.subject == *subject && row.load == load && its == size
            };
            let shown = rows.iter().find(name).map(|row| cell(row));
            let _ = write!(text, " {} |", shown.unwrap_or_else(|| "-".to_owned()));
        }
        text.push('\n');
    }
}

fn number(value: f64) -> String {
    match value {
        0.0 => "0".to_owned(),
        value if value < 0.095 => format!("{value:.2}"),
        value if value < 9.95 => format!("{value:.1}"),
        value => format!("{value:.0}"),
    }
}

/// Lists where Pinfold misses its goal, and the code that causes the transfers.
fn causes(text: &mut String, rows: &[Row]) {
    let _ = writeln!(
        text,
        "\nPinfold's rows with more than {} transfers in {} operations, and the code and lines that \
         cause them. Transfers are for {1} operations of both kinds.",
        GOAL.0, GOAL.1
    );
    for row in rows.iter().filter(|row| row.subject.starts_with("pinfold")) {
        let both = row.both();
        let transfers = GOAL.1 * both.each(both.transfers());
        if transfers <= GOAL.0 {
            continue;
        }
        let size = row.size.map(|size| format!(" {size}")).unwrap_or_default();
        let _ = writeln!(
            text,
            "\n{} {}{size}, {} CPUs: {}",
            row.subject,
            row.load,
            row.cpus,
            number(transfers)
        );
        let share = |count: u64| number(GOAL.1 * both.each(count));
        for site in row.sites.iter().take(SHOWN) {
            let (op, name, transfers) = (&site.op, &site.name, share(site.transfers));
            let what = match (site.syscalls, site.lines) {
                (0, 1) => format!("line {:#x}", site.line),
                (0, lines) => format!("{lines} lines"),
                (syscalls, _) => format!("{} system calls", share(syscalls)),
            };
            let _ = writeln!(text, "  {transfers:>5} {op}: {name} ({what})");
        }
    }
}
