//! `pinfold bench`: measures counters, object caches and page allocation on this machine, beside
//! competing designs.

mod all;
mod compare;
mod counter;
mod pft;
mod protect;
pub mod slab;
mod vmstat;

use anyhow::{Context, Result, bail};
use protect::{Spinlock, masked};
use std::process::ExitCode;

/// Measure what counting and allocating cost on this machine
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    Vmstat(vmstat::Args),
    Counter(counter::Args),
    Slab(slab::Args),
    Pft(pft::Args),
    All(all::Args),
    Compare(compare::Args),
}

/// Measures or compares what the arguments ask for, and prints or writes the results.
///
/// # Errors
///
/// Fails if something cannot be measured or compared, or the results cannot be written.
pub fn main(args: Args) -> Result<ExitCode> {
    match args.what {
        What::Vmstat(args) => vmstat::main(&args),
        What::Counter(args) => counter::main(&args),
        What::Slab(args) => slab::main(&args),
        What::Pft(args) => pft::main(&args),
        What::All(args) => all::main(&args),
        What::Compare(args) => compare::main(&args),
    }?;
    Ok(ExitCode::SUCCESS)
}

/// Runs `work` on a thread of its own, so that `work` can pin its thread without pinning the
/// caller.
fn on_own_thread<R: Send>(work: impl FnOnce() -> Result<R> + Send) -> Result<R> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("measuring".into());
        let thread = thread.spawn_scoped(scope, work);
        let joined = thread.context("starting the measuring thread")?.join();
        joined.unwrap_or_else(|_| bail!("the measuring thread panicked"))
    })
}

/// Parses seconds of the command line, at most `most`.
pub(crate) fn seconds(text: &str, most: f64) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if seconds > 0.0 && seconds <= most => Ok(seconds),
        _ => Err(format!("give a number above 0 and up to {most}")),
    }
}

/// Parses a positive number of the command line.
fn at_least_one(text: &str) -> Result<u32, String> {
    count(text, u32::MAX)
}

fn count(text: &str, most: u32) -> Result<u32, String> {
    match text.parse() {
        Ok(0) => Err("0 would measure nothing; give 1 or more".to_owned()),
        Ok(number) if number <= most => Ok(number),
        _ => Err(format!("give a whole number from 1 to {most}")),
    }
}
