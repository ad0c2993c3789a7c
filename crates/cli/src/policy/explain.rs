//! Everything there is to say about a policy on a machine.

use super::{Machine, words};
use pinfold::mempolicy::{Flags, Mempolicy, Mode, PolicyError, effective, node_for, zonelist};
use pinfold::topology::{MAX_NODES, NodeId, NodeSet};
use pinfold_malloc::settings::POLICY;
use serde::Serialize;
use std::fmt;

const PAGES: u64 = 8;
/// The most rows shown: of fallback orders, and of nodes per line of weights.
const ROWS: usize = 8;

/// Where a policy comes from: the command line, PINFOLD_POLICY, or this thread.
#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    Argument,
    Variable,
    Thread,
}

#[derive(Serialize)]
pub struct Explanation {
    /// The policy in the kernel's words.
    text: String,
    source: Source,
    /// Whether a tmpfs takes the policy as `mpol=`.
    tmpfs: bool,
    /// Nodes without memory. A tmpfs refuses the policy only because of them.
    tmpfs_refuses: Vec<usize>,
    mode: &'static str,
    meaning: &'static str,
    flags: Vec<Named>,
    /// The nodes that the policy names: a list, "all", or empty.
    named: String,
    home: Option<usize>,
    /// The nodes that memory comes from. Empty if the policy leaves none.
    nodes: Vec<usize>,
    allowed: Vec<usize>,
    /// The node of the CPU that touches the pages.
    from: usize,
    /// The nodes of the first pages.
    pages: Vec<usize>,
    weights: Vec<Weight>,
    fallback: Vec<Order>,
    on_change: String,
    /// Whether the policy can be used here.
    pub usable: bool,
    /// Whether `pinfold run --policy` starts a program with the policy.
    runnable: bool,
    verdict: String,
}

#[derive(Serialize)]
struct Named {
    name: &'static str,
    meaning: &'static str,
}

#[derive(Serialize)]
struct Weight {
    node: usize,
    weight: u8,
}

/// The nodes that are tried, in this order.
#[derive(Serialize)]
struct Order {
    from: usize,
    nodes: Vec<Step>,
}

#[derive(Serialize)]
struct Step {
    node: usize,
    distance: u32,
}

impl Explanation {
    /// Explains a policy on a machine, for a thread on node `from`.
    pub fn of(policy: &Mempolicy, machine: &Machine, from: NodeId, source: Source) -> Self {
        let mut bound = effective(None, Some(policy)).clone();
        let possible = bound.contextualize(&machine.allowed);
        let weights = machine.weights();
        let weighted = policy.mode() == Mode::WeightedInterleave;
        let node = |page| node_for(&bound, page, from, &weights, &machine.distances).0;
        let weight = |node| Weight {
            node,
            weight: weights.weight(NodeId(node)),
        };
        let homeless = machine.home_fault(policy);
        let placed = possible.is_ok() && homeless.is_none();
        let (usable, verdict) = match (possible, homeless, source) {
            (Err(error), ..) => (false, refused(&error, policy, machine)),
            (_, Some(fault), _) => (false, format!("cannot be used here: {fault}")),
            (.., Source::Thread) => (
                true,
                "in effect in this thread; programs that it starts inherit it".into(),
            ),
            // The library gives this policy to a thread, and a thread's policy has no home node.
            (.., Source::Variable) if policy.home().is_some() => (
                false,
                format!("cannot be used here: {}", PolicyError::HomeOfThread),
            ),
            _ => verdict(policy, machine),
        };
        let runnable = usable && machine.program_fault(policy).is_none();
        let tmpfs_refuses = policy
            .user_nodes()
            .without(&machine.topology.with_memory)
            .iter()
            .filter(|_| tmpfs_has_words(policy))
            .collect::<Vec<_>>();
        Explanation {
            text: policy.to_string(),
            source,
            tmpfs: tmpfs_has_words(policy) && tmpfs_refuses.is_empty(),
            tmpfs_refuses,
            mode: policy.mode().name(),
            meaning: words::of_mode(policy.mode()),
            flags: words::of_flags(policy.flags())
                .map(|(name, meaning)| Named { name, meaning })
                .collect(),
            named: words::named_as(policy),
            home: policy.home().map(|home| home.0),
            nodes: bound.nodes().iter().filter(|_| placed).collect(),
            allowed: machine.allowed.iter().collect(),
            from: from.0,
            pages: (0..PAGES).filter(|_| placed).map(node).collect(),
            weights: bound
                .nodes()
                .iter()
                .filter(|_| placed && weighted)
                .map(weight)
                .collect(),
            fallback: if placed {
                orders(&bound, machine, from)
            } else {
                Vec::new()
            },
            on_change: words::of_change(policy, bound.nodes()),
            usable,
            runnable,
            verdict,
        }
    }
}

/// Returns the fallback order from the node that asks. If nodes are used in turn, returns the order
/// from each of them.
fn orders(bound: &Mempolicy, machine: &Machine, from: NodeId) -> Vec<Order> {
    let in_turn = matches!(bound.mode(), Mode::Interleave | Mode::WeightedInterleave);
    let first = match bound.mode() {
        Mode::Preferred => bound.nodes().iter().next().map_or(from, NodeId),
        _ => bound.home().unwrap_or(from),
    };
    let single: NodeSet = [first.0].into_iter().collect();
    let starts = if in_turn { bound.nodes() } else { &single };
    let order = |from: usize| Order {
        from,
        nodes: zonelist(bound, NodeId(from), &machine.distances)
            .filter(|node| machine.allowed.contains(node.0))
            .map(|node| Step {
                node: node.0,
                distance: machine.distances.distance(NodeId(from), node),
            })
            .collect(),
    };
    starts.iter().map(order).collect()
}

/// Returns whether a tmpfs has words for the policy. It knows neither `balancing` nor home nodes,
/// and knows all nodes only by naming none.
fn tmpfs_has_words(policy: &Mempolicy) -> bool {
    !policy.flags().contains(Flags::BALANCING)
        && policy.home().is_none()
        && policy.user_nodes().len() < MAX_NODES
}

fn refused(error: &PolicyError, policy: &Mempolicy, machine: &Machine) -> String {
    let why = machine.fault(policy).unwrap_or_else(|| error.to_string());
    format!("cannot be used here: {why}")
}

/// Returns whether the running kernel accepts the policy, and a sentence that says so.
fn verdict(policy: &Mempolicy, machine: &Machine) -> (bool, String) {
    let kernel = machine.kernel();
    let mut said = format!("{kernel} accepts it");
    if !machine.is_here() {
        said = format!("{kernel} was not asked, because it is not the running kernel");
    } else if let Err(error) = machine.try_policy(policy) {
        return (false, format!("{kernel} rejects it: {error:#}"));
    } else if machine.fault(policy).is_some() {
        said += ", with only some of its nodes";
    }
    if policy.home().is_some() && machine.is_here() {
        said += ", but only for ranges of addresses";
    }
    if let Some(fault) = machine.program_fault(policy) {
        said += &format!("; `pinfold run --policy` refuses it: {fault}");
    }
    (true, said)
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        line(f, "policy", &self.text)?;
        if self.tmpfs && self.mode != Mode::Default.name() {
            line(f, "", format_args!("for a tmpfs: mpol={}", self.text))?;
        }
        if !self.tmpfs_refuses.is_empty() {
            let nodes: NodeSet = self.tmpfs_refuses.iter().copied().collect();
            let nodes = super::listed(&nodes);
            let text = format!("a tmpfs here would refuse {nodes}, without memory");
            line(f, "", text)?;
        }
        if self.source == Source::Variable {
            let text = format!("from {POLICY}; programs started with the library use it");
            line(f, "", text)?;
        }
        line(f, "mode", format_args!("{}: {}", self.mode, self.meaning))?;
        for (at, flag) in self.flags.iter().enumerate() {
            let label = if at == 0 { "flags" } else { "" };
            line(f, label, format_args!("{}: {}", flag.name, flag.meaning))?;
        }
        line(f, "nodes", self.nodes_line())?;
        if let Some(home) = self.home {
            let text = format!("distances are measured from node {home}");
            line(f, "", text)?;
        }
        for weights in self.weights.chunks(ROWS) {
            let each = weights
                .iter()
                .map(|one| format!("{} x {}", one.node, one.weight));
            line(f, "weights", each.collect::<Vec<_>>().join(", "))?;
        }
        self.pages_lines(f)?;
        for (at, order) in self.fallback.iter().take(ROWS).enumerate() {
            let label = if at == 0 { "fallback" } else { "" };
            line(f, label, order)?;
        }
        let text = format!("when the allowed nodes change: {}", self.on_change);
        line(f, "change", text)?;
        line(f, "kernel", &self.verdict)
    }
}

fn line(f: &mut fmt::Formatter<'_>, label: &str, text: impl fmt::Display) -> fmt::Result {
    writeln!(f, "{label:<12}{text}")
}

impl Explanation {
    fn nodes_line(&self) -> String {
        let allowed: NodeSet = self.allowed.iter().copied().collect();
        let here: NodeSet = self.nodes.iter().copied().collect();
        let named = match self.named.as_str() {
            "" => "names no nodes",
            named => &format!("names {named}"),
        };
        let here = if here.is_empty() {
            String::new()
        } else {
            format!("; here that means {here}")
        };
        format!("{named}{here} (this process may use {allowed})")
    }

    fn pages_lines(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.pages.is_empty() {
            return Ok(());
        }
        let row = |name: &str, numbers: &mut dyn Iterator<Item = usize>| {
            numbers.fold(name.to_owned(), |row, number| row + &format!("{number:>5}"))
        };
        line(f, "pages", row("page", &mut (0..self.pages.len())))?;
        line(f, "", row("node", &mut self.pages.iter().copied()))?;
        let in_turn = self.mode.ends_with("interleave");
        let counted = if in_turn {
            ", numbered from the start of a file or mapping; a thread's policy counts the pages that the thread touches"
        } else {
            ""
        };
        let text = format!("touched by a CPU of node {}{counted}", self.from);
        line(f, "", text)
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "from node {}:", self.from)?;
        for (at, step) in self.nodes.iter().enumerate() {
            let comma = if at == 0 { "" } else { "," };
            write!(f, "{comma} {} (distance {})", step.node, step.distance)?;
        }
        f.write_str("; then none")
    }
}
