//! Names the shared library as it is installed, so that programs linked with it find it under that name.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libpinfold.so");
    println!("cargo::rerun-if-changed=build.rs");
}
