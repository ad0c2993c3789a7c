//! The results for people: slab_test's tables in its own words, one subject after the other, then
//! the comparisons.

use super::measure::Measured;
use super::subjects::SubjectName;
use super::{Row, Test};
use crate::figures::Machine;
use crate::output::Table;
use crate::stats::geometric_mean;
use crate::{Op, Scenario};
use std::fmt::Write;

/// Formats all results.
pub fn text(measured: &Measured) -> String {
    let (plan, rows) = (&measured.plan, &measured.rows[..]);
    let mut text = format!(
        "{}\nMedians of {}; with several threads, means of {}, each pinned to a CPU.\n",
        Machine::read().describe(),
        crate::figures::rounds(plan.rounds),
        measured.threads,
    );
    for note in &plan.notes {
        text += note;
        text.push('\n');
    }
    for &subject in &plan.subjects {
        if !SubjectName::RIVALS.contains(&subject) {
            text += &slab_test(rows, subject, plan.calls);
        }
    }
    text + &hardening(rows) + &bulk(rows) + &rivals(rows)
}

/// A scenario's heading and the format of its lines, in slab_test's words.
struct Part {
    scenario: Scenario,
    heading: &'static str,
    line: fn(calls: usize, size: usize, cycles: &Cells) -> String,
}

/// The figures of one scenario and size.
struct Cells<'a>(Vec<&'a Row>);

impl Cells<'_> {
    fn of(&self, op: Op) -> String {
        let row = self.0.iter().find(|row| row.op == op);
        row.map_or("-".to_owned(), |row| figure(row.cycles))
    }

    /// Formats the figures as slab_test does for several threads.
    fn average(&self) -> String {
        match self.0[..] {
            [pair] => format!("Average={}", figure(pair.cycles)),
            _ => format!("Average={}/{}", self.of(Op::Alloc), self.of(Op::Free)),
        }
    }
}

/// Formats cycles. slab_test prints whole cycles. These figures are smaller, so a tenth matters.
fn figure(cycles: f64) -> String {
    format!("{cycles:.1}")
}

const PARTS: [Part; 6] = [
    Part {
        scenario: Scenario::Single,
        heading: "Single thread testing\n=====================\n1. Kmalloc: Repeatedly allocate then free test\n",
        line: |calls, size, cycles| {
            let (alloc, free) = (cycles.of(Op::Alloc), cycles.of(Op::Free));
            format!("{calls} times kmalloc({size}) -> {alloc} cycles kfree -> {free} cycles")
        },
    },
    Part {
        scenario: Scenario::Pair,
        heading: "2. Kmalloc: alloc/free test\n",
        line: |calls, size, cycles| {
            let pair = cycles.of(Op::Pair);
            format!("{calls} times kmalloc({size})/kfree -> {pair} cycles")
        },
    },
    Part {
        scenario: Scenario::Concurrent,
        heading: "Concurrent allocs\n=================\n",
        line: |_, size, cycles| format!("Kmalloc N*alloc N*free({size}): {}", cycles.average()),
    },
    Part {
        scenario: Scenario::ConcurrentPair,
        heading: "",
        line: |_, size, cycles| format!("Kmalloc N*(alloc free)({size}): {}", cycles.average()),
    },
    Part {
        scenario: Scenario::Remote,
        heading: "Remote free test\n================\n",
        line: |_, size, cycles| format!("N*remote free({size}): {}", cycles.average()),
    },
    Part {
        scenario: Scenario::OneToN,
        heading: "1 alloc N free test\n===================\n",
        line: |_, size, cycles| format!("1 alloc N free({size}): {}", cycles.average()),
    },
];

/// Formats one subject's results as slab_test does.
fn slab_test(rows: &[Row], subject: SubjectName, calls: usize) -> String {
    let mut text = String::new();
    for part in PARTS {
        let mine = |row: &&Row| row.subject == subject && row.scenario == Test::Of(part.scenario);
        let rows: Vec<&Row> = rows.iter().filter(mine).collect();
        if rows.is_empty() {
            continue;
        }
        text += part.heading;
        for cell in rows.chunk_by(|one, next| one.size == next.size) {
            text += &(part.line)(calls, cell[0].size, &Cells(cell.to_vec()));
            text.push('\n');
        }
    }
    match text.is_empty() {
        true => text,
        false => format!("\n{}: {}\n\n{text}", subject.name(), subject.describe()),
    }
}

/// Formats what hardening costs: in each scenario, a hardened cache's figures divided by a plain
/// cache's.
fn hardening(rows: &[Row]) -> String {
    let of = |subject| rows.iter().filter(move |row| row.subject == subject);
    let hardened = || of(SubjectName::PinfoldHardened);
    let mut table = Table::new(["scenario", "operation", "least", "most", "mean"]);
    let mut seen = Vec::new();
    for (scenario, op) in hardened().map(|row| (row.scenario, row.op)) {
        if seen.contains(&(scenario, op)) {
            continue;
        }
        let mut ratios = Vec::new();
        for row in hardened().filter(|row| (row.scenario, row.op) == (scenario, op)) {
            let plain =
                |plain: &&Row| (plain.scenario, plain.op, plain.size) == (scenario, op, row.size);
            ratios.extend(
                of(SubjectName::PinfoldCache)
                    .find(plain)
                    .map(|plain| row.cycles / plain.cycles),
            );
        }
        let Some(mean) =
            mean(ratios.iter().map(|&ratio| Some(ratio))).filter(|mean| mean.is_finite())
        else {
            continue;
        };
        seen.push((scenario, op));
        let least = ratios.iter().copied().fold(f64::MAX, f64::min);
        let most = ratios.iter().copied().fold(0.0, f64::max);
        let [least, most, mean] = [least, most, mean].map(|ratio| format!("{ratio:.2}"));
        table.row([
            scenario.name().to_owned(),
            op.name().to_owned(),
            least,
            most,
            mean,
        ]);
    }
    match seen.is_empty() {
        true => String::new(),
        false => format!(
            "\nThe cost of hardening: a hardened KmemCache's cycles divided by a plain one's, over the sizes\n{table}"
        ),
    }
}

fn bulk(rows: &[Row]) -> String {
    let mut table = Table::new(["objects per call", "bulk", "single calls", "ratio"]);
    let mut is_there = false;
    for row in rows {
        if let (Some(batch), Some(single)) = (row.batch, row.single_cycles) {
            is_there = true;
            table.row([
                batch.to_string(),
                figure(row.cycles),
                figure(single),
                format!("{:.2}", row.cycles / single),
            ]);
        }
    }
    if !is_there {
        return String::new();
    }
    let size = super::bulk::SIZE;
    format!(
        "\nBulk test: cycles per object of {size} bytes, allocated and freed by a KmemCache\n{table}"
    )
}

/// The scenarios in which the protections are compared, a table for each entry, and its heading.
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
fn rivals(rows: &[Row]) -> String {
    let rivals: Vec<Row> = rows
        .iter()
        .filter(|row| SubjectName::RIVALS.contains(&row.subject))
        .cloned()
        .collect();
    if rivals.is_empty() {
        return String::new();
    }
    let mut text = "\nThe same fast path, protected in four ways\n".to_owned();
    for rival in SubjectName::RIVALS {
        let _ = writeln!(text, "{}: {}", rival.name(), rival.describe());
    }
    for (scenarios, heading) in COMPARED {
        let among = |row: &&Row| scenarios.iter().any(|&one| row.scenario == Test::Of(one));
        let rows: Vec<Row> = rivals.iter().filter(among).cloned().collect();
        if !rows.is_empty() {
            let _ = write!(text, "\n{heading}\n{}", side_by_side(&rows));
        }
    }
    text + &gains(&rivals)
}

/// Formats a row for each size, with the figures of each rival.
fn side_by_side(rows: &[Row]) -> Table {
    let mut table = Table::new(["bytes", "rseq", "tid", "locked", "masked-signals"]);
    for size in sizes(rows) {
        let cell = |name| {
            let cell = rows
                .iter()
                .filter(|row| row.subject == name && row.size == size);
            let figures: Vec<String> = cell.map(|row| figure(row.cycles)).collect();
            match figures.is_empty() {
                true => "-".to_owned(),
                false => figures.join(" / "),
            }
        };
        let [rseq, tid, locked, masked] = SubjectName::RIVALS.map(cell);
        table.row([size.to_string(), rseq, tid, locked, masked]);
    }
    table
}

/// Returns the sizes that were measured, in ascending order.
fn sizes(rows: &[Row]) -> Vec<usize> {
    let mut sizes: Vec<usize> = rows.iter().map(|row| row.size).collect();
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

/// Formats how much faster a pair becomes without each protection (lock, masked signals,
/// transaction id), in the form of the kernel's commit of 2015: before -> after, percent.
fn gains(rows: &[Row]) -> String {
    let pair = Test::Of(Scenario::Pair);
    let pairs = |name| {
        let mine = rows
            .iter()
            .filter(|row| row.subject == name && row.scenario == pair);
        let cycles: Vec<_> = mine.map(|row| Some(row.cycles)).collect();
        (!cycles.is_empty()).then(|| mean(cycles.into_iter()))?
    };
    let [rseq, tid, locked, masked] = SubjectName::RIVALS.map(pairs);
    let gains = removing("the lock", locked, rseq)
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

/// Returns the geometric mean, or `None` if a size has no figure.
fn mean(cycles: impl Iterator<Item = Option<f64>>) -> Option<f64> {
    Some(geometric_mean(&cycles.collect::<Option<Vec<f64>>>()?))
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
