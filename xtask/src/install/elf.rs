//! Strips programs and libraries, and reads what they need.

use anyhow::{Context, Result, bail};
use object::Object;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The options of objcopy that drop the compiler's bitcode and name, which no program uses.
pub const DROPPED: [&str; 3] = [
    "--remove-section=.llvmbc",
    "--remove-section=.llvmcmd",
    "--remove-section=.comment",
];

pub fn objcopy() -> Command {
    Command::new("objcopy")
}

/// Writes `from` to `to` without its symbols and debug information.
pub fn strip(from: &Path, to: &Path) -> Result<()> {
    let mut copy = objcopy();
    copy.arg("--strip-unneeded").args(DROPPED);
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

/// What the loader needs to load a file.
#[derive(Debug, Default, PartialEq)]
pub struct Needs {
    pub libraries: BTreeSet<String>,
    /// The oldest version of glibc that has all symbols and features, like 2.35.
    pub glibc: (u32, u32),
}

/// Returns what the loader needs to load all of `files`.
pub fn needs(files: &[&Path]) -> Result<Needs> {
    let said = Command::new("objdump").arg("-p").args(files).output();
    let said = said.context("cannot start objdump, of Debian's package binutils")?;
    if !said.status.success() {
        bail!("objdump failed: {}", String::from_utf8_lossy(&said.stderr));
    }
    Ok(read_needs(&String::from_utf8_lossy(&said.stdout)))
}

fn read_needs(said: &str) -> Needs {
    let mut needs = Needs::default();
    for line in said.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match *words {
            ["NEEDED", library] => {
                needs.libraries.insert(library.to_owned());
            }
            // Packed relocations.
            [_, _, _, "GLIBC_ABI_DT_RELR"] => needs.glibc = needs.glibc.max((2, 36)),
            [_, _, _, version] => {
                let numbers = version.strip_prefix("GLIBC_").unwrap_or_default();
                let mut numbers = numbers.split('.').map_while(|number| number.parse().ok());
                if let (Some(major), Some(minor)) = (numbers.next(), numbers.next()) {
                    needs.glibc = needs.glibc.max((major, minor));
                }
            }
            _ => {}
        }
    }
    needs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_version_of_glibc_counts() {
        let needs = |last: &str| {
            read_needs(&format!(
                "  NEEDED               libc.so.6\n  SONAME               libpinfold.so.0\n\
                 \x20   0x09691a75 0x00 02 GLIBC_2.2.5\n    0x069691b4 0x00 08 {last}\n"
            ))
        };
        assert_eq!(needs("GLIBC_2.34").glibc, (2, 34));
        assert_eq!(needs("GLIBC_ABI_DT_RELR").glibc, (2, 36));
        assert_eq!(needs("GCC_3.0").glibc, (2, 2));
        assert!(needs("x").libraries.iter().eq(["libc.so.6"]));
    }
}
