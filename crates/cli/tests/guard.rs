//! Guarded blocks by the command: `pinfold run --guard`.
//!
//! The program is this test itself, run by `pinfold run`.

mod program;

use program::{ROLE, RUN, in_role};
use std::hint::black_box;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// How long the program commits its fault again and again.
const PATIENCE: Duration = Duration::from_secs(60);

#[inline(never)]
fn reads(block: *const u8) -> u8 {
    // SAFETY: none if the block is freed: this is the fault.
    unsafe { block.add(3).read_volatile() }
}

/// Reads freed blocks if the environment asks for it. Does nothing as a test.
#[test]
fn role() {
    if std::env::var(ROLE).is_err() {
        return;
    }
    let begin = Instant::now();
    while begin.elapsed() < PATIENCE {
        let block = black_box(vec![1u8; 200]);
        let address = block.as_ptr();
        drop(block);
        black_box(reads(address));
    }
}

fn run(options: &[&str]) -> Output {
    let words = [&RUN[..2], options, &["--"]].concat();
    in_role(&words, "reads").output().unwrap()
}

#[test]
fn a_use_after_the_free_ends_the_program_with_a_report() {
    let output = run(&["--guard"]);
    let said = String::from_utf8_lossy(&output.stderr);
    // `pinfold run` replaces itself by the program, so the signal is the program's.
    assert_eq!(output.status.signal(), Some(libc::SIGSEGV), "{said}");
    let report = said.find("pinfold: guarded block: ").expect(&said);
    let stacks: Vec<&str> = said[report..].split(" by thread ").collect();
    let [head, done, allocated, freed] = stacks[..] else {
        panic!("{said}");
    };
    assert!(head.contains("after the block was freed"), "{said}");
    assert!(head.contains("of 200 bytes, free"), "{said}");
    // The stacks begin with the program's own functions.
    for stack in [done, allocated, freed] {
        let first = stack.lines().nth(1).unwrap_or_default();
        assert!(!first.contains("libpinfold"), "{said}");
    }
    assert!(done.contains("reads"), "{said}");
}

#[test]
fn a_wrong_interval_is_refused() {
    for wrong in ["0", "often", "2t"] {
        let output = run(&[&format!("--guard={wrong}")]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains("--guard"), "{said}");
    }
    let output = Command::new(env!("CARGO_BIN_EXE_pinfold"))
        .args(["run", "--", "true"])
        .env("PINFOLD_GUARD", "often")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("PINFOLD_GUARD=often"), "{said}");
}
