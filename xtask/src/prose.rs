//! The rules for comments and Markdown that `tidy` checks: how wide a line is, and which words a
//! reader would stumble over.

use std::path::Path;

/// The widest comment line or Markdown line, in characters.
const COLUMNS: usize = 100;

/// Words and phrases that plain technical English does without.
const MARKS: [&str; 10] = [
    "as it comes",
    "for ever",
    "for want of",
    "hence",
    "in the midst",
    "likewise",
    "nobody's",
    "somebody's",
    "therefrom",
    "whoever",
];

/// How a file's comments begin.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Language {
    /// The file is Markdown, and all of it is prose but fenced code.
    Markdown,
    /// `//` or `/*`.
    Slashes,
    /// `#`.
    Hash,
}

fn language(file: &Path) -> Option<Language> {
    let extension = file.extension().and_then(|extension| extension.to_str());
    match extension {
        Some("md") => Some(Language::Markdown),
        Some("rs" | "c" | "cc" | "cpp" | "h" | "hpp") => Some(Language::Slashes),
        Some("toml" | "sh") => Some(Language::Hash),
        // The scripts of `.ci` have no extension.
        None if file.parent()?.file_name()? == ".ci" => Some(Language::Hash),
        _ => None,
    }
}

/// Whether `file` has prose that is checked.
pub fn is_checked(file: &Path) -> bool {
    language(file).is_some()
}

/// Adds a fault for each line of `text` that breaks a rule.
pub fn check(file: &Path, text: &str, faults: &mut Vec<String>) {
    let Some(language) = language(file) else {
        return;
    };
    let mut fenced = false;
    for (at, line) in text.lines().enumerate() {
        let place = format!("{}:{}", file.display(), at + 1);
        let trimmed = line.trim_start();
        let prose = match language {
            Language::Markdown => {
                fenced ^= trimmed.starts_with("```");
                (!fenced).then_some(trimmed)
            }
            Language::Slashes => comment(trimmed),
            Language::Hash => trimmed.strip_prefix('#'),
        };
        let Some(prose) = prose else { continue };
        let is_table = prose.trim_start().starts_with(['|', '#', '┌', '│', '└']);
        let width = line.chars().count();
        if width > COLUMNS && !is_table {
            faults.push(format!(
                "{place}: {width} columns; comments and Markdown have at most {COLUMNS}"
            ));
        }
        if let Some(mark) = mark(prose) {
            faults.push(format!(
                "{place}: \"{mark}\" is not plain English; say who does what"
            ));
        }
    }
}

/// The text of a comment line, or of a comment in C behind code. `None` if the line is code.
fn comment(line: &str) -> Option<&str> {
    let markers = ["///", "//!", "//", "/*", "* "];
    let whole = markers.iter().find_map(|marker| line.strip_prefix(marker));
    let behind = || line.strip_suffix("*/")?.split_once(" /* ");
    whole.or_else(|| Some(behind()?.1))
}

/// The first mark in `prose`.
fn mark(prose: &str) -> Option<&'static str> {
    let lower = prose.to_lowercase();
    let found = MARKS.into_iter().find(|mark| has_word(&lower, mark));
    let asks = prose.contains('?');
    let begins = |text: &str| text.trim_start().starts_with("Who ");
    let inverted = begins(prose) || prose.split(". ").any(begins);
    found.or((inverted && !asks).then_some("Who …"))
}

/// Returns whether `text` has `word` with no letter or digit beside it.
fn has_word(text: &str, word: &str) -> bool {
    text.match_indices(word).any(|(at, _)| {
        let before = text[..at].chars().next_back();
        let behind = text[at + word.len()..].chars().next();
        [before, behind]
            .iter()
            .all(|beside| !beside.is_some_and(char::is_alphanumeric))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(file: &str, text: &str) -> usize {
        let mut faults = Vec::new();
        check(Path::new(file), text, &mut faults);
        faults.len()
    }

    #[test]
    fn long_lines_of_prose_are_found() {
        let long = "word ".repeat(25);
        assert_eq!(faults("a.rs", &format!("    // {long}")), 1);
        assert_eq!(faults("a.h", &format!(" * {long}")), 1);
        assert_eq!(faults("a.md", &long), 1);
        assert_eq!(faults("a.md", &format!("| {long} |")), 0);
        assert_eq!(faults("a.md", &format!("```\n{long}\n```")), 0);
        assert_eq!(faults("a.rs", &format!("let text = \"{long}\";")), 0);
        assert_eq!(faults("a.h", &format!("A = 1, /* {long}*/")), 1);
        assert_eq!(faults("a.toml", &format!("# {long}")), 1);
        assert_eq!(faults(".ci/run", &format!("  # {long}")), 1);
        assert_eq!(faults(".ci/run", &format!("echo \"{long}\"")), 0);
    }

    #[test]
    fn marks_of_dialect_are_found() {
        assert_eq!(faults("a.rs", "/// It waits for ever."), 1);
        assert_eq!(faults("a.rs", "/// Calls `f` for every cache."), 0);
        assert_eq!(faults("a.rs", "// The slab is nobody's then."), 1);
        assert_eq!(faults("a.c", "/* Who frees it has it no more. */"), 1);
        assert_eq!(faults("a.md", "It ends. Who waits goes on."), 1);
        assert_eq!(faults("a.md", "Who frees an object?"), 0);
        assert_eq!(faults("a.rs", "let whoever = 1;"), 0);
    }
}
