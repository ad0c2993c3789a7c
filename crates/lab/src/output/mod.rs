//! How the command and the benchmarks write text and files.
//!
//! `text.rs` is the one place that makes text harmless. Whatever [`print()`], [`print_more`],
//! [`note`] and [`report`] write has passed it.

mod file;
mod object;
mod table;
mod text;

pub use file::{check_writable, clear, write};
pub use object::object;
pub use table::{Columns, Table, figure};
pub use text::{Lines, escaped};

use anyhow::Result;
use serde::Serialize;
use std::io::{self, ErrorKind, Write};
use std::{env, fmt};
use text::escaped_lines;

/// Writes to standard output, with control characters escaped. A reader that closes the pipe early
/// is no error.
///
/// # Errors
///
/// Fails if standard output cannot be written.
pub fn print(text: &str) -> Result<()> {
    print_more(text).map(drop)
}

/// Writes to standard output, with control characters escaped. Returns false if the reader has
/// closed the pipe.
///
/// # Errors
///
/// Fails if standard output cannot be written for another reason.
pub fn print_more(text: &str) -> Result<bool> {
    match io::stdout().write_all(escaped_lines(text).as_bytes()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Prints the object of `value` on one line if `json` is true, and otherwise `text`.
///
/// # Errors
///
/// Fails if standard output cannot be written, or the value has no form in JSON.
pub fn show(
    json: bool,
    command: &str,
    value: &impl Serialize,
    text: impl FnOnce() -> String,
) -> Result<()> {
    print(&match json {
        true => object(command, value)?,
        false => text(),
    })
}

/// Writes a line to standard error, after the name `pinfold`, with control characters escaped. Does
/// nothing if standard error cannot be written.
pub fn note(text: impl fmt::Display) {
    report(&format!("pinfold: {text}\n"));
}

/// Writes to standard error, with control characters escaped. Does nothing if standard error cannot
/// be written.
pub fn report(text: &str) {
    let _ = io::stderr().write_all(escaped_lines(text).as_bytes());
}

/// Returns whether the terminal can move its cursor, by the environment variable `TERM`.
pub fn can_move_cursor() -> bool {
    env::var_os("TERM").is_some_and(|term| !term.is_empty() && term != "dumb")
}
