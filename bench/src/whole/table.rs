//! Tables for people: one for each program, then the means and the goals.

use super::rows::{self, BASE, Cost, Row};
use super::subjects::PROFILED;
use crate::machine::Machine;

const MIB: f64 = (1 << 20) as f64;
/// The bound on a program's time, as a multiple of the best peer's.
const MAX_TIME: f64 = 1.15;
/// The bound on a program's memory, as a multiple of the base's. Programs that need at most
/// [`SMALL`] are exempt.
const MAX_MEMORY: f64 = 1.15;
const SMALL: f64 = 10.0 * MIB;
/// The goals for the geometric means: for time relative to the best single peer, for memory
/// relative to the base.
const TIME_GOAL: f64 = 0.95;
const MEMORY_GOAL: f64 = 1.0;

/// Prints all results.
pub fn print(machine: &Machine, rows: &[Row], rounds: u32) {
    println!("{}", machine.describe());
    println!(
        "Medians of {rounds} round(s), with the least and the most in brackets. x {BASE} and x best are ratios to {BASE} and to the best peer of the program."
    );
    for program in rows::programs(rows) {
        of_program(rows, program);
    }
    means(rows);
    for line in profiles(rows).into_iter().chain(verdicts(rows)) {
        println!("{line}");
    }
}

fn of_program(rows: &[Row], program: &str) {
    let of: Vec<_> = rows.iter().filter(|row| row.program == program).collect();
    let Some(first) = of.first() else { return };
    println!(
        "\n{program}: {} ({} thread{})",
        first.what,
        first.threads,
        if first.threads == 1 { "" } else { "s" }
    );
    println!(
        "{:<16} {:>8} {:>17} {:>7} {:>6} {:>8} {:>9} {:>7} {:>6} {:>9} {:>9}",
        "subject",
        "seconds",
        "[spread]",
        "x glibc",
        "x best",
        "cpu s",
        "peak MiB",
        "x glibc",
        "x best",
        "settled",
        "faults"
    );
    for row in of {
        if let Some(error) = &row.error {
            println!("{:<16} ERROR: {error}", row.subject);
            continue;
        }
        let (Some(seconds), Some(cpu), Some(peak), Some(faults), Some(spread)) = (
            row.seconds,
            row.cpu_seconds,
            row.peak_rss_bytes,
            row.faults,
            row.spread,
        ) else {
            continue;
        };
        let ratio = |cost: Cost, to: Option<&Row>| {
            let ratio = to.and_then(|to| Some(cost.of(row)? / cost.of(to)?));
            ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}"))
        };
        let base = rows::find(rows, program, BASE);
        println!(
            "{:<16} {:>8.3} {:>17} {:>7} {:>6} {:>8.3} {:>9.1} {:>7} {:>6} {:>9} {:>9}",
            row.subject,
            seconds,
            format!("[{:.3}, {:.3}]", spread.seconds[0], spread.seconds[1]),
            ratio(Cost::Time, base),
            ratio(Cost::Time, rows::best_peer(rows, program, Cost::Time)),
            cpu,
            peak as f64 / MIB,
            ratio(Cost::Memory, base),
            ratio(Cost::Memory, rows::best_peer(rows, program, Cost::Memory)),
            row.settled_rss_bytes.map_or_else(
                || "-".to_owned(),
                |bytes| format!("{:.1}", bytes as f64 / MIB)
            ),
            faults
        );
    }
}

fn means(rows: &[Row]) {
    let best = [Cost::Time, Cost::Memory].map(|cost| rows::best_single_peer(rows, cost));
    println!(
        "\nGeometric means; the best single peer is {} by time, {} by peak memory",
        best[0].unwrap_or("-"),
        best[1].unwrap_or("-")
    );
    println!(
        "{:<16} {:>8} {:>12} {:>12} {:>12} {:>12}",
        "subject", "programs", "time x glibc", "time x best", "peak x glibc", "peak x best"
    );
    for subject in rows::subjects(rows) {
        let mean = |to: Option<&str>, cost| {
            let mean = rows::mean_ratio(rows, subject, to?, cost)?.0;
            Some(format!("{mean:.3}"))
        };
        let shown = |to, cost| mean(to, cost).unwrap_or_else(|| "-".to_owned());
        let count = rows::mean_ratio(rows, subject, BASE, Cost::Time).map_or(0, |(_, count)| count);
        println!(
            "{subject:<16} {count:>8} {:>12} {:>12} {:>12} {:>12}",
            shown(Some(BASE), Cost::Time),
            shown(best[0], Cost::Time),
            shown(Some(BASE), Cost::Memory),
            shown(best[1], Cost::Memory)
        );
    }
}

/// Returns a line for each subject with a heap profile: the cost of the profile.
fn profiles(rows: &[Row]) -> Vec<String> {
    let line = |subject: &str| {
        let plain = subject.strip_suffix(PROFILED)?;
        let (time, count) = rows::mean_ratio(rows, subject, plain, Cost::Time)?;
        let memory = rows::mean_ratio(rows, subject, plain, Cost::Memory)?.0;
        Some(format!(
            "heap profile, {subject} / {plain}: time {time:.3}, peak memory {memory:.3}, over {count} programs"
        ))
    };
    rows::subjects(rows).into_iter().filter_map(line).collect()
}

/// Returns, for each build of Pinfold without a profile, whether it meets its goals, and the
/// programs that miss their bounds.
fn verdicts(rows: &[Row]) -> Vec<String> {
    let mut lines = Vec::new();
    let is_compared = |subject: &&str| {
        let is_pinfold = |row: &Row| row.subject == *subject && row.is_pinfold;
        !subject.ends_with(PROFILED) && rows.iter().any(is_pinfold)
    };
    for subject in rows::subjects(rows).into_iter().filter(is_compared) {
        let mut goal = |what: &str, to: &str, cost, most| {
            if let Some((mean, count)) = rows::mean_ratio(rows, subject, to, cost) {
                let verdict = if mean <= most { "met" } else { "missed" };
                lines.push(format!(
                    "goal {subject}: {what} / {to} {mean:.3} over {count} programs, at most {most}: {verdict}"
                ));
            }
        };
        if let Some(best) = rows::best_single_peer(rows, Cost::Time) {
            goal("time", best, Cost::Time, TIME_GOAL);
        }
        goal("peak memory", BASE, Cost::Memory, MEMORY_GOAL);
        lines.extend(misses(rows, subject));
    }
    lines
}

/// Returns a line for each program that fails, or that needs more time or memory than its bound.
fn misses(rows: &[Row], subject: &str) -> Vec<String> {
    let mut lines = Vec::new();
    for row in rows.iter().filter(|row| row.subject == subject) {
        let program = row.program;
        if let Some(error) = &row.error {
            lines.push(format!("miss {subject}: {program} failed: {error}"));
        }
        let best = rows::best_peer(rows, program, Cost::Time);
        if let (Some(ours), Some(best)) = (row.seconds, best) {
            let ratio = ours / best.seconds.unwrap_or(f64::NAN);
            if ratio > MAX_TIME {
                lines.push(format!(
                    "miss {subject}: {program} takes {ratio:.2} x {}'s time, more than {MAX_TIME}",
                    best.subject
                ));
            }
        }
        let base = rows::find(rows, program, BASE).and_then(|base| Cost::Memory.of(base));
        if let (Some(ours), Some(base)) = (Cost::Memory.of(row), base) {
            let ratio = ours / base;
            if ratio > MAX_MEMORY && ours > SMALL {
                lines.push(format!(
                    "miss {subject}: {program} needs {ratio:.2} x {BASE}'s memory, more than {MAX_MEMORY}"
                ));
            }
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::whole::rows::tests::example;

    #[test]
    fn programs_that_miss_their_bounds_are_listed() {
        let lines = misses(&example(), "pinfold-malloc").join("\n");
        assert!(lines.contains("first takes 2.00 x glibc's time"), "{lines}");
        assert!(
            lines.contains("first needs 2.00 x glibc's memory"),
            "{lines}"
        );
        assert!(!lines.contains("second"), "{lines}");
    }

    #[test]
    fn goals_cover_only_builds_of_pinfold() {
        let lines = verdicts(&example());
        assert!(
            lines[0].contains("time / glibc 0.707 over 2 programs"),
            "{lines:?}"
        );
        assert!(
            lines[0].ends_with("met") && lines[1].ends_with("missed"),
            "{lines:?}"
        );
        assert!(
            lines.iter().all(|line| !line.contains(" mimalloc:")),
            "{lines:?}"
        );
    }
}
