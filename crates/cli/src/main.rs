//! The `pinfold` command.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

use clap::{CommandFactory, Parser, Subcommand};
use pinfold_lab::{bench, jitter, output};
use std::process::ExitCode;

mod compare;
mod doctor;
mod foreign;
#[cfg(fuzzing)]
pub mod fuzzing;
mod heap;
mod live;
mod manual;
mod migrate;
mod numastat;
mod policy;
mod run;

/// The command line. Its help begins with the package's description in Cargo.toml.
#[derive(Parser)]
#[command(name = "pinfold", version, about, max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Run(run::Args),
    Compare(compare::Args),
    Doctor(doctor::Args),
    Bench(bench::Args),
    Jitter(jitter::Args),
    Policy(policy::Args),
    Numastat(numastat::Args),
    Migrate(migrate::Args),
    List(live::list::Args),
    Stat(live::stat::Args),
    Slabinfo(live::slabinfo::Args),
    Vmstat(live::vmstat::Args),
    Top(live::top::Args),
    Heap(heap::Args),
    Serve(live::serve::Args),
    Trim(live::control::TrimArgs),
    Set(live::control::SetArgs),
    Man(manual::ManArgs),
    Completions(manual::CompletionsArgs),
    /// Name functions: used by this command itself
    #[command(hide = true)]
    NameFunctions,
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Run(args) => run::main(args),
        Command::Compare(args) => compare::main(args),
        Command::Doctor(args) => doctor::main(args),
        Command::Bench(args) => bench::main(args),
        Command::Jitter(args) => jitter::main(args),
        Command::Policy(args) => policy::main(args),
        Command::Numastat(args) => numastat::main(args),
        Command::Migrate(args) => migrate::main(args),
        Command::List(args) => live::list::main(args),
        Command::Stat(args) => live::stat::main(args),
        Command::Slabinfo(args) => live::slabinfo::main(args),
        Command::Vmstat(args) => live::vmstat::main(args),
        Command::Top(args) => live::top::main(args),
        Command::Heap(args) => heap::main(args),
        Command::Serve(args) => live::serve::main(args),
        Command::Trim(args) => live::control::trim(args),
        Command::Set(args) => live::control::set(args),
        Command::Man(args) => manual::man(args, Arguments::command()),
        Command::Completions(args) => manual::completions(args, Arguments::command()),
        Command::NameFunctions => heap::child_main(),
    };
    outcome.unwrap_or_else(|error| {
        output::note(format_args!("{error:#}"));
        ExitCode::from(2)
    })
}
