//! What `tidy` checks of documents beside their words: that each link leads somewhere, that a Rust
//! program in them is whole, and that the table of tests names every test.

use anyhow::{Context, Result};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Component, Path, PathBuf};

/// The document that says what each test shows.
const TESTS: &str = "crates/pinfold/tests/README.md";
/// How the name of a file of tests ends.
const SOURCES: [&str; 3] = [".rs", ".c", ".cpp"];

/// Adds a fault for each relative link of a Markdown file whose file or heading does not exist, and
/// for each document that a file names by a path that does not exist.
pub fn check(file: &Path, text: &str, faults: &mut Vec<String>) -> Result<()> {
    for (line, path) in named_documents(text) {
        if !Path::new(path).is_file() {
            faults.push(format!("{}:{line}: {path} does not exist", file.display()));
        }
    }
    if file.extension().is_none_or(|extension| extension != "md") {
        return Ok(());
    }
    for line in partial_programs(text) {
        faults.push(format!(
            "{}:{line}: this Rust program has no fn main, or hides a line from rustdoc's readers; \
             readers of the file copy what they see",
            file.display()
        ));
    }
    for (line, target) in links(text) {
        if let Some(fault) = wrong(file, text, target)? {
            faults.push(format!("{}:{line}: {fault}", file.display()));
        }
    }
    Ok(())
}

/// Returns what is wrong with a link to `target` in `file`, whose content is `text`.
fn wrong(file: &Path, text: &str, target: &str) -> Result<Option<String>> {
    if target.contains("://") || target.starts_with("mailto:") {
        return Ok(None);
    }
    let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
    let folder = file.parent().unwrap_or(Path::new(""));
    let linked = normal(&folder.join(path));
    if !path.is_empty() && !linked.exists() {
        return Ok(Some(format!("the link leads to {path}, which is missing")));
    }
    if anchor.is_empty() {
        return Ok(None);
    }
    let other;
    let headings = match path {
        "" => anchors(text),
        _ => {
            other = fs::read_to_string(&linked).with_context(|| linked.display().to_string())?;
            anchors(&other)
        }
    };
    let fault = || format!("the link leads to {target}, which has no such heading");
    Ok((!headings.contains(anchor)).then(fault))
}

/// Returns `path` without `..`.
fn normal(path: &Path) -> PathBuf {
    let mut whole = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => _ = whole.pop(),
            part => whole.push(part),
        }
    }
    whole
}

/// Returns the lines of Markdown that are not in a fenced block, with their numbers.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut fenced = false;
    (1..).zip(text.lines()).filter(move |(_, line)| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        !fenced && !fence
    })
}

/// Returns the lines at which Rust blocks begin that do not compile if a reader copies them.
fn partial_programs(text: &str) -> Vec<usize> {
    let mut found = Vec::new();
    let mut lines = (1..).zip(text.lines());
    while let Some((number, line)) = lines.next() {
        let Some(words) = line.strip_prefix("```") else {
            continue;
        };
        let block = lines.by_ref().map(|(_, line)| line);
        let block: Vec<&str> = block.take_while(|line| *line != "```").collect();
        let is_hidden = |line: &&str| line.trim_start().starts_with("# ");
        let is_whole = block.iter().any(|line| line.starts_with("fn main()"));
        if words.starts_with("rust") && (!is_whole || block.iter().any(is_hidden)) {
            found.push(number);
        }
    }
    found
}

/// Returns where each inline link leads to, with the number of its line.
fn links(text: &str) -> impl Iterator<Item = (usize, &str)> {
    prose(text).flat_map(|(number, line)| {
        let targets = line.match_indices("](");
        targets.filter_map(move |(at, _)| Some((number, line[at + 2..].split_once(')')?.0)))
    })
}

/// Returns the anchors that a Markdown file's headings have, by the rules of GitHub.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (_, line) in prose(text) {
        let title = line.trim_start_matches('#');
        if title.len() == line.len() || !title.starts_with(' ') {
            continue;
        }
        let letters = title.trim().chars().filter_map(|letter| match letter {
            ' ' => Some('-'),
            '-' | '_' => Some(letter),
            letter => letter.is_alphanumeric().then_some(letter),
        });
        let anchor = letters.collect::<String>().to_lowercase();
        let later = (1..).map(|nth| format!("{anchor}-{nth}"));
        let mut names = [anchor.clone()].into_iter().chain(later);
        found.extend(names.find(|name| !found.contains(name)));
    }
    found
}

/// Returns the paths of documents that a text names from the root, with the numbers of the lines.
fn named_documents(text: &str) -> impl Iterator<Item = (usize, &str)> {
    const FOLDER: &str = concat!("docs", "/");
    (1..).zip(text.lines()).flat_map(|(number, line)| {
        line.match_indices(FOLDER).filter_map(move |(at, _)| {
            let is_root = !line[..at].ends_with(|before: char| before.is_alphanumeric())
                && !line[..at].ends_with(['/', '-', '.', '_']);
            let rest = &line[at..];
            let is_inside = |letter: char| letter.is_alphanumeric() || "/-_.".contains(letter);
            let end = rest.find(|letter| !is_inside(letter)).unwrap_or(rest.len());
            let path = rest[..end].trim_end_matches('.');
            (is_root && path.ends_with(".md")).then_some((number, path))
        })
    })
}

/// Adds a fault for each file below `crates/*/tests` that the table of tests does not name, and for
/// each file that the table names and that does not exist.
///
/// A heading of the table begins with the folder that its section is about: that of a crate means
/// the crate's `tests`. A name that ends with a slash stands for all files of a folder.
pub fn check_tests(faults: &mut Vec<String>) -> Result<()> {
    let text = fs::read_to_string(TESTS).context(TESTS)?;
    let named = named_tests(&text);
    let mut files = Vec::new();
    for entry in fs::read_dir("crates")? {
        let folder = entry?.path().join("tests");
        if folder.is_dir() {
            collect(&folder, &mut files)?;
        }
    }
    let is_in_folder = |file: &str| {
        let mut folders = named.iter().filter(|name| name.ends_with('/'));
        folders.any(|folder| file.starts_with(folder.as_str()))
    };
    for file in &files {
        if !named.contains(file) && !is_in_folder(file) {
            faults.push(format!("{TESTS}: {file} is missing"));
        }
    }
    for name in named.iter().filter(|name| !Path::new(name).exists()) {
        faults.push(format!("{TESTS}: {name} does not exist"));
    }
    Ok(())
}

/// Adds the sources of tests in `folder` and in the folders below it.
fn collect(folder: &Path, files: &mut Vec<String>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        let name = path.display().to_string();
        if path.is_dir() {
            collect(&path, files)?;
        } else if SOURCES.iter().any(|end| name.ends_with(end)) {
            files.push(name);
        }
    }
    Ok(())
}

/// Returns the paths of the files and folders that begin the rows of the tables.
fn named_tests(text: &str) -> BTreeSet<String> {
    let mut named = BTreeSet::new();
    let mut folder = None;
    for (_, line) in prose(text) {
        if let Some(title) = line.strip_prefix("##") {
            let first = title.trim_start_matches('#').trim_start();
            let first = first.split([' ', ':']).next().unwrap_or_default();
            let is_crate = first.starts_with("crates/");
            folder = is_crate.then(|| match first.matches('/').count() {
                1 => format!("{first}/tests"),
                _ => first.to_owned(),
            });
        }
        let Some(row) = line.strip_prefix("| `") else {
            continue;
        };
        let cell = row.split(" |").next().unwrap_or_default();
        for name in cell.split('`').step_by(2) {
            let is_file = SOURCES.iter().any(|end| name.ends_with(end)) || name.ends_with('/');
            match &folder {
                _ if !is_file => {}
                _ if name.starts_with("crates/") => _ = named.insert(name.to_owned()),
                Some(folder) => _ = named.insert(format!("{folder}/{name}")),
                None => {}
            }
        }
    }
    named
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_outside_of_code_are_found() {
        let text = "See [a](b.md#c), ![d](e.svg).\n```\n[f](g)\n```\n[h](https://i)";
        let found: Vec<_> = links(text).collect();
        assert_eq!(found, [(1, "b.md#c"), (1, "e.svg"), (5, "https://i")]);
    }

    #[test]
    fn a_rust_program_is_whole() {
        let text = "```rust\nfn main() {}\n```\n```sh\n# ls\n```\n```rust\nlet a = 1;\n```\n\
                    ```rust,no_run\nfn main() {}\n# drop(a);\n```\n";
        assert_eq!(partial_programs(text), [7, 10]);
    }

    #[test]
    fn anchors_are_those_of_github() {
        let text = "# `pinfold run --stats`: it's\n## Twice\n## Twice\n#no\n```\n# code\n```";
        let expected = ["pinfold-run---stats-its", "twice", "twice-1"];
        assert_eq!(anchors(text), expected.map(str::to_owned).into());
    }

    #[test]
    fn a_link_without_its_file_or_heading_is_wrong() {
        let file = Path::new("a.md");
        let wrong = |target| wrong(file, "# Here", target).unwrap().is_some();
        assert!(!wrong("#here") && !wrong("https://example.com/x"));
        assert!(wrong("#there") && wrong("missing.md") && wrong("missing/"));
    }

    #[test]
    fn documents_are_named_from_the_root() {
        let text = concat!(
            "docs",
            "/a.md, x/docs",
            "/b.md (docs",
            "/c/d-e.md). docs",
            "/"
        );
        let found: Vec<_> = named_documents(text).map(|(_, path)| path).collect();
        assert_eq!(
            found,
            [concat!("docs", "/a.md"), concat!("docs", "/c/d-e.md")]
        );
    }

    #[test]
    fn the_table_names_files_by_the_folder_of_its_heading() {
        let text = "## crates/a: b\n| `c.rs`, `d.rs` | `e.rs` |\n### crates/a/tests/f\n\
                    | `g.c` |\n| `h/` |\n## Rest\n| `crates/i/tests/j.rs` |\n| `k.rs` |";
        let expected = [
            "crates/a/tests/c.rs",
            "crates/a/tests/d.rs",
            "crates/a/tests/f/g.c",
            "crates/a/tests/f/h/",
            "crates/i/tests/j.rs",
        ];
        assert_eq!(named_tests(text), expected.map(str::to_owned).into());
    }
}
