//! What the rounds say: medians, spreads, ratios, and a verdict in words.

use super::round::Cost;
use crate::output::{Lines, Table};
use pinfold_lab::stats::{median, quantile};
use serde::Serialize;
use std::collections::BTreeMap;

/// The share of figures without a real difference for which a verdict may name one.
const ERRORS: f64 = 0.05;
/// Differences below this many percent are shown as none.
const SHOWN: f64 = 0.05;

/// What is measured.
pub struct Measure {
    /// The name in JSON.
    pub key: &'static str,
    name: &'static str,
    unit: &'static str,
    /// By what a value is divided for people, and digits after the point.
    scale: (f64, usize),
    of: fn(&Cost) -> Option<f64>,
}

const MIB: f64 = (1 << 20) as f64;

const SECONDS: (&str, f64, usize) = ("s", 1.0, 3);
const MEBIBYTES: (&str, f64, usize) = ("MiB", MIB, 1);
const COUNT: (&str, f64, usize) = ("", 1.0, 0);

pub const MEASURES: [Measure; 5] = [
    measure("seconds", "time", SECONDS, |cost| Some(cost.seconds)),
    measure("cpu_seconds", "CPU time", SECONDS, |cost| {
        Some(cost.cpu_seconds)
    }),
    measure("peak_bytes", "peak memory", MEBIBYTES, |cost| {
        Some(cost.peak_bytes)
    }),
    measure("settled_bytes", "settled memory", MEBIBYTES, |cost| {
        cost.settled_bytes
    }),
    measure("page_faults", "page faults", COUNT, |cost| {
        Some(cost.faults)
    }),
];

const fn measure(
    key: &'static str,
    name: &'static str,
    (unit, divisor, digits): (&'static str, f64, usize),
    of: fn(&Cost) -> Option<f64>,
) -> Measure {
    Measure {
        key,
        name,
        unit,
        scale: (divisor, digits),
        of,
    }
}

/// The rounds of one measure.
#[derive(Serialize)]
pub struct Figure {
    median: f64,
    least: f64,
    most: f64,
    /// `None` for the program as it is.
    ratio: Option<Ratio>,
    rounds: Vec<f64>,
}

/// How a measure stands to that of the program as it is.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Ratio {
    /// The median of the rounds' ratios.
    median: f64,
    /// What the ratio is with a confidence of 95 %. `None` if the rounds are too few.
    interval: Option<(f64, f64)>,
}

impl Ratio {
    /// Divides round by round. What disturbs a whole round does not change its ratio.
    fn of(ours: &[f64], base: &[f64]) -> Option<Ratio> {
        let ratios = ours.iter().zip(base).map(|(ours, base)| ours / base);
        let ratios: Vec<f64> = ratios.collect();
        let is_finite = !ratios.is_empty() && ratios.iter().all(|ratio| ratio.is_finite());
        is_finite.then(|| Ratio {
            median: median(&ratios),
            interval: interval(ratios.clone()),
        })
    }
}

/// Returns the confidence interval of a median that belongs to the sign test (Dixon and Mood, "The
/// statistical sign test", 1946). It assumes that the rounds are independent, and nothing about how
/// they are distributed. In `n` rounds, the number of values below the true median is that of heads
/// in `n` throws of a coin. So the interval from the value that is `k` from the least to the one
/// that is `k` from the most misses the median with twice the probability of at most `k` heads.
fn interval(mut values: Vec<f64>) -> Option<(f64, f64)> {
    values.sort_by(f64::total_cmp);
    let count = values.len();
    let mut exactly = 0.5_f64.powi(count as i32);
    let (mut at_most, mut found) = (exactly, None);
    for k in 0..count / 2 {
        if 2.0 * at_most > ERRORS {
            break;
        }
        found = Some((values[k], values[count - 1 - k]));
        exactly *= (count - k) as f64 / (k + 1) as f64;
        at_most += exactly;
    }
    found
}

/// An allocator's rounds.
#[derive(Serialize)]
pub struct Measured {
    pub name: String,
    pub library: Option<String>,
    /// Why there are no figures.
    pub failure: Option<String>,
    /// Whether the program wrote the same as on the first allocator. `None` if it does not always
    /// write the same, or if its output was not compared.
    pub same_output: Option<bool>,
    pub figures: BTreeMap<&'static str, Figure>,
}

#[derive(Serialize)]
pub struct Report {
    /// The program and its arguments.
    pub program: Vec<String>,
    /// Complete rounds, without the first one, which warms up.
    pub rounds: usize,
    /// The first one is the program as it is.
    pub allocators: Vec<Measured>,
    pub verdicts: Vec<String>,
}

/// Returns the figures of an allocator's rounds.
pub fn figures(ours: &[Cost], base: Option<&[Cost]>) -> BTreeMap<&'static str, Figure> {
    let of = |measure: &Measure| {
        let values = |costs: &[Cost]| costs.iter().filter_map(measure.of).collect::<Vec<_>>();
        let rounds = values(ours);
        let figure = (!rounds.is_empty()).then(|| Figure {
            median: median(&rounds),
            least: quantile(&rounds, 0.0),
            most: quantile(&rounds, 1.0),
            ratio: base.and_then(|base| Ratio::of(&rounds, &values(base))),
            rounds,
        })?;
        Some((measure.key, figure))
    };
    MEASURES.iter().filter_map(of).collect()
}

/// Says in words how an allocator stands to the program as it is.
pub fn verdict(measured: &Measured) -> String {
    let name = &measured.name;
    if let Some(failure) = &measured.failure {
        return format!("{name}: FAILED: {failure}");
    }
    let (mut differ, mut equal, mut unknown) = (Vec::new(), Vec::new(), false);
    for measure in &MEASURES {
        let figure = measured.figures.get(measure.key);
        let Some(ratio) = figure.and_then(|figure| figure.ratio) else {
            continue;
        };
        let percent = |ratio: f64| 100.0 * (ratio - 1.0);
        match ratio
            .interval
            .map(|(low, high)| (percent(low), percent(high)))
        {
            None => unknown = true,
            Some((low, high)) if low > SHOWN || high < -SHOWN => {
                let more = match (low > 0.0, measure.unit) {
                    (true, _) => "more",
                    // What has no unit is counted.
                    (false, "") => "fewer",
                    (false, _) => "less",
                };
                let (near, far) = (low.abs().min(high.abs()), low.abs().max(high.abs()));
                let middle = percent(ratio.median).abs();
                let name = measure.name;
                differ.push(format!(
                    "{middle:.1} % {more} {name} ({near:.1} to {far:.1} %)"
                ));
            }
            Some((low, high)) => {
                equal.push(format!("{} ({low:+.1} to {high:+.1} %)", measure.name));
            }
        }
    }
    let mut parts = differ;
    if !equal.is_empty() {
        let equal = equal.join(", ");
        parts.push(format!(
            "no difference that the spread does not cover in {equal}"
        ));
    }
    if unknown {
        parts
            .push("too few rounds to tell a difference from the spread; give 6 or more".to_owned());
    }
    if parts.is_empty() {
        parts.push("not compared".to_owned());
    }
    if measured.same_output == Some(false) {
        parts.push("ITS STANDARD OUTPUT DIFFERS from that of the program as it is".to_owned());
    }
    format!("{name}: {}", parts.join("; "))
}

/// The report for people.
pub fn text(report: &Report) -> String {
    let mut rows = Vec::new();
    for measure in &MEASURES {
        let of = |measured| -> Option<_> { Some((measured, measured_figure(measured, measure)?)) };
        let found = report.allocators.iter().filter_map(of);
        for (nth, (measured, figure)) in found.enumerate() {
            rows.push((measure, nth == 0, measured, figure));
        }
    }
    let value = |measure: &Measure, value: f64| {
        let (scale, digits) = measure.scale;
        format!("{:.digits$}", value / scale)
    };
    let ratio = |figure: &Figure, show: fn(Ratio) -> Option<String>| {
        figure.ratio.and_then(show).unwrap_or_default()
    };
    let heading = |(measure, is_first, ..): &(&Measure, bool, &Measured, &Figure)| match is_first {
        true => format!("{} {}", measure.name, measure.unit)
            .trim()
            .to_owned(),
        false => String::new(),
    };
    let table = Table::of(&rows)
        .column("", heading)
        .column("on", |(.., measured, _)| &measured.name)
        .column("median", |(measure, .., it)| value(measure, it.median))
        .column("least", |(measure, .., it)| value(measure, it.least))
        .column("most", |(measure, .., it)| value(measure, it.most))
        .column("x as it is", |(.., it)| {
            ratio(it, |ratio| Some(format!("{:.3}", ratio.median)))
        })
        .column("95 %", |(.., it)| {
            ratio(it, |ratio| {
                ratio
                    .interval
                    .map(|(low, high)| format!("{low:.3} to {high:.3}"))
            })
        })
        .table();
    let mut lines = Lines::default();
    for verdict in &report.verdicts {
        lines.add(verdict);
    }
    let rounds = report.rounds;
    match rounds {
        0 => lines.to_string(),
        _ => format!("Rounds: {rounds}, after one to warm up\n\n{table}\n{lines}"),
    }
}

fn measured_figure<'m>(measured: &'m Measured, measure: &Measure) -> Option<&'m Figure> {
    measured.figures.get(measure.key)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn costs(seconds: &[f64]) -> Vec<Cost> {
        let cost = |&seconds: &f64| Cost {
            seconds,
            cpu_seconds: 1.0,
            peak_bytes: 4096.0,
            faults: 0.0,
            settled_bytes: None,
        };
        seconds.iter().map(cost).collect()
    }

    fn verdict_of(ours: &[f64], base: &[f64]) -> String {
        verdict(&Measured {
            name: "new".to_owned(),
            library: None,
            failure: None,
            same_output: None,
            figures: figures(&costs(ours), Some(&costs(base))),
        })
    }

    /// The confidence is that of tables of the sign test: of nine values, the second and the last
    /// but one. Five values are too few.
    #[test]
    fn the_interval_is_that_of_the_sign_test() {
        let values = |count: u32| (1..=count).map(f64::from).rev().collect::<Vec<_>>();
        for (count, expected) in [
            (0, None),
            (5, None),
            (6, Some((1.0, 6.0))),
            (8, Some((1.0, 8.0))),
            (9, Some((2.0, 8.0))),
            (12, Some((3.0, 10.0))),
            (20, Some((6.0, 15.0))),
        ] {
            assert_eq!(interval(values(count)), expected, "{count}");
        }
    }

    /// A difference within each round is found although the rounds differ more from each other.
    #[test]
    fn a_verdict_compares_within_rounds() {
        let base = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0];
        let ours = base.map(|seconds| seconds * 0.9);
        let text = verdict_of(&ours, &base);
        assert!(
            text.starts_with("new: 10.0 % less time (10.0 to 10.0 %); no diff"),
            "{text}"
        );
        let mut mixed = ours;
        mixed[0] = 2.0;
        mixed[1] = 3.0;
        let text = verdict_of(&mixed, &base);
        assert!(
            text.contains("cover in time (-10.0 to +50.0 %), CPU time"),
            "{text}"
        );
        // A measure that is 0 has no ratio.
        assert!(!text.contains("page faults"), "{text}");
    }

    #[test]
    fn too_few_rounds_give_no_verdict() {
        let text = verdict_of(&[1.0, 1.0], &[9.0, 9.0]);
        assert!(
            text.contains("too few rounds") && !text.contains("less"),
            "{text}"
        );
    }
}
