//! `pinfold migrate`: moves the pages of a process to other nodes.

use crate::foreign::{Deadline, Identity, NO_PROC};
use crate::live;
use crate::numastat::Process;
use crate::numastat::maps::Usage;
use crate::output::{self, Lines, Table};
use crate::policy::{Machine, listed};
use anyhow::{Context, Result, bail};
use pinfold::mempolicy::{self, Mempolicy, PolicyError};
use pinfold::topology::{ListError, MAX_NODES, NodeSet};
use serde::Serialize;
use std::fmt;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

/// How long to read where the pages lie, before and again after the move.
const PATIENCE: Duration = Duration::from_secs(20);

/// Move the pages of a process from some nodes to others, as `migratepages` does
///
/// Pages on the n-th node of FROM move to the n-th node of TO. If TO has fewer nodes, its nodes are
/// used again from the first. If the two have different numbers of nodes, pages on a node that is
/// in both stay there. The process stands still for a moment. Its policies stay, so the
/// memory that it touches later may come from the old nodes. Pages that other processes map too
/// move only if this command has CAP_SYS_NICE.
///
/// The exit status is 0 if the kernel moved all pages that it tried to move, 1 if it could not move
/// some, and 2 if nothing was moved or the outcome is not known.
#[derive(clap::Args)]
pub struct Args {
    /// The process
    #[arg(value_name = "PID", value_parser = live::pid)]
    pid: u32,

    /// Nodes, like 0-3,8, or `all`
    #[arg(value_name = "FROM", value_parser = nodes)]
    from: NodeSet,

    /// Nodes, like 0-3,8, or `all`
    #[arg(value_name = "TO", value_parser = nodes)]
    to: NodeSet,

    /// Print one JSON object instead of lines
    #[arg(long)]
    json: bool,
}

/// Parses a list of nodes. `all` are all that can be.
fn nodes(text: &str) -> Result<NodeSet, String> {
    if text == "all" {
        return Ok((0..MAX_NODES).collect());
    }
    let nodes: NodeSet = text.parse().map_err(|error: ListError| error.to_string())?;
    match nodes.is_empty() {
        true => Err("name a node, like 0".to_owned()),
        false => Ok(nodes),
    }
}

/// What was moved.
#[derive(Serialize)]
struct Answer {
    process: Identity,
    from: Vec<usize>,
    to: Vec<usize>,
    /// Pages that the kernel tried to move and could not.
    not_moved_pages: usize,
    nodes: Vec<OnNode>,
}

/// The process's memory on a node.
#[derive(Serialize)]
struct OnNode {
    node: usize,
    before_bytes: u64,
    after_bytes: u64,
}

pub fn main(args: Args) -> Result<ExitCode> {
    let pid = args.pid;
    let machine = Machine::read(Path::new("/"))?;
    let from = there(&machine, &args.from).context("FROM")?;
    let to = there(&machine, &args.to).context("TO")?;
    if let Some(fault) = machine.fault(&Mempolicy::bind(to.clone())?) {
        bail!("TO: {fault}");
    }
    check_numbers()?;
    let process = Process::open(Path::new("/"), pid)?;
    // This also makes sure that the process has not ended.
    let (_, before) = read(&process)?;
    let number = i32::try_from(pid).context("a process id is below 2^31")?;
    let not_moved = mempolicy::migrate(number, &from, &to).map_err(|error| explain(error, pid))?;
    // If the process has not ended yet, no other one had its number, so the call met this process.
    let (name, after) = read(&process).with_context(|| {
        format!(
            "the kernel was asked to move the pages of process {pid}, but the outcome is not known; if the process had ended, another one with its number may have been moved"
        )
    })?;
    let nodes = machine
        .topology
        .nodes
        .or(&before.nodes())
        .or(&after.nodes());
    let nodes = nodes.iter().map(|node| OnNode {
        node,
        before_bytes: before.total(node),
        after_bytes: after.total(node),
    });
    let answer = Answer {
        process: process.identity(name),
        from: from.iter().collect(),
        to: to.iter().collect(),
        not_moved_pages: not_moved,
        nodes: nodes.collect(),
    };
    output::show(args.json, "migrate", &answer, || answer.to_string())?;
    Ok(ExitCode::from(u8::from(not_moved > 0)))
}

/// Returns the nodes, of which each is there. `all` are the nodes with memory.
fn there(machine: &Machine, nodes: &NodeSet) -> Result<NodeSet> {
    if nodes.len() == MAX_NODES {
        return Ok(machine.topology.with_memory.clone());
    }
    match machine.absent(nodes) {
        Some(fault) => bail!(fault),
        None => Ok(nodes.clone()),
    }
}

/// Fails if `/proc` numbers processes in another way than system calls do. A number from there
/// would mean another process.
fn check_numbers() -> Result<()> {
    let own = std::fs::read_link("/proc/self").ok();
    let number: Option<u32> = own.and_then(|own| own.to_str()?.parse().ok());
    if number.context(NO_PROC)? != std::process::id() {
        bail!(
            "/proc shows the processes of another PID namespace; run this in that namespace, for example by nsenter"
        );
    }
    Ok(())
}

/// Returns the process's name, and its bytes by node.
fn read(process: &Process) -> Result<(String, Usage)> {
    let _deadline = Deadline::after(PATIENCE);
    process.usage()
}

/// Says what to do about the kernel's refusal.
fn explain(error: PolicyError, pid: u32) -> anyhow::Error {
    let what = match error {
        PolicyError::NeedsRights(_) => format!(
            "process {pid}: run this as its owner, or as root; nodes that the process may not use need root"
        ),
        _ => format!("process {pid}"),
    };
    anyhow::Error::new(error).context(what)
}

impl Answer {
    /// Returns the bytes that are left on nodes that they should have left.
    fn left(&self) -> u64 {
        let is_left = |on: &&OnNode| self.from.contains(&on.node) && !self.to.contains(&on.node);
        let left = self.nodes.iter().filter(is_left);
        left.fold(0, |sum, on| sum.saturating_add(on.after_bytes))
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let set = |nodes: &[usize]| listed(&nodes.iter().copied().collect());
        let mut head = Lines::default();
        head.add(format_args!(
            "process {} ({}): moved from {} to {}; pages that could not be moved: {}",
            self.process.pid,
            self.process.name,
            set(&self.from),
            set(&self.to),
            self.not_moved_pages
        ));
        let mut table = Table::of(["before", "after"]).column("MiB", |row| row);
        for on in &self.nodes {
            table = table.column(format_args!("node {}", on.node), |row| {
                live::mib(match row {
                    "before" => on.before_bytes,
                    _ => on.after_bytes,
                })
            });
        }
        write!(f, "{head}{}", table.table())?;
        let left = self.from.iter().copied();
        let left: Vec<_> = left.filter(|node| !self.to.contains(node)).collect();
        if self.left() > 0 {
            writeln!(
                f,
                "{} MiB stay on {}: pages in use, or without CAP_SYS_NICE, pages that other processes map too",
                live::mib(self.left()),
                set(&left)
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_lists() {
        assert_eq!(nodes("0-2,5").unwrap().to_string(), "0-2,5");
        assert_eq!(nodes("all").unwrap().len(), MAX_NODES);
        for text in ["", " ", "x", "0-", "1024", "0@1", "!0", "-1", "al"] {
            assert!(nodes(text).is_err(), "{text}");
        }
    }
}
