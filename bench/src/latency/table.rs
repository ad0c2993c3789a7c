//! Tables for people: one for each situation, number of threads and kind of call.

use super::rows::{Call, Cause, Op, Row};
use pinfold_lab::output::{Table, figure};
use pinfold_lab::stats;

const MIB: f64 = (1 << 20) as f64;

pub fn text(rows: &[Row], rounds: u32) -> String {
    let mut text = format!(
        "Medians of {rounds} round(s). \"on CPU\" leaves out calls during which the thread did not \
         run for most of the time.\nThe last columns count the calls of all rounds that took more \
         than 50 us, by what explains them.\n"
    );
    if rows.iter().any(|row| !row.counts_system_calls) {
        text += "System calls could not be counted, which needs root. They are among \"own\".\n";
    }
    for setup in stats::distinct(rows.iter().map(Row::setup)) {
        let here: Vec<_> = rows.iter().filter(|row| row.setup() == setup).collect();
        text += &format!("\n{}, {} threads\n", setup.situation, setup.threads);
        text += &clock(&here);
        for op in [Op::Malloc, Op::Free, Op::FreeOther] {
            let rows: Vec<_> = here.iter().copied().filter(|row| row.op == op).collect();
            if !rows.is_empty() {
                text += &format!("\n{}", of_op(op, rows));
            }
        }
        text += &longest(&here);
    }
    text
}

/// Returns a line with the times of reading the clock twice, which every other time includes.
fn clock(rows: &[&Row]) -> String {
    let clocks = rows.iter().filter(|row| row.op == Op::Clock);
    let median = |value: fn(&Row) -> f64| {
        let values: Vec<_> = clocks.clone().map(|row| value(row)).collect();
        stats::median(&values)
    };
    format!(
        "Each time includes that of reading the clock: {:.0} ns; p99.999 {:.0} ns, longest on CPU \
         {:.0} us.\n",
        median(|row| row.figures.p50_ns),
        median(|row| row.figures.p99999_ns),
        median(|row| row.figures.longest_on_cpu_us),
    )
}

fn of_op(op: Op, rows: Vec<&Row>) -> Table {
    let ns = |value: f64| figure(Some(value), 0);
    let us = |value: f64| figure(Some(value), 0);
    let mut columns = Table::of(rows)
        .column(format!("{op}, ns"), |row| &row.subject)
        .column("p50", |row| ns(row.figures.p50_ns))
        .column("p90", |row| ns(row.figures.p90_ns))
        .column("p99", |row| ns(row.figures.p99_ns))
        .column("p99.9", |row| ns(row.figures.p999_ns))
        .column("p99.99", |row| ns(row.figures.p9999_ns))
        .column("p99.999", |row| ns(row.figures.p99999_ns))
        .column("longest us", |row| us(row.figures.longest_us))
        .column("on CPU us", |row| us(row.figures.longest_on_cpu_us))
        .column("M calls", |row| figure(Some(row.figures.calls / 1e6), 1))
        .column("peak MiB", |row| {
            figure(Some(row.figures.peak_rss_bytes / MIB), 0)
        });
    for cause in Cause::ALL {
        columns = columns.column(cause.name().replace('_', " "), |row| row.above_50us[&cause]);
    }
    columns.table()
}

/// Returns the longest call of each subject, and the longest on the CPU, with what ran meanwhile.
fn longest(rows: &[&Row]) -> String {
    let mut text = String::from("\nThe longest calls of all rounds, and what ran during them:\n");
    for subject in stats::distinct(rows.iter().map(|row| row.subject.as_str())) {
        let own = rows
            .iter()
            .filter(|row| row.subject == subject && row.op != Op::Clock);
        let first = own.clone().flat_map(|row| row.longest_calls.first());
        let on_cpu = own.flat_map(|row| row.longest_calls_on_cpu.first());
        let by_time = |one: &&Call, other: &&Call| one.us.total_cmp(&other.us);
        for call in [first.max_by(by_time), on_cpu.max_by(by_time)]
            .into_iter()
            .flatten()
        {
            text += &format!("  {subject}: {}\n", describe(call));
        }
    }
    text
}

fn describe(call: &Call) -> String {
    let size = match call.op {
        Op::Malloc => format!(" of {} bytes", call.size),
        _ => String::new(),
    };
    format!(
        "{}{size} took {:.0} us: {}; {:.0} us off the CPU, preempted {} times, waited {} times, \
         {} system calls, {} page faults",
        call.op,
        call.us,
        call.cause.name().replace('_', " "),
        call.off_cpu_us,
        call.preemptions,
        call.waits,
        call.system_calls,
        call.faults
    )
}
