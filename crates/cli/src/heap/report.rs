//! A heap profile for people: the functions and call stacks that hold the most memory.

use crate::foreign::Identity;
use crate::output::{Lines, Table};
use pinfold_malloc::heap_profile::DEFAULT_INTERVAL;
use pinfold_pprof::internal::profile::{Profile, Stack, Values, What, by_key};
use std::collections::HashSet;

/// Formats bytes, which may be negative in a difference.
pub fn bytes(n: f64) -> String {
    const UNITS: [&str; 4] = ["B", "KiB", "MiB", "GiB"];
    let mut unit = 0;
    let mut rest = n;
    while rest.abs() >= 1024.0 && unit + 1 < UNITS.len() {
        rest /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{} B", rounded(rest, 0)),
        _ => format!("{} {}", rounded(rest, 1), UNITS[unit]),
    }
}

/// Formats a number. What rounds to 0 has no sign.
fn rounded(n: f64, digits: usize) -> String {
    let text = format!("{n:.digits$}");
    match text.parse() {
        Ok(0.0) => text.trim_start_matches('-').to_owned(),
        _ => text,
    }
}

fn blocks(objects: f64) -> String {
    match rounded(objects, 0) {
        one if one == "1" => "1 block".to_owned(),
        more => format!("{more} blocks"),
    }
}

/// Says how the bytes relate to the blocks.
fn relation(what: What) -> &'static str {
    match what {
        What::Fragments => "beside",
        _ => "in",
    }
}

/// Returns a line that tells lost blocks from reachable ones.
pub fn lost(profile: &Profile) -> String {
    let totals = profile.totals();
    let [lost, reachable] = [What::Lost, What::Reachable].map(|what| {
        let (bytes, blocks) = (bytes(what.bytes(&totals)), blocks(what.objects(&totals)));
        format!("{}: {bytes}, in {blocks}", what.word())
    });
    let mut line = Lines::default();
    line.add(format_args!("{lost}; {reachable}"));
    line.to_string()
}

/// Returns whether each sample stands for one block, and no sample was dropped.
fn is_exact(profile: &Profile, what: What) -> bool {
    // Lost and reachable blocks are blocks in use.
    let what = match what {
        What::Lost | What::Reachable => What::InUse,
        _ => what,
    };
    let blocks = what.objects(&profile.totals());
    let is_each = (blocks - what.samples(profile) as f64).abs() < 0.5;
    profile.interval == 1 && profile.dropped == 0 && is_each
}

/// Returns the line that sums the profile up.
pub fn summary(profile: &Profile, what: What) -> String {
    let totals = profile.totals();
    let samples = what.samples(profile);
    let (all, objects) = (what.bytes(&totals), what.objects(&totals));
    let blocks = blocks(objects);
    let is_exact = is_exact(profile, what);
    let about = if is_exact { "" } else { "about " };
    let mut lines = Lines::default();
    lines.add(match &profile.older {
        None => format!(
            "{}: {} {}, {} {about}{blocks}",
            profile.title,
            bytes(all),
            what.word(),
            relation(what),
        ),
        Some((old, ..)) => format!(
            "{}: {}{} {} since {old}, in about {blocks}",
            profile.title,
            if all >= 0.5 { "+" } else { "" },
            bytes(all),
            what.word(),
        ),
    });
    if let Some((_, old_in_use, old_all)) = &profile.older {
        let old = match what {
            What::Allocated => old_all,
            _ => old_in_use,
        };
        lines.add(format_args!(
            "estimated from {samples} and {old} samples, lately one in {}",
            bytes(profile.interval as f64)
        ));
    } else if is_exact && samples > 0 {
        lines.add("exact: each allocation since the profile's start was recorded");
    } else if samples > 0 {
        let deviation = 100.0 * deviation(all, profile.interval as f64);
        let deviation = match (profile.dropped, profile.interval > DEFAULT_INTERVAL) {
            // It depends on how the blocks lie, so the sums do not tell.
            _ if what == What::Fragments => String::new(),
            (0, false) => format!("; standard deviation at most about {deviation:.0} %"),
            // Earlier samples may have had a longer interval, so this is no bound.
            (0, true) => format!("; standard deviation about {deviation:.0} %"),
            // What was dropped is not known.
            _ => String::new(),
        };
        lines.add(format_args!(
            "estimated from {samples} samples, lately one in {}{deviation}",
            bytes(profile.interval as f64)
        ));
    } else if profile.all_samples > 0 {
        lines.add(format_args!(
            "all sampled blocks were freed: {} samples were taken; --alloc shows them",
            profile.all_samples
        ));
    } else {
        lines.add(
            "no samples yet; blocks from before the start are not known, and a smaller --interval \
             takes more samples",
        );
    }
    if profile.dropped > 0 {
        lines.add(format_args!(
            "{} samples were dropped, so the figures are too low: a table was full, or the stack \
             could not be walked; a larger interval takes fewer samples",
            profile.dropped
        ));
    }
    let nameless = profile.nameless();
    if nameless > 0 {
        lines.add(format_args!(
            "{nameless} of {} addresses have no function's name",
            profile.locations.len()
        ));
    }
    for note in &profile.notes {
        lines.add(note);
    }
    lines.to_string()
}

/// Lists the functions, those with the most flat bytes first.
pub fn functions(profile: &Profile, what: What, most: usize) -> String {
    let total = what.bytes(&profile.totals());
    let flat = by_key(
        profile
            .stacks
            .iter()
            .filter_map(|stack| Some((profile.functions(stack).next()?, stack.values))),
    );
    let cumulative = by_key(profile.stacks.iter().flat_map(|stack| {
        let functions: HashSet<String> = profile.functions(stack).collect();
        functions
            .into_iter()
            .map(|function| (function, stack.values))
    }));
    let mut rows: Vec<_> = cumulative.into_iter().collect();
    let flat_of = |name: &String| flat.get(name).copied().unwrap_or_default();
    rows.sort_by(|(a, x), (b, y)| {
        let key = |name, values| (what.bytes(&flat_of(name)).abs(), what.bytes(values).abs());
        let (first, second) = (key(a, x), key(b, y));
        second
            .partial_cmp(&first)
            .unwrap_or(std::cmp::Ordering::Equal)
            .then(a.cmp(b))
    });
    // In a difference, the signs tell what grew and what shrank.
    let percent = |n: f64| match total.abs() {
        none if none < 0.5 => "-".to_owned(),
        total => format!("{}%", rounded(100.0 * n / total, 1)),
    };
    rows.retain(|(name, all)| {
        let values = [what.bytes(&flat_of(name)), what.bytes(all)];
        values.iter().any(|value| value.abs() >= 0.5)
    });
    if rows.is_empty() {
        return String::new();
    }
    let rows = rows.iter().take(most);
    let table = Table::of(rows.map(|(name, all)| (name, flat_of(name), what.bytes(all))))
        .column("FLAT", |(_, own, _)| bytes(what.bytes(&own)))
        .column("FLAT%", |(_, own, _)| percent(what.bytes(&own)))
        .column("CUM", |(.., all)| bytes(all))
        .column("CUM%", |(.., all)| percent(all))
        .column("BLOCKS", |(_, own, _)| rounded(what.objects(&own), 0))
        .names("FUNCTION", |(name, ..)| name);
    table.table().to_string()
}

/// Returns the `most` call stacks with the most bytes, largest first.
pub fn largest(profile: &Profile, what: What, most: usize) -> Vec<&Stack> {
    let mut stacks: Vec<&Stack> = profile
        .stacks
        .iter()
        .filter(|stack| what.bytes(&stack.values) != 0.0)
        .collect();
    stacks.sort_by(|a, b| {
        let (a, b) = (what.bytes(&a.values).abs(), what.bytes(&b.values).abs());
        b.partial_cmp(&a).unwrap_or(std::cmp::Ordering::Equal)
    });
    stacks.truncate(most);
    stacks
}

/// Lists the `most` call stacks with the most bytes, largest first.
pub fn stacks(profile: &Profile, what: What, most: usize) -> String {
    let mut text = Lines::default();
    let about = match profile.older.is_none() && is_exact(profile, what) {
        true => "",
        false => "about ",
    };
    for stack in largest(profile, what, most) {
        text.add(format_args!(
            "{} {} {about}{}, {}, from:",
            bytes(what.bytes(&stack.values)),
            relation(what),
            blocks(what.objects(&stack.values)),
            what.word(),
        ));
        for &nth in &stack.locations {
            let location = &profile.locations[nth];
            if location.lines.is_empty() {
                text.add(format_args!("    {}", profile.address(location)));
            }
            for line in &location.lines {
                match line.file.as_str() {
                    "" => text.add(format_args!("    {}", line.function)),
                    file => text.add(format_args!("    {} ({file}:{})", line.function, line.line)),
                }
            }
        }
    }
    text.to_string()
}

/// Returns the fields of the profile for programs, with the `most` call stacks with the most bytes.
/// `process` is the running process that has the profile.
pub fn json(
    profile: &Profile,
    process: Option<&Identity>,
    what: What,
    most: usize,
) -> serde_json::Value {
    let totals = profile.totals();
    let values = |values: &Values| {
        serde_json::json!({
            "inuse_bytes": values.bytes.round() as i64,
            "inuse_objects": values.objects.round() as i64,
            "alloc_bytes": values.allocated_bytes.round() as i64,
            "alloc_objects": values.allocated_objects.round() as i64,
            "fragment_bytes": profile.has_fragments.then(|| values.fragment_bytes.round() as i64),
        })
    };
    let stacks: Vec<_> = largest(profile, what, most)
        .into_iter()
        .map(|stack| {
            let functions: Vec<String> = profile.functions(stack).collect();
            serde_json::json!({"functions": functions, "values": values(&stack.values)})
        })
        .collect();
    serde_json::json!({
        "process": process,
        "title": profile.title,
        "interval_bytes": profile.interval,
        "samples": profile.all_samples,
        "samples_in_use": profile.samples,
        "dropped_samples": profile.dropped,
        "notes": profile.notes,
        "totals": values(&totals),
        "stacks": stacks,
    })
}

/// Returns a bound for the standard deviation of an estimate of `bytes` bytes, as a share of them.
///
/// A block of S bytes is sampled with probability p = 1 − e^(−S/R), and counts S/p then. So its
/// variance is S²·(1 − p)/p. That is at most S·R, and about S·R for blocks smaller than R. Growth
/// in place has the same bound.
fn deviation(bytes: f64, interval: f64) -> f64 {
    (interval / bytes.max(1.0)).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_deviation_follows_samples_of_small_blocks_and_not_those_of_large_ones() {
        let interval = 524_288.0;
        // A hundred samples of small blocks, each of which stands for an interval.
        assert!((deviation(100.0 * interval, interval) - 0.1).abs() < 1e-9);
        // One block of 50 MiB is known within a tenth, although it is one sample.
        assert!((deviation(50.0 * 1_048_576.0, interval) - 0.1).abs() < 1e-9);
        assert!(deviation(0.0, interval).is_finite());
    }
}
