//! Results: a row for each program and subject, with medians and spreads.

use super::Results;
use super::launch::Sample;
use super::programs::Program;
use super::subjects::Subject;
use pinfold_lab::stats;
use serde::Serialize;
use std::collections::HashMap;

/// One result. A failed program has no figures.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Row {
    pub subject: String,
    pub program: &'static str,
    pub threads: u32,
    /// Medians over the rounds.
    pub seconds: Option<f64>,
    pub cpu_seconds: Option<f64>,
    pub peak_rss_bytes: Option<u64>,
    /// From the round that waited for it.
    pub settled_rss_bytes: Option<u64>,
    pub faults: Option<u64>,
    /// The least and the most over the rounds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spread: Option<Spread>,
    /// The reason why there are no figures.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The sample of each round.
    pub rounds: Vec<Sample>,
    /// What the program does, for people.
    #[serde(skip)]
    pub what: &'static str,
    /// Whether the subject is a build of Pinfold.
    #[serde(skip)]
    pub is_pinfold: bool,
}

/// The least and the most over the rounds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    pub seconds: [f64; 2],
    pub cpu_seconds: [f64; 2],
    pub peak_rss_bytes: [u64; 2],
    pub faults: [u64; 2],
}

/// The subject that all others are compared with.
pub const BASE: &str = "glibc";

/// Returns all rows, grouped by program, in the order of the subjects.
pub fn all(
    programs: &[Program],
    subjects: &[Subject],
    threads: u32,
    results: &HashMap<(usize, usize), Results>,
) -> Vec<Row> {
    let mut rows = Vec::new();
    for (at, program) in programs.iter().enumerate() {
        let of = |which: usize| {
            results
                .get(&(at, which))
                .and_then(|result| result.as_ref().ok())
        };
        let base = (subjects.iter().position(|subject| subject.name == BASE))
            .filter(|&which| of(which).is_some())
            .or_else(|| (0..subjects.len()).find(|&which| of(which).is_some()));
        let expected =
            base.and_then(|which| Some((&subjects[which].name, of(which)?.first()?.output)));
        for (which, subject) in subjects.iter().enumerate() {
            let mut row = Row {
                subject: subject.name.clone(),
                program: program.name,
                threads: program.threads(threads),
                what: program.what,
                is_pinfold: subject.is_pinfold,
                ..Row::default()
            };
            match results.get(&(at, which)) {
                Some(Ok(samples)) => match expected {
                    Some((base, output))
                        if samples.iter().any(|sample| sample.output != output) =>
                    {
                        row.error = Some(format!("its output differs from the one under {base}"));
                    }
                    _ => fill(&mut row, samples),
                },
                Some(Err(error)) => row.error = Some(error.clone()),
                None => row.error = Some("it was not measured".to_owned()),
            }
            rows.push(row);
        }
    }
    rows
}

fn fill(row: &mut Row, samples: &[Sample]) {
    let floats = |value: fn(&Sample) -> f64| samples.iter().map(value).collect::<Vec<_>>();
    let seconds = floats(|sample| sample.seconds);
    let cpu_seconds = floats(|sample| sample.cpu_seconds);
    let peak = floats(|sample| sample.peak_rss_bytes as f64);
    let faults = floats(|sample| sample.faults as f64);
    row.seconds = Some(micros(stats::median(&seconds)));
    row.cpu_seconds = Some(micros(stats::median(&cpu_seconds)));
    row.peak_rss_bytes = Some(stats::median(&peak) as u64);
    row.faults = Some(stats::median(&faults) as u64);
    row.settled_rss_bytes = samples.iter().find_map(|sample| sample.settled_rss_bytes);
    let range = |values: &[f64]| [stats::quantile(values, 0.0), stats::quantile(values, 1.0)];
    row.spread = Some(Spread {
        seconds: range(&seconds).map(micros),
        cpu_seconds: range(&cpu_seconds).map(micros),
        peak_rss_bytes: range(&peak).map(|value| value as u64),
        faults: range(&faults).map(|value| value as u64),
    });
    row.rounds = samples.to_vec();
}

fn micros(seconds: f64) -> f64 {
    (seconds * 1e6).round() / 1e6
}

/// A cost to compare.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Cost {
    Time,
    Memory,
}

impl Cost {
    pub fn of(self, row: &Row) -> Option<f64> {
        match self {
            Cost::Time => row.seconds,
            Cost::Memory => row.peak_rss_bytes.map(|bytes| bytes as f64),
        }
    }
}

pub fn programs(rows: &[Row]) -> Vec<&'static str> {
    stats::distinct(rows.iter().map(|row| row.program))
}

pub fn subjects(rows: &[Row]) -> Vec<&str> {
    stats::distinct(rows.iter().map(|row| row.subject.as_str()))
}

pub fn find<'a>(rows: &'a [Row], program: &str, subject: &str) -> Option<&'a Row> {
    rows.iter()
        .find(|row| row.program == program && row.subject == subject)
}

/// Returns the best row of a program among those of peers.
pub fn best_peer<'a>(rows: &'a [Row], program: &str, cost: Cost) -> Option<&'a Row> {
    let peers = rows
        .iter()
        .filter(|row| row.program == program && !row.is_pinfold);
    let measured = peers.filter_map(|row| Some((cost.of(row)?, row)));
    Some(measured.min_by(|one, other| one.0.total_cmp(&other.0))?.1)
}

/// Returns the geometric mean of `subject`'s costs divided by `other`'s, and the number of programs
/// in it: those that ran under both.
pub fn mean_ratio(rows: &[Row], subject: &str, other: &str, cost: Cost) -> Option<(f64, usize)> {
    let ratio = |program| {
        Some(cost.of(find(rows, program, subject)?)? / cost.of(find(rows, program, other)?)?)
    };
    let ratios: Vec<_> = programs(rows).into_iter().filter_map(ratio).collect();
    (!ratios.is_empty()).then(|| (stats::geometric_mean(&ratios), ratios.len()))
}

/// Returns the peer with the least mean cost relative to the base, over all programs.
pub fn best_single_peer(rows: &[Row], cost: Cost) -> Option<&str> {
    let is_peer = |subject: &&str| {
        rows.iter()
            .any(|row| row.subject == *subject && !row.is_pinfold)
    };
    let peers = subjects(rows).into_iter().filter(is_peer);
    let means = peers.filter_map(|peer| Some((mean_ratio(rows, peer, BASE, cost)?.0, peer)));
    Some(means.min_by(|one, other| one.0.total_cmp(&other.0))?.1)
}

#[cfg(test)]
pub mod tests {
    use super::*;

    fn sample(seconds: f64, peak: u64, output: u64) -> Sample {
        Sample {
            seconds,
            cpu_seconds: seconds,
            peak_rss_bytes: peak,
            settled_rss_bytes: None,
            faults: 7,
            output,
        }
    }

    fn subject(name: &str) -> Subject {
        Subject {
            name: name.to_owned(),
            library: "/x.so".into(),
            is_pinfold: name.starts_with("pinfold"),
            variables: &[],
        }
    }

    /// Makes rows of two programs under three subjects. `first` takes 2, 1 and 4 s. `second` takes
    /// 2 and 8 s, and fails under the third subject.
    pub fn example() -> Vec<Row> {
        let program = |name| Program {
            name,
            ..Program::default()
        };
        let mut results = HashMap::new();
        for (key, seconds, peak) in [
            ((0, 0), 2.0, 20 << 20),
            ((0, 1), 1.0, 10 << 20),
            ((0, 2), 4.0, 5 << 20),
            ((1, 0), 2.0, 8 << 20),
            ((1, 1), 8.0, 8 << 20),
        ] {
            let rounds = [seconds * 2.0, seconds, seconds * 0.5];
            results.insert(key, Ok(rounds.map(|value| sample(value, peak, 1)).to_vec()));
        }
        results.insert((1, 2), Err("signal 11 ended it".to_owned()));
        let programs = [program("first"), program("second")];
        let subjects = [
            subject("pinfold-malloc"),
            subject("glibc"),
            subject("mimalloc"),
        ];
        all(&programs, &subjects, 2, &results)
    }

    #[test]
    fn a_row_has_the_median_and_the_spread() {
        let rows = example();
        let row = find(&rows, "first", "pinfold-malloc").unwrap();
        assert_eq!(row.seconds, Some(2.0));
        assert_eq!(row.spread.unwrap().seconds, [1.0, 4.0]);
        assert_eq!(row.threads, 1);
    }

    #[test]
    fn a_failure_is_a_row_without_figures() {
        let rows = example();
        let row = find(&rows, "second", "mimalloc").unwrap();
        assert_eq!((row.seconds, row.peak_rss_bytes), (None, None));
        let json = serde_json::to_string(row).unwrap();
        assert!(
            json.contains(r#""seconds":null"#) && json.contains("signal 11"),
            "{json}"
        );
    }

    #[test]
    fn an_output_that_differs_from_the_base_is_a_failure() {
        let results = HashMap::from([
            ((0, 0), Ok(vec![sample(1.0, 1, 1), sample(1.0, 1, 2)])),
            ((0, 1), Ok(vec![sample(1.0, 1, 1)])),
        ]);
        let rows = all(
            &[Program::default()],
            &[subject("other"), subject("glibc")],
            1,
            &results,
        );
        assert!(rows[0].error.as_ref().unwrap().contains("under glibc"));
        assert_eq!(rows[0].seconds, None);
        assert_eq!(rows[1].error, None);
    }

    #[test]
    fn ratios_are_taken_over_programs_that_ran_under_both() {
        let rows = example();
        let (mean, count) = mean_ratio(&rows, "pinfold-malloc", "glibc", Cost::Time).unwrap();
        assert!((mean - 0.5_f64.sqrt()).abs() < 1e-9, "{mean}");
        assert_eq!(count, 2);
        let (mean, count) = mean_ratio(&rows, "mimalloc", "glibc", Cost::Time).unwrap();
        assert_eq!((mean, count), (4.0, 1));
        assert_eq!(best_single_peer(&rows, Cost::Time), Some("glibc"));
        assert_eq!(best_single_peer(&rows, Cost::Memory), Some("mimalloc"));
    }

    #[test]
    fn the_best_peer_is_not_pinfold() {
        let rows = example();
        assert_eq!(
            best_peer(&rows, "second", Cost::Time).unwrap().subject,
            "glibc"
        );
        assert_eq!(
            best_peer(&rows, "first", Cost::Memory).unwrap().subject,
            "mimalloc"
        );
    }
}
