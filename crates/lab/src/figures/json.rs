//! Results for programs.

use super::Machine;
use anyhow::Result;
use serde::Serialize;

#[derive(Serialize)]
struct Figures<'a, R> {
    bench: &'a str,
    machine: Machine,
    rows: &'a [R],
}

/// Formats one JSON object: the name of the measurement, the machine and the rows.
pub fn json<R: Serialize>(bench: &str, rows: &[R]) -> Result<String> {
    let figures = Figures {
        bench,
        machine: Machine::read(),
        rows,
    };
    Ok(serde_json::to_string_pretty(&figures)? + "\n")
}
