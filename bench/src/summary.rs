//! The summary: Pinfold's cycles divided by those of the best peer in the same cell.

use crate::slab::Rows;
use crate::subjects::SubjectName;
use pinfold_lab::bench::slab::Test;
use pinfold_lab::{Op, Scenario, stats};

/// The largest size that the targets cover.
const LARGEST: usize = 4096;

/// A cell compared with its best peer.
#[derive(Clone, Debug)]
struct Ratio {
    scenario: Test,
    op: Op,
    size: usize,
    ratio: f64,
    peer: SubjectName,
    is_doubtful: bool,
}

/// Formats a line for each of Pinfold's subjects, scenario and operation, and one for each target.
///
/// The targets are for comparisons with allocators, so there are none beside object pools.
pub fn text(rows: &Rows) -> String {
    let mut text = String::new();
    let has_pools = rows.0.iter().any(|row| row.subject.is_pool());
    for subject in [SubjectName::PinfoldCache, SubjectName::PinfoldMalloc] {
        let all = ratios(rows, subject);
        if all.is_empty() {
            continue;
        }
        text += &format!(
            "\n{subject} / the best peer of each cell, sizes to {LARGEST}: geometric mean, worst cell\n"
        );
        for of in rows.operations() {
            let name = format!("{}, {}", of.0.name(), of.1.name());
            text += &line(&name, &all, |ratio| (ratio.scenario, ratio.op) == of);
        }
        if has_pools {
            continue;
        }
        let is_single = |ratio: &Ratio| ratio.scenario.least_threads() == 1;
        let (mean, cell) = match subject {
            SubjectName::PinfoldCache => (0.8, Some(1.1)),
            _ => (1.0, None),
        };
        text += &target("one thread", &all, mean, cell, is_single);
        if subject == SubjectName::PinfoldCache {
            text += &target("all scenarios", &all, 0.75, Some(1.0), |_| true);
        }
        for scenario in [Scenario::Remote, Scenario::OneToN] {
            text += &target(scenario.name(), &all, 1.0, None, |ratio| {
                ratio.scenario == Test::Of(scenario)
            });
        }
    }
    text
}

fn ratios(rows: &Rows, subject: SubjectName) -> Vec<Ratio> {
    let ours = (rows.0.iter()).filter(|row| row.subject == subject && row.size <= LARGEST);
    ours.filter_map(|row| {
        let peers = (rows.0.iter()).filter(|peer| {
            !peer.subject.is_pinfold()
                && (peer.scenario, peer.size, peer.op) == (row.scenario, row.size, row.op)
        });
        let best = peers.min_by(|one, other| one.cycles.total_cmp(&other.cycles))?;
        Some(Ratio {
            scenario: row.scenario,
            op: row.op,
            size: row.size,
            ratio: row.cycles / best.cycles,
            peer: best.subject,
            is_doubtful: stats::is_doubtful(&row.rounds) || stats::is_doubtful(&best.rounds),
        })
    })
    .collect()
}

fn line(name: &str, all: &[Ratio], belongs: impl Fn(&Ratio) -> bool) -> String {
    mean_and_worst(all, belongs).map_or_else(String::new, |(mean, worst)| {
        format!("  {name:<16} {mean:>5.2}   {}\n", describe(&worst))
    })
}

/// Formats whether the mean is within its bound, and whether each cell is, if there is a bound for
/// cells.
fn target(
    name: &str,
    all: &[Ratio],
    mean_bound: f64,
    cell_bound: Option<f64>,
    belongs: impl Fn(&Ratio) -> bool,
) -> String {
    let Some((mean, worst)) = mean_and_worst(all, belongs) else {
        return String::new();
    };
    let verdict = |holds: bool| if holds { "met" } else { "missed" };
    let cells = cell_bound.map_or_else(String::new, |bound| {
        let (worst, verdict) = (describe(&worst), verdict(worst.ratio <= bound));
        format!("; {worst}, at most {bound:.1}: {verdict}")
    });
    let verdict = verdict(mean <= mean_bound);
    format!("  target {name}: mean {mean:.2}, at most {mean_bound:.1}: {verdict}{cells}\n")
}

fn mean_and_worst(all: &[Ratio], belongs: impl Fn(&Ratio) -> bool) -> Option<(f64, Ratio)> {
    let chosen: Vec<_> = all.iter().filter(|ratio| belongs(ratio)).collect();
    let worst = (chosen.iter()).max_by(|one, other| one.ratio.total_cmp(&other.ratio))?;
    let ratios: Vec<_> = chosen.iter().map(|ratio| ratio.ratio).collect();
    Some((stats::geometric_mean(&ratios), (*worst).clone()))
}

fn describe(worst: &Ratio) -> String {
    format!(
        "worst {:.2}{} ({} {} of {} bytes against {})",
        worst.ratio,
        if worst.is_doubtful { "?" } else { "" },
        worst.scenario.name(),
        worst.op.name(),
        worst.size,
        worst.peer
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use pinfold_lab::Timing;

    #[test]
    fn each_cell_is_compared_with_its_own_best_peer() {
        let mut rows = Rows::default();
        for (subject, size, cycles) in [
            (SubjectName::PinfoldCache, 8, 4.0),
            (SubjectName::PinfoldMalloc, 8, 1.0),
            (SubjectName::Mimalloc, 8, 8.0),
            (SubjectName::Glibc, 8, 16.0),
            (SubjectName::PinfoldCache, 64, 6.0),
            (SubjectName::Mimalloc, 64, 12.0),
            (SubjectName::Glibc, 64, 3.0),
            (SubjectName::PinfoldCache, 8192, 100.0),
            (SubjectName::Glibc, 8192, 1.0),
        ] {
            let op = Op::Pair;
            rows.add(
                subject,
                Test::Of(Scenario::Pair),
                size,
                Timing { op, cycles },
                1,
            );
        }
        let all = ratios(&rows, SubjectName::PinfoldCache);
        let (mean, worst) = mean_and_worst(&all, |_| true).unwrap();
        assert_eq!(mean, 1.0);
        assert_eq!(
            (worst.size, worst.peer, worst.ratio),
            (64, SubjectName::Glibc, 2.0)
        );
    }
}
