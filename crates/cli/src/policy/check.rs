//! `pinfold policy --check PID`: which pages of a process lie where their policy does not want
//! them.
//!
//! The kernel shows a process's mappings in `/proc/PID/numa_maps`, each with its policy and its
//! pages by node. What these counts prove, by the mapping's policy:
//!
//! | policy | misplaced |
//! |---|---|
//! | `bind`, `prefer (many)`, `interleave`, `weighted interleave` | pages on other nodes than the policy's; whose turn a page of an interleaving policy was is not known |
//! | `prefer` | pages on other nodes than the one that it names |
//! | `local`, `default` | unknown; but if all threads may run on one node's CPUs only, pages on other nodes |
//! | text that this command does not understand, or that the kernel may have cut | unknown |
//!
//! This is the kernel's rule when it moves pages to where they are used (`mpol_misplaced`). Pages
//! of a file lie where the policy of the thread that read them first wanted them. The kernel shows
//! how many pages of a mapping are a file's, but not on which nodes these are. So as many pages of
//! the mapping as the file has there may be the file's, and are unknown. Shared memory is not
//! counted as a file. A mapping without a policy shows the policy of the process's first thread,
//! whichever thread touched the pages.

use crate::foreign::{Deadline, Identity, Process as Files};
use crate::numastat;
use crate::numastat::maps::{Kind, Line, each_line};
use crate::output::{Lines, Table};
use anyhow::{Context, Result};
use pinfold::internal::topology_below;
use pinfold::mempolicy::{Distances, Mempolicy, Mode};
use pinfold::topology::{CpuSet, MAX_NODES, NodeId, NodeSet, Topology};
use serde::Serialize;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

/// How long to read the process's files. The kernel looks at each page of a process for its list.
const PATIENCE: Duration = Duration::from_secs(20);

/// The most mappings that are shown. Those with the most misplaced bytes are.
const MOST: usize = 500;

/// The most characters of a mapping's file that are shown.
const MOST_NAME: usize = 200;

/// The kernel prints a policy into a buffer of 64 bytes, and cuts it there.
const WHOLE: usize = 62;

/// Pages, and their bytes. Pages of one process may differ in size.
#[derive(Clone, Copy, Default, Serialize)]
struct Amount {
    pages: u64,
    bytes: u64,
}

impl Amount {
    fn add(&mut self, pages: u64, page_size: u64) {
        let bytes = pages.saturating_mul(page_size);
        self.pages = self.pages.saturating_add(pages);
        self.bytes = self.bytes.saturating_add(bytes);
    }
}

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let noun = if self.pages == 1 { "page" } else { "pages" };
        let mib = self.bytes as f64 / f64::from(1 << 20);
        write!(f, "{} {noun} ({mib:.1} MiB)", self.pages)
    }
}

/// Pages of which nothing is known, by reason.
#[derive(Default, Serialize)]
struct Unknown {
    /// The policy is `local` or `default`, and the threads may run on CPUs of several nodes.
    local: Amount,
    /// They may be a file's.
    file: Amount,
    /// The policy's text is unknown.
    text: Amount,
}

/// A mapping with misplaced pages.
#[derive(Serialize)]
struct Mapping {
    /// Its first address, in hexadecimal digits.
    address: String,
    policy: String,
    wanted: Vec<usize>,
    /// `heap`, `stack`, `huge`, `anonymous`, or the file's name as the kernel writes it.
    memory: String,
    #[serde(rename = "page_bytes")]
    page_size: u64,
    #[serde(rename = "misplaced_pages")]
    misplaced: u64,
    /// Other pages on unwanted nodes, which may be a file's.
    #[serde(rename = "unknown_pages")]
    unknown: u64,
    pages: Vec<OnNode>,
}

#[derive(Serialize)]
struct OnNode {
    node: usize,
    pages: u64,
}

/// What was found.
#[derive(Serialize)]
pub struct Checked {
    process: Identity,
    misplaced: Amount,
    /// Pages on a node that their policy wants.
    placed: Amount,
    unknown: Unknown,
    mappings: Vec<Mapping>,
    /// Mappings with misplaced pages that are not shown.
    #[serde(rename = "left_out_mappings")]
    left_out: usize,
    /// The node on which `local` memory should be, if it is known.
    #[serde(rename = "local_node")]
    local: Option<usize>,
}

/// Where a policy wants pages.
enum Wanted {
    On(NodeSet),
    Local,
    Unknown,
}

/// Returns where a policy wants pages. The kernel prints the nodes that a policy has at the moment,
/// also for `static` and `relative` policies.
fn wanted(policy: &str) -> Wanted {
    let known = Mempolicy::parse(policy).ok();
    let Some(known) = known.filter(|_| policy.len() <= WHOLE) else {
        return Wanted::Unknown;
    };
    match known.mode() {
        Mode::Default | Mode::Local => Wanted::Local,
        _ if known.user_nodes().is_empty() || known.user_nodes().len() == MAX_NODES => {
            Wanted::Unknown
        }
        _ => Wanted::On(known.user_nodes().clone()),
    }
}

/// Returns whether a mapping's pages belong to a file that is not in memory only. The kernel gives
/// the other names to memory that processes share.
fn is_of_file(line: &Line<'_>) -> bool {
    const SHARED: [&str; 5] = [
        "/dev/shm/",
        "/memfd:",
        "/SYSV",
        "/dev/zero",
        "/anon_hugepage",
    ];
    let file = line.file.filter(|_| line.kind != Kind::Huge);
    file.is_some_and(|file| !SHARED.iter().any(|name| file.starts_with(name)))
}

fn memory(line: &Line<'_>) -> String {
    match (line.file, line.kind) {
        (Some(file), _) if file.chars().nth(MOST_NAME).is_some() => {
            let shown: String = file.chars().take(MOST_NAME).collect();
            shown + "…"
        }
        (Some(file), _) => file.to_owned(),
        (None, Kind::Heap) => "heap".to_owned(),
        (None, Kind::Stack) => "stack".to_owned(),
        (None, Kind::Huge) => "huge".to_owned(),
        (None, Kind::Private) => "anonymous".to_owned(),
    }
}

/// Returns the node from which `local` memory comes, if all threads of a process may run on one
/// node's CPUs only: that node, or the nearest one with memory that all threads may use.
fn local_node(files: &Files, topology: &Topology) -> Option<NodeId> {
    let mut allowed = CpuSet::EMPTY;
    let mut memory = topology.with_memory.clone();
    for task in files.tasks().ok()? {
        let status = task.and_then(|task| task.status()).ok()?;
        let list = str::from_utf8(status.field("Cpus_allowed_list:")?).ok()?;
        allowed = allowed.or(&list.parse().ok()?);
        if let Some(list) = status.field("Mems_allowed_list:") {
            memory = memory.and(&str::from_utf8(list).ok()?.parse().ok()?);
        }
    }
    let runs_on = |&node: &usize| {
        let cpus = topology.cpus_of(NodeId(node)).unwrap_or_default();
        !cpus.and(&allowed).is_empty()
    };
    let mut nodes = topology.nodes.iter().filter(runs_on);
    let only = nodes.next().filter(|_| nodes.next().is_none())?;
    let distances = Distances::read(topology);
    (distances.nearest_first(NodeId(only))).find(|node| memory.contains(node.0))
}

/// Checks the pages of a process.
pub fn check(root: &Path, pid: u32) -> Result<Checked> {
    let _deadline = Deadline::after(PATIENCE);
    let topology = topology_below(root.as_os_str().as_bytes())?;
    let process = numastat::Process::open(root, pid)?;
    let maps = process.maps()?;
    let local = local_node(process.files(), &topology);
    let identity = process.identity(maps.name.clone());
    let checked = Checked::of(pid, maps.name, &maps.text, local);
    Ok(Checked {
        process: identity,
        ..checked.with_context(|| format!("process {pid}"))?
    })
}

impl Checked {
    /// Judges the mappings in a `numa_maps`. `local` is the node from which `local` memory comes,
    /// if it is known.
    pub fn of(pid: u32, name: String, numa_maps: &str, local: Option<NodeId>) -> Result<Checked> {
        let mut checked = Checked {
            process: Identity::named(pid, name),
            misplaced: Amount::default(),
            placed: Amount::default(),
            unknown: Unknown::default(),
            mappings: Vec::new(),
            left_out: 0,
            local: local.map(|node| node.0),
        };
        each_line(numa_maps, |line| {
            checked.add(&line);
            Ok(())
        })?;
        checked.shorten();
        Ok(checked)
    }

    pub fn is_misplaced(&self) -> bool {
        self.misplaced.pages > 0
    }

    /// Judges a mapping.
    fn add(&mut self, line: &Line<'_>) {
        let sum = |pages: &mut dyn Iterator<Item = u64>| pages.fold(0, u64::saturating_add);
        let all = sum(&mut line.pages.iter().map(|&(_, pages)| pages));
        let of_file = match is_of_file(line) {
            true => all.saturating_sub(line.anonymous),
            false => 0,
        };
        let nodes = match (wanted(line.policy), self.local) {
            (Wanted::On(nodes), _) => nodes,
            (Wanted::Local, Some(local)) => [local].into_iter().collect(),
            (Wanted::Local, None) => return self.unknown.local.add(all, line.page_size),
            (Wanted::Unknown, _) => return self.unknown.text.add(all, line.page_size),
        };
        let elsewhere = line
            .pages
            .iter()
            .filter(|&&(node, _)| !nodes.contains(node));
        let elsewhere = sum(&mut elsewhere.map(|&(_, pages)| pages));
        let misplaced = elsewhere.saturating_sub(of_file);
        let unknown = elsewhere - misplaced;
        self.placed.add(all - elsewhere, line.page_size);
        self.misplaced.add(misplaced, line.page_size);
        self.unknown.file.add(unknown, line.page_size);
        if misplaced == 0 {
            return;
        }
        self.mappings.push(Mapping {
            address: line.address.to_owned(),
            policy: line.policy.to_owned(),
            wanted: nodes.iter().collect(),
            memory: memory(line),
            page_size: line.page_size,
            misplaced,
            unknown,
            pages: line
                .pages
                .iter()
                .map(|&(node, pages)| OnNode { node, pages })
                .collect(),
        });
        // The worst list has a line for each of many mappings, so it is shortened meanwhile.
        if self.mappings.len() > 2 * MOST {
            self.shorten();
        }
    }

    /// Keeps the mappings with the most misplaced bytes, in the order of their addresses.
    fn shorten(&mut self) {
        let more = self.mappings.len().saturating_sub(MOST);
        if more == 0 {
            return;
        }
        let bytes = |mapping: &Mapping| mapping.misplaced.saturating_mul(mapping.page_size);
        let mut sizes: Vec<u64> = self.mappings.iter().map(bytes).collect();
        sizes.sort_unstable();
        let least = sizes[more];
        let mut equal = sizes[more..].iter().filter(|&&size| size == least).count();
        self.mappings
            .retain(|mapping| match bytes(mapping).cmp(&least) {
                std::cmp::Ordering::Less => false,
                std::cmp::Ordering::Greater => true,
                std::cmp::Ordering::Equal => {
                    let kept = equal > 0;
                    equal -= usize::from(kept);
                    kept
                }
            });
        self.left_out += more;
    }

    /// Says the outcome in one line.
    fn verdict(&self) -> String {
        if self.is_misplaced() {
            return format!(
                "{} do not lie where their policy wants them",
                self.misplaced
            );
        }
        match self.placed.pages {
            0 => "nothing known to be misplaced: the policy of no page tells its node".to_owned(),
            _ => format!(
                "nothing misplaced: {} lie where their policy wants them",
                self.placed
            ),
        }
    }
}

impl fmt::Display for Checked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = Lines::default();
        text.add(format_args!(
            "process {} ({}): {}",
            self.process.pid,
            self.process.name,
            self.verdict()
        ));
        f.write_str(&text.to_string())?;
        if !self.mappings.is_empty() {
            writeln!(f)?;
            let table = Table::of(&self.mappings)
                .column("address", |mapping| &mapping.address)
                .column("wanted", |mapping| {
                    mapping.wanted.iter().copied().collect::<NodeSet>()
                })
                .column("misplaced", |mapping| mapping.misplaced)
                .column("kB/page", |mapping| mapping.page_size / 1024)
                .column("pages by node", |mapping| {
                    let nodes = mapping.pages.iter();
                    let nodes = nodes.map(|on| format!("{}: {}", on.node, on.pages));
                    nodes.collect::<Vec<_>>().join(", ")
                })
                .column("policy", |mapping| &mapping.policy)
                .names("memory", |mapping| &mapping.memory)
                .table();
            write!(f, "{table}")?;
            if self.left_out > 0 {
                writeln!(
                    f,
                    "and {} mappings with fewer misplaced bytes",
                    self.left_out
                )?;
            }
        }
        let unknown = [
            (
                self.unknown.local,
                "under `local` or `default`, and the threads may run on several nodes",
            ),
            (
                self.unknown.file,
                "on other nodes that may be pages of files; the policy of their first reader placed these",
            ),
            (
                self.unknown.text,
                "under policies whose text is unknown, or cut by the kernel",
            ),
        ];
        for (amount, why) in unknown.iter().filter(|(amount, _)| amount.pages > 0) {
            writeln!(f, "unknown: {amount} {why}")?;
        }
        Ok(())
    }
}
