//! A heap profile as a flame graph.

use super::report::What;
use super::symbols::Profile;
use crate::output::{self, escaped};
use anyhow::{Context, Result};
use inferno::flamegraph::{self, Options};
use std::path::Path;

/// Draws the call stacks to an SVG file. In a difference, leaves out the call stacks that hold less
/// than before.
pub fn draw(profile: &Profile, what: What, path: &Path) -> Result<()> {
    let lines: Vec<String> = profile
        .stacks
        .iter()
        .filter(|stack| what.bytes(&stack.values) >= 1.0)
        .map(|stack| {
            let mut functions: Vec<String> = profile
                .functions(stack)
                .map(|function| escaped(&function).replace(';', ":"))
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
        None => format!("Heap of {}, bytes {}", escaped(&profile.title), what.word()),
        Some((old, ..)) => format!(
            "Heap of {}, growth of the bytes {} since {}",
            escaped(&profile.title),
            what.word(),
            escaped(old)
        ),
    };
    options.count_name = "bytes".into();
    options.factor = 1.0;
    let mut picture = Vec::new();
    let lines = lines.iter().map(String::as_str);
    flamegraph::from_lines(&mut options, lines, &mut picture).context("cannot draw")?;
    output::write("the flame graph", path, &picture)
}
