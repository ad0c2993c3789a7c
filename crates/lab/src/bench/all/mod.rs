//! `pinfold bench all`: the benchmarks of the five documents that Pinfold's benchmarks come from,
//! one after the other, as tables or as one HTML file.

mod compare;
mod page;
mod part;
mod rows;
mod seeds;
mod verdict;

use crate::output;
use anyhow::{Result, ensure};
use page::page;
use part::Part;
use seeds::DOCUMENTS;
use std::path::PathBuf;

/// Run all benchmarks briefly, beside the figures of the documents that they come from
///
/// Runs bench vmstat, bench slab, jitter, bench counter and bench pft, each in a process of its
/// own, and prints for each: the question of the document of 2007 to 2015 that it comes from, the
/// document's own figures beside this machine's, what they mean, and the benchmark's tables. A
/// benchmark that cannot run here says why, and the others still run. Takes a few minutes.
#[derive(clap::Args)]
pub struct Args {
    /// Write one HTML file with tables and plots instead of printing tables. The file needs no
    /// other file and no script. It appears at once when all benchmarks are over
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,

    /// Print one JSON object instead of tables
    #[arg(long, conflicts_with = "html")]
    json: bool,

    /// Measure so briefly that the figures only show that everything runs
    #[arg(long)]
    quick: bool,

    /// Seconds for each setup of the jitter test; a run of the counter's loop takes a fiftieth of
    /// that, and at least 0.2 [default: 20, with --quick 0.5]
    #[arg(long, allow_negative_numbers = true, value_name = "SECONDS", value_parser = seconds)]
    seconds: Option<f64>,

    /// Measure one benchmark and print its results for the process that prints all of them
    #[arg(long, hide = true, conflicts_with = "html")]
    part: Option<Part>,
}

fn seconds(text: &str) -> Result<f64, String> {
    const RANGE: std::ops::RangeInclusive<f64> = 0.05..=3600.0;
    match text.parse() {
        Ok(seconds) if RANGE.contains(&seconds) => Ok(seconds),
        _ => Err(format!(
            "give a number from {} to {}",
            RANGE.start(),
            RANGE.end()
        )),
    }
}

pub fn main(args: &Args) -> Result<()> {
    if let Some(part) = args.part {
        return output::print(&serde_json::to_string(&part.measure(args))?);
    }
    if let Some(file) = &args.html {
        ensure!(
            file.file_name().is_some(),
            "cannot write the report to {}: this names no file",
            file.display()
        );
        output::check_writable("the report", file)?;
    }
    let outcomes: Vec<_> = Part::ALL.into_iter().map(|part| part.run(args)).collect();
    let sections: Vec<_> = (DOCUMENTS.seeds)
        .iter()
        .zip(Part::ALL)
        .zip(&outcomes)
        .map(|((seed, part), outcome)| page::Section::new(seed, part.command(args), outcome))
        .collect();
    match &args.html {
        _ if args.json => {
            let benchmarks: Result<Vec<_>> = sections.iter().map(page::Section::json).collect();
            let all = serde_json::json!({ "benchmarks": benchmarks? });
            output::print(&output::object("bench all", &all)?)
        }
        Some(file) => {
            let page = page(&sections, args.quick)?;
            output::write("the report", file, page.as_bytes())?;
            let measured = outcomes.iter().filter(|outcome| outcome.is_ok()).count();
            let (all, file) = (outcomes.len(), file.display());
            output::print(&format!("{measured} of {all} benchmarks are in {file}\n"))
        }
        None => {
            let sections: Vec<_> = sections.iter().map(page::Section::text).collect();
            output::print(&sections.join("\n\n"))
        }
    }
}
