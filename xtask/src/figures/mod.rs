//! `cargo xtask figures`: the measured tables of the documents are drawn from raw files, and the
//! figures of their sentences are compared with those tables.
//!
//! `bench/README.md` describes the comments in the documents. [`raw`] reads the raw files and picks
//! values from them. [`document`] finds the comments and draws the tables. [`prose`] judges the
//! figures of sentences. [`measure`] runs the commands that write the raw files.

mod document;
mod measure;
mod prose;
mod raw;

use anyhow::{Context, Result, bail};
use raw::Runs;
use std::fs;
use std::path::{Path, PathBuf};

/// Renews the measured tables of the documents from the raw files below bench/runs.
///
/// Then judges the figures of the sentences, and fails if one is not in the raw data. See
/// bench/README.md.
#[derive(clap::Args)]
pub struct Args {
    /// Changes nothing, and fails if a table is not what its raw file gives
    #[arg(long)]
    check: bool,
    /// Renews raw files instead of tables: those whose names begin with a NAME, or all that need
    /// no peers
    #[arg(long, value_name = "NAME", num_args = 0.., conflicts_with = "check")]
    measure: Option<Vec<String>>,
}

pub fn main(args: &Args) -> Result<()> {
    if let Some(names) = &args.measure {
        return measure::main(names);
    }
    let faults = review(!args.check)?;
    for fault in &faults {
        eprintln!("{fault}");
    }
    if !faults.is_empty() {
        bail!(
            "{} figures are not those of the raw files; see the lines above",
            faults.len()
        );
    }
    Ok(())
}

/// Compares the documents with the raw files.
///
/// Writes the tables anew if `renew`, and otherwise returns a fault for each document whose tables
/// differ. Returns a fault for each figure of a sentence that is in no raw file.
///
/// # Errors
///
/// If a file cannot be read or written.
pub fn review(renew: bool) -> Result<Vec<String>> {
    let runs = Runs::new("bench/runs");
    let mut faults = Vec::new();
    for file in documents()? {
        let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        let place = |line: usize, fault: &str| format!("{}:{line}: {fault}", file.display());
        let draw = |text: &str| document::draw(text, &runs, &link_to_runs(&file));
        let mut drawn = match draw(&text) {
            Ok(drawn) => drawn,
            Err((line, error)) => {
                faults.push(place(line, &format!("{error:#}")));
                continue;
            }
        };
        if renew && drawn.text != text {
            fs::write(&file, &drawn.text).with_context(|| file.display().to_string())?;
            println!("{} is renewed", file.display());
            // The sentences have other line numbers then.
            drawn = draw(&drawn.text).map_err(|(_, error)| error)?;
        } else if let Some(line) = first_difference(&text, &drawn.text) {
            let fault = "this line is not what the raw file gives; run `cargo xtask figures`";
            faults.push(place(line, fault));
        }
        for (line, fault) in prose::judge(&drawn.sections) {
            faults.push(place(line, &fault));
        }
    }
    Ok(faults)
}

/// Returns the documents whose tables and figures come from raw files.
fn documents() -> Result<Vec<PathBuf>> {
    let mut files = vec![PathBuf::from("README.md"), "docs/figures.md".into()];
    for entry in fs::read_dir("docs/seeds")? {
        files.push(entry?.path());
    }
    files.retain(|file| file.extension().is_some_and(|extension| extension == "md"));
    files.sort();
    Ok(files)
}

/// Returns how a document links to the folder of raw files.
fn link_to_runs(file: &Path) -> String {
    let depth = file.components().count() - 1;
    format!("{}bench/runs/", "../".repeat(depth))
}

/// Returns the number of the first line that differs.
fn first_difference(old: &str, new: &str) -> Option<usize> {
    let (mut old, mut new) = (old.lines(), new.lines());
    (1..).find_map(|number| match (old.next(), new.next()) {
        (None, None) => Some(None),
        (one, other) => (one != other).then_some(Some(number)),
    })?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_that_differs_is_named() {
        assert_eq!(first_difference("a\nb\n", "a\nb\n"), None);
        assert_eq!(first_difference("a\nb\n", "a\nc\n"), Some(2));
        assert_eq!(first_difference("a\n", "a\nc\n"), Some(2));
    }

    #[test]
    fn documents_link_to_the_raw_files() {
        let link = |file| link_to_runs(Path::new(file));
        assert_eq!(link("README.md"), "bench/runs/");
        assert_eq!(link("a/b/c.md"), "../../bench/runs/");
    }
}
