//! Which nodes memory comes from: `cargo run --release -p pinfold --example mempolicy`.
//!
//! A [`Mempolicy`] is a value with the kernel's words as its text. This example explains a policy,
//! and then uses it for a cache.

use pinfold::mempolicy::{self, Distances, Mempolicy, zonelist};
use pinfold::slab::Cache;
use pinfold::topology::{NodeId, Topology};
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let machine = Topology::system()?;
    let distances = Distances::read(&machine);
    println!("{} CPUs, nodes {}", machine.online.len(), machine.nodes);

    // A text that is no policy names the piece that is wrong.
    let error = "bind:0-x".parse::<Mempolicy>().unwrap_err();
    println!("{error}");

    // Binding computes the nodes of this machine that the policy means.
    let mut policy: Mempolicy = "interleave".parse()?;
    policy.contextualize(&machine.with_memory)?;
    for from in machine.nodes.iter().map(NodeId) {
        let order = zonelist(&policy, from, &distances).map(|node| node.0.to_string());
        println!(
            "{policy} from node {}: {}",
            from.0,
            order.collect::<Vec<_>>().join(", ")
        );
    }

    // Each refill of a CPU's sheaf takes memory from the next node.
    let tables = Cache::<[u64; 512]>::builder("table")
        .policy(&policy)
        .build()?;
    let table = tables.alloc([1; 512]).expect("there is memory");
    // A sandbox may forbid this question.
    if let Ok(node) = mempolicy::node_at(table.as_ptr().cast()) {
        println!("a table is on node {}", node.0);
    }
    Ok(())
}
