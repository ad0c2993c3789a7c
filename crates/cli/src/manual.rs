//! `pinfold man` and `pinfold completions`: what man and shells know of this command, made from the
//! definitions of its options.

use anyhow::{Context, Result};
use clap::Command;
use pinfold_lab::output;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Write the manual pages to a folder, one for each command
#[derive(clap::Args)]
pub struct ManArgs {
    /// The folder, like ~/.local/share/man/man1
    folder: PathBuf,
}

/// Print what a shell needs to complete this command's options
#[derive(clap::Args)]
pub struct CompletionsArgs {
    /// The shell
    shell: clap_complete::Shell,
}

pub fn man(args: ManArgs, command: Command) -> Result<ExitCode> {
    let folder = args.folder;
    let write = || -> Result<()> {
        fs::create_dir_all(&folder)?;
        Ok(clap_mangen::generate_to(command, &folder)?)
    };
    write().with_context(|| format!("cannot write manual pages to {}", folder.display()))?;
    Ok(ExitCode::SUCCESS)
}

pub fn completions(args: CompletionsArgs, mut command: Command) -> Result<ExitCode> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut command, "pinfold", &mut text);
    output::write("the completions", Path::new("-"), &text)?;
    Ok(ExitCode::SUCCESS)
}
