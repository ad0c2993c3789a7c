//! The machine, as the rows of this command name its facts.

use pinfold_benchkit::machine;
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

    /// Formats a line for people.
    pub fn describe(&self) -> String {
        self.facts.describe("")
    }
}
