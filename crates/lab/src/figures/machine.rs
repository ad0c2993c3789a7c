//! The machine, as the rows of this command name its facts.

use crate::machine;
use serde::Serialize;

/// What a reader needs to judge the results.
#[derive(Serialize)]
pub struct Machine {
    #[serde(flatten)]
    facts: machine::Machine,
    /// Millions of ticks per second of the counter that measures cycles.
    tsc_mhz: u64,
    /// How Pinfold reaches its per-CPU memory.
    backend: &'static str,
}

impl Machine {
    /// Reads the facts. Takes 50 ms if the counter does not state its rate.
    pub fn read() -> Machine {
        let facts = machine::Machine::read();
        Machine {
            tsc_mhz: facts.tsc_hz / 1_000_000,
            backend: facts.backend,
            facts,
        }
    }

    /// Returns the facts with their names, for people.
    pub fn facts(&self) -> Vec<(&'static str, String)> {
        let machine::Machine {
            cpu,
            cpus,
            architecture,
            kernel,
            libc,
            ..
        } = &self.facts;
        vec![
            ("CPU", format!("{cpu} ({architecture})")),
            ("CPUs that may be used", cpus.to_string()),
            ("kernel", format!("Linux {kernel}")),
            ("C library", libc.clone()),
            ("counter", format!("{} MHz", self.tsc_mhz)),
            ("per-CPU memory by", self.backend.to_owned()),
        ]
    }

    /// Formats a line for people.
    pub fn describe(&self) -> String {
        self.facts.describe("")
    }
}
