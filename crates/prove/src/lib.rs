//! A model checker for the critical sections of `pinfold-rseq`. `docs/proof.md` describes the
//! model, its limits and its results.
//!
//! - `image` reads a built library. `x86` and `arm` decode its instructions into `ir`.
//! - `machine` has the state of the CPUs and threads, and runs one instruction.
//! - `kernel` has what the kernel does between two instructions.
//! - `explore` visits all states that a scene can reach.
//! - `spec` says what an operation does when it runs alone.
//! - `scenarios` has the situations in which each section is checked. `scene` sets them up.
//! - `library` compares the copies in a library with the sections that are checked.
//! - `probe` builds the library, and `report` checks it.
//! - `mutants` makes faulty sections, each of which a scenario must find.
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "not published")]

pub mod arm;
pub mod explore;
pub mod image;
pub mod ir;
pub mod kernel;
pub mod library;
pub mod machine;
pub mod mutants;
pub mod probe;
pub mod report;
pub mod scenarios;
pub mod scene;
pub mod spec;
pub mod x86;
