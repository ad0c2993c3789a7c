//! Tables for people: one for each program, then the means and the goals.

use super::rows::{self, BASE, Cost, Row};
use super::subjects::PROFILED;
use anyhow::Result;
use pinfold_lab::figures::{Panels, Plot, Series};
use pinfold_lab::output::{Table, figure};
use pinfold_lab::stats::geometric_mean;

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

pub fn text(rows: &[Row], rounds: u32) -> String {
    let mut text = format!(
        "Medians of {rounds} round(s), with the least and the most in brackets. x {BASE} and x best are ratios to {BASE} and to the best peer of the program.\n"
    );
    for program in rows::programs(rows) {
        text += &of_program(rows, program);
    }
    text += &means(rows);
    for line in profiles(rows).into_iter().chain(verdicts(rows)) {
        text += &(line + "\n");
    }
    text
}

fn of_program(rows: &[Row], program: &str) -> String {
    let (mut heading, mut errors) = (String::new(), String::new());
    let mut measured = Vec::new();
    for row in rows.iter().filter(|row| row.program == program) {
        let plural = if row.threads == 1 { "" } else { "s" };
        heading = format!(
            "\n{program}: {} ({} thread{plural})\n",
            row.what, row.threads
        );
        match &row.error {
            Some(error) => errors += &format!("{}: ERROR: {error}\n", row.subject),
            None => measured.push(row),
        }
    }
    let ratio = |row: &Row, cost: Cost, to: Option<&Row>| {
        figure(to.and_then(|to| Some(cost.of(row)? / cost.of(to)?)), 2)
    };
    let base = rows::find(rows, program, BASE);
    let best = |cost| rows::best_peer(rows, program, cost);
    let mib = |bytes: Option<u64>| figure(bytes.map(|bytes| bytes as f64 / MIB), 1);
    let spread = |row: &Row| {
        let [low, high] = row.spread?.seconds;
        Some(format!("[{low:.3}, {high:.3}]"))
    };
    let table = Table::of(measured)
        .column("subject", |row| &row.subject)
        .column("seconds", |row| figure(row.seconds, 3))
        .column("[spread]", |row| spread(row).unwrap_or_default())
        .column("x glibc", |row| ratio(row, Cost::Time, base))
        .column("x best", |row| ratio(row, Cost::Time, best(Cost::Time)))
        .column("cpu s", |row| figure(row.cpu_seconds, 3))
        .column("peak MiB", |row| mib(row.peak_rss_bytes))
        .column("x glibc", |row| ratio(row, Cost::Memory, base))
        .column("x best", |row| ratio(row, Cost::Memory, best(Cost::Memory)))
        .column("settled", |row| mib(row.settled_rss_bytes))
        .column("faults", |row| {
            figure(row.faults.map(|faults| faults as f64), 0)
        })
        .table();
    format!("{heading}{table}{errors}")
}

fn means(rows: &[Row]) -> String {
    let best = [Cost::Time, Cost::Memory].map(|cost| rows::best_single_peer(rows, cost));
    let mean = |subject, to: Option<&str>, cost| {
        figure(
            to.and_then(|to| Some(rows::mean_ratio(rows, subject, to, cost)?.0)),
            3,
        )
    };
    let count = |subject| rows::mean_ratio(rows, subject, BASE, Cost::Time);
    let table = Table::of(rows::subjects(rows))
        .column("subject", |subject| subject)
        .column("programs", |subject| {
            count(subject).map_or(0, |(_, count)| count)
        })
        .column("time x glibc", |subject| {
            mean(subject, Some(BASE), Cost::Time)
        })
        .column("time x best", |subject| mean(subject, best[0], Cost::Time))
        .column("peak x glibc", |subject| {
            mean(subject, Some(BASE), Cost::Memory)
        })
        .column("peak x best", |subject| {
            mean(subject, best[1], Cost::Memory)
        })
        .table();
    let [time, memory] = best.map(|best| best.unwrap_or("-"));
    format!(
        "\nGeometric means; the best single peer is {time} by time, {memory} by peak memory\n{table}"
    )
}

/// Draws time against memory, relative to the base.
pub fn plot(rows: &[Row]) -> Result<String> {
    panels(
        ["time / glibc", "peak memory / glibc"],
        &rows::programs(rows),
        &rows::subjects(rows),
        &|program, subject, cost| {
            let base = cost.of(rows::find(rows, program, BASE)?)?;
            Some(cost.of(rows::find(rows, program, subject)?)? / base)
        },
    )
}

/// Draws ratios of time against ratios of memory: a panel of the geometric means, and one for each
/// program. `axes` names both ratios.
pub fn panels(
    axes: [&str; 2],
    programs: &[&str],
    subjects: &[&str],
    ratio: &dyn Fn(&str, &str, Cost) -> Option<f64>,
) -> Result<String> {
    let panel = |title, ratio: &dyn Fn(&str, Cost) -> Option<f64>| {
        let point = |subject| Some((ratio(subject, Cost::Time)?, ratio(subject, Cost::Memory)?));
        let series = subjects.iter().map(|&subject| Series {
            name: subject.to_owned(),
            points: point(subject).into_iter().collect(),
        });
        Plot {
            title,
            x: axes[0],
            y: axes[1],
            log_x: false,
            log_y: false,
            series: series.collect(),
        }
    };
    let means = |subject: &str, cost| {
        let ratios = programs
            .iter()
            .filter_map(|program| ratio(program, subject, cost));
        let ratios: Vec<_> = ratios.collect();
        (!ratios.is_empty()).then(|| geometric_mean(&ratios))
    };
    let mut plots = vec![panel("geometric means", &means)];
    for &program in programs {
        plots.push(panel(program, &|subject, cost| {
            ratio(program, subject, cost)
        }));
    }
    Panels { columns: 3, plots }.svg()
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
    fn the_plot_has_a_point_for_each_subject_that_was_measured() {
        let picture = plot(&example()).unwrap();
        // Three means, three subjects of the first program, and two of the second, where the third
        // subject failed.
        assert_eq!(picture.matches("<circle").count(), 3 + 3 + 2);
        for text in ["pinfold-malloc", "mimalloc", "first", "geometric means"] {
            assert!(picture.lines().any(|line| line == text), "{text}");
        }
    }

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
