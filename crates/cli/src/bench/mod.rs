//! `pinfold bench`: measures counters, object caches and page allocation on this machine, beside
//! competing designs.

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

/// Lets the library choose the process's index, as it does when it first counts. The other designs
/// then use the same index.
fn settle_index() {
    static FIRST: EventCounter = EventCounter::new();
    FIRST.inc();
    pinfold_rseq::init(Index::Cid);
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

/// Keeps each CPU's part on cache lines of its own: on two, because CPUs fetch lines in pairs.
#[derive(Default)]
#[repr(align(128))]
struct Padded<T>(T);

/// Waits until `done` returns true. The kernel spins with preemption disabled. Here the thread that
/// this one waits for may have been preempted, so this one yields its CPU after some turns.
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
