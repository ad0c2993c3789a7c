//! Pinfold and its peers, side by side: `slab` prints cycles per operation, `memory` what a thousand threads leave, `counter` what
//! counting costs.

mod args;
mod built;
mod child;
mod counter;
mod cycles;
mod machine;
mod memory;
mod pool;
mod report;
mod rows;
mod runner;
mod scenarios;
mod slab;
mod stats;
mod subjects;
mod summary;

use args::{Args, Command};
use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    let result = match Args::parse().command {
        Command::Slab(args) => slab::run(&args),
        Command::Memory(args) => memory::run(&args),
        Command::Counter(args) => counter::run(&args),
        Command::SlabChild(args) => child::serve(&args),
        Command::MemoryChild(args) => memory::child::measure(&args),
        Command::CounterMemoryChild(args) => counter::memory::child(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pinfold-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}
