//! `pinfold run`: starts a program with the library preloaded.

mod elf;
mod library;
mod program;
mod report;
mod signals;
mod statistics;

use crate::complain;
use anyhow::{Context, Result};
use program::{Obstacle, Program};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Command, ExitCode, ExitStatus};

/// What a shell answers for a command that cannot be executed, and for one that is not there.
const NOT_EXECUTABLE: u8 = 126;
const NOT_FOUND: u8 = 127;

/// Start a program on Pinfold: the library is preloaded, nothing else changes.
///
/// Output, signals and exit status pass through; a program killed by signal N gives 128+N, one that cannot be executed
/// 126, one that is not there 127. Programs that nothing can be preloaded into (static, setuid, made for another
/// machine or C library) run as they are, with a word about it.
#[derive(clap::Args)]
pub struct Args {
    /// Afterwards, print on standard error what the allocator did
    ///
    /// Counting makes each call some nanoseconds slower. docs/stats.md explains every line.
    #[arg(long)]
    stats: bool,

    /// Afterwards, write to FILE as JSON what the allocator did
    #[arg(long, value_name = "FILE")]
    stats_json: Option<PathBuf>,

    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

pub fn main(args: Args) -> Result<ExitCode> {
    let library = library::find()?;
    let (name, arguments) = args.command.split_first().context("no command given")?;
    let program = match program::find(name) {
        Ok(program) => program,
        Err(error) => return Ok(refuse(name, &error)),
    };
    // Made before the command starts: a bad name is better known now.
    let json = args.stats_json.as_deref().map(create).transpose()?;
    let counted = args.stats || json.is_some();
    let mut command = Command::new(&program.path);
    command.arg0(name).args(arguments);
    let obstacle = program.obstacle();
    if let Some(obstacle) = &obstacle {
        explain(&program, obstacle, counted);
    } else {
        command.env("LD_PRELOAD", library::preload(&library));
    }
    let error = if counted && obstacle.is_none() {
        match run_counted(command)? {
            Ok((status, report)) => {
                if args.stats {
                    report.print();
                }
                if let Some(file) = json {
                    report.write_json(file);
                }
                return Ok(exit_code(status));
            }
            Err(error) => error,
        }
    } else {
        // In place: the program has this process's number, terminal and signals.
        signals::prepare_exec(&mut command);
        command.exec()
    };
    Ok(match program.missing() {
        Some(missing) => refuse_without(name, &missing.display().to_string()),
        None => refuse(name, &error),
    })
}

fn create(path: &std::path::Path) -> Result<File> {
    File::create(path).with_context(|| format!("cannot write {}", path.display()))
}

/// Runs the command as a child; says how it ended and what it did, or why it did not start.
fn run_counted(mut command: Command) -> Result<io::Result<(ExitStatus, statistics::Report)>> {
    // In this order, so that a signal never leaves the directory behind: dropped last, the relay guards it.
    let relay = signals::Relay::start();
    let directory = statistics::Directory::make()?;
    command.env(statistics::VARIABLE, directory.path());
    let mut child = match relay.spawn(&mut command) {
        Ok(child) => child,
        Err(error) => return Ok(Err(error)),
    };
    let status = relay.wait(&mut child)?;
    Ok(Ok((status, directory.read(child.id()))))
}

/// As shells do.
fn exit_code(status: ExitStatus) -> ExitCode {
    let code = status
        .code()
        .or_else(|| status.signal().map(|signal| 128 + signal));
    ExitCode::from(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}

/// Says why a command did not start.
fn refuse(name: &OsStr, error: &io::Error) -> ExitCode {
    let name = name.display();
    if error.kind() == io::ErrorKind::NotFound {
        complain(format_args!("{name}: command not found"));
        ExitCode::from(NOT_FOUND)
    } else {
        complain(format_args!("{name}: cannot execute: {error}"));
        ExitCode::from(NOT_EXECUTABLE)
    }
}

/// The system's error is then the same as for a command that is not there.
fn refuse_without(name: &OsStr, missing: &str) -> ExitCode {
    let name = name.display();
    complain(format_args!(
        "{name}: cannot execute: it needs {missing}, which is not there"
    ));
    ExitCode::from(NOT_FOUND)
}

fn explain(program: &Program, obstacle: &Obstacle, counted: bool) {
    let binary = program.binary.display();
    let nothing = if counted { " and uncounted" } else { "" };
    complain(format_args!(
        "{binary} {obstacle}; it runs without Pinfold{nothing}"
    ));
}
