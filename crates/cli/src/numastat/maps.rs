//! Parses `/proc/PID/numa_maps`, which has a line for each mapping: `address policy word…`.
//!
//! - `huge`, `heap` and `stack` tell the kind of the mapping.
//! - `N3=12` means that 12 pages lie on node 3.
//! - `kernelpagesize_kB=4` is the size of a page. A reserved huge page counts as one page of its
//!   size, a transparent one as all the pages that it replaces.
//!
//! A blank in a file's name is written as `\040`, so that blanks always separate words.

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

/// Bytes by node and kind.
#[derive(Debug, Default)]
pub struct Usage(BTreeMap<(usize, Kind), u64>);

impl Usage {
    /// Adds up all lines of the file.
    pub fn parse(text: &str) -> Result<Usage> {
        let mut usage = Usage::default();
        for (number, line) in text.lines().enumerate() {
            usage
                .add(line)
                .with_context(|| format!("line {} of numa_maps, {line:?}", number + 1))?;
        }
        Ok(usage)
    }

    fn add(&mut self, line: &str) -> Result<()> {
        let mut kind = Kind::Private;
        let mut page_size = None;
        let mut pages = Vec::new();
        // Skips the address. The policy may contain blanks and so make more words, but none of
        // those below.
        for word in line.split_ascii_whitespace().skip(1) {
            if let Some(known) = kind_of(word) {
                kind = kind.min(known);
            } else if let Some(kib) = word.strip_prefix("kernelpagesize_kB=") {
                page_size = Some(kib.parse::<u64>().context("kernelpagesize_kB")?);
            } else if let Some(found) = on_node(word)? {
                pages.push(found);
            }
        }
        let size = match page_size {
            Some(kib) => kib.checked_mul(1024).context("kernelpagesize_kB")?,
            None if pages.is_empty() => return Ok(()),
            None => bail!("has no kernelpagesize_kB, which kernels since Linux 3.19 write"),
        };
        for (node, count) in pages {
            let bytes = self.0.entry((node, kind)).or_default();
            let more = size.checked_mul(count).context("too many pages")?;
            *bytes = bytes.checked_add(more).context("too many pages")?;
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
