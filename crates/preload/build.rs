//! Names the shared library as it is installed, so that programs linked with it find it under that
//! name, and orders its code.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libpinfold.so");
    // A thread that was preempted in a critical section leaves the section's address with the
    // kernel: the library must stay where it is.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // What every process runs lies side by side.
    let folder = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_default();
    println!("cargo::rustc-cdylib-link-arg=-Wl,-T,{folder}/order.ld");
    println!("cargo::rerun-if-changed=order.ld");
    println!("cargo::rerun-if-changed=build.rs");
}
