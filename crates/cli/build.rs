//! Tells the command where Cargo puts libpinfold.so, which a release of the command contains
//! (`src/run/contained.rs`).

use std::path::Path;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(contains_library)");
    let variable = |name| std::env::var(name).unwrap_or_default();
    if variable("PROFILE") != "release" {
        return;
    }
    // `cargo xtask install` strips the library before it builds the command.
    const STRIPPED: &str = "PINFOLD_CONTAINED_LIBRARY";
    println!("cargo::rerun-if-env-changed={STRIPPED}");
    // Cargo may run this script before it builds the library, so the script only computes the path.
    // OUT_DIR is FOLDER/build/PACKAGE/out, and the library will be in FOLDER/deps.
    let (stripped, out) = (variable(STRIPPED), variable("OUT_DIR"));
    let library = match Path::new(&out).ancestors().nth(3) {
        _ if !stripped.is_empty() => stripped.into(),
        Some(folder) => folder.join("deps/libpinfold_preload.so"),
        None => return,
    };
    println!("cargo::rustc-env=PINFOLD_CONTAINED={}", library.display());
    println!("cargo::rustc-cfg=contains_library");
}
