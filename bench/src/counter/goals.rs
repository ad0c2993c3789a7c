//! The goals for the figures.

use super::pass::SPREAD;
use super::rows::{self, Op, Row};
use super::subjects::Name;
use super::{ADDS_AGAINST_A_SUM, SHARDS_AGAINST_ADDS, SIXTEEN_ADDS};
use pinfold_lab::stats;

const OURS: [Name; 2] = [Name::PinfoldEvent, Name::Pinfold];
const PEERS: [Name; 2] = [Name::FastTelemetry, Name::FastCounter];

/// Returns a row for each goal whose figures were measured.
pub fn rows(rows: &[Row], threads: &[usize]) -> Vec<Row> {
    let mut goals = Vec::new();
    for ours in OURS {
        goals.extend(against_atomics(rows, ours));
        goals.extend(threads.iter().filter_map(|&t| against_peers(rows, ours, t)));
    }
    let vmstat = ratio(
        rows::add(rows, Name::Vmstat, 1),
        rows::add(rows, Name::PinfoldEvent, 1),
    );
    goals.extend(vmstat.map(|ratio| {
        let what = "inc, 1 thread(s) / pinfold-event's".to_owned();
        goal(Name::Vmstat, what, ratio, At::Most(1.3))
    }));
    for ours in OURS {
        goals.extend(sum(rows, ours));
        goals.extend(summing(rows, ours));
    }
    goals
}

enum At {
    Most(f64),
    Least(f64),
}

fn goal(subject: Name, what: String, ratio: f64, at: At) -> Row {
    let mut row = Row::new(subject.name(), Op::Goal);
    let (limit, met, word) = match at {
        At::Most(limit) => (limit, ratio <= limit, "at most"),
        At::Least(limit) => (limit, ratio >= limit, "at least"),
    };
    row.goal = Some(format!("{what}: {word} {limit}"));
    row.ratio = Some((ratio * 1_000.0).round() / 1_000.0);
    row.limit = Some(limit);
    row.met = Some(met);
    row
}

fn ratio(ours: Option<f64>, theirs: Option<f64>) -> Option<f64> {
    Some(ours? / theirs?)
}

fn against_atomics(rows: &[Row], ours: Name) -> Vec<Row> {
    let against = |threads, theirs: Name, limit| {
        let ratio = ratio(
            rows::add(rows, ours, threads),
            rows::add(rows, theirs, threads),
        )?;
        let what = format!("add, {threads} thread(s) / {theirs}'s");
        Some(goal(ours, what, ratio, At::Most(limit)))
    };
    let spread = || {
        let cycles = |name| rows::adds(rows, name, 1, SPREAD)?.cycles;
        let ratio = ratio(cycles(ours), cycles(Name::AtomicOwn))?;
        let what = format!(
            "add, 1 thread(s), to {SPREAD} counters in turn / {}'s",
            Name::AtomicOwn
        );
        Some(goal(ours, what, ratio, At::Most(0.5)))
    };
    [
        against(1, Name::AtomicOwn, 0.5),
        spread(),
        against(2, Name::Atomic, 0.2),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn against_peers(rows: &[Row], ours: Name, threads: usize) -> Option<Row> {
    let peers = PEERS.iter().filter_map(|&peer| {
        let cycles = rows::add(rows, peer, threads)?;
        Some((cycles, peer))
    });
    let (best, peer) = peers.min_by(|a, b| a.0.total_cmp(&b.0))?;
    let ratio = rows::add(rows, ours, threads)? / best;
    let what = format!("add, {threads} thread(s) / the best peer's, {peer}");
    Some(goal(ours, what, ratio, At::Most(1.0)))
}

fn sum(rows: &[Row], ours: Name) -> Option<Row> {
    let ratio = ratio(rows::sum(rows, ours.name()), rows::sum(rows, SIXTEEN_ADDS))?;
    let what = format!(
        "sum of {SHARDS_AGAINST_ADDS} shards / {ADDS_AGAINST_A_SUM} uncontended atomic adds"
    );
    Some(goal(ours, what, ratio, At::Most(1.0)))
}

/// Compares the adds per second while another thread sums with those without, round by round.
fn summing(rows: &[Row], ours: Name) -> Option<Row> {
    let rounds = |summing| {
        let row =
            (rows.iter()).find(|row| (row.subject, row.summing) == (ours.name(), Some(summing)))?;
        Some(&row.rounds)
    };
    let ratios: Vec<_> = (rounds(false)?.iter().zip(rounds(true)?))
        .map(|(without, with)| without / with)
        .collect();
    let what = "adds a second while another thread sums / without".to_owned();
    Some(goal(ours, what, stats::median(&ratios), At::Least(0.7)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn add(subject: Name, threads: usize, cycles: f64) -> Row {
        let mut row = Row::new(subject.name(), Op::Add);
        (row.threads, row.counters) = (Some(threads), Some(1));
        row.cycles = Some(cycles);
        row
    }

    #[test]
    fn goals_compare_pinfold_with_the_best_peer() {
        let measured = [
            add(Name::PinfoldEvent, 1, 5.0),
            add(Name::FastTelemetry, 1, 20.0),
            add(Name::FastCounter, 1, 10.0),
            add(Name::AtomicOwn, 1, 8.0),
        ];
        let goals = rows(&measured, &[1, 2]);
        let said: Vec<_> = (goals.iter())
            .map(|row| (row.goal.as_deref().unwrap(), row.ratio, row.met))
            .collect();
        assert_eq!(
            said,
            [
                (
                    "add, 1 thread(s) / atomic-own's: at most 0.5",
                    Some(0.625),
                    Some(false)
                ),
                (
                    "add, 1 thread(s) / the best peer's, fast-counter: at most 1",
                    Some(0.5),
                    Some(true)
                ),
            ]
        );
    }
}
