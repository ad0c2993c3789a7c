//! The machine on which a policy is explained: its nodes, the nodes that this process may use, and
//! the distances between nodes.

use anyhow::{Context, Result, anyhow};
use pinfold::internal::topology_below;
use pinfold::mempolicy::{self, Distances, Flags, Mempolicy, Move, PolicyError, Weights};
use pinfold::topology::{CpuId, MAX_NODES, NodeId, NodeSet, Topology};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// At least the size of any page. A policy is tried on memory that begins at a multiple of it.
const MAX_PAGE: usize = 64 << 10;

pub struct Machine {
    root: PathBuf,
    pub topology: Topology,
    /// The nodes with memory that this process may use.
    pub allowed: NodeSet,
    pub distances: Distances,
}

impl Machine {
    /// Reads the machine's files below `root`.
    pub fn read(root: &Path) -> Result<Machine> {
        let topology = topology_below(root.as_os_str().as_bytes())?;
        let mut machine = Machine {
            root: root.to_owned(),
            distances: Distances::read(&topology),
            allowed: NodeSet::EMPTY,
            topology,
        };
        let with_memory = &machine.topology.with_memory;
        let mems = machine
            .mems_allowed()
            .unwrap_or_else(|| with_memory.clone());
        machine.allowed = mems.and(with_memory);
        Ok(machine)
    }

    /// Returns whether this is the machine that the command runs on.
    pub fn is_here(&self) -> bool {
        self.root == Path::new("/")
    }

    /// Returns the nodes that this process may use, with or without memory. Reads a file if the
    /// kernel cannot be asked.
    fn mems_allowed(&self) -> Option<NodeSet> {
        let asked = self.is_here().then(mempolicy::mems_allowed);
        if let Some(Ok(nodes)) = asked {
            return Some(nodes);
        }
        let status = self.text("proc/self/status");
        let list = status
            .lines()
            .find_map(|line| line.strip_prefix("Mems_allowed_list:"))?;
        list.parse().ok()
    }

    #[expect(clippy::disallowed_methods, reason = "a file of the kernel's own")]
    fn text(&self, file: &str) -> String {
        fs::read_to_string(self.root.join(file)).unwrap_or_default()
    }

    /// Returns the node of the CPU that this thread runs on, or the first node with CPUs if no file
    /// tells that CPU.
    pub fn local(&self) -> NodeId {
        let cpus = |node: usize| {
            let cpus = self.topology.cpus_of(NodeId(node));
            cpus.unwrap_or_default()
        };
        let mut nodes = self.topology.nodes.iter();
        let found = match self.current_cpu() {
            Some(CpuId(cpu)) => nodes.find(|&node| cpus(node).contains(cpu)),
            None => nodes.find(|&node| !cpus(node).is_empty()),
        };
        NodeId(found.or(self.topology.nodes.iter().next()).unwrap_or(0))
    }

    /// Reads field 39 of `/proc/self/stat`. Field 2 is the command's name in brackets, with any
    /// characters.
    fn current_cpu(&self) -> Option<CpuId> {
        let stat = self.text("proc/self/stat");
        let (_, after) = stat.rsplit_once(')')?;
        let number = after.split_ascii_whitespace().nth(39 - 3)?;
        number.parse().ok().map(CpuId)
    }

    pub fn weights(&self) -> Weights {
        Weights::read(&self.topology)
    }

    /// Returns the kernel's name and release, like "Linux 6.18.5".
    pub fn kernel(&self) -> String {
        let release = self.text("proc/sys/kernel/osrelease");
        format!("Linux {}", release.trim()).trim_end().to_owned()
    }

    /// Returns what is wrong with the nodes that a policy names: they do not exist, have no memory,
    /// or are not allowed for this process.
    pub fn fault(&self, policy: &Mempolicy) -> Option<String> {
        let named = policy.user_nodes();
        // Relative positions wrap around, and "all" means the nodes that exist.
        let by_number = !policy.flags().contains(Flags::RELATIVE) && named.len() < MAX_NODES;
        let wanted = if by_number { named } else { &NodeSet::EMPTY };
        if let Some(fault) = self.absent(wanted) {
            return Some(fault);
        }
        let with_memory = &self.topology.with_memory;
        let empty = wanted.without(with_memory);
        if !empty.is_empty() {
            return Some(format!(
                "{} without memory; {} memory",
                are(&empty),
                have(with_memory)
            ));
        }
        let barred = wanted.without(&self.allowed);
        (!barred.is_empty()).then(|| {
            format!(
                "{} not allowed for this process; it may use {} (its cpuset; see Mems_allowed_list in /proc/self/status)",
                are(&barred),
                listed(&self.allowed)
            )
        })
    }

    /// Returns which of the nodes do not exist, if any.
    pub fn absent(&self, wanted: &NodeSet) -> Option<String> {
        let nodes = &self.topology.nodes;
        let absent = wanted.without(nodes);
        (!absent.is_empty()).then(|| {
            format!(
                "{} not there; this machine has {}",
                are(&absent),
                listed(nodes)
            )
        })
    }

    /// Returns what is wrong with the policy's home node.
    pub fn home_fault(&self, policy: &Mempolicy) -> Option<String> {
        let nodes = &self.topology.nodes;
        let home = policy.home().filter(|home| !nodes.contains(home.0))?;
        Some(format!(
            "home node {} is not there; this machine has {}",
            home.0,
            listed(nodes)
        ))
    }

    /// Returns why no program can be started with the policy, as far as the kernel need not be
    /// asked.
    pub fn program_fault(&self, policy: &Mempolicy) -> Option<String> {
        match policy.home() {
            Some(_) => Some(PolicyError::HomeOfThread.to_string()),
            None => self.fault(policy),
        }
    }

    /// Checks whether the running kernel accepts a policy. Sets the policy for a thread that ends
    /// afterwards or, if the policy has a home node, for a range of memory.
    ///
    /// # Errors
    ///
    /// The kernel's answer, or why the kernel could not be asked.
    pub fn try_policy(&self, policy: &Mempolicy) -> Result<()> {
        let policy = policy.clone();
        let trial = move || -> Result<(), PolicyError> {
            if policy.home().is_none() {
                return mempolicy::set_for_thread(&policy);
            }
            let memory = vec![1u8; 2 * MAX_PAGE];
            let page = memory.as_ptr().map_addr(|at| at.next_multiple_of(MAX_PAGE));
            let answer = mempolicy::apply(page, MAX_PAGE, &policy, Move::No, false);
            mempolicy::apply(page, MAX_PAGE, &Mempolicy::default(), Move::No, false)?;
            answer
        };
        let thread = std::thread::Builder::new()
            .spawn(trial)
            .context("starting the thread that tries the policy")?;
        let answer = thread.join();
        Ok(answer.map_err(|_| anyhow!("the thread that tries the policy panicked"))??)
    }
}

/// Formats nodes: "node 3", "nodes 2-3".
pub fn listed(nodes: &NodeSet) -> String {
    match nodes.len() {
        0 => "no nodes".to_owned(),
        1 => format!("node {nodes}"),
        _ => format!("nodes {nodes}"),
    }
}

fn are(nodes: &NodeSet) -> String {
    let verb = if nodes.len() == 1 { "is" } else { "are" };
    format!("{} {verb}", listed(nodes))
}

fn have(nodes: &NodeSet) -> String {
    let verb = if nodes.len() == 1 { "has" } else { "have" };
    format!("{} {verb}", listed(nodes))
}
