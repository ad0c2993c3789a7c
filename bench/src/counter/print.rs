//! Tables for people.

use super::memory;
use super::pass::SPREAD;
use super::rows::{self, Op, Row};
use super::subjects::Name;
use super::{Measured, SHARDS_AGAINST_ADDS};
use pinfold_lab::output::Table;
use pinfold_lab::stats;

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

/// Formats a value. The text of a missing value is empty.
fn number(value: Option<usize>) -> String {
    value.map_or_else(String::new, |value| value.to_string())
}

fn adds(measured: &Measured) -> String {
    let mut text = String::new();
    for counters in [1, SPREAD] {
        let what = match counters {
            1 => "one counter".to_owned(),
            several => format!("{several} counters in turn"),
        };
        let find = |subject, threads| rows::adds(&measured.rows, subject, threads, counters);
        let threads = &measured.threads;
        let has_any = |&subject: &Name| threads.iter().any(|&n| find(subject, n).is_some());
        let subjects = measured.subjects.iter().copied().filter(has_any);
        let mut table = Table::of(subjects).column("threads", |subject| subject);
        for &threads in threads {
            table = table.column(threads, |subject| figure(find(subject, threads)));
        }
        let table = table.table();
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
    let a_shard = |row: &Row| Some(format!("{:.1}", row.cycles? / row.shards? as f64));
    let table = Table::of(of(measured, Op::Sum))
        .column("", |row| row.subject)
        .column("cycles (ns)", Row::figure)
        .column("a shard", |row| a_shard(row).unwrap_or_default())
        .column("shards", |row| number(row.shards))
        .column("in counters", |row| number(row.counters))
        .table();
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
    let rows = measured.subjects.iter().filter_map(|&subject| {
        let find = |summing| {
            of(measured, Op::Add)
                .find(|row| (row.subject, row.summing) == (subject.name(), Some(summing)))
        };
        Some((subject, find(false)?, find(true)?))
    });
    let table = Table::of(rows)
        .column("", |(subject, ..)| subject)
        .column("without sums", |(_, without, _)| without.figure())
        .column("while another thread sums", |(.., with)| with.figure())
        .table();
    format!("\nadd 1, {adders} thread(s): cycles (nanoseconds), medians\n{table}")
}

fn memory(measured: &Measured) -> String {
    let rows = of(measured, Op::Memory);
    let rows = rows.filter_map(|row| Some((row, row.bytes?, row.counters?, row.how?)));
    let table = Table::of(rows)
        .column("", |(row, ..)| row.subject)
        .column("KiB", |(_, bytes, ..)| bytes / 1024)
        .column("bytes each", |(_, bytes, counters, _)| {
            format!("{:.1}", bytes as f64 / counters as f64)
        })
        .column("how", |(.., how)| how)
        .column("threads", |(row, ..)| number(row.threads))
        .table();
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
    let rows = of(measured, Op::Goal);
    let rows = rows.filter_map(|row| Some((row, row.goal.as_ref()?, row.ratio?, row.met?)));
    let table = Table::of(rows)
        .column("goal of", |(row, ..)| row.subject)
        .column("ratio", |(_, _, ratio, _)| format!("{ratio:.3}"))
        .column("", |(.., met)| if met { "met" } else { "missed" })
        .names("goal", |(_, goal, ..)| goal)
        .table();
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
