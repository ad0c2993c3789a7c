//! What every command does with its results: prints them as text or as JSON, and saves every round.

use crate::machine::Machine;
use anyhow::{Context, Result};
use clap::Args;
use pinfold_lab::figures::{Figures, date, json};
use pinfold_lab::output;
use serde::Serialize;
use serde_json::Value;
use std::fs;
use std::path::PathBuf;
use std::time::SystemTime;

/// How the results are delivered.
#[derive(Clone, Copy, Debug, Args)]
pub struct Output {
    /// Print one JSON object instead of tables.
    #[arg(long)]
    json: bool,
    /// Save every round's figures below bench/runs/.
    #[arg(long)]
    save: bool,
}

/// The content of a saved file.
#[derive(Serialize)]
struct Saved<'a, R> {
    /// The command line, without the program's path.
    command: String,
    /// Date and time in UTC.
    date: String,
    #[serde(flatten)]
    figures: Figures<'a, Machine, R>,
}

impl Output {
    /// Delivers the results of the command `bench`. A row's `rounds` are only saved.
    pub fn deliver<R: Serialize>(
        self,
        bench: &str,
        machine: &Machine,
        rows: &[R],
        text: impl FnOnce() -> String,
    ) -> Result<()> {
        machine.warn();
        if self.save {
            let path = save(bench, machine, rows)?;
            eprintln!("saved: {}", path.display());
        }
        if !self.json {
            return output::print(&format!("{machine}\n{}", text()));
        }
        let rows = rows
            .iter()
            .map(without_rounds)
            .collect::<Result<Vec<_>>>()?;
        output::print(&json(bench, machine, &rows)?)
    }
}

fn without_rounds<R: Serialize>(row: &R) -> Result<Value> {
    let mut row = serde_json::to_value(row)?;
    if let Value::Object(fields) = &mut row {
        fields.remove("rounds");
    }
    Ok(row)
}

/// Writes `rows` to a file in `bench/runs/<date>-<bench>/`, named by the time of day. Returns its
/// path.
fn save<R: Serialize>(bench: &str, machine: &Machine, rows: &[R]) -> Result<PathBuf> {
    let (day, time) = date(SystemTime::now());
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let saved = Saved {
        command: format!("pinfold-bench {}", arguments.join(" ")),
        date: format!("{day} {time}"),
        figures: Figures {
            bench,
            machine,
            rows,
        },
    };
    // `cargo run` sets the package's folder. Otherwise the file goes below the current folder.
    let package = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| "bench".into());
    let directory = PathBuf::from(package)
        .join("runs")
        .join(format!("{day}-{bench}"));
    fs::create_dir_all(&directory).with_context(|| format!("cannot make {directory:?}"))?;
    let path = directory.join(format!("{}.json", time.replace(':', "")));
    // One row per line, so that the files of two runs can be compared.
    let text = serde_json::to_string(&saved)?.replace("{\"subject\"", "\n{\"subject\"");
    fs::write(&path, text + "\n").with_context(|| format!("cannot write {path:?}"))?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_saved_rows_have_their_rounds() {
        let row = serde_json::json!({ "subject": "pinfold", "cycles": 6.0, "rounds": [5.0, 7.0] });
        let expected = serde_json::json!({ "subject": "pinfold", "cycles": 6.0 });
        assert_eq!(without_rounds(&row).unwrap(), expected);
    }
}
