//! `cargo xtask tidy`: house rules that the compiler does not check.

use crate::calls;
use crate::documents;
use crate::figures;
use crate::floors::{Edge, FLOORS, Floors};
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};

/// The most lines of code in a file. Empty lines and those with only a comment do not count, so
/// that this rule costs no words.
const MAX_LINES: usize = 800;
/// The widest line of a comment or of Markdown, in characters. Tables may be wider.
const MAX_COLUMNS: usize = 100;
/// The most lines between a SAFETY comment and its unsafe block.
const REASON_WITHIN: usize = 5;

pub fn main() -> Result<()> {
    let mut files = Vec::new();
    for folder in [".ci", "crates", "bench", "xtask", "docs", "fuzz", "vm"] {
        collect(Path::new(folder), &mut files)?;
    }
    for entry in fs::read_dir(".")? {
        files.extend(Some(entry?.path()).filter(|path| is_checked(path)));
    }
    let mut faults = Vec::new();
    for file in &files {
        let text = fs::read_to_string(file).with_context(|| file.display().to_string())?;
        check_widths(file, &text, &mut faults);
        documents::check(file, &text, &mut faults)?;
        if extension(file) == Some("rs") {
            check(file, &text, &mut faults);
            calls::check(file, &text, &mut faults);
        }
    }
    documents::check_tests(&mut faults)?;
    faults.extend(figures::review(false)?);
    for floors in &FLOORS {
        check_floors(floors, &mut faults)?;
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
    for floors in &FLOORS {
        println!("floors of {}, top-down: {floors}", floors.path().display());
    }
    println!("{} files are tidy", files.len());
    Ok(())
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() && !path.ends_with("target") {
            collect(&path, files)?;
        } else if is_checked(&path) {
            files.push(path);
        }
    }
    Ok(())
}

fn extension(file: &Path) -> Option<&str> {
    file.extension().and_then(|extension| extension.to_str())
}

fn is_checked(file: &Path) -> bool {
    match extension(file) {
        Some("md" | "rs" | "c" | "cc" | "cpp" | "h" | "hpp" | "toml" | "sh") => true,
        // The scripts of `.ci` have no extension.
        None => file.starts_with(".ci"),
        _ => false,
    }
}

/// Adds a fault for each line of a comment or of Markdown that is too wide.
fn check_widths(file: &Path, text: &str, faults: &mut Vec<String>) {
    let is_comment = |line: &str| {
        ["//", "/*", "* ", "# "]
            .iter()
            .any(|mark| line.starts_with(mark))
    };
    let is_markdown = extension(file) == Some("md");
    let is_table = |line: &str| {
        let text = line.trim_start_matches(['/', '!', '#', '*', ' ']);
        text.starts_with(['|', '┌', '│', '└'])
    };
    let mut fenced = false;
    for (at, line) in text.lines().enumerate() {
        fenced ^= is_markdown && line.trim_start().starts_with("```");
        let is_text = if is_markdown {
            !fenced
        } else {
            is_comment(line.trim_start())
        };
        let width = line.chars().count();
        if width > MAX_COLUMNS && is_text && !is_table(line) {
            let place = format!("{}:{}", file.display(), at + 1);
            faults.push(format!(
                "{place}: {width} columns; at most {MAX_COLUMNS} are allowed"
            ));
        }
    }
}

fn check(file: &Path, text: &str, faults: &mut Vec<String>) {
    let lines: Vec<&str> = text.lines().collect();
    let name = file.display();
    let is_code = |line: &&&str| !line.trim().is_empty() && !line.trim_start().starts_with("//");
    let code = lines.iter().filter(is_code).count();
    if code > MAX_LINES {
        faults.push(format!(
            "{name}: {code} lines of code; at most {MAX_LINES} are allowed"
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
    }
}

fn check_floors(floors: &Floors, faults: &mut Vec<String>) -> Result<()> {
    let findings = floors.check()?;
    let folder = floors.path();
    for module in findings.unlisted {
        faults.push(format!(
            "{}: the module {module} has no floor; add it to xtask/src/floors.rs",
            folder.display()
        ));
    }
    for edge in findings.upward {
        let (place, Edge { from, to, line, .. }) = (edge.file.display(), &edge);
        faults.push(format!(
            "{place}:{line}: {from} uses {to}, a module above its own"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_files_and_unsafe_blocks_without_reasons_are_found() {
        let unsafe_block = concat!("fn f() {\n    unsafe ", "{ g() }\n}\n");
        let text = |code, comments| {
            let lines = ["x\n".repeat(code), "    /// y\n\n".repeat(comments)];
            format!("{unsafe_block}{}", lines.concat())
        };
        let faults_in = |text: String| {
            let mut faults = Vec::new();
            check(Path::new("crates/x.rs"), &text, &mut faults);
            faults.len()
        };
        assert_eq!(faults_in(text(MAX_LINES - 3, 0)), 1);
        assert_eq!(faults_in(text(MAX_LINES - 3, 500)), 1);
        assert_eq!(faults_in(text(MAX_LINES - 2, 0)), 2);
    }
}
