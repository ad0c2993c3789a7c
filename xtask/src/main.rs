//! Developers' chores: `cargo xtask tidy`.
fn main() {}
