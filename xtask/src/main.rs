//! Chores for developers: `cargo xtask tidy`, `figures`, `stack`, `install`, `deb`, `wheel`,
//! `vm`, `root` and `policy-tests`.
#![forbid(unsafe_code)]

mod calls;
mod deb;
mod documents;
mod figures;
mod floors;
mod install;
mod stack;
mod tidy;
mod vm;
mod wheel;

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand};
use std::path::PathBuf;
use std::process::{Command, ExitCode};

/// Chores for the developers of Pinfold.
#[derive(Parser)]
#[command(bin_name = "cargo xtask", max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// Checks the house rules of modules, files, unsafe blocks and documents.
    ///
    /// Dependencies point down, files are short, comments are narrow, unsafe blocks have reasons,
    /// links lead somewhere, the table of tests is complete, and `figures --check` finds nothing.
    Tidy,
    Figures(figures::Args),
    Stack(stack::Args),
    Install(install::Args),
    Deb(deb::Args),
    Wheel(wheel::Args),
    Vm(vm::Args),
    Root(vm::chroot::Args),
    PolicyTests(vm::policy_tests::Args),
    Many(vm::many::Args),
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().chore {
        Chore::Tidy => tidy::main(),
        Chore::Figures(args) => figures::main(&args),
        Chore::Stack(args) => stack::main(args),
        Chore::Install(args) => install::main(args),
        Chore::Deb(args) => deb::main(&args),
        Chore::Wheel(args) => wheel::main(&args),
        Chore::Vm(args) => vm::main(args),
        Chore::Root(args) => vm::chroot::main(&args),
        Chore::PolicyTests(args) => vm::policy_tests::main(&args),
        Chore::Many(args) => vm::many::main(&args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Returns the folder of what cargo builds.
fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| "target".into(), PathBuf::from)
}

/// Runs a command to its end.
///
/// # Errors
///
/// If the command does not start, or fails.
fn run(command: &mut Command) -> Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let status = command.status();
    let status = status.with_context(|| format!("cannot start {name}"))?;
    if !status.success() {
        bail!("{name} failed: {status}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    /// Splits a command line at its spaces, and parses it.
    fn parse(line: &str) -> Result<Chore, clap::Error> {
        let words = ["xtask"].into_iter().chain(line.split(' '));
        Arguments::try_parse_from(words).map(|arguments| arguments.chore)
    }

    #[test]
    fn the_definition_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn documented_command_lines_are_accepted() {
        for line in [
            "tidy",
            "figures",
            "figures --check",
            "figures --measure",
            "figures --measure 000 003-same",
            "stack",
            "stack --limit 2048 --entry malloc --entry free --frames 256 --without f --chains",
            "install --prefix /usr/local",
            "install --prefix /usr --destdir /tmp/root",
            "install --prefix /usr --libdir lib/x86_64-linux-gnu",
            "install --prefix /usr --remove",
            "deb",
            "deb --to /tmp/debs",
            "wheel",
            "vm",
            "vm --list",
            "vm --prepare --machine cpus16 -- topology operations machine_cpus",
            "vm --machine memoryless --machine sparse -- topology machine_",
            "vm --shell pinfold",
            "vm --kernel-args nohz_full=5-7 --seconds 60",
            "vm --prepare --arch aarch64 -- operations rseq-unit =counter",
            "root --libc 2.43",
            "root --libc 2.31 --package gcc --package libc6-dev --prepare",
            "root --libc 2.43 -- target/release/pinfold-bench slab --sizes 64",
            "policy-tests",
            "many",
            "many --check",
            "many --cpus 2,240 --subjects pinfold-malloc,glibc --loads remote,larson --save",
            "policy-tests --ltp /src/ltp --seconds 600 numactl/shmtest ltp/mbind",
        ] {
            let error = parse(line).err().map(|error| error.to_string());
            assert_eq!(error, None, "{line}");
        }
    }

    #[test]
    fn wrong_command_lines_are_refused_with_status_2() {
        for line in [
            "",
            "clean",
            "tidy --edges",
            "figures 000",
            "figures --check --measure",
            "stack --limit many",
            "install",
            "install --prefix relative/folder",
            "install --prefix /usr --libdir ../lib",
            "deb --maintainer nobody",
            "vm topology",
            "vm --machine nodes5",
            "vm --arch riscv64",
            "vm --seconds",
            "vm --list --prepare",
            "root",
            "root --libc 2.43 ls",
            "policy-tests --ltp",
            "many --cpus 3",
        ] {
            let status = parse(line).err().map(|error| error.exit_code());
            assert_eq!(status, Some(2), "{line}");
        }
    }
}
