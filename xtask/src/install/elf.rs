//! Strips programs and libraries, and reads what they need.

use anyhow::{Context, Result};
use object::Object;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The options of objcopy that drop the compiler's bitcode, which only the compiler can read.
pub const NO_BITCODE: [&str; 2] = ["--remove-section=.llvmbc", "--remove-section=.llvmcmd"];

pub fn objcopy() -> Command {
    Command::new("objcopy")
}

/// Writes `from` to `to` without its symbols and debug information.
pub fn strip(from: &Path, to: &Path) -> Result<()> {
    let mut copy = objcopy();
    copy.args(["--strip-unneeded", "--remove-section=.comment"]);
    crate::run(copy.arg(from).arg(to)).context("objcopy comes with Debian's package binutils")
}

/// Writes the symbols and the debug information of `from` to `to`.
pub fn split_debug(from: &Path, to: &Path) -> Result<()> {
    let mut copy = objcopy();
    copy.args(["--only-keep-debug", "--compress-debug-sections=zlib"]);
    crate::run(copy.arg(from).arg(to)).context("objcopy comes with Debian's package binutils")
}

/// Returns where debuggers look for the debug information of `file`, below `lib/debug`.
pub fn debug_place(file: &Path) -> Result<PathBuf> {
    let bytes = fs::read(file).with_context(|| file.display().to_string())?;
    let object = object::File::parse(&*bytes).with_context(|| file.display().to_string())?;
    let id = object.build_id()?.filter(|id| id.len() > 1);
    let id = id.with_context(|| format!("{} has no build id", file.display()))?;
    let hex = |bytes: &[u8]| -> String { bytes.iter().map(|byte| format!("{byte:02x}")).collect() };
    Ok(Path::new(".build-id")
        .join(hex(&id[..1]))
        .join(hex(&id[1..]) + ".debug"))
}
