//! Measures Pinfold and its peers side by side.
//!
//! `slab` prints cycles per operation, `memory` the memory that a thousand threads leave, `counter`
//! the cost of counters, `percpu` the cost of per-CPU operations, and `whole` the cost of whole
//! programs.

mod args;
mod built;
mod child;
mod counter;
mod machine;
mod memory;
mod percpu;
mod results;
mod runner;
mod slab;
mod subjects;
mod summary;
mod whole;

use args::{Args, Command};
use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    let result = match Args::parse().command {
        Command::Slab(args) => slab::run(&args).map(done),
        Command::Plot(args) => slab::plot_saved(&args).map(done),
        Command::Memory(args) => memory::run(&args).map(done),
        Command::Counter(args) => counter::run(&args).map(done),
        Command::Percpu(args) => percpu::run(&args).map(done),
        Command::Whole(args) => whole::run(&args),
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
