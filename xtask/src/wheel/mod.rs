//! `cargo xtask wheel`: a Python package with the command and the library.

use crate::install::{self, LIBRARY, LICENSES, MEMBERS, THIRD_PARTY, elf, licenses};
use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Builds a Python wheel with the command and the library.
///
/// The wheel's tag names the oldest glibc that has all that the files need, so build it on the
/// oldest system that shall install it. SOURCE_DATE_EPOCH, or else the time of the last commit, is
/// the time in the wheel.
#[derive(clap::Args)]
pub struct Args {
    /// The folder for the wheel [default: target/wheel].
    #[arg(long, value_name = "DIR")]
    to: Option<PathBuf>,
}

const MODULES: [(&str, &str); 2] = [
    ("__init__.py", include_str!("__init__.py")),
    ("__main__.py", include_str!("__main__.py")),
];
const PACK: &str = include_str!("pack.py");
const VERSION: &str = env!("CARGO_PKG_VERSION");

pub fn main(args: &Args) -> Result<()> {
    let (to, work) = install::folders(args.to.as_deref(), "wheel")?;

    let built = install::build()?;
    let package = work.join("pinfold");
    for (from, folder, name) in [
        (&built.command, "bin", "pinfold"),
        (&built.library, "lib", LIBRARY),
    ] {
        let to = package.join(folder).join(name);
        fs::create_dir_all(to.parent().context("no folder")?)?;
        fs::copy(from, &to).with_context(|| format!("copying {}", from.display()))?;
    }
    for (name, text) in MODULES {
        fs::write(package.join(name), text)?;
    }
    let (major, minor) = elf::needs(&[&built.command, &built.library])?.glibc;
    let tag = format!(
        "py3-none-manylinux_{major}_{minor}_{}",
        std::env::consts::ARCH
    );
    let info = format!("pinfold-{VERSION}.dist-info");
    describe(&work.join(&info), &tag)?;

    let wheel = to.join(format!("pinfold-{VERSION}-{tag}.whl"));
    let mut pack = Command::new("python3");
    pack.args(["-c", PACK]).args([&work, &wheel]).arg(info);
    crate::run(pack.arg(crate::deb::epoch()?)).context("python3 packs the wheel")?;
    println!("{}", wheel.display());
    Ok(fs::remove_dir_all(&work)?)
}

/// Writes what installers read.
fn describe(folder: &Path, tag: &str) -> Result<()> {
    fs::create_dir_all(folder)?;
    let metadata = format!(
        "Metadata-Version: 2.1\nName: pinfold\nVersion: {VERSION}\n\
         Summary: A memory allocator on per-CPU caches: runs programs on it and looks into them\n\
         License: MIT OR Apache-2.0\nRequires-Python: >=3.7\n\
         Description-Content-Type: text/markdown\n\n\
         `pinfold run -- COMMAND` runs any dynamically linked program on Pinfold, and \
         `python -m pinfold run SCRIPT.py` a script.\n"
    );
    let wheel = format!(
        "Wheel-Version: 1.0\nGenerator: xtask {VERSION}\nRoot-Is-Purelib: false\nTag: {tag}\n"
    );
    fs::write(folder.join("METADATA"), metadata)?;
    fs::write(folder.join("WHEEL"), wheel)?;
    let scripts = "[console_scripts]\npinfold = pinfold.__main__:main\n";
    fs::write(folder.join("entry_points.txt"), scripts)?;
    for license in LICENSES {
        fs::copy(license, folder.join(license)).context(license)?;
    }
    let texts = licenses::third_party(&licenses::crates(&MEMBERS)?)?;
    fs::write(folder.join(THIRD_PARTY), texts)?;
    Ok(())
}
