//! Runs a test of the same file in another process.

use std::process::Command;

/// Runs the ignored test `name`, which must pass, after `prepare` has changed the command. Returns
/// what the test printed.
#[track_caller]
pub fn passes(name: &str, prepare: impl FnOnce(&mut Command)) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--ignored", "--nocapture"]);
    prepare(command.arg("--test-threads=1"));
    let output = command.output().unwrap();
    let [text, error] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    let status = output.status;
    assert!(
        status.success() && text.contains("1 passed"),
        "{name}: {status}\n{text}{error}"
    );
    text
}
