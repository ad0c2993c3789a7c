//! Tables for people: slab_test's tables for Pinfold, then all subjects side by side, then the
//! summary.

use crate::args::SlabArgs;
use crate::machine::Machine;
use crate::rows::{Row, Rows};
use crate::runner::OBJECTS;
use crate::slab::scenarios;
use crate::subjects::SubjectName;
use crate::summary;
use pinfold_lab::{Op, Scenario};

/// Prints all results.
pub fn print(machine: &Machine, rows: &Rows, args: &SlabArgs) {
    println!("{}", machine.describe());
    let (rounds, warmup) = (args.rounds, args.setup.warmup);
    println!(
        "Median of {rounds} rounds, {warmup} untimed pass(es) before each; cycles are ticks of the counter."
    );
    slab_test(
        rows,
        SubjectName::PinfoldCache,
        "Kmem_cache",
        ["kmem_cache_alloc", "kmem_cache_free"],
    );
    slab_test(
        rows,
        SubjectName::PinfoldMalloc,
        "Malloc",
        ["malloc", "free"],
    );
    for scenario in scenarios(rows) {
        for &op in scenario.operations() {
            side_by_side(rows, scenario, op);
        }
    }
    summary::print(rows);
}

/// Prints the two tables of slab_test's single thread testing.
fn slab_test(rows: &Rows, subject: SubjectName, title: &str, [alloc, free]: [&str; 2]) {
    let cell = |scenario, size, op| rows.find(subject, scenario, size, op).map(figure);
    let mut repeatedly = Vec::new();
    let mut at_once = Vec::new();
    for size in rows.sizes() {
        if let (Some(one), Some(other)) = (
            cell(Scenario::Single, size, Op::Alloc),
            cell(Scenario::Single, size, Op::Free),
        ) {
            repeatedly.push(format!(
                "{OBJECTS} times {alloc}({size}) -> {one} cycles {free} -> {other} cycles"
            ));
        }
        if let Some(pair) = cell(Scenario::Pair, size, Op::Pair) {
            at_once.push(format!(
                "{OBJECTS} times {alloc}({size})/{free} -> {pair} cycles"
            ));
        }
    }
    if repeatedly.is_empty() && at_once.is_empty() {
        return;
    }
    println!("\nSingle thread testing: {subject}\n=====================");
    if !repeatedly.is_empty() {
        println!("1. {title}: Repeatedly allocate then free test");
        repeatedly.iter().for_each(|line| println!("{line}"));
    }
    if !at_once.is_empty() {
        println!("2. {title}: alloc/free test");
        at_once.iter().for_each(|line| println!("{line}"));
    }
}

/// Prints a table of one operation: a row for each size, a column for each subject.
fn side_by_side(rows: &Rows, scenario: Scenario, op: Op) {
    let subjects = rows.subjects();
    let threads = (rows.rows().iter())
        .find(|row| row.scenario == scenario)
        .map_or(0, |row| row.threads);
    let plural = if threads == 1 { "" } else { "s" };
    println!(
        "\n{}, {}: cycles, {threads} thread{plural}",
        scenario.name(),
        op.name()
    );
    print!("{:>6}", "size");
    for subject in &subjects {
        print!(" {subject:>15}");
    }
    println!();
    let mut doubtful = false;
    for size in rows.sizes() {
        print!("{size:>6}");
        for &subject in &subjects {
            let row = rows.find(subject, scenario, size, op);
            doubtful |= row.is_some_and(Row::is_doubtful);
            print!(" {:>15}", row.map_or_else(|| "-".to_owned(), figure));
        }
        println!();
    }
    if doubtful {
        println!(
            "? doubtful: the middle half of the rounds is wider than a quarter of the median."
        );
    }
}

fn figure(row: &Row) -> String {
    let mark = if row.is_doubtful() { "?" } else { "" };
    format!("{:.1}{mark}", row.cycles)
}
