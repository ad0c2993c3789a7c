//! The whole system by node, in the words and layout of `numastat`: the kernel's counts of
//! allocations, and the memory of each node.

use super::table::{Form, Table};
use crate::foreign;
use anyhow::{Context, Result};
use pinfold::topology::NodeSet;
use serde::ser::{Serialize, SerializeStruct, Serializer};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::Path;

/// Numbers by name, each with one number for each node.
pub struct System {
    nodes: Vec<usize>,
    /// Pages by kind of allocation, in the order of the kernel's file.
    pages: Vec<(String, Vec<u64>)>,
    /// Bytes by kind of memory, in the order of the kernel's file.
    memory: Vec<(String, Vec<u64>)>,
    page_bytes: u64,
}

/// One node, as it is printed for programs.
#[derive(serde::Serialize)]
struct Node<'s> {
    node: usize,
    pages: BTreeMap<&'s str, u64>,
    memory_bytes: BTreeMap<&'s str, u64>,
}

impl Serialize for System {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        fn of(rows: &[(String, Vec<u64>)], nth: usize) -> BTreeMap<&str, u64> {
            let rows = rows.iter();
            rows.map(|(name, row)| (&name[..], row[nth])).collect()
        }
        let nodes = self.nodes.iter().enumerate();
        let nodes = nodes.map(|(nth, &node)| Node {
            node,
            pages: of(&self.pages, nth),
            memory_bytes: of(&self.memory, nth),
        });
        let mut object = serializer.serialize_struct("System", 1)?;
        object.serialize_field("nodes", &nodes.collect::<Vec<_>>())?;
        object.end()
    }
}

/// The kinds of memory that `numastat -m` prints, in its order. A table leaves out those that the
/// kernel does not have. `--json` has all that the kernel has.
const MEMORY: &str = "MemTotal MemFree MemUsed Active Inactive Active(anon) Inactive(anon) \
    Active(file) Inactive(file) Unevictable Mlocked Dirty Writeback FilePages Mapped AnonPages \
    Shmem KernelStack PageTables NFS_Unstable Bounce WritebackTmp Slab SReclaimable SUnreclaim \
    AnonHugePages ShmemHugePages ShmemPmdMapped HugePages_Total HugePages_Free HugePages_Surp \
    KReclaimable";

const LABEL: usize = 16;
const CELL: usize = 16;

impl System {
    /// Reads the files of all `nodes` below `root`.
    #[expect(clippy::disallowed_methods, reason = "a file of the kernel's own")]
    pub fn read(root: &Path, nodes: &NodeSet) -> Result<System> {
        let nodes: Vec<usize> = nodes.iter().collect();
        let huge = huge_page_bytes(root);
        let (mut pages, mut memory) = (Vec::new(), Vec::new());
        for (nth, node) in nodes.iter().enumerate() {
            let folder = root.join(format!("sys/devices/system/node/node{node}"));
            let read = |file: &str| {
                let path = folder.join(file);
                fs::read_to_string(&path).with_context(|| path.display().to_string())
            };
            for line in read("numastat")?.lines() {
                if let Some((name, count)) = line.split_once(' ') {
                    let count = count.trim().parse().ok();
                    set(&mut pages, name, nth, nodes.len(), count);
                }
            }
            // Node 0 MemTotal:       24684092 kB
            for line in read("meminfo")?.lines() {
                let mut words = line.split_whitespace().skip(2);
                let (Some(name), Some(number)) = (words.next(), words.next()) else {
                    continue;
                };
                let name = name.trim_end_matches(':');
                // Reserved huge pages are counted, and everything else is in KiB.
                let unit = if name.starts_with("HugePages_") {
                    huge
                } else {
                    1024
                };
                let number = number.parse::<u64>().ok();
                let bytes = number.map(|number| number.saturating_mul(unit));
                set(&mut memory, name, nth, nodes.len(), bytes);
            }
        }
        // SAFETY: `sysconf` has no preconditions.
        let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as u64;
        Ok(System {
            nodes,
            pages,
            memory,
            page_bytes,
        })
    }

    /// Formats the pages by kind of allocation, as `numastat` without options.
    pub fn pages(&self) -> String {
        let mut text = " ".repeat(LABEL);
        for node in &self.nodes {
            let _ = write!(text, "{:>CELL$}", format!("node{node}"));
        }
        text.push('\n');
        for (name, row) in &self.pages {
            let _ = write!(text, "{name:<LABEL$}");
            for count in row {
                let _ = write!(text, "{count:>CELL$}");
            }
            text.push('\n');
        }
        text
    }

    /// Formats the same in MiB, with a total, as `numastat -n`.
    pub fn pages_in_mib(&self, form: Form) -> String {
        let rows = self.pages.iter().map(|(name, row)| {
            let bytes = row
                .iter()
                .map(|&pages| pages.saturating_mul(self.page_bytes));
            (capitals(name), bytes.collect())
        });
        self.table("Per-node numastat info (in MBs):", rows, form)
    }

    /// Formats the memory of the nodes in MiB, with a total, as `numastat -m`.
    pub fn memory(&self, form: Form) -> String {
        let rows = MEMORY.split(' ').filter_map(|wanted| {
            let mut rows = self.memory.iter();
            rows.find(|(name, _)| name == wanted).cloned()
        });
        self.table("Per-node system memory usage (in MBs):", rows, form)
    }

    fn table(
        &self,
        title: &str,
        rows: impl Iterator<Item = (String, Vec<u64>)>,
        form: Form,
    ) -> String {
        let table = Table {
            title,
            corner: "",
            nodes: &self.nodes,
            rows: rows.collect(),
            has_sum: false,
            gap: 1,
        };
        table.text(form)
    }
}

/// Sets the number of node `nth` of `nodes` in the row `name`.
fn set(
    rows: &mut Vec<(String, Vec<u64>)>,
    name: &str,
    nth: usize,
    nodes: usize,
    value: Option<u64>,
) {
    let at = rows.iter().position(|(known, _)| known == name);
    let at = at.unwrap_or_else(|| {
        rows.push((name.to_owned(), vec![0; nodes]));
        rows.len() - 1
    });
    rows[at].1[nth] = value.unwrap_or(0);
}

/// Returns `numa_hit` as `Numa_Hit`.
fn capitals(name: &str) -> String {
    let words = name.split('_').map(|word| {
        let mut letters = word.chars();
        let first = letters.next().map(|letter| letter.to_ascii_uppercase());
        first.into_iter().chain(letters).collect::<String>()
    });
    words.collect::<Vec<_>>().join("_")
}

/// Returns the bytes of a reserved huge page.
#[expect(clippy::disallowed_methods, reason = "a file of the kernel's own")]
fn huge_page_bytes(root: &Path) -> u64 {
    let file = fs::read_to_string(root.join("proc/meminfo")).unwrap_or_default();
    let line = file
        .lines()
        .find_map(|line| line.strip_prefix("Hugepagesize:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(2048).saturating_mul(1024)
}

/// Returns the processes whose command line contains `pattern`, without this one.
pub fn matching(root: &Path, pattern: &str) -> Result<Vec<u32>> {
    /// How many bytes of a command line are searched.
    const SEARCHED: usize = 1 << 20;
    let folder = root.join("proc");
    let mut pids = foreign::pids(&folder).with_context(|| folder.display().to_string())?;
    pids.retain(|&pid| {
        let process = foreign::Process::in_any_state(&folder.join(pid.to_string()), pid);
        let command = process.and_then(|process| process.read_start("cmdline", SEARCHED));
        let command = String::from_utf8_lossy(&command.unwrap_or_default()).replace('\0', " ");
        pid != std::process::id() && command.contains(pattern)
    });
    pids.sort_unstable();
    Ok(pids)
}
