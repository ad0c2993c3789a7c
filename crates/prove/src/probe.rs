//! Builds the library that has one function for each section.

use crate::image::Arch;
use anyhow::{Context, Result, ensure};
use std::path::PathBuf;
use std::process::Command;

/// The result of a build.
pub enum Built {
    Library(PathBuf),
    /// What is missing to build for the architecture.
    Missing(String),
}

/// Builds the library for an architecture.
///
/// # Errors
///
/// If the compiler fails.
pub fn build(arch: Arch) -> Result<Built> {
    let triple = format!("{}-unknown-linux-gnu", arch.name());
    let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let target = root.join("target/prove");
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
    if std::env::consts::ARCH != arch.name() {
        let linker = format!("{}-linux-gnu-gcc", arch.name());
        if Command::new(&linker).arg("--version").output().is_err() {
            return Ok(Built::Missing(format!("{linker} is not installed")));
        }
        if !has_target(&triple) {
            return Ok(Built::Missing(format!("run `rustup target add {triple}`")));
        }
        let variable = format!(
            "CARGO_TARGET_{}_LINKER",
            triple.replace('-', "_").to_uppercase()
        );
        cargo.env(variable, linker);
    }
    cargo.args([
        "build",
        "--quiet",
        "--release",
        "--package",
        "pinfold-probe",
    ]);
    cargo
        .args(["--target", &triple])
        .arg("--target-dir")
        .arg(&target);
    // The flags of the checker's own build are not those of the library.
    cargo.env_remove("RUSTFLAGS").current_dir(&root);
    let status = cargo.status().context("cannot start cargo")?;
    ensure!(
        status.success(),
        "cargo cannot build the library for {triple}"
    );
    let library = target.join(triple).join("release/libpinfold_probe.so");
    Ok(Built::Library(library))
}

/// Returns whether the compiler has a standard library for `triple`.
fn has_target(triple: &str) -> bool {
    let rustc = std::env::var_os("RUSTC").unwrap_or("rustc".into());
    let output = Command::new(rustc)
        .args(["--print", "target-libdir", "--target", triple])
        .output();
    let Ok(output) = output else {
        return false;
    };
    let folder = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    PathBuf::from(folder).is_dir()
}
