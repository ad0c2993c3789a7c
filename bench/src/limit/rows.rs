//! Results: a row for each program and subject.

use super::replay::{Recorded, Served};
use crate::whole::launch::Sample;
use crate::whole::programs::Program;
use crate::whole::rows::Row as WholeRow;
use pinfold_lab::stats;
use serde::Serialize;

/// The least share of allocations that an oracle must have served itself. With less, the time is
/// partly glibc's.
pub const MIN_SHARE: f64 = 0.95;
const PAGE: u64 = 4096;

/// One result. What is not known has no figure.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Row {
    pub subject: String,
    pub program: &'static str,
    /// `load`, `attack` or `real`.
    pub kind: &'static str,
    pub threads: u32,
    /// The median over the rounds.
    pub seconds: Option<f64>,
    /// The median of the fastest oracle.
    pub floor_seconds: Option<f64>,
    pub over_floor: Option<f64>,
    /// The peak of live bytes, rounded up to pages.
    pub live_bytes: Option<u64>,
    /// The peak of resident memory, without what the program has beside its heap.
    pub heap_bytes: Option<u64>,
    pub over_live: Option<f64>,
    /// The share of allocations that the fastest oracle served itself.
    pub planned_share: Option<f64>,
    /// The fastest oracle: how its plan places objects, or `lists`.
    pub floor_plan: Option<&'static str>,
    /// Why there is no recording, or no floor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// Why the subject has no figures.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    pub rounds: Vec<Sample>,
    /// Whether the subject is a build of Pinfold.
    #[serde(skip)]
    pub is_pinfold: bool,
}

/// The fastest oracle that followed its plan.
#[derive(Clone, Copy, Debug)]
struct Floor {
    seconds: f64,
    share: f64,
    plan: &'static str,
}

/// A subject that takes less than this part of the fastest oracle's time shows that the oracle's
/// time is no floor.
const MIN_RATIO: f64 = 0.97;

/// Returns the fastest oracle. Returns the reason if no oracle gives a floor. `replays`, `names`
/// and `served` have the oracles' results in the same order.
fn floor(
    replays: &[WholeRow],
    names: &[&'static str],
    served: &[Vec<Served>],
) -> Result<Floor, String> {
    let mut best: Result<Floor, String> = Err("it has no plan".to_owned());
    for ((row, &plan), served) in replays.iter().zip(names).zip(served) {
        let share = served.iter().map(|one| one.share).fold(1.0, f64::min);
        let reason = match (&row.error, row.seconds) {
            (None, Some(seconds)) if share >= MIN_SHARE => {
                if best.as_ref().map_or(true, |best| seconds < best.seconds) {
                    best = Ok(Floor {
                        seconds,
                        share,
                        plan,
                    });
                }
                continue;
            }
            (Some(error), _) => format!("under the oracle, {error}"),
            _ => format!(
                "glibc served {:.1} % of the allocations",
                (1.0 - share) * 100.0
            ),
        };
        best = best.or(Err(reason));
    }
    best
}

/// Makes the rows of a program. `rows` are those of the subjects, and `note` is the reason if there
/// is no recording.
pub fn all(
    program: &Program,
    rows: Vec<WholeRow>,
    recorded: &Recorded,
    replays: &[WholeRow],
    names: &[&'static str],
    served: &[Vec<Served>],
) -> Vec<Row> {
    let floor = floor(replays, names, served).and_then(|floor| {
        let faster = rows.iter().find(|row| {
            row.seconds
                .is_some_and(|ours| ours < floor.seconds * MIN_RATIO)
        });
        match faster {
            Some(row) => Err(format!(
                "{} is faster than the fastest oracle, {} with {:.3} s",
                row.subject, floor.plan, floor.seconds
            )),
            None => Ok(floor),
        }
    });
    let note = recorded.note.as_ref().or(floor.as_ref().err());
    let live = (recorded.peak_live > 0).then(|| recorded.peak_live.next_multiple_of(PAGE));
    // With huge pages, more of the arena is resident than the objects touch.
    let mut beside = Vec::new();
    for (served, oracle) in served.iter().zip(&recorded.oracles) {
        let usable = served
            .iter()
            .filter(|one| one.share >= MIN_SHARE && !oracle.huge);
        beside.extend(usable.map(|one| one.beside_heap as f64));
    }
    let beside = (!beside.is_empty()).then(|| stats::median(&beside) as u64);
    let kind = match (program.attack, program.source.is_some()) {
        (true, _) => "attack",
        (false, true) => "load",
        (false, false) => "real",
    };
    let row = |row: WholeRow| {
        let floor = floor.as_ref();
        let heap = (row.peak_rss_bytes).and_then(|peak| Some(peak.saturating_sub(beside?)));
        let floor_seconds = floor.ok().map(|floor| floor.seconds);
        Row {
            subject: row.subject,
            program: row.program,
            kind,
            threads: row.threads,
            seconds: row.seconds,
            floor_seconds,
            over_floor: row
                .seconds
                .zip(floor_seconds)
                .map(|(ours, floor)| ours / floor),
            live_bytes: live,
            heap_bytes: heap,
            over_live: heap.zip(live).map(|(heap, live)| heap as f64 / live as f64),
            planned_share: floor.ok().map(|floor| floor.share),
            floor_plan: floor.ok().map(|floor| floor.plan),
            note: note.cloned(),
            error: row.error,
            rounds: row.rounds,
            is_pinfold: row.is_pinfold,
        }
    };
    rows.into_iter().map(row).collect()
}
