//! Where the shared library is.

use anyhow::{Result, bail};
use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Names the library outright.
const VARIABLE: &str = "PINFOLD_LIBRARY";

/// Looks for the library: where `PINFOLD_LIBRARY` says; beside an installed command, in `../lib`; beside a built one.
pub fn find() -> Result<PathBuf> {
    let library = match env::var_os(VARIABLE) {
        Some(path) => named(Path::new(&path))?,
        None => beside(&env::current_exe()?.canonicalize()?)?,
    };
    let name = library.as_os_str().as_encoded_bytes();
    if name.iter().any(|byte| b" :".contains(byte)) {
        bail!(
            "{} has a space or a colon in its path, which the loader takes for the end of a name; put the library elsewhere and set {VARIABLE} to its path",
            library.display()
        );
    }
    Ok(library)
}

fn file(path: &Path) -> Option<PathBuf> {
    path.canonicalize().ok().filter(|path| path.is_file())
}

fn named(path: &Path) -> Result<PathBuf> {
    let Some(library) = file(path) else {
        bail!("{VARIABLE} names {}, which is no file", path.display());
    };
    Ok(library)
}

fn beside(command: &Path) -> Result<PathBuf> {
    let here = command.parent().unwrap_or(Path::new("/"));
    let lib = here.parent().unwrap_or(here).join("lib");
    let places = [
        lib.join("libpinfold.so"),
        lib.join(format!("{}-linux-gnu/libpinfold.so", env::consts::ARCH)),
        here.join("libpinfold.so"),
        // Cargo leaves a dependency's shared library here.
        here.join("deps/libpinfold_preload.so"),
        here.join("libpinfold_preload.so"),
    ];
    if let Some(library) = places.iter().find_map(|place| file(place)) {
        return Ok(library);
    }
    let looked = places.map(|place| place.display().to_string()).join(", ");
    bail!(
        "the shared library is missing: it is none of {looked}; install it together with the command (cargo xtask install), or set {VARIABLE} to its path"
    )
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
