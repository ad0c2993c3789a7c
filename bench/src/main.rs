//! Measures Pinfold and its peers side by side.
//!
//! `slab` prints cycles per operation, `memory` the memory that a thousand threads leave, `counter`
//! the cost of counters, `percpu` the cost of per-CPU operations, `whole` the cost of whole
//! programs, `limit` how far that is from the least possible, `latency` the times of single calls,
//! and `musl` the cost of programs with musl.

mod args;
mod built;
mod child;
mod counter;
mod latency;
mod limit;
mod machine;
mod memory;
mod musl;
mod percpu;
mod results;
mod runner;
mod slab;
mod subjects;
mod summary;
mod whole;

use anyhow::{Context, Result, bail};
use args::{Args, Command, PlotArgs};
use clap::Parser;
use serde::Deserialize;
use std::process::ExitCode;

fn main() -> ExitCode {
    let result = match Args::parse().command {
        Command::Slab(args) => slab::run(&args).map(done),
        Command::Plot(args) => plot(&args).map(done),
        Command::Memory(args) => memory::run(&args).map(done),
        Command::Counter(args) => counter::run(&args).map(done),
        Command::Percpu(args) => percpu::run(&args).map(done),
        Command::Whole(args) => whole::run(&args),
        Command::Limit(args) => limit::run(&args),
        Command::Latency(args) => latency::run(&args).map(done),
        Command::Musl(args) => musl::run(&args).map(done),
        Command::SlabChild(args) => child::serve(&args).map(done),
        Command::MemoryChild(args) => memory::child::measure(&args).map(done),
        Command::CounterMemoryChild(args) => counter::memory::child(&args).map(done),
    };
    result.unwrap_or_else(|error| {
        eprintln!("pinfold-bench: {error:#}");
        ExitCode::from(2)
    })
}

/// Returns the exit status of a command that can only succeed or return an error.
fn done((): ()) -> ExitCode {
    ExitCode::SUCCESS
}

/// Draws a saved file.
fn plot(args: &PlotArgs) -> Result<()> {
    #[derive(Deserialize)]
    struct Kind {
        bench: String,
    }
    let run = args.run.display();
    let text = std::fs::read_to_string(&args.run).with_context(|| format!("reading {run}"))?;
    let kind: Kind = serde_json::from_str(&text)
        .with_context(|| format!("{run} is no file that --save or --json wrote"))?;
    let drawn = match kind.bench.as_str() {
        "slab" => slab::plot_saved(&text),
        "whole" => whole::plot_saved(&text),
        "limit" => limit::plot_saved(&text),
        other => bail!("{run} has figures of {other}; give one of slab, whole or limit"),
    };
    let drawn = drawn.with_context(|| format!("reading the rows of {run}"))?;
    pinfold_lab::output::write("the plot", &args.picture, drawn.as_bytes())
}
