//! `cargo xtask install`: installs the command, the libraries, the headers and the pkg-config file.

use anyhow::{Context, Result, bail};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Builds and installs the command, the libraries, the headers and the pkg-config file.
#[derive(clap::Args)]
pub struct Args {
    /// Where the files will be used, like /usr/local.
    #[arg(long, value_name = "DIR", value_parser = absolute)]
    prefix: PathBuf,
    /// Copies the files below this folder instead, for a package.
    #[arg(
        long,
        value_name = "DIR",
        default_value = "",
        hide_default_value = true
    )]
    destdir: OsString,
}

fn absolute(folder: &str) -> Result<PathBuf> {
    let folder = PathBuf::from(folder);
    if !folder.is_absolute() {
        bail!("this is not an absolute path");
    }
    Ok(folder)
}

pub fn main(args: Args) -> Result<()> {
    let prefix = args.prefix;
    build()?;
    let release = crate::target().join("release");
    let to = match args.destdir.is_empty() {
        true => prefix.clone(),
        false => Path::new(&args.destdir).join(prefix.strip_prefix("/")?),
    };
    for (built, installed, mode) in [
        ("pinfold", "bin/pinfold", 0o755),
        ("libpinfold_preload.so", "lib/libpinfold.so", 0o755),
        ("libpinfold_names.a", "lib/libpinfold.a", 0o644),
    ] {
        copy(&release.join(built), &to.join(installed), mode)?;
    }
    for header in [
        "pinfold.h",
        "pinfold_percpu.h",
        "pinfold_show.h",
        "pinfold_policy.h",
        "pinfold.hpp",
    ] {
        copy(
            &Path::new("crates/malloc/include").join(header),
            &to.join("include").join(header),
            0o644,
        )?;
    }
    let pc = to.join("lib/pkgconfig/pinfold.pc");
    fs::create_dir_all(pc.parent().context("no folder")?)?;
    fs::write(&pc, pkg_config(&prefix)).with_context(|| pc.display().to_string())?;
    println!("installed in {}", to.display());
    Ok(())
}

fn build() -> Result<()> {
    let flags = flags_without_paths(&crate::target())?;
    for package in ["pinfold-preload", "pinfold-names", "pinfold-cli"] {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--release", "-p", package]);
        crate::run(cargo.env("CARGO_ENCODED_RUSTFLAGS", &flags))?;
    }
    Ok(())
}

/// Returns the compiler's flags with which no file names this source folder, the crates' folder or
/// the builder's home. The flags of the environment stay.
fn flags_without_paths(target: &Path) -> Result<OsString> {
    const BETWEEN: &str = "\x1f";
    let mut flags: Vec<OsString> =
        match std::env::var_os("CARGO_ENCODED_RUSTFLAGS").filter(|flags| !flags.is_empty()) {
            Some(flags) => Vec::from([flags]),
            None => {
                let flags = std::env::var("RUSTFLAGS").unwrap_or_default();
                flags.split_whitespace().map(OsString::from).collect()
            }
        };
    let home = std::env::home_dir();
    let crates = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let crates = crates.or_else(|| Some(home.as_ref()?.join(".cargo")));
    // The compiler takes the last pair that fits, so that the innermost folder comes last.
    for (folder, name) in [
        (home, "home"),
        (crates, "cargo"),
        (Some(std::env::current_dir()?), "pinfold"),
        (Some(std::path::absolute(target)?), "target"),
    ] {
        let Some(folder) = folder.filter(|folder| folder.parent().is_some()) else {
            continue;
        };
        let mut flag = OsString::from("--remap-path-prefix=");
        flag.push(folder);
        flag.push("=");
        flag.push(name);
        flags.push(flag);
    }
    Ok(flags.join(OsStr::new(BETWEEN)))
}

fn copy(from: &Path, to: &Path, mode: u32) -> Result<()> {
    fs::create_dir_all(to.parent().context("no folder")?)?;
    // A running program may have the old file mapped, so this replaces the file instead of writing
    // to it.
    let _ = fs::remove_file(to);
    fs::copy(from, to)
        .with_context(|| format!("copying {} to {}", from.display(), to.display()))?;
    fs::set_permissions(to, fs::Permissions::from_mode(mode))?;
    Ok(())
}

fn pkg_config(prefix: &Path) -> String {
    format!(
        "prefix={}\nlibdir=${{prefix}}/lib\nincludedir=${{prefix}}/include\n\n\
         Name: pinfold\nDescription: Memory allocation on per-CPU caches\nVersion: {}\n\
         Libs: -L${{libdir}} -lpinfold\nLibs.private: -lgcc_s -lc\nCflags: -I${{includedir}}\n",
        prefix.display(),
        env!("CARGO_PKG_VERSION")
    )
}
