//! Tables for people.

use super::memory;
use super::pass::SPREAD;
use super::rows::{self, Op, Row};
use super::subjects::Name;
use super::{Measured, SHARDS_AGAINST_ADDS};
use pinfold_lab::output::Table;
use pinfold_lab::stats;

/// Formats all results.
pub fn text(measured: &Measured) -> String {
    let mut text = adds(measured)
        + &sums(measured)
        + &summing(measured)
        + &memory(measured)
        + &goals(measured);
    if measured.rows.iter().any(Row::is_doubtful) {
        text = text + "\n" + stats::DOUBTFUL;
    }
    text
}

fn of(measured: &Measured, op: Op) -> impl Iterator<Item = &Row> {
    measured.rows.iter().filter(move |row| row.op == op)
}

fn figure(row: Option<&Row>) -> String {
    row.map_or_else(|| "-".to_owned(), Row::figure)
}

fn adds(measured: &Measured) -> String {
    let mut text = String::new();
    for counters in [1, SPREAD] {
        let what = match counters {
            1 => "one counter".to_owned(),
            several => format!("{several} counters in turn"),
        };
        let threads = measured.threads.iter().map(usize::to_string);
        let mut table = Table::new(["threads".to_owned()].into_iter().chain(threads));
        for &subject in &measured.subjects {
            let find = |&threads| rows::adds(&measured.rows, subject, threads, counters);
            if measured
                .threads
                .iter()
                .any(|threads| find(threads).is_some())
            {
                let figures = measured.threads.iter().map(|threads| figure(find(threads)));
                table.row([subject.name().to_owned()].into_iter().chain(figures));
            }
        }
        text += &format!("\nadd 1 to {what}: cycles (nanoseconds) of CPU time, medians\n{table}");
    }
    let cpus = measured.cpus;
    if measured.threads.iter().any(|&threads| threads > cpus) {
        text += &format!(
            "More threads than the {cpus} CPUs are not pinned. At any moment, at most {cpus} of them add.\n"
        );
    }
    text
}

fn sums(measured: &Measured) -> String {
    let mut table = Table::new(["", "cycles (ns)", "a shard", "shards", "in counters"]);
    for row in of(measured, Op::Sum) {
        let a_shard = (row.cycles.zip(row.shards)).map(|(cycles, shards)| cycles / shards as f64);
        let number = |value: Option<usize>| value.map_or_else(String::new, |it| it.to_string());
        table.row([
            row.subject.to_owned(),
            row.figure(),
            a_shard.map_or_else(String::new, |cycles| format!("{cycles:.1}")),
            number(row.shards),
            number(row.counters),
        ]);
    }
    let mut text = format!("\nsum without adders: cycles (nanoseconds), medians\n{table}");
    let shards = measured.shards;
    if shards < SHARDS_AGAINST_ADDS {
        text += &format!(
            "Pinfold's counters have a shard for each possible CPU, {shards} here. For {SHARDS_AGAINST_ADDS} shards, several counters are \
             summed, so the figure includes a sum's fixed cost several times: it is an upper bound.\n"
        );
    }
    text
}

fn summing(measured: &Measured) -> String {
    let adders = measured.adders_beside_a_summer;
    if adders == 0 {
        return "\nadd 1 while another thread sums: left out, because it needs 2 CPUs\n".to_owned();
    }
    let mut table = Table::new(["", "without sums", "while another thread sums"]);
    for &subject in &measured.subjects {
        let find = |summing| {
            of(measured, Op::Add)
                .find(|row| (row.subject, row.summing) == (subject.name(), Some(summing)))
        };
        if let (Some(without), Some(with)) = (find(false), find(true)) {
            table.row([subject.name().to_owned(), without.figure(), with.figure()]);
        }
    }
    format!("\nadd 1, {adders} thread(s): cycles (nanoseconds), medians\n{table}")
}

fn memory(measured: &Measured) -> String {
    let mut table = Table::new(["", "KiB", "bytes each", "how", "threads"]);
    for row in of(measured, Op::Memory) {
        let (Some(bytes), Some(counters), Some(how)) = (row.bytes, row.counters, row.how) else {
            continue;
        };
        table.row([
            row.subject.to_owned(),
            (bytes / 1024).to_string(),
            format!("{:.1}", bytes as f64 / counters as f64),
            how.to_owned(),
            row.threads.map_or_else(String::new, |it| it.to_string()),
        ]);
    }
    let mut text = format!(
        "\nmemory of counters that every CPU has added to\n{table}{}\n",
        memory::formulas(measured.cpus)
    );
    let bytes = |subject: &str| {
        let row = of(measured, Op::Memory).find(|row| row.subject == subject)?;
        Some(row.bytes? as f64)
    };
    for other in ["padded", Name::FastCounter.name(), "folly"] {
        if let (Some(ours), Some(theirs)) = (bytes(Name::Pinfold.name()), bytes(other)) {
            text += &format!("pinfold / {other}: {:.3}\n", ours / theirs);
        }
    }
    text
}

fn goals(measured: &Measured) -> String {
    let mut table = Table::with_names_last(["goal of", "ratio", "", "goal"]);
    for row in of(measured, Op::Goal) {
        if let (Some(goal), Some(ratio), Some(met)) = (&row.goal, row.ratio, row.met) {
            let verdict = if met { "met" } else { "missed" };
            let ratio = format!("{ratio:.3}");
            table.row([
                row.subject.to_owned(),
                ratio,
                verdict.to_owned(),
                goal.clone(),
            ]);
        }
    }
    format!("\n{table}")
}

/// Prints a line to standard error if no peer was measured, because most goals compare with peers.
pub fn missing(measured: &Measured) {
    let no_peer = ![Name::FastTelemetry, Name::FastCounter]
        .iter()
        .any(|&peer| rows::add(&measured.rows, peer, measured.threads[0]).is_some());
    if no_peer {
        eprintln!("note: no peer was measured, so there is nothing to compare Pinfold's adds with");
    }
}
