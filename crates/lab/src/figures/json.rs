//! Results for programs.

use anyhow::Result;
use serde::Serialize;

/// The object that a measurement prints for programs.
#[derive(Serialize)]
pub struct Figures<'a, M, R> {
    /// The name of the measurement.
    pub bench: &'a str,
    /// What a reader needs to know of the machine.
    pub machine: &'a M,
    /// The results.
    pub rows: &'a [R],
}

/// Formats one JSON object: the name of the measurement, the machine and the rows.
///
/// # Errors
///
/// Fails if a value has no form in JSON.
pub fn json<M: Serialize, R: Serialize>(bench: &str, machine: &M, rows: &[R]) -> Result<String> {
    let figures = Figures {
        bench,
        machine,
        rows,
    };
    Ok(serde_json::to_string_pretty(&figures)? + "\n")
}
