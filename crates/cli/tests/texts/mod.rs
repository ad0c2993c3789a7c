//! What a command has printed.
#![allow(dead_code, reason = "each test uses a part")]

use std::process::Output;

/// Returns standard output, standard error and the exit status.
pub fn of(output: Output) -> (String, String, Option<i32>) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (
        text(&output.stdout),
        text(&output.stderr),
        output.status.code(),
    )
}

/// Asserts that `text` contains each of `words`.
#[track_caller]
pub fn assert_has(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "no {word:?} in {text}");
    }
}
