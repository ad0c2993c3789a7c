//! `pinfold bench`: what the counters, object caches and pages cost on this machine, beside the designs that they compete with.

mod counter;
mod cpus;
mod pft;
mod slab;
mod spinlock;
mod vmstat;

use anyhow::{Context, Result, bail};
use pinfold::counter::EventCounter;
use pinfold_rseq::Index;
use spinlock::Spinlock;
use std::process::ExitCode;

/// Measure what counting and allocating cost on this machine.
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
}

pub fn main(args: Args) -> Result<ExitCode> {
    match args.what {
        What::Vmstat(args) => vmstat::main(&args),
        What::Counter(args) => counter::main(&args),
        What::Slab(args) => slab::main(&args),
        What::Pft(args) => pft::main(&args),
    }?;
    Ok(ExitCode::SUCCESS)
}

/// Lets the library choose the process's index, as it does when it first counts; the rivals then use the same one.
fn settle_index() {
    static FIRST: EventCounter = EventCounter::new();
    FIRST.inc();
    pinfold_rseq::init(Index::Cid);
}

/// Runs `work` on a thread of its own, so that only this one gets pinned.
fn on_own_thread<R: Send>(work: impl FnOnce() -> Result<R> + Send) -> Result<R> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("measuring".into());
        let thread = thread.spawn_scoped(scope, work);
        let joined = thread.context("starting the measuring thread")?.join();
        joined.unwrap_or_else(|_| bail!("the measuring thread panicked"))
    })
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

/// Waits for `done`. The kernel spins with preemption disabled; here whoever is waited for may have been preempted, and
/// after some turns the CPU is offered to it.
#[inline]
pub fn spin_until(done: impl Fn() -> bool) {
    const TURNS: u32 = 100;
    let mut turn = 0;
    while !done() {
        if turn < TURNS {
            turn += 1;
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
    }
}
