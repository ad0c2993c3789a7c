//! Where the shared library is.

use anyhow::{Result, bail};
use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Names the library outright.
const VARIABLE: &str = "PINFOLD_LIBRARY";

/// Looks for the library: where `PINFOLD_LIBRARY` says; beside an installed command, in `../lib`; beside a built one.
pub fn find() -> Result<PathBuf> {
    let library = look()?;
    if library
        .as_os_str()
        .as_encoded_bytes()
        .iter()
        .any(|byte| b" :".contains(byte))
    {
        bail!(
            "{} has a space or a colon in its path, which the loader takes for the end of a name; put the library elsewhere and set {VARIABLE} to its path",
            library.display()
        );
    }
    Ok(library)
}

fn look() -> Result<PathBuf> {
    if let Some(path) = env::var_os(VARIABLE) {
        let path = PathBuf::from(path);
        return match path.canonicalize() {
            Ok(path) if path.is_file() => Ok(path),
            _ => bail!("{VARIABLE} names {}, which is no file", path.display()),
        };
    }
    let command = env::current_exe()?.canonicalize()?;
    let here = command.parent().unwrap_or(Path::new("/"));
    let places = [
        here.join("../lib/libpinfold.so"),
        here.join("../lib/x86_64-linux-gnu/libpinfold.so"),
        here.join("../lib/aarch64-linux-gnu/libpinfold.so"),
        here.join("libpinfold.so"),
        // Cargo leaves a dependency's shared library here.
        here.join("deps/libpinfold_preload.so"),
        here.join("libpinfold_preload.so"),
    ];
    let found = places.iter().find_map(|place| place.canonicalize().ok());
    let Some(found) = found else {
        bail!(
            "libpinfold.so is not in {}, nor beside the command; install it with the command, or set {VARIABLE} to its path",
            here.join("../lib").display()
        );
    };
    Ok(found)
}

/// `LD_PRELOAD` with the library first.
pub fn preload(library: &Path) -> OsString {
    let mut list = library.as_os_str().to_owned();
    if let Some(others) = env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        list.push(":");
        list.push(others);
    }
    list
}
