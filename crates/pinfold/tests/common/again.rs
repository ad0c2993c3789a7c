//! Runs a test of the same file in another process.
#![allow(dead_code, reason = "each test uses a part")]

use std::process::Command;

/// Names the test that a process was started for.
const ONLY: &str = "PINFOLD_TEST_ONLY";

/// Returns whether this process was started for the test `name`.
pub fn is_alone(name: &str) -> bool {
    std::env::var(ONLY).is_ok_and(|only| only == name)
}

/// Returns true in a process that was started for the test `name`. Elsewhere, starts such a process
/// after `prepare` has changed the command, and returns false when the test has passed there.
#[track_caller]
pub fn alone(name: &str, prepare: impl FnOnce(&mut Command)) -> bool {
    let is_alone = is_alone(name);
    if !is_alone {
        passes(name, prepare);
    }
    is_alone
}

/// Runs the test `name` in a process of its own, where it must pass, after `prepare` has changed
/// the command. Returns what the test printed.
#[track_caller]
pub fn passes(name: &str, prepare: impl FnOnce(&mut Command)) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--include-ignored", "--nocapture"]);
    prepare(command.arg("--test-threads=1").env(ONLY, name));
    let output = command.output().unwrap();
    let [text, error] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    let status = output.status;
    assert!(
        status.success() && text.contains("1 passed"),
        "{name}: {status}\n{text}{error}"
    );
    eprint!("{error}");
    text
}
