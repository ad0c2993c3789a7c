//! A heap profile as a flame graph.

use super::report::What;
use super::symbols::Profile;
use anyhow::{Context, Result};
use inferno::flamegraph::{self, Options};
use std::fs::File;
use std::io::BufWriter;
use std::path::Path;

/// Draws the call stacks to an SVG file. In a difference, leaves out what became less.
pub fn draw(profile: &Profile, what: What, path: &Path) -> Result<()> {
    let lines: Vec<String> = profile
        .stacks
        .iter()
        .filter(|stack| what.bytes(&stack.values) >= 1.0)
        .map(|stack| {
            let mut functions: Vec<String> = profile
                .functions(stack)
                .map(|function| function.replace(';', ":"))
                .collect();
            functions.reverse();
            format!("{} {:.0}", functions.join(";"), what.bytes(&stack.values))
        })
        .collect();
    if lines.is_empty() {
        anyhow::bail!("{}: no call stack holds memory to draw", path.display());
    }
    let mut options = Options::default();
    options.title = match &profile.older {
        None => format!("Heap of {}, bytes {}", profile.title, what.word()),
        Some((old, ..)) => format!(
            "Heap of {}, growth of the bytes {} since {old}",
            profile.title,
            what.word()
        ),
    };
    options.count_name = "bytes".into();
    options.factor = 1.0;
    let named = || cannot_write(path);
    let file = BufWriter::new(File::create(path).with_context(named)?);
    flamegraph::from_lines(&mut options, lines.iter().map(String::as_str), file).with_context(named)
}

/// Says that a file cannot be written, and what to do.
pub fn cannot_write(path: &Path) -> String {
    format!(
        "cannot write {}; give a file in a folder that you may write to",
        path.display()
    )
}
