//! The results for people: slab_test's tables in its own words, one subject after the other, then
//! the comparisons.

use super::measure::Measured;
use super::subjects::SubjectName;
use super::{Row, Rows, Test};
use crate::figures::rounds;
use crate::output::Table;
use crate::stats::{geometric_mean, quantile};
use crate::{Name, Scenario};
use std::fmt::Write;

/// Formats all results.
pub fn text(measured: &Measured) -> String {
    let (plan, rows) = (&measured.plan, &measured.rows);
    let mut text = format!(
        "Medians of {}; with several threads, means of {}, each pinned to a CPU.\n",
        rounds(plan.rounds),
        measured.threads,
    );
    for note in &plan.notes {
        text += note;
        text.push('\n');
    }
    for &subject in &plan.subjects {
        if !SubjectName::RIVALS.contains(&subject) {
            text += &slab_test(rows, subject, subject.describe(), plan.calls);
        }
    }
    text + &hardening(rows) + &bulk(rows) + &rivals(rows)
}

/// A scenario's heading and the format of its lines, in slab_test's words.
struct Part {
    scenario: Scenario,
    heading: &'static str,
    line: fn(calls: usize, size: usize, cycles: &[String]) -> String,
}

const PARTS: [Part; 6] = [
    Part {
        scenario: Scenario::Single,
        heading: "Single thread testing\n=====================\n1. Kmalloc: Repeatedly allocate then free test\n",
        line: |calls, size, cycles| {
            let cycles = cycles.join(" cycles kfree -> ");
            format!("{calls} times kmalloc({size}) -> {cycles} cycles")
        },
    },
    Part {
        scenario: Scenario::Pair,
        heading: "2. Kmalloc: alloc/free test\n",
        line: |calls, size, cycles| {
            format!(
                "{calls} times kmalloc({size})/kfree -> {} cycles",
                cycles[0]
            )
        },
    },
    Part {
        scenario: Scenario::Concurrent,
        heading: "Concurrent allocs\n=================\n",
        line: |_, size, cycles| format!("Kmalloc N*alloc N*free({size}): {}", average(cycles)),
    },
    Part {
        scenario: Scenario::ConcurrentPair,
        heading: "",
        line: |_, size, cycles| format!("Kmalloc N*(alloc free)({size}): {}", average(cycles)),
    },
    Part {
        scenario: Scenario::Remote,
        heading: "Remote free test\n================\n",
        line: |_, size, cycles| format!("N*remote free({size}): {}", average(cycles)),
    },
    Part {
        scenario: Scenario::OneToN,
        heading: "1 alloc N free test\n===================\n",
        line: |_, size, cycles| format!("1 alloc N free({size}): {}", average(cycles)),
    },
];

/// Formats the figures as slab_test does for several threads.
fn average(cycles: &[String]) -> String {
    format!("Average={}", cycles.join("/"))
}

/// Formats one subject's results as slab_test does, after a line that describes the subject.
pub fn slab_test<N: Name>(rows: &Rows<N>, subject: N, about: &str, calls: usize) -> String {
    let mut text = String::new();
    for part in PARTS {
        let mine =
            |row: &&Row<N>| row.subject == subject && row.scenario == Test::Of(part.scenario);
        let mut rows: Vec<_> = rows.0.iter().filter(mine).collect();
        if rows.is_empty() {
            continue;
        }
        rows.sort_by_key(|row| row.size);
        text += part.heading;
        for cell in rows.chunk_by(|one, next| one.size == next.size) {
            let figures: Vec<_> = cell.iter().map(|row| row.figure()).collect();
            text += &(part.line)(calls, cell[0].size, &figures);
            text.push('\n');
        }
    }
    match text.is_empty() {
        true => text,
        false => format!("\n{}: {about}\n\n{text}", subject.name()),
    }
}

/// Formats what hardening costs: in each scenario, a hardened cache's figures divided by a plain
/// cache's.
fn hardening(rows: &Rows<SubjectName>) -> String {
    let (plain, hardened) = (SubjectName::PinfoldCache, SubjectName::PinfoldHardened);
    let rows = rows.operations().into_iter().filter_map(|(test, op)| {
        let ratio = |size| {
            let of = |subject| Some(rows.find(subject, test, size, op)?.cycles);
            Some(of(hardened)? / of(plain)?)
        };
        let ratios: Vec<f64> = rows.sizes().into_iter().filter_map(ratio).collect();
        let [least, most] = [0.0, 1.0].map(|at| quantile(&ratios, at));
        let figures = [least, most, geometric_mean(&ratios)];
        (!ratios.is_empty()).then_some((test, op, figures))
    });
    let mut table = Table::of(rows)
        .column("scenario", |(test, ..)| test.name())
        .column("operation", |(_, op, _)| op);
    for (at, heading) in ["least", "most", "mean"].into_iter().enumerate() {
        table = table.column(heading, |(.., figures)| format!("{:.2}", figures[at]));
    }
    let table = table.table();
    match table.is_empty() {
        true => String::new(),
        false => format!(
            "\nThe cost of hardening: a hardened KmemCache's cycles divided by a plain one's, over the sizes\n{table}"
        ),
    }
}

fn bulk(rows: &Rows<SubjectName>) -> String {
    let rows = rows
        .0
        .iter()
        .filter_map(|row| Some((row, row.batch?, row.single_cycles?)));
    let table = Table::of(rows)
        .column("objects per call", |(_, batch, _)| batch)
        .column("bulk", |(row, ..)| row.figure())
        .column("single calls", |(.., single)| format!("{single:.1}"))
        .column("ratio", |(row, _, single)| {
            format!("{:.2}", row.cycles / single)
        })
        .table();
    if table.is_empty() {
        return String::new();
    }
    let size = super::bulk::SIZE;
    format!(
        "\nBulk test: cycles per object of {size} bytes, allocated and freed by a KmemCache\n{table}"
    )
}

/// The scenarios in which subjects are compared, a table for each entry, and its heading.
const COMPARED: [(&[Scenario], &str); 5] = [
    (
        &[Scenario::Single, Scenario::Pair],
        "alloc / free of scenario 1, pair of scenario 2",
    ),
    (&[Scenario::Concurrent], "N*alloc N*free: alloc / free"),
    (&[Scenario::ConcurrentPair], "N*(alloc free): pair"),
    (&[Scenario::Remote], "N*remote free: alloc / free"),
    (&[Scenario::OneToN], "1 alloc N free: alloc / free"),
];

/// Formats the protections side by side, and what removing each one gains.
fn rivals(rows: &Rows<SubjectName>) -> String {
    let is_rival = |row: &&Row<SubjectName>| SubjectName::RIVALS.contains(&row.subject);
    let rivals = Rows(rows.0.iter().filter(is_rival).cloned().collect());
    if rivals.0.is_empty() {
        return String::new();
    }
    let mut text =
        "\nThe same fast path, without protection and protected in four ways\n".to_owned();
    for rival in SubjectName::RIVALS {
        let _ = writeln!(text, "{}: {}", rival.name(), rival.describe());
    }
    text + &side_by_side(&rivals, &SubjectName::RIVALS) + &gains(&rivals)
}

/// Formats the scenarios of slab_test: a row for each size, with the figures of each subject.
pub fn side_by_side<N: Name>(rows: &Rows<N>, subjects: &[N]) -> String {
    let mut text = String::new();
    for (scenarios, heading) in COMPARED {
        let tests: Vec<_> = scenarios.iter().map(|&one| Test::Of(one)).collect();
        let cell = |subject: N, size: usize| {
            let cell = (rows.0.iter()).filter(|row| {
                row.subject == subject && row.size == size && tests.contains(&row.scenario)
            });
            let figures: Vec<_> = cell.map(Row::figure).collect();
            (!figures.is_empty()).then(|| figures.join(" / "))
        };
        let has_any = |&size: &usize| subjects.iter().any(|&one| cell(one, size).is_some());
        let sizes = rows.sizes().into_iter().filter(has_any);
        let mut table = Table::of(sizes).column("bytes", |size| size);
        for &subject in subjects {
            table = table.column(subject.name(), |size| {
                cell(subject, size).unwrap_or_else(|| "-".to_owned())
            });
        }
        let table = table.table();
        if !table.is_empty() {
            let _ = write!(text, "\n{heading}\n{table}");
        }
    }
    text
}

/// Formats what each protection takes beyond the unprotected path, and how much faster a pair
/// becomes without each protection (lock, masked signals, transaction id), in the form of the
/// kernel's commit of 2015: before -> after, percent.
fn gains(rows: &Rows<SubjectName>) -> String {
    let pair = Test::Of(Scenario::Pair);
    let pairs = |name| {
        let mine = (rows.0.iter()).filter(|row| row.subject == name && row.scenario == pair);
        let cycles: Vec<_> = mine.map(|row| row.cycles).collect();
        (!cycles.is_empty()).then(|| geometric_mean(&cycles))
    };
    let [unprotected, rseq, tid, locked, masked] = SubjectName::RIVALS.map(pairs);
    let costs = SubjectName::RIVALS.into_iter().skip(1).filter_map(|name| {
        let beyond = pairs(name)? - unprotected?;
        Some(format!(
            "the protection of {name} costs {beyond:.1} cycles\n"
        ))
    });
    let gains = costs.collect::<String>()
        + &removing("the lock", locked, rseq)
        + &removing("masked signals and the lock", masked, rseq)
        + &removing("the transaction id", tid, rseq)
        + &replacing(locked, tid);
    if gains.is_empty() {
        return gains;
    }
    format!(
        "\nPairs, geometric means over the sizes:\n{gains}\
         (The kernel in 2015, removing preemption on/off: 14.821 -> 14.049 ns, 5 %)\n"
    )
}

fn removing(what: &str, before: Option<f64>, after: Option<f64>) -> String {
    let (Some(before), Some(after)) = (before, after) else {
        return String::new();
    };
    let gain = 100.0 * (1.0 - after / before);
    format!("removing {what}: {before:.1} -> {after:.1} cycles, {gain:.1} %\n")
}

/// Formats the kernel's own step, whose "before" and "after" both exist here.
fn replacing(lock: Option<f64>, tid: Option<f64>) -> String {
    match removing("", lock, tid).split_once(": ") {
        Some((_, figures)) => format!("replacing the lock by the transaction id: {figures}"),
        None => String::new(),
    }
}
