//! Gives the shared library the name under which it is installed, so that programs linked with it
//! find it, and orders its code.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libpinfold.so");
    // The kernel keeps the address of a thread's last critical section until the thread's next
    // preemption, so the library must stay mapped after `dlclose`.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // Places the code that every process runs side by side.
    let folder = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_default();
    println!("cargo::rustc-cdylib-link-arg=-Wl,-T,{folder}/order.ld");
    println!("cargo::rerun-if-changed=order.ld");
    println!("cargo::rerun-if-changed=build.rs");
}
