//! Parses `/proc/PID/numa_maps`, which has a line for each mapping: `address policy word…`.
//!
//! - `huge`, `heap` and `stack` tell the kind of the mapping.
//! - `N3=12` means that 12 pages lie on node 3.
//! - `kernelpagesize_kB=4` is the size of a page. A reserved huge page counts as one page of its
//!   size, a transparent one as all the pages that it replaces.
//!
//! In a file's name, the kernel writes a blank as `\040`, an equals sign as `\075` and the end of a
//! line as `\012`, so that blanks separate words, and no name looks like another word. Other white
//! space can be a part of a name.

use anyhow::{Context, Result, bail};
use pinfold::topology::{MAX_NODES, NodeSet};
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Huge,
    Heap,
    Stack,
    Private,
}

/// A mapping.
#[derive(Debug, PartialEq, Eq)]
pub struct Line<'t> {
    /// The address of its first byte, in hexadecimal digits.
    pub address: &'t str,
    /// The policy of the mapping's first page, in the kernel's words: the mapping's own, or that of
    /// the process's first thread.
    pub policy: &'t str,
    pub kind: Kind,
    /// The file that is mapped, as the kernel writes its name.
    pub file: Option<&'t str>,
    /// Pages that belong to no file.
    pub anonymous: u64,
    /// Bytes of a page. 0 if there are no pages.
    pub page_size: u64,
    /// Nodes, and how many pages lie on each.
    pub pages: Vec<(usize, u64)>,
}

/// Calls `visit` with each line, until it fails.
pub fn each_line<'t>(text: &'t str, mut visit: impl FnMut(Line<'t>) -> Result<()>) -> Result<()> {
    for (number, line) in text.lines().enumerate() {
        Line::parse(line)
            .and_then(&mut visit)
            .with_context(|| format!("line {} of numa_maps, {line:?}", number + 1))?;
    }
    Ok(())
}

impl<'t> Line<'t> {
    fn parse(line: &'t str) -> Result<Line<'t>> {
        let (address, rest) = line.split_once(' ').unwrap_or((line, ""));
        let (policy, words) = rest.split_at(policy_length(rest));
        let mut parsed = Line {
            address,
            policy,
            kind: Kind::Private,
            file: None,
            anonymous: 0,
            page_size: 0,
            pages: Vec::new(),
        };
        for word in words.split(' ') {
            if let Some(known) = kind_of(word) {
                parsed.kind = parsed.kind.min(known);
            } else if let Some(file) = word.strip_prefix("file=") {
                parsed.file = Some(file);
            } else if let Some(pages) = word.strip_prefix("anon=") {
                parsed.anonymous = pages.parse().context("anon")?;
            } else if let Some(kib) = word.strip_prefix("kernelpagesize_kB=") {
                let kib: u64 = kib.parse().context("kernelpagesize_kB")?;
                parsed.page_size = kib.checked_mul(1024).context("kernelpagesize_kB")?;
            } else if let Some(found) = on_node(word)? {
                parsed.pages.push(found);
            }
        }
        if parsed.page_size == 0 && !parsed.pages.is_empty() {
            bail!("has no kernelpagesize_kB, which kernels since Linux 3.19 write");
        }
        Ok(parsed)
    }
}

/// Returns the length of the policy at the beginning of a text. Two modes have a blank in their
/// names.
fn policy_length(text: &str) -> usize {
    let word = |text: &str| text.find(' ').unwrap_or(text.len());
    let mut length = word(text);
    for (first, second) in [("prefer ", "(many)"), ("weighted ", "interleave")] {
        let behind = text.strip_prefix(first);
        if let Some(behind) = behind.filter(|behind| behind.starts_with(second)) {
            length = first.len() + word(behind);
        }
    }
    length
}

/// Bytes by node and kind.
#[derive(Debug, Default)]
pub struct Usage(BTreeMap<(usize, Kind), u64>);

impl Usage {
    /// Adds up all lines of the file.
    pub fn parse(text: &str) -> Result<Usage> {
        let mut usage = Usage::default();
        each_line(text, |line| usage.add(&line))?;
        Ok(usage)
    }

    fn add(&mut self, line: &Line<'_>) -> Result<()> {
        for &(node, count) in &line.pages {
            let bytes = self.0.entry((node, line.kind)).or_default();
            let more = line.page_size.checked_mul(count);
            let sum = more.and_then(|more| bytes.checked_add(more));
            *bytes = sum.context("too many pages")?;
        }
        Ok(())
    }

    pub fn bytes(&self, kind: Kind, node: usize) -> u64 {
        self.0.get(&(node, kind)).copied().unwrap_or(0)
    }

    pub fn total(&self, node: usize) -> u64 {
        let kinds = [Kind::Huge, Kind::Heap, Kind::Stack, Kind::Private];
        kinds.iter().fold(0, |sum: u64, &kind| {
            sum.saturating_add(self.bytes(kind, node))
        })
    }

    pub fn nodes(&self) -> NodeSet {
        self.0.keys().map(|&(node, _)| node).collect()
    }
}

fn kind_of(word: &str) -> Option<Kind> {
    match word {
        "huge" => Some(Kind::Huge),
        "heap" => Some(Kind::Heap),
        "stack" => Some(Kind::Stack),
        // Before Linux 4.5, the kernel marked the stacks of threads like this.
        _ => word.starts_with("stack:").then_some(Kind::Stack),
    }
}

/// Parses the node and the pages of `N3=12`. `None` for other words.
fn on_node(word: &str) -> Result<Option<(usize, u64)>> {
    let Some((node, pages)) = word.strip_prefix('N').and_then(|rest| rest.split_once('=')) else {
        return Ok(None);
    };
    let (node, pages) = (node.parse().ok(), pages.parse().ok());
    match (node, pages) {
        (Some(node), Some(pages)) if node < MAX_NODES => Ok(Some((node, pages))),
        _ => bail!("{word:?} is not a node and a number of pages"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
00400000 default file=/usr/bin/python3 mapped=500 mapmax=3 active=0 N0=300 N1=200 kernelpagesize_kB=4
01000000 interleave:0-3 heap anon=8 dirty=8 N0=2 N1=2 N2=2 N3=2 kernelpagesize_kB=4
7f0000000000 prefer (many):0-1 huge anon=3 dirty=3 N1=3 kernelpagesize_kB=2048
7f1000000000 bind=static|balancing:1 anon=512 dirty=512 N1=512 kernelpagesize_kB=4
7f2000000000 weighted interleave:0-1 file=/dev/hugepages/heap huge dirty=1 N0=1 kernelpagesize_kB=1048576
7f3000000000 default file=/tmp/a\\040stack\\040N0=7 mapped=1 N3=1 kernelpagesize_kB=64
7f4000000000 default
7ffd00000000 default stack anon=5 dirty=5 N2=5 kernelpagesize_kB=4
7ffe00000000 default stack:77 anon=1 dirty=1 N2=1 kernelpagesize_kB=4
";

    #[test]
    fn pages_by_kind_and_node() {
        let usage = Usage::parse(TEXT).unwrap();
        let row = |kind| [0, 1, 2, 3].map(|node| usage.bytes(kind, node));
        assert_eq!(row(Kind::Huge), [1 << 30, 3 * (2 << 20), 0, 0]);
        assert_eq!(row(Kind::Heap), [8192; 4]);
        assert_eq!(row(Kind::Stack), [0, 0, 6 * 4096, 0]);
        assert_eq!(row(Kind::Private), [300 << 12, 712 << 12, 0, 64 << 10]);
        assert_eq!(usage.total(3), 8192 + (64 << 10));
        assert_eq!(usage.nodes().to_string(), "0-3");
    }

    #[test]
    fn policies_and_files_are_found() {
        let mut found = Vec::new();
        let parsed = each_line(TEXT, |line| {
            found.push((line.policy, line.file, line.anonymous));
            Ok(())
        });
        parsed.unwrap();
        let policies: Vec<_> = found.iter().map(|line| line.0).collect();
        assert_eq!(
            policies,
            [
                "default",
                "interleave:0-3",
                "prefer (many):0-1",
                "bind=static|balancing:1",
                "weighted interleave:0-1",
                "default",
                "default",
                "default",
                "default"
            ]
        );
        assert_eq!(found[0].1, Some("/usr/bin/python3"));
        assert_eq!((found[1].1, found[1].2), (None, 8));
    }

    /// The kernel escapes neither carriage returns nor form feeds in names.
    #[test]
    fn a_files_name_is_one_word() {
        let text = "1000 bind:1 file=/a\rhuge\x0cheap mapped=2 N0=2 kernelpagesize_kB=4\n";
        let usage = Usage::parse(text).unwrap();
        assert_eq!(usage.bytes(Kind::Private, 0), 8192);
        each_line(text, |line| {
            assert_eq!(line.file, Some("/a\rhuge\x0cheap"));
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn a_malformed_line_is_reported_with_its_number() {
        for (line, words) in [
            ("1000 default anon=1 N0=1", "Linux 3.19"),
            ("1000 default N0=x kernelpagesize_kB=4", "N0=x"),
            ("1000 default N9999=1 kernelpagesize_kB=4", "N9999=1"),
            ("1000 default N0=1 kernelpagesize_kB=", "kernelpagesize"),
            (
                "1000 default N0=18446744073709551615 kernelpagesize_kB=4",
                "too many",
            ),
        ] {
            let error = format!("{:#}", Usage::parse(line).unwrap_err());
            assert!(error.contains(words) && error.contains("line 1"), "{error}");
        }
        assert!(Usage::parse("").unwrap().nodes().is_empty());
    }
}
