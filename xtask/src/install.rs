//! `cargo xtask install`: installs the command, the libraries, the headers and the pkg-config file.

use anyhow::{Context, Result, bail};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

pub fn main(options: &[&str]) -> Result<()> {
    let (mut prefix, mut destdir) = (None, PathBuf::new());
    let mut options = options.iter();
    while let Some(option) = options.next() {
        let value = options
            .next()
            .with_context(|| format!("{option} needs a folder"))?;
        match *option {
            "--prefix" => prefix = Some(PathBuf::from(value)),
            "--destdir" => destdir = PathBuf::from(value),
            other => bail!("unknown option {other}; the options are --prefix and --destdir"),
        }
    }
    let prefix =
        prefix.context("--prefix is missing; say where to install, like --prefix /usr/local")?;
    if !prefix.is_absolute() {
        bail!(
            "--prefix {} is not an absolute path; give one, like /usr/local",
            prefix.display()
        );
    }
    build()?;
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| PathBuf::from("target"), PathBuf::from);
    let release = target.join("release");
    let to = destdir.join(prefix.strip_prefix("/").unwrap_or(&prefix));
    let to = if destdir.as_os_str().is_empty() {
        prefix.clone()
    } else {
        to
    };
    copy(&release.join("pinfold"), &to.join("bin/pinfold"), 0o755)?;
    copy(
        &release.join("libpinfold_preload.so"),
        &to.join("lib/libpinfold.so"),
        0o755,
    )?;
    copy(
        &release.join("libpinfold_names.a"),
        &to.join("lib/libpinfold.a"),
        0o644,
    )?;
    for header in ["pinfold.h", "pinfold_policy.h", "pinfold.hpp"] {
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
    for package in [
        &["-p", "pinfold-preload"][..],
        &["-p", "pinfold-names"],
        &["-p", "pinfold-cli"],
    ] {
        let status = Command::new(env!("CARGO"))
            .args(["build", "--release"])
            .args(package)
            .status()?;
        if !status.success() {
            bail!("the build failed");
        }
    }
    Ok(())
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
