//! The emulated machines. A new machine is a new row in [`MACHINES`].

use anyhow::{Context, Result};

/// A machine to emulate.
pub struct Machine {
    pub name: &'static str,
    /// What the machine is for.
    pub about: &'static str,
    pub nodes: &'static [Node],
    /// Distances as firmware reports them: from the CPUs of the row's node to the memory of the
    /// column's node. 10 is local. Without a table, all other distances are 20.
    pub distances: &'static [&'static [u8]],
    /// Additional words for the kernel's command line.
    pub kernel: &'static str,
}

/// A node of a machine. CPUs are numbered consecutively, node after node.
pub struct Node {
    pub cpus: u32,
    pub mebibytes: u32,
    /// False for a hole in the kernel's numbers: firmware reports the node's CPUs, but none is
    /// plugged in.
    pub there: bool,
}

const fn node(cpus: u32, mebibytes: u32) -> Node {
    Node {
        cpus,
        mebibytes,
        there: true,
    }
}

const HOLE: Node = Node {
    cpus: 1,
    mebibytes: 0,
    there: false,
};

pub const MACHINES: &[Machine] = &[
    Machine {
        name: "nodes4",
        about: "four nodes in a ring, the last CPU isolated and without a tick",
        nodes: &[node(2, 1024), node(2, 1024), node(2, 1024), node(2, 1024)],
        distances: &[
            &[10, 20, 30, 20],
            &[20, 10, 20, 30],
            &[30, 20, 10, 20],
            &[20, 30, 20, 10],
        ],
        kernel: "isolcpus=7 nohz_full=7",
    },
    Machine {
        name: "nodes2",
        about: "two nodes of two CPUs; the default for aarch64, whose emulation is slower",
        nodes: &[node(2, 512), node(2, 512)],
        distances: &[],
        kernel: "",
    },
    Machine {
        name: "cpus16",
        about: "sixteen CPUs, one node",
        nodes: &[node(16, 1536)],
        distances: &[],
        kernel: "",
    },
    Machine {
        name: "cpus2",
        about: "one node with two CPUs",
        nodes: &[node(2, 1024)],
        distances: &[],
        kernel: "",
    },
    Machine {
        name: "cpus8",
        about: "one node with eight CPUs",
        nodes: &[node(8, 1536)],
        distances: &[],
        kernel: "",
    },
    Machine {
        name: "cpus64",
        about: "one node with 64 CPUs, which tick only if they have several threads",
        nodes: &[node(64, 3072)],
        distances: &[],
        kernel: "nohz_full=1-63 lpj=4000000 tsc=reliable",
    },
    Machine {
        name: "cpus240",
        about: "one node with 240 CPUs, nearly as many as qemu 7.2 can emulate; as cpus64",
        nodes: &[node(240, 6144)],
        distances: &[],
        kernel: "nohz_full=1-239 lpj=4000000 tsc=reliable",
    },
    Machine {
        name: "memoryless",
        about: "node 1 has CPUs and no memory, and node 2 is nearest to it; node 3 has memory and no CPUs",
        nodes: &[node(2, 768), node(2, 0), node(2, 512), node(0, 256)],
        distances: &[
            &[10, 40, 20, 30],
            &[40, 10, 15, 50],
            &[20, 15, 10, 30],
            &[30, 50, 30, 10],
        ],
        kernel: "",
    },
    Machine {
        name: "sparse",
        about: "nodes 0, 2 and 5; firmware reports 1, 3 and 4, which do not exist",
        nodes: &[node(2, 768), HOLE, node(2, 512), HOLE, HOLE, node(2, 512)],
        distances: &[
            &[10, 99, 20, 99, 99, 40],
            &[99, 10, 99, 99, 99, 99],
            &[20, 99, 10, 99, 99, 30],
            &[99, 99, 99, 10, 99, 99],
            &[99, 99, 99, 99, 10, 99],
            &[40, 99, 30, 99, 99, 10],
        ],
        kernel: "",
    },
];

impl Machine {
    /// # Errors
    ///
    /// If there is no machine of this name.
    pub fn named(name: &str) -> Result<&'static Machine> {
        let found = MACHINES.iter().find(|machine| machine.name == name);
        found.context("cargo xtask vm --list lists the machines")
    }

    /// Returns the number of places for CPUs, whether or not a CPU is plugged in.
    pub fn places(&self) -> u32 {
        self.nodes.iter().map(|node| node.cpus).sum()
    }

    /// Returns the nodes with the first CPU place of each.
    pub fn numbered(&self) -> impl Iterator<Item = (usize, u32, &Node)> {
        let mut next = 0;
        self.nodes.iter().enumerate().map(move |(id, node)| {
            let first = next;
            next += node.cpus;
            (id, first, node)
        })
    }

    /// Returns what tests should find, for `PINFOLD_MACHINE`: `node:cpus:mebibytes:distances` for
    /// each present node. The kernel numbers the plugged-in CPUs without gaps.
    pub fn expected(&self) -> String {
        let there = |id: usize| self.nodes[id].there;
        let mut next = 0;
        let mut nodes = Vec::new();
        for (id, node) in self.nodes.iter().enumerate().filter(|(id, _)| there(*id)) {
            let cpus: Vec<_> = (next..next + node.cpus)
                .map(|cpu| cpu.to_string())
                .collect();
            next += node.cpus;
            let distances: Vec<_> = (0..self.nodes.len())
                .filter(|to| there(*to))
                .map(|to| self.distance(id, to).to_string())
                .collect();
            let (cpus, distances) = (cpus.join(","), distances.join(","));
            nodes.push(format!("{id}:{cpus}:{}:{distances}", node.mebibytes));
        }
        nodes.join(";")
    }

    pub fn distance(&self, from: usize, to: usize) -> u8 {
        let said = self.distances.get(from).and_then(|row| row.get(to));
        said.copied().unwrap_or(if from == to { 10 } else { 20 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distance_tables_are_square_and_local_is_ten() {
        for machine in MACHINES {
            let nodes = machine.nodes.len();
            let rows = machine.distances;
            assert!(rows.is_empty() || rows.len() == nodes, "{}", machine.name);
            assert!(
                rows.iter().all(|row| row.len() == nodes),
                "{}",
                machine.name
            );
            assert!((0..nodes).all(|node| machine.distance(node, node) == 10));
            assert!(machine.nodes[0].there && machine.nodes[0].mebibytes > 0);
        }
    }

    #[test]
    fn absent_nodes_are_not_expected() {
        let sparse = Machine::named("sparse").unwrap();
        let expected = sparse.expected();
        assert_eq!(
            expected,
            "0:0,1:768:10,20,40;2:2,3:512:20,10,30;5:4,5:512:40,30,10"
        );
        assert_eq!(sparse.places(), 9);
    }
}
