//! Runs `pinfold bench` for the tests of its parts.
#![allow(dead_code, reason = "each test file uses some of the functions")]

use assert_cmd::Command;
use serde_json::Value;

pub fn bench(arguments: &[&str]) -> Command {
    let mut command = Command::cargo_bin("pinfold").unwrap();
    command.arg("bench").args(arguments);
    command
}

/// Returns the standard output of a run that must succeed.
pub fn output(arguments: &[&str]) -> String {
    let output = bench(arguments).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the rows of a run with `--json`, after checking what surrounds them.
pub fn rows(arguments: &[&str]) -> Vec<Value> {
    let text = output(&[arguments, &["--json"]].concat());
    let mut figures: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(figures["bench"], arguments[0]);
    for text in ["cpu", "kernel", "libc", "backend"] {
        assert!(figures["machine"][text].is_string(), "{text}: {figures}");
    }
    for number in ["cpus", "tsc_mhz"] {
        assert!(
            figures["machine"][number].as_u64() > Some(0),
            "{number}: {figures}"
        );
    }
    match figures["rows"].take() {
        Value::Array(rows) => rows,
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
pub fn refused(arguments: &[&str], words: &[&str]) {
    let output = bench(arguments).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
    assert!(output.stdout.is_empty(), "{arguments:?}");
    for word in words {
        assert!(
            error.contains(word),
            "{arguments:?}: no {word:?} in {error}"
        );
    }
}
