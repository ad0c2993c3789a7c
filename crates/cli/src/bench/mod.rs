//! `pinfold bench`: what the counters cost on this machine, beside the designs that they compete with.

mod counter;
mod vmstat;

use anyhow::Result;
use pinfold::counter::EventCounter;
use pinfold_rseq::Index;
use std::process::ExitCode;

/// Measure what counting costs on this machine.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    Vmstat(vmstat::Args),
    Counter(counter::Args),
}

pub fn main(args: Args) -> Result<ExitCode> {
    match args.what {
        What::Vmstat(args) => vmstat::main(&args),
        What::Counter(args) => counter::main(&args),
    }?;
    Ok(ExitCode::SUCCESS)
}

/// Lets the library choose the process's index, as it does when it first counts; the rivals then use the same one.
fn settle_index() {
    static FIRST: EventCounter = EventCounter::new();
    FIRST.inc();
    pinfold_rseq::init(Index::Cid);
}

/// Reads a count from the command line.
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

/// Keeps each CPU's part on lines of its own; two lines, because CPUs fetch pairs of them.
#[derive(Default)]
#[repr(align(128))]
struct Padded<T>(T);
