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
    // Cargo may run this script before it builds the library, so the script only computes the path.
    // OUT_DIR is FOLDER/build/PACKAGE/out, and the library will be in FOLDER/deps.
    if let Some(folder) = Path::new(&variable("OUT_DIR")).ancestors().nth(3) {
        let library = folder.join("deps/libpinfold_preload.so");
        println!("cargo::rustc-env=PINFOLD_CONTAINED={}", library.display());
        println!("cargo::rustc-cfg=contains_library");
    }
}
