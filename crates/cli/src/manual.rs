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
    let failed = || format!("cannot make {}", folder.display());
    fs::create_dir_all(&folder).with_context(failed)?;
    let mut command = command.disable_help_subcommand(true);
    command.build();
    write_pages(&command, &folder)?;
    Ok(ExitCode::SUCCESS)
}

/// Writes the page of a command, and those of the commands below it.
fn write_pages(command: &Command, folder: &Path) -> Result<()> {
    let visible = command
        .get_subcommands()
        .filter(|below| !below.is_hide_set());
    for below in visible {
        write_pages(below, folder)?;
    }
    let page = clap_mangen::Man::new(command.clone());
    let mut text = Vec::new();
    page.render(&mut text)?;
    output::write("the manual page", &folder.join(page.get_filename()), &text)
}

pub fn completions(args: CompletionsArgs, mut command: Command) -> Result<ExitCode> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut command, "pinfold", &mut text);
    output::write("the completions", Path::new("-"), &text)?;
    Ok(ExitCode::SUCCESS)
}
