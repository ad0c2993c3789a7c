//! The `pinfold` command.
#![deny(unsafe_code)]

use clap::{Parser, Subcommand};
use std::fmt;
use std::io::Write;
use std::process::ExitCode;

mod doctor;
mod run;

/// Run any program on per-CPU memory caches.
///
/// Pinfold allocates from caches per CPU, as the Linux kernel does: no lock, no atomic read-modify-write and no system call
/// on the common path, and nothing per thread.
#[derive(Parser)]
#[command(
    version,
    max_term_width = 100,
    after_help = "For example:\n  pinfold run --stats -- python3 -c \"print('hello')\"\n  pinfold doctor"
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Run(run::Args),
    Doctor(doctor::Args),
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Run(args) => run::main(args),
        Command::Doctor(args) => doctor::main(args),
    };
    outcome.unwrap_or_else(|error| {
        complain(format_args!("{error:#}"));
        ExitCode::from(2)
    })
}

/// Says a line on standard error; one that is closed stops nothing.
fn complain(what: fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "pinfold: {what}");
}
