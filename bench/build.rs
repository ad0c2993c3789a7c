//! Compiles the per-CPU operations in C that `percpu` compares Pinfold's with.

use std::env::var;

fn main() {
    println!("cargo::rustc-check-cfg=cfg(sections)");
    println!("cargo::rerun-if-changed=percpu");
    println!("cargo::rerun-if-changed=../crates/malloc/include/pinfold_percpu.h");
    let is = |what: &str, value| var(format!("CARGO_CFG_TARGET_{what}")).as_deref() == Ok(value);
    // The sections in C are written for x86-64, and take glibc's registration of the rseq area.
    if !is("ARCH", "x86_64") || !is("ENV", "gnu") {
        return;
    }
    println!("cargo::rustc-cfg=sections");
    cc::Build::new()
        .files(["called", "inlined", "pinfold"].map(|name| format!("percpu/loops_{name}.c")))
        .file("percpu/called.c")
        .include("../crates/malloc/include")
        .opt_level(2)
        .warnings_into_errors(true)
        .extra_warnings(true)
        .compile("percpu_loops");
}
