//! Tables for people.

use super::memory;
use super::pass::SPREAD;
use super::rows::{self, Op, Row};
use super::subjects::Name;
use super::{Measured, SHARDS_AGAINST_ADDS};

/// Prints all results.
pub fn print(measured: &Measured) {
    println!("{}", measured.machine.describe());
    adds(measured);
    sums(measured);
    summing(measured);
    memory(measured);
    println!("\ngoals");
    for row in of(measured, Op::Goal) {
        if let (Some(goal), Some(ratio), Some(met)) = (&row.goal, row.ratio, row.met) {
            let verdict = if met { "met" } else { "missed" };
            println!("{:<14} {ratio:>7.3}  {verdict:<6}  {goal}", row.subject);
        }
    }
    if measured.rows.iter().any(Row::is_doubtful) {
        println!(
            "\n? doubtful: the middle half of the rounds is wider than a quarter of the median."
        );
    }
}

fn of(measured: &Measured, op: Op) -> impl Iterator<Item = &Row> {
    measured.rows.iter().filter(move |row| row.op == op)
}

fn adds(measured: &Measured) {
    for counters in [1, SPREAD] {
        let what = match counters {
            1 => "one counter".to_owned(),
            several => format!("{several} counters in turn"),
        };
        println!("\nadd 1 to {what}: cycles (nanoseconds) of CPU time, medians");
        print!("{:<14}", "threads");
        for threads in &measured.threads {
            print!(" {threads:>18}");
        }
        println!();
        for &subject in &measured.subjects {
            let find = |threads| rows::adds(&measured.rows, subject, threads, counters);
            if !measured
                .threads
                .iter()
                .any(|&threads| find(threads).is_some())
            {
                continue;
            }
            print!("{subject:<14}");
            for &threads in &measured.threads {
                let row = find(threads);
                print!(" {:>18}", row.map_or_else(|| "-".to_owned(), figure));
            }
            println!();
        }
    }
    let cpus = measured.cpus;
    if measured.threads.iter().any(|&threads| threads > cpus) {
        println!(
            "More threads than the {cpus} CPUs are not pinned. At any moment, at most {cpus} of them add."
        );
    }
}

fn sums(measured: &Measured) {
    println!("\nsum without adders: cycles (nanoseconds), medians");
    for row in of(measured, Op::Sum) {
        let what = match (row.shards, row.counters) {
            (Some(shards), Some(1)) => format!("{shards} shards"),
            (Some(shards), Some(counters)) => {
                format!("{shards} shards, in {counters} counters that are summed in turn")
            }
            _ => String::new(),
        };
        let per_shard = (row.cycles.zip(row.shards))
            .map_or_else(String::new, |(cycles, shards)| {
                format!("{:.1} a shard", cycles / shards as f64)
            });
        println!(
            "{:<14} {:>18}  {per_shard:<14} {what}",
            row.subject,
            figure(row)
        );
    }
    let shards = measured.shards;
    if shards < SHARDS_AGAINST_ADDS {
        println!(
            "Pinfold's counters have a shard for each possible CPU, {shards} here. For {SHARDS_AGAINST_ADDS} shards, several counters are \
             summed, so the figure includes a sum's fixed cost several times: it is an upper bound."
        );
    }
}

fn summing(measured: &Measured) {
    let adders = measured.adders_beside_a_summer;
    if adders == 0 {
        println!("\nadd 1 while another thread sums: left out, because it needs 2 CPUs");
        return;
    }
    println!(
        "\nadd 1, {adders} thread(s): first alone, then while another thread sums all the time: cycles (nanoseconds), medians"
    );
    for &subject in &measured.subjects {
        let find = |summing| {
            of(measured, Op::Add)
                .find(|row| (row.subject, row.summing) == (subject.name(), Some(summing)))
        };
        if let (Some(without), Some(with)) = (find(false), find(true)) {
            println!("{subject:<14} {:>18} {:>18}", figure(without), figure(with));
        }
    }
}

fn memory(measured: &Measured) {
    println!("\nmemory of counters that every CPU has added to");
    for row in of(measured, Op::Memory) {
        let (Some(bytes), Some(counters), Some(how)) = (row.bytes, row.counters, row.how) else {
            continue;
        };
        let each = bytes as f64 / counters as f64;
        let threads = row
            .threads
            .map_or_else(String::new, |threads| format!(", {threads} threads"));
        println!(
            "{:<14} {:>10} KiB {each:>9.1} bytes each, {how}{threads}",
            row.subject,
            bytes / 1024
        );
    }
    println!("{}", memory::formulas(measured.cpus));
    let bytes = |subject: &str| {
        let row = of(measured, Op::Memory).find(|row| row.subject == subject)?;
        Some(row.bytes? as f64)
    };
    for other in ["padded", Name::FastCounter.name(), "folly"] {
        if let (Some(ours), Some(theirs)) = (bytes(Name::Pinfold.name()), bytes(other)) {
            println!("pinfold / {other}: {:.3}", ours / theirs);
        }
    }
}

fn figure(row: &Row) -> String {
    match (row.cycles, row.ns_per_op) {
        (Some(cycles), Some(ns)) => {
            let mark = if row.is_doubtful() { "?" } else { "" };
            format!("{cycles:.1}{mark} ({ns:.2})")
        }
        _ => "-".to_owned(),
    }
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
