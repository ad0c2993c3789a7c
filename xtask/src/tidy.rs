//! `cargo xtask tidy`: house rules that the compiler does not check.

use crate::prose;
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};

/// Modules of the library, top-down. Each uses only modules after it.
const ORDER: [&str; 14] = [
    "pages",
    "slab",
    "page",
    "segment",
    "vmstat",
    "mempolicy",
    "shepherd",
    "nodes",
    "counter",
    "percpu",
    "topology",
    "fork",
    "lock",
    "sys",
];
const LINES_MOST: usize = 500;
/// The most lines between a SAFETY comment and its unsafe block.
const REASON_WITHIN: usize = 5;

pub fn main() -> Result<()> {
    let mut files = Vec::new();
    for folder in ["crates", "bench", "xtask", "docs", "vm"] {
        collect(Path::new(folder), &mut files)?;
    }
    for entry in fs::read_dir(".")? {
        files.extend(Some(entry?.path()).filter(|path| prose::is_checked(path)));
    }
    let mut faults = Vec::new();
    for file in &files {
        let text = fs::read_to_string(file).with_context(|| file.display().to_string())?;
        prose::check(file, &text, &mut faults);
        if file.extension().is_some_and(|extension| extension == "rs") {
            check(file, &text, &mut faults);
        }
    }
    for fault in &faults {
        eprintln!("{fault}");
    }
    if !faults.is_empty() {
        bail!(
            "{} house rules are broken; see the lines above",
            faults.len()
        );
    }
    println!("floors, top-down: {}", ORDER.join(" > "));
    println!("{} files are tidy", files.len());
    Ok(())
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() && !path.ends_with("target") {
            collect(&path, files)?;
        } else if prose::is_checked(&path) {
            files.push(path);
        }
    }
    Ok(())
}

fn check(file: &Path, text: &str, faults: &mut Vec<String>) {
    let lines: Vec<&str> = text.lines().collect();
    let name = file.display();
    if lines.len() > LINES_MOST {
        faults.push(format!(
            "{name}: {} lines; at most {LINES_MOST} are allowed",
            lines.len()
        ));
    }
    for (at, line) in lines.iter().enumerate() {
        let place = format!("{name}:{}", at + 1);
        let above = &lines[at.saturating_sub(REASON_WITHIN)..=at];
        let opens = line.contains(concat!("unsafe ", "{")) && !line.trim_start().starts_with("//");
        if opens && !above.iter().any(|line| line.contains("SAFETY")) {
            faults.push(format!(
                "{place}: an unsafe block without a SAFETY comment in the {REASON_WITHIN} lines above"
            ));
        }
        if [concat!("TO", "DO"), concat!("FIX", "ME")]
            .iter()
            .any(|word| line.contains(word))
        {
            faults.push(format!("{place}: a note about unfinished work"));
        }
        if let Some(used) = upward(file, line) {
            faults.push(format!("{place}: uses {used}, a module above its own"));
        }
    }
}

/// Returns the module that this line uses although it is above the line's own module.
fn upward(file: &Path, line: &str) -> Option<&'static str> {
    let inside = file.strip_prefix("crates/pinfold/src").ok()?;
    let own = inside.iter().next()?.to_str()?.trim_end_matches(".rs");
    let own = ORDER.iter().position(|module| *module == own)?;
    let code = line.split("//").next().unwrap_or("");
    let uses = |module: &str| {
        code.match_indices("crate::")
            .any(|(at, _)| names(&code[at + 7..], module))
    };
    ORDER[..own].iter().find(|module| uses(module)).copied()
}

/// Returns whether the path behind `crate::` names `module`, alone or in braces.
fn names(path: &str, module: &str) -> bool {
    let is_word = |text: &str| {
        text.chars()
            .next()
            .is_some_and(|c| c.is_alphanumeric() || c == '_')
    };
    let starts = |text: &str| text.strip_prefix(module).is_some_and(|rest| !is_word(rest));
    match path.strip_prefix('{') {
        Some(list) => list.split(',').any(|item| starts(item.trim())),
        None => starts(path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uses_of_modules_above_are_found() {
        let page = Path::new("crates/pinfold/src/page/arena.rs");
        assert_eq!(upward(page, "use crate::slab::KmemCache;"), Some("slab"));
        assert_eq!(upward(page, "use crate::{sys, slab};"), Some("slab"));
        assert_eq!(upward(page, "use crate::lock::Lock;"), None);
        assert_eq!(upward(page, "// use crate::slab"), None);
        assert_eq!(upward(page, "crate::slabs::x()"), None);
        assert_eq!(
            upward(
                Path::new("crates/pinfold/src/topology.rs"),
                "crate::nodes::count()"
            ),
            Some("nodes")
        );
    }

    #[test]
    fn long_files_and_unsafe_blocks_without_reasons_are_found() {
        let mut faults = Vec::new();
        let text = format!(
            "fn f() {{
    {} g() }}
}}
{}",
            concat!("unsafe ", "{"),
            "x
"
            .repeat(LINES_MOST)
        );
        check(Path::new("crates/x.rs"), &text, &mut faults);
        assert_eq!(faults.len(), 2, "{faults:?}");
    }
}
