//! Names the functions and source lines of code addresses, by binutils' addr2line.

use super::counts::{Code, Row};
use super::{CACHE, Subject};
use anyhow::{Context, Result};
use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Names the sites of all rows.
pub fn name(rows: &mut [Row], subjects: &[Subject]) -> Result<()> {
    let glibc = subjects.iter().find(|subject| subject.name == "glibc");
    let libc = glibc.map(|subject| subject.library.clone());
    let file_of = |row: &Row, code: &Code| -> Option<(PathBuf, u64)> {
        let name = if row.subject == CACHE.0 {
            CACHE.1
        } else {
            &row.subject
        };
        match code {
            Code::Allocator(at) => {
                let subject = subjects.iter().find(|subject| subject.name == name)?;
                Some((subject.library.clone(), *at))
            }
            Code::Libc(at) => Some((libc.clone()?, *at)),
            Code::Other(_) => None,
        }
    };
    let mut wanted: HashMap<PathBuf, BTreeSet<u64>> = HashMap::new();
    for row in rows.iter() {
        for (file, at) in row.sites.iter().filter_map(|site| file_of(row, &site.code)) {
            wanted.entry(file).or_default().insert(at);
        }
    }
    let mut names = HashMap::new();
    for (file, addresses) in wanted {
        let found = look_up(&file, &addresses)?;
        names.extend(
            found
                .into_iter()
                .map(|(at, name)| ((file.clone(), at), name)),
        );
    }
    for row in rows {
        let found: Vec<_> = row
            .sites
            .iter()
            .map(|site| {
                let file = file_of(row, &site.code);
                let known = file
                    .and_then(|file| names.get(&file).cloned())
                    .unwrap_or_default();
                match site.code {
                    Code::Allocator(at) => format!("{at:#x} {known}"),
                    Code::Libc(at) => format!("libc {at:#x} {known}"),
                    Code::Other(at) => format!("{at:#x}"),
                }
            })
            .collect();
        for (site, name) in row.sites.iter_mut().zip(found) {
            site.name = name.trim_end().to_owned();
        }
    }
    Ok(())
}

/// Returns what addr2line says of each address: `INNER at FILE:LINE, in OUTER`, where `INNER` may
/// be inlined into `OUTER`.
fn look_up(file: &Path, addresses: &BTreeSet<u64>) -> Result<Vec<(u64, String)>> {
    let said = Command::new("addr2line")
        .args([
            "--addresses",
            "--functions",
            "--demangle",
            "--inlines",
            "--exe",
        ])
        .arg(file)
        .args(addresses.iter().map(|at| format!("{at:#x}")))
        .output()
        .context("cannot start addr2line; install binutils")?;
    Ok(names(&String::from_utf8_lossy(&said.stdout)))
}

/// Reads addr2line's output: the address, and then a line with a function and a line with a place
/// in the sources for each function, the innermost first.
fn names(said: &str) -> Vec<(u64, String)> {
    let mut found = Vec::new();
    let mut lines = said.lines().peekable();
    while let Some(line) = lines.next() {
        let Some(at) = line
            .strip_prefix("0x")
            .and_then(|hex| u64::from_str_radix(hex, 16).ok())
        else {
            continue;
        };
        let mut frames = Vec::new();
        while lines.peek().is_some_and(|line| !line.starts_with("0x")) {
            let function = lines.next().unwrap_or_default();
            frames.push((function, lines.next().unwrap_or_default()));
        }
        let Some((inner, place)) = frames.first() else {
            continue;
        };
        let outer = frames.last().map_or("", |frame| frame.0);
        // The sources of Rust's library say nothing about the allocator.
        let own = frames.iter().find(|frame| !frame.1.starts_with("/rustc/"));
        let (inner, place) = own.copied().unwrap_or((*inner, *place));
        let place = place.split_once("/crates/").map_or(place, |parts| parts.1);
        let place = place.split(" (disc").next().unwrap_or_default();
        let within = if inner == outer {
            String::new()
        } else {
            format!(", in {outer}")
        };
        let name = match place.starts_with("??") {
            true => inner.to_owned(),
            false => format!("{inner} at {place}{within}"),
        };
        found.push((at, name));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A reader of the table finds the code by this name.
    #[test]
    fn the_innermost_function_of_the_project_names_an_address() {
        let said = "0x0000000000000010\nload\n/rustc/x/atomic.rs:1\nlock\n/w/crates/a/b.rs:7 \
                    (discriminator 1)\nouter\n/w/crates/a/b.rs:9\n0x20\nf\n??:0\n";
        let expected = [(16, "lock at a/b.rs:7, in outer"), (32, "f")];
        assert_eq!(
            names(said),
            expected.map(|(at, name)| (at, name.to_owned()))
        );
    }
}
