//! The model that predicts time from counts, and its error on this machine.
//!
//! A pair of an allocation and a free takes
//!
//! - its instructions times the cycles of an instruction, which the same subject's `single` and
//!   `pair` show on one CPU;
//! - its transfers times what a cache line from another CPU costs here;
//! - its locked instructions and system calls times what they cost here.
//!
//! The model has no parameter that is fitted to the loads that it predicts.

use super::counts::Row;
use super::{CACHE, Subject};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::collections::HashMap;
use std::fmt::Write;
use std::path::Path;
use std::process::{Command, Stdio};

/// How often each load runs here; the result is the median.
const ROUNDS: usize = 9;

/// What this machine's primitives cost, in cycles.
struct Costs {
    line: f64,
    locked: f64,
    syscall: f64,
}

impl Costs {
    /// Returns what `pinfold-bench` measures before each run.
    fn measure() -> Result<Costs> {
        let said = Command::new(env!("CARGO"))
            .args(["run", "--quiet", "--release", "-p", "pinfold-bench", "--"])
            .args(["slab", "--subjects", "glibc", "--scenario", "single"])
            .args(["--sizes", "64", "--rounds", "1", "--json"])
            .stderr(Stdio::inherit())
            .output()
            .context("cannot start cargo")?;
        let said: Value = serde_json::from_slice(&said.stdout).context("pinfold-bench slab")?;
        let cost = |name: &str| {
            let cost = said["machine"]["primitives"][name].as_f64();
            cost.with_context(|| format!("pinfold-bench has no {name}; run it on two CPUs"))
        };
        Ok(Costs {
            line: cost("cache_line_cycles")?,
            locked: cost("locked_add_cycles")?,
            syscall: cost("system_call_cycles")?,
        })
    }

    /// Returns the cycles of a pair without those of its instructions.
    fn of_events(&self, row: &Row) -> f64 {
        let cost = |counts: super::counts::Counts| {
            self.line * counts.each(counts.transfers())
                + self.locked * counts.each(counts.locked)
                + self.syscall * counts.each(counts.syscalls)
        };
        let touch = self.line * row.alloc.each(row.program.touches);
        cost(row.alloc) + cost(row.free) + touch
    }
}

/// Returns the instructions of a pair.
fn instructions(row: &Row) -> f64 {
    row.alloc.each(row.alloc.instructions) + row.free.each(row.free.instructions)
}

/// What the model said, for the tables.
pub struct Said {
    costs: Costs,
    /// The factor by which the model is off on two CPUs, in the median. `None` if nothing was
    /// predicted there.
    pub error: Option<f64>,
}

/// Measures slab_test's scenarios on two of this machine's CPUs, and predicts them for all numbers
/// of CPUs. Writes both into the rows.
pub fn predict(
    rows: &mut [Row],
    subjects: &[Subject],
    program: &Path,
    objects: u32,
) -> Result<Said> {
    let costs = Costs::measure()?;
    // What an instruction of a subject and size costs, by `single`.
    let mut each = HashMap::new();
    for row in rows
        .iter_mut()
        .filter(|row| row.size.is_some() && row.cpus == 2)
    {
        let cycles = clock(row, subjects, program, objects)?;
        row.clock = Some(cycles);
        if row.load == "single" {
            let own = (cycles - costs.of_events(row)).max(0.0) / instructions(row).max(1.0);
            each.insert((row.size, row.subject.clone()), own);
        }
    }
    let mut errors = Vec::new();
    for row in rows.iter_mut().filter(|row| row.size.is_some()) {
        let Some(each) = each.get(&(row.size, row.subject.clone())) else {
            bail!("the model needs the load single on 2 CPUs; add them to --loads and --cpus");
        };
        let model = each * instructions(row) + costs.of_events(row);
        row.model = Some(model);
        let off = row.clock.map(|clock| (model / clock).ln().abs());
        errors.extend(off.filter(|_| row.load != "single"));
    }
    errors.sort_by(f64::total_cmp);
    let error = errors.get(errors.len() / 2).map(|error| error.exp());
    Ok(Said { costs, error })
}

/// Returns a table: the model beside the clock on 2 CPUs, and what the model predicts for more.
pub fn text(rows: &[Row], said: &Said) -> String {
    let costs = &said.costs;
    let mut text = format!(
        "\ncycles of an allocation and a free by the model and by the clock; here a line costs {} \
         cycles, a locked add {}, a system call {}\n\n| load | subject | CPUs | model | clock | \
         model/clock |\n|---|---|---|---|---|---|\n",
        costs.line, costs.locked, costs.syscall
    );
    for row in rows {
        let (Some(model), Some(size)) = (row.model, row.size) else {
            continue;
        };
        let clock = match row.clock {
            Some(clock) => format!("{clock:.0} | {:.2}", model / clock),
            None => "- | -".to_owned(),
        };
        let (load, subject, cpus) = (row.load, &row.subject, row.cpus);
        let _ = writeln!(
            text,
            "| {load} {size} | {subject} | {cpus} | {model:.0} | {clock} |"
        );
    }
    if let Some(error) = said.error {
        let _ = writeln!(
            text,
            "\nthe model is off by a factor of {error:.2} in the median"
        );
    }
    text
}

/// Returns the cycles of an allocation and a free of a row's load on two of this machine's CPUs.
fn clock(row: &Row, subjects: &[Subject], program: &Path, objects: u32) -> Result<f64> {
    let is_cache = row.subject == CACHE.0;
    let name = if is_cache { CACHE.1 } else { &row.subject };
    let subject = subjects
        .iter()
        .find(|subject| subject.name == name)
        .context("no library")?;
    let mut rounds = Vec::new();
    for _ in 0..ROUNDS {
        let said = Command::new(program)
            .env("LD_PRELOAD", &subject.library)
            .env("LD_BIND_NOW", "1")
            .args([
                row.load,
                &row.size.unwrap_or(0).to_string(),
                &objects.to_string(),
                "2",
                "0",
            ])
            .args(is_cache.then_some("cache"))
            .output()?;
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        let cycles = said.trim().strip_prefix("cycles ").with_context(|| {
            format!(
                "{} did not end under {} on this machine",
                row.load, row.subject
            )
        })?;
        rounds.push(
            cycles
                .split(' ')
                .filter_map(|one| one.parse::<f64>().ok())
                .sum::<f64>(),
        );
    }
    rounds.sort_by(f64::total_cmp);
    Ok(rounds[rounds.len() / 2])
}
