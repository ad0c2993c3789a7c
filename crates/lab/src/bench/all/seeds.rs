//! The five documents that Pinfold's benchmarks come from: their questions and their own figures.

use serde::Deserialize;
use std::sync::LazyLock;

/// The documents, as `seeds.json` has them.
#[derive(Deserialize)]
pub struct Documents {
    pub seeds: Vec<Seed>,
    /// The ways to increment of 2007, in cycles per call: inc_zone, dec_zone, count_vm_event.
    pub increments: Vec<(String, [u32; 3])>,
    /// slab_test of 2015.
    pub slab: Vec<Slab>,
    /// The loop of 2011 with 16 processes and 10,000,000 passes in each, in seconds: real, user,
    /// sys.
    pub loops: Vec<(String, [f64; 3])>,
    /// The tables of 2008.
    pub faults: Vec<Faults>,
}

/// A document, and the benchmark that answers its question.
#[derive(Deserialize)]
pub struct Seed {
    /// The benchmark's name on the command line.
    pub bench: String,
    pub title: String,
    /// Where the figures were published.
    pub source: String,
    /// The machine that the document's figures come from.
    pub machine: String,
    pub question: String,
}

/// slab_test of 2015 for one size, in cycles: alloc, free, and a pair of both.
#[derive(Deserialize)]
pub struct Slab {
    pub size: u32,
    pub before: [u32; 3],
    pub after: [u32; 3],
}

/// A table of 2008. A line for each number of threads from 1 to 7 has the faults per CPU second and
/// per wall-clock second before the patches, and the same two after them.
#[derive(Deserialize)]
pub struct Faults {
    pub memory: String,
    pub policy: String,
    pub title: String,
    pub lines: [[u32; 4]; 7],
}

/// The passes of all processes of 2011.
pub const PASSES: f64 = 160e6;

pub static DOCUMENTS: LazyLock<Documents> = LazyLock::new(|| {
    serde_json::from_str(include_str!("seeds.json")).expect("the figures have this form")
});
