//! What the load reports, and the rows: medians over the rounds.

use super::{Setup, Situation};
use anyhow::{Context, Result};
use pinfold_lab::stats;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

pinfold_lab::names! {
    /// A timed call.
    pub enum Op {
        /// `malloc`.
        Malloc = "malloc",
        /// `free`, in the thread that allocated the block.
        Free = "free",
        /// `free`, in another thread.
        FreeOther = "free_other",
        /// Nothing: the clock is read twice.
        Clock = "clock",
    }
}

pinfold_lab::names! {
    /// What explains a long call: the first of these that applies.
    pub enum Cause {
        /// The kernel gave the CPU to another thread for at least half of the time.
        Preempted = "preempted",
        /// The thread slept for at least half of the time, for example for a lock.
        Waited = "waited",
        /// The thread did not run for at least half of the time, without a context switch: the
        /// host ran something else.
        Stolen = "stolen",
        /// The call made system calls.
        SystemCalls = "system_calls",
        /// The call caused page faults.
        Faults = "faults",
        /// None of these: the allocator's own time in user space, and interrupts.
        Own = "own",
    }
}

impl Cause {
    /// Returns whether the thread ran on its CPU.
    pub fn is_on_cpu(self) -> bool {
        matches!(self, Cause::SystemCalls | Cause::Faults | Cause::Own)
    }
}

/// The load's report.
#[derive(Debug, Deserialize)]
pub struct Report {
    ns_per_tick: f64,
    counts_system_calls: bool,
    ops: BTreeMap<Op, Times>,
    longest: Vec<Call>,
    #[serde(skip_deserializing)]
    pub peak_rss_bytes: u64,
}

/// The times of one kind of call, in ticks.
#[derive(Debug, Deserialize)]
struct Times {
    /// Times, and how many calls took as long. In ascending order.
    buckets: Vec<(u64, u64)>,
    longest_unexplained: u64,
    causes: BTreeMap<Cause, OfCause>,
}

/// The long calls with one cause.
#[derive(Debug, Deserialize)]
struct OfCause {
    /// How many took more than 50 us.
    above: u64,
    longest: u64,
}

/// A long call, and what the kernel counted meanwhile.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Call {
    pub op: Op,
    pub cause: Cause,
    /// The bytes asked for. Only of `malloc`.
    pub size: u64,
    pub us: f64,
    pub off_cpu_us: f64,
    pub preemptions: u64,
    pub waits: u64,
    pub system_calls: u64,
    pub faults: u64,
}

/// The distribution of one round.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Figures {
    pub p50_ns: f64,
    pub p90_ns: f64,
    pub p99_ns: f64,
    pub p999_ns: f64,
    pub p9999_ns: f64,
    pub p99999_ns: f64,
    pub longest_us: f64,
    /// The longest call during which the thread ran on its CPU for most of the time.
    pub longest_on_cpu_us: f64,
    pub calls: f64,
    /// Peak resident memory of the load.
    pub peak_rss_bytes: f64,
}

/// One result.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub subject: String,
    pub op: Op,
    pub threads: u32,
    pub situation: Situation,
    /// The medians over the rounds.
    #[serde(flatten)]
    pub figures: Figures,
    /// How many calls of all rounds took more than 50 us, by cause.
    pub above_50us: BTreeMap<Cause, u64>,
    /// Whether the load could count system calls. Otherwise they look like `own`.
    pub counts_system_calls: bool,
    /// The longest calls of all rounds, and the longest on the CPU.
    pub longest_calls: Vec<Call>,
    pub longest_calls_on_cpu: Vec<Call>,
    pub rounds: Vec<Figures>,
}

/// How many of the longest calls a row has.
const LISTED: usize = 8;

impl Row {
    pub fn setup(&self) -> Setup {
        Setup {
            situation: self.situation,
            threads: self.threads,
        }
    }
}

/// Returns the rows of one subject, one for each kind of call.
pub fn of(subject: &str, setup: Setup, reports: &[Report]) -> Result<Vec<Row>> {
    let row = |op| -> Result<Row> {
        let all = reports.iter().map(|report| {
            let times = report
                .ops
                .get(&op)
                .filter(|times| !times.buckets.is_empty());
            times.map(|times| (report, times))
        });
        let all: Vec<_> = all.flatten().collect();
        let rounds: Vec<_> = all.iter().map(|(report, of)| figures(report, of)).collect();
        let above =
            |cause: Cause| -> u64 { all.iter().map(|(_, of)| of.causes[&cause].above).sum() };
        let longest = |on_cpu: bool| {
            let calls = reports.iter().flat_map(|report| &report.longest);
            let wanted = calls.filter(|call| call.op == op && (call.cause.is_on_cpu() || !on_cpu));
            let mut calls: Vec<_> = wanted.cloned().collect();
            calls.sort_by(|one, other| other.us.total_cmp(&one.us));
            calls.truncate(LISTED);
            calls
        };
        Ok(Row {
            subject: subject.to_owned(),
            op,
            threads: setup.threads,
            situation: setup.situation,
            figures: medians(&rounds).with_context(|| format!("no call of {op} was recorded"))?,
            above_50us: Cause::ALL.map(|cause| (cause, above(cause))).into(),
            counts_system_calls: reports.iter().all(|report| report.counts_system_calls),
            longest_calls: longest(false),
            longest_calls_on_cpu: longest(true),
            rounds,
        })
    };
    let measured = |op: &Op| reports.iter().any(|of| !of.ops[op].buckets.is_empty());
    Op::ALL.into_iter().filter(measured).map(row).collect()
}

/// Returns the figures of one round.
fn figures(report: &Report, times: &Times) -> Figures {
    let ns = |ticks: u64| ticks as f64 * report.ns_per_tick;
    let longest = |on_cpu: bool| {
        let causes = times
            .causes
            .iter()
            .filter(|(cause, _)| cause.is_on_cpu() || !on_cpu);
        let explained = causes.map(|(_, of)| of.longest).max().unwrap_or(0);
        ns(explained.max(times.longest_unexplained)) / 1e3
    };
    let quantile = |share| ns(quantile(&times.buckets, share));
    Figures {
        p50_ns: quantile(0.5),
        p90_ns: quantile(0.9),
        p99_ns: quantile(0.99),
        p999_ns: quantile(0.999),
        p9999_ns: quantile(0.9999),
        p99999_ns: quantile(0.99999),
        longest_us: longest(false),
        longest_on_cpu_us: longest(true),
        calls: count(&times.buckets) as f64,
        peak_rss_bytes: report.peak_rss_bytes as f64,
    }
}

fn count(buckets: &[(u64, u64)]) -> u64 {
    buckets.iter().map(|(_, count)| count).sum()
}

/// Returns the least time that at least the share `share` of the calls did not exceed.
fn quantile(buckets: &[(u64, u64)], share: f64) -> u64 {
    let wanted = (count(buckets) as f64 * share).ceil() as u64;
    let mut so_far = 0;
    let found = buckets.iter().find(|(_, count)| {
        so_far += count;
        so_far >= wanted
    });
    found.map_or(0, |(ticks, _)| *ticks)
}

/// Returns the median of each figure, or `None` if there is no round.
fn medians(rounds: &[Figures]) -> Option<Figures> {
    let median = |value: fn(&Figures) -> f64| {
        let values: Vec<_> = rounds.iter().map(value).collect();
        (stats::median(&values) * 10.0).round() / 10.0
    };
    (!rounds.is_empty()).then(|| Figures {
        p50_ns: median(|of| of.p50_ns),
        p90_ns: median(|of| of.p90_ns),
        p99_ns: median(|of| of.p99_ns),
        p999_ns: median(|of| of.p999_ns),
        p9999_ns: median(|of| of.p9999_ns),
        p99999_ns: median(|of| of.p99999_ns),
        longest_us: median(|of| of.longest_us),
        longest_on_cpu_us: median(|of| of.longest_on_cpu_us),
        calls: median(|of| of.calls),
        peak_rss_bytes: median(|of| of.peak_rss_bytes),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A report as the load prints it: 90 short calls, 9 of 1 us and one of 100 us.
    fn report(cause: &str) -> Report {
        let causes = Cause::ALL.map(|of| {
            let long = if of.name() == cause { 1 } else { 0 };
            format!(
                "\"{of}\":{{\"above\":{long},\"longest\":{}}}",
                long * 200_000
            )
        });
        let causes = causes.join(",");
        let op = |name, buckets| {
            format!(
                "\"{name}\":{{\"buckets\":[{buckets}],\"longest_unexplained\":2000,\"causes\":{{{causes}}}}}"
            )
        };
        let ops = [
            op("malloc", "[40,90],[2000,9],[200000,1]"),
            op("free", "[40,1]"),
            op("free_other", ""),
            op("clock", "[20,1]"),
        ];
        let call = format!(
            "{{\"op\":\"malloc\",\"cause\":\"{cause}\",\"size\":64,\"us\":100.0,\"off_cpu_us\":0.0,\
             \"preemptions\":0,\"waits\":0,\"system_calls\":0,\"faults\":0}}"
        );
        let text = format!(
            "{{\"ns_per_tick\":0.5,\"counts_system_calls\":true,\"ops\":{{{}}},\"longest\":[{call}]}}",
            ops.join(",")
        );
        serde_json::from_str(&text).unwrap()
    }

    fn rows(cause: &str) -> Vec<Row> {
        let setup = Setup {
            situation: Situation::Idle,
            threads: 2,
        };
        of("glibc", setup, &[report(cause)]).unwrap()
    }

    /// Whoever reads a percentile relies on its rank, and a kind of call that did not happen has no
    /// row.
    #[test]
    fn percentiles_are_by_rank() {
        let rows = rows("own");
        let ops: Vec<_> = rows.iter().map(|row| row.op).collect();
        assert_eq!(ops, [Op::Malloc, Op::Free, Op::Clock]);
        let malloc = &rows[0].figures;
        let found = [malloc.p50_ns, malloc.p90_ns, malloc.p99_ns, malloc.p999_ns];
        assert_eq!(found, [20.0, 20.0, 1000.0, 100_000.0]);
        assert_eq!(malloc.calls, 100.0);
    }

    /// A call during which another thread had the CPU must not count as the allocator's longest.
    #[test]
    fn a_preempted_call_is_not_the_longest_on_the_cpu() {
        for (cause, on_cpu, listed) in [("own", 100.0, 1), ("preempted", 1.0, 0)] {
            let row = &rows(cause)[0];
            let longest = (row.figures.longest_us, row.figures.longest_on_cpu_us);
            assert_eq!(longest, (100.0, on_cpu), "{cause}");
            assert_eq!(row.above_50us.values().sum::<u64>(), 1, "{cause}");
            assert_eq!(row.longest_calls_on_cpu.len(), listed, "{cause}");
        }
    }
}
