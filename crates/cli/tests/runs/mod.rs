//! Runs `pinfold bench` for the tests of its parts.
#![allow(dead_code, reason = "each test file uses some of the functions")]

use assert_cmd::Command;
use serde_json::Value;

/// A short run of `pinfold bench counter`.
pub const COUNTER: &str = "counter --amount 32768 --threads 3 --rounds 1 --seconds 0.2";

/// Returns the command `pinfold bench` with the words of `line`.
pub fn bench(line: &str) -> Command {
    let mut command = Command::cargo_bin("pinfold").unwrap();
    command.arg("bench").args(line.split(' '));
    command
}

/// Returns the standard output of a run that must succeed.
pub fn output(line: &str) -> String {
    output_of(&mut bench(line))
}

/// Returns the standard output of a command that must succeed.
pub fn output_of(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{command:?}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the rows of a run with `--json`, after checking what surrounds them.
pub fn rows(line: &str) -> Vec<Value> {
    let rows = rows_of(&mut bench(line));
    assert_eq!(rows.0, line.split(' ').next().unwrap());
    rows.1
}

/// Returns the name of the measurement, and the rows of a command.
pub fn rows_of(command: &mut Command) -> (String, Vec<Value>) {
    let mut figures: Value = serde_json::from_str(&output_of(command.arg("--json"))).unwrap();
    for text in ["cpu", "kernel", "libc", "backend"] {
        assert!(figures["machine"][text].is_string(), "{text}: {figures}");
    }
    for number in ["cpus", "tsc_mhz"] {
        assert!(
            figures["machine"][number].as_u64() > Some(0),
            "{number}: {figures}"
        );
    }
    let primitives = &figures["machine"]["primitives"];
    for cycles in ["locked_add_cycles", "system_call_cycles"] {
        assert!(
            primitives[cycles].as_f64() > Some(0.0),
            "{cycles}: {figures}"
        );
    }
    let name = figures["bench"].as_str().unwrap().to_owned();
    match figures["rows"].take() {
        Value::Array(rows) => (name, rows),
        other => panic!("rows: {other}"),
    }
}

pub fn fields(row: &Value) -> Vec<&str> {
    let mut names: Vec<_> = row
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect();
    names.sort_unstable();
    names
}

pub fn subjects(rows: &[Value]) -> Vec<&str> {
    let mut names: Vec<_> = rows
        .iter()
        .map(|row| row["subject"].as_str().unwrap())
        .collect();
    names.dedup();
    names
}

/// Checks that a run gives status 2, no standard output, and an error that contains all `words`.
pub fn refused(line: &str, words: &[&str]) {
    let output = bench(line).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{line}: {error}");
    assert!(output.stdout.is_empty(), "{line}");
    for word in words {
        assert!(error.contains(word), "{line}: no {word:?} in {error}");
    }
}
