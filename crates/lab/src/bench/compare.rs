//! `pinfold bench compare`: what changed between two runs of one benchmark on one kind of host.

use crate::machine::Host;
use crate::output::{Table, figure, print};
use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{Mode, OFlags, open};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Compare two runs of the same benchmark, row by row
///
/// OLD and NEW are files with the object that `pinfold bench NAME --json` or `pinfold jitter
/// --json` printed, or that `pinfold-bench NAME --json` printed or `--save` saved. For each figure
/// of each row in both files, prints the old value, the new one, and the new one divided by the old
/// one.
///
/// The command refuses two runs from different kinds of host: another CPU model, or a primitive
/// that takes several times as long. For example, an uncontended locked add may take at most 1.5
/// times as long on one host as on the other. A ratio to a rival that uses locked instructions
/// would hold on one of the hosts only. Each run records what its machine's primitives cost, in
/// machine.primitives.
#[derive(clap::Args)]
pub struct Args {
    /// The earlier run
    old: PathBuf,

    /// The later run
    new: PathBuf,
}

/// The most bytes of a file. The runs of all benchmarks have less than a twentieth.
const BYTES: u64 = 8 << 20;
/// The most figures that are compared.
const FIGURES: usize = 20_000;
/// The most characters of a name that are shown.
const NAME: usize = 200;

/// The fields that say what a row is of. All other numbers are figures.
const KEYS: [&str; 27] = [
    "program",
    "subject",
    "scenario",
    "op",
    "variant",
    "situation",
    "goal",
    "how",
    "memory",
    "policy",
    "size",
    "threads",
    "cpus",
    "processes",
    "batch",
    "amount",
    "items",
    "counters",
    "shards",
    "interval_ms",
    "settle",
    "signals",
    "summing",
    "mmap",
    "hand_over",
    "limit",
    "same_code_as",
];

/// A run as its file has it.
#[derive(Deserialize)]
struct Run {
    bench: String,
    machine: Host,
    rows: Vec<Map<String, Value>>,
}

pub fn main(args: &Args) -> Result<()> {
    let [old, new] = [&args.old, &args.new].map(|file| read(file));
    print(&report(&old?, &new?)?)
}

fn read(file: &Path) -> Result<Run> {
    let text = contents(file).with_context(|| format!("cannot read {}", file.display()))?;
    serde_json::from_str(&text).with_context(|| {
        format!(
            "{} is not a run of a benchmark; give a file with what a benchmark printed with --json",
            file.display()
        )
    })
}

/// Reads a regular file. Does not wait for a pipe's other end.
fn contents(file: &Path) -> Result<String> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = File::from(open(file, flags, Mode::empty())?);
    ensure!(file.metadata()?.is_file(), "it is not a regular file");
    let mut text = String::new();
    (file.take(BYTES + 1))
        .read_to_string(&mut text)
        .context("it is not a text")?;
    let is_short = text.len() as u64 <= BYTES;
    ensure!(is_short, "it has more than {} MiB", BYTES >> 20);
    Ok(text)
}

/// Formats the comparison. Fails if the runs are not comparable.
fn report(old: &Run, new: &Run) -> Result<String> {
    check(old, new)?;
    let (old_figures, new_figures) = (figures(old)?, figures(new)?);
    let both = old_figures.iter().filter_map(|(names, &(at, old))| {
        let (_, new) = *new_figures.get(names)?;
        Some((at, names, old, new))
    });
    let mut both: Vec<_> = both.collect();
    both.sort_unstable_by_key(|(at, ..)| *at);
    ensure!(
        !both.is_empty(),
        "the two runs have no row in common; give runs of the same subjects"
    );
    let alone = old_figures.len() + new_figures.len() - 2 * both.len();
    let shown = |value: f64| match value.abs() {
        large if large >= 1000.0 => format!("{value:.0}"),
        _ => format!("{value:.2}"),
    };
    let ratio = |old: f64, new: f64| (old > 0.0).then_some(new / old);
    let table = Table::of(both)
        .column("figure", |(_, (row, field), ..)| format!("{row}: {field}"))
        .column("old", |(.., old, _)| shown(old))
        .column("new", |(.., new)| shown(new))
        .column("new / old", |(.., old, new)| figure(ratio(old, new), 2))
        .table();
    let mut text = format!(
        "{}: the new run's figures divided by the old run's\n",
        old.bench
    );
    if alone > 0 {
        text += &format!("{alone} figures are in one of the two runs only.\n");
    }
    Ok(format!(
        "{text}old, {}\nnew, {}\n\n{table}",
        old.machine.primitives, new.machine.primitives
    ))
}

/// Fails unless the runs are of one benchmark and from one kind of host.
fn check(old: &Run, new: &Run) -> Result<()> {
    let (of_old, of_new) = (&old.bench, &new.bench);
    ensure!(
        of_old == of_new,
        "the old run is of the benchmark {of_old:?}, and the new one of {of_new:?}; give two runs of \
         one benchmark"
    );
    for (run, which) in [(old, "old"), (new, "new")] {
        ensure!(
            (run.machine.primitives.locked_add_cycles).is_some_and(|cycles| cycles > 0.0),
            "the {which} run does not say what a locked add costs on its machine, so its host may be \
             of another kind; measure it again with this version"
        );
    }
    if let Some(how) = old.machine.difference(&new.machine) {
        bail!(
            "the runs are from different kinds of host: {how}. Their figures are not comparable; \
             measure both on one machine"
        );
    }
    Ok(())
}

/// A row's name, and the name of one of its figures.
type Names = (String, String);

/// Returns the figures of all rows by their names, each with its place in the file. Fails if two
/// have the same names.
fn figures(run: &Run) -> Result<BTreeMap<Names, (usize, f64)>> {
    let mut figures = BTreeMap::new();
    for row in &run.rows {
        let name = name(row);
        for (field, value) in row {
            let is_figure = !KEYS.contains(&&field[..]);
            if let Some(value) = value.as_f64().filter(|_| is_figure) {
                let at = figures.len();
                let names = (name.clone(), cut(field));
                if let Some(_other) = figures.insert(names, (at, value)) {
                    bail!(
                        "a run has two rows {name:?}, which cannot be told apart; compare runs of \
                         this version"
                    );
                }
                ensure!(
                    figures.len() <= FIGURES,
                    "a run has more than {FIGURES} figures; compare fewer subjects or sizes at a \
                     time"
                );
            }
        }
    }
    Ok(figures)
}

/// Returns what tells the row from the others: its subject and its parameters.
fn name(row: &Map<String, Value>) -> String {
    let words = KEYS.iter().filter_map(|&key| match row.get(key)? {
        Value::String(text) => Some(cut(text)),
        Value::Bool(true) => Some(key.to_owned()),
        Value::Bool(false) => Some(format!("no {key}")),
        Value::Number(number) => Some(format!("{key} {number}")),
        _ => None,
    });
    cut(&words.collect::<Vec<_>>().join(", "))
}

/// Cuts a name from a file to a length that a table can show.
fn cut(name: &str) -> String {
    match name.char_indices().nth(NAME) {
        Some((end, _)) => format!("{}…", &name[..end]),
        None => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn run(rows: &Value) -> Run {
        let run = json!({
            "bench": "slab",
            "machine": {
                "cpu": "CPU", "architecture": "x86_64", "kernel": "6", "cpus": 2,
                "primitives": {"locked_add_cycles": 3.0},
            },
            "rows": rows,
        });
        serde_json::from_value(run).unwrap()
    }

    #[test]
    fn each_figure_that_both_have_is_compared() {
        let row =
            |subject, size, cycles| json!({"subject": subject, "size": size, "cycles": cycles});
        let old = run(&json!([
            row("rseq", 8, 4.0),
            row("rseq", 16, 4.0),
            row("tid", 8, 0.0)
        ]));
        let new = run(&json!([
            row("rseq", 16, 5.0),
            row("rseq", 8, 2.0),
            row("tid", 8, 1.0)
        ]));
        let text = report(&old, &new).unwrap();
        let line = |start: &str| {
            let line = text.lines().find(|line| line.starts_with(start)).unwrap();
            line.split_whitespace().rev().take(3).collect::<Vec<_>>()
        };
        assert_eq!(line("rseq, size 8: cycles"), ["0.50", "2.00", "4.00"]);
        assert_eq!(line("rseq, size 16: cycles"), ["1.25", "5.00", "4.00"]);
        // Nothing can be divided by zero.
        assert_eq!(line("tid, size 8: cycles"), ["-", "1.00", "0.00"]);
        assert!(!text.contains("only"), "{text}");
        let text = report(&old, &run(&json!([row("rseq", 8, 2.0)]))).unwrap();
        let alone = "2 figures are in one of the two runs only.";
        assert!(text.contains(alone), "{text}");
    }

    #[test]
    fn names_from_a_file_are_short_and_harmless() {
        let long = "x".repeat(100_000);
        let hostile = format!("\u{1b}[2J\n{long}");
        let rows = json!([{ "subject": hostile, hostile.clone(): 1.0, "cycles": 1e300 }]);
        let text = report(&run(&rows), &run(&rows)).unwrap();
        assert!(text.len() < 10_000 && !text.contains('\u{1b}'));
        assert!(text.contains("\\u001b[2J\\u000ax"), "{text}");
    }

    #[test]
    fn what_is_no_figure_is_left_out() {
        let rows = json!([{ "subject": "a", "met": true, "rounds": [1.0], "b": null }]);
        assert!(figures(&run(&rows)).unwrap().is_empty());
        let row = |size: usize| json!({"size": size, "a": 1, "b": 2});
        let many: Vec<_> = (0..FIGURES).map(row).collect();
        assert!(figures(&run(&json!(many))).is_err());
    }

    #[test]
    fn rows_that_cannot_be_told_apart_are_refused() {
        let row = |cpus: usize, mapped: bool| json!({"cpus": cpus, "mmap": mapped, "cycles": 1.0});
        let apart = json!([row(1, false), row(2, false), row(2, true)]);
        assert_eq!(figures(&run(&apart)).unwrap().len(), 3);
        assert!(figures(&run(&json!([row(1, false), row(1, false)]))).is_err());
    }

    #[test]
    fn a_run_without_a_measured_locked_add_is_refused() {
        for cycles in [json!(-5.0), json!(0.0), json!(null)] {
            let mut unmeasured = run(&json!([]));
            unmeasured.machine.primitives = serde_json::from_value(json!({
                "locked_add_cycles": cycles
            }))
            .unwrap();
            assert!(check(&run(&json!([])), &unmeasured).is_err());
        }
    }

    /// The runs that the documents show.
    #[test]
    fn published_runs_have_no_two_rows_of_one_name() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../bench/runs/published");
        let mut runs = 0;
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path
                .extension()
                .is_some_and(|extension| extension == "json")
            {
                let text = std::fs::read_to_string(&path).unwrap();
                let found = serde_json::from_str(&text).map(|run: Run| figures(&run).unwrap());
                assert!(found.unwrap().len() > 5, "{}", path.display());
                runs += 1;
            }
        }
        assert!(runs > 5);
    }
}
