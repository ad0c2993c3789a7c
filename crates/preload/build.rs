//! Gives the shared library the name under which it is installed, so that programs linked with it
//! find it, and orders its code.
//!
//! The compiler passes a version script that exports the functions marked `no_mangle`, and no other
//! name (`exports` lists them). The linker accepts no second script beside it, so the names have no
//! version. Those of the C library must not have one: the loader binds a program's
//! `malloc@GLIBC_2.2.5` only to that version or to a name without a version.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libpinfold.so.0");
    // The kernel keeps the address of a thread's last critical section until the thread's next
    // preemption, so the library must stay mapped after `dlclose`.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // Code has the same distance from the file's beginning as in memory: perf looks for a probe at
    // the place in the file that is the probe's address.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,separate-code");
    if std::env::var("CARGO_CFG_TARGET_ARCH").is_ok_and(|arch| arch == "x86_64") {
        // All returns go back to their calls, so a program with a shadow stack may keep it. Rust's
        // standard library does not say this of itself, so the linker has to.
        println!("cargo::rustc-cdylib-link-arg=-Wl,-z,shstk");
    }
    // Places the code that every process runs side by side.
    let folder = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_default();
    println!("cargo::rustc-cdylib-link-arg=-Wl,-T,{folder}/order.ld");
    println!("cargo::rerun-if-changed=order.ld");
    let_link_without_libgcc();
    if knows_packed_relocations() {
        // A fifteenth of the bytes that the loader reads, so that these and the constants of the
        // start fit into the 64 KiB that the kernel maps at once.
        println!("cargo::rustc-cdylib-link-arg=-Wl,-z,pack-relative-relocs");
    }
    println!("cargo::rerun-if-changed=build.rs");
}

/// With musl, Rust's standard library asks for the shared libgcc_s, which systems with glibc do not
/// have for musl. This library loads an unwinder only when one is called for (`unwind.rs`), so an
/// empty linker script serves as well.
fn let_link_without_libgcc() {
    let variable = |name| std::env::var(name).unwrap_or_default();
    if variable("CARGO_CFG_TARGET_ENV") == "musl" {
        let folder = variable("OUT_DIR");
        let script = std::path::Path::new(&folder).join("libgcc_s.so");
        if std::fs::write(script, "/* nothing */\n").is_ok() {
            println!("cargo::rustc-link-search=native={folder}");
        }
    }
}

/// Returns whether the C library's loader on this machine applies packed relocations, as glibc's
/// does from 2.36 on. A library for another architecture is made without them.
fn knows_packed_relocations() -> bool {
    let variable = |name| std::env::var(name).unwrap_or_default();
    variable("HOST") == variable("TARGET")
        && variable("CARGO_CFG_TARGET_ENV") == "gnu"
        && glibc().is_some_and(|version| version >= (2, 36))
}

#[cfg(target_env = "gnu")]
fn glibc() -> Option<(u32, u32)> {
    unsafe extern "C" {
        fn gnu_get_libc_version() -> *const std::ffi::c_char;
    }
    // SAFETY: the C library's answer is a C string, which stays.
    let version = unsafe { std::ffi::CStr::from_ptr(gnu_get_libc_version()) };
    let (major, rest) = version.to_str().ok()?.split_once('.')?;
    let minor = rest.split('.').next()?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(not(target_env = "gnu"))]
fn glibc() -> Option<(u32, u32)> {
    None
}
