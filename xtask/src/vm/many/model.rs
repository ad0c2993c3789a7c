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

/// Measures slab_test's scenarios here and returns a table: the model beside the clock on 2 CPUs,
/// and what the model predicts for more CPUs.
pub fn text(rows: &[Row], subjects: &[Subject], program: &Path, objects: u32) -> Result<String> {
    let costs = Costs::measure()?;
    let mut text = format!(
        "\ncycles of an allocation and a free by the model and by the clock; here a line costs {} \
         cycles, a locked add {}, a system call {}\n\n| load | subject | CPUs | model | clock | \
         model/clock |\n|---|---|---|---|---|---|\n",
        costs.line, costs.locked, costs.syscall
    );
    let is_scenario = |row: &&Row| row.size.is_some();
    let mut clocks = HashMap::new();
    for row in rows.iter().filter(is_scenario).filter(|row| row.cpus == 2) {
        let cycles = clock(row, subjects, program, objects)?;
        clocks.insert((row.load, row.size, &row.subject), (row, cycles));
    }
    let mut errors = Vec::new();
    for row in rows.iter().filter(is_scenario) {
        // The instructions of a load cost as much as those of this load, on one CPU.
        let Some((base, cycles)) = clocks.get(&("single", row.size, &row.subject)) else {
            bail!("the model needs the load single on 2 CPUs; add them to --loads and --cpus");
        };
        let each = (cycles - costs.of_events(base)).max(0.0) / instructions(base).max(1.0);
        let model = each * instructions(row) + costs.of_events(row);
        let (load, size) = (row.load, row.size.unwrap_or(0));
        let _ = write!(
            text,
            "| {load} {size} | {} | {} | {model:.0} |",
            row.subject, row.cpus
        );
        match clocks.get(&(load, row.size, &row.subject)) {
            Some((_, cycles)) if row.cpus == 2 => {
                let ratio = model / cycles;
                let _ = writeln!(text, " {cycles:.0} | {ratio:.2} |");
                errors.extend((load != "single").then(|| ratio.ln().abs()));
            }
            _ => text += " - | - |\n",
        }
    }
    errors.sort_by(f64::total_cmp);
    if let Some(median) = errors.get(errors.len() / 2) {
        let _ = writeln!(
            text,
            "\nthe model is off by a factor of {:.2} in the median",
            median.exp()
        );
    }
    Ok(text)
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
