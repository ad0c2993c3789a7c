//! The machine that a measurement ran on, and how the peers were built.

use crate::built::Built;
use pinfold_lab::machine::{self, line};
use serde::Serialize;

/// What a reader needs to judge the results.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    #[serde(flatten)]
    facts: machine::Machine,
    /// Ticks per second of the counter that measures cycles.
    pub tsc_hz: u64,
    /// The governor of the CPU's frequency, if the system shows it.
    #[serde(skip_serializing_if = "Option::is_none")]
    governor: Option<String>,
    /// When the kernel uses transparent huge pages.
    #[serde(skip_serializing_if = "Option::is_none")]
    transparent_huge_pages: Option<String>,
    /// How Pinfold reaches its per-CPU memory.
    pinfold_backend: &'static str,
    /// How the peers were built.
    #[serde(flatten)]
    built: Built,
}

impl Machine {
    /// Reads the facts. Takes 50 ms if the counter does not state its rate.
    pub fn read() -> Machine {
        let facts = machine::Machine::read();
        Machine {
            tsc_hz: facts.tsc_hz,
            governor: line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
            transparent_huge_pages: line("/sys/kernel/mm/transparent_hugepage/enabled")
                .and_then(|modes| Some(modes.split_once('[')?.1.split_once(']')?.0.to_owned())),
            pinfold_backend: facts.backend,
            built: Built::read(),
            facts,
        }
    }

    /// Warns on standard error about whatever makes the figures unfair.
    pub fn warn(&self) {
        for warning in self.built.warnings() {
            eprintln!("{warning}");
        }
    }

    /// Formats a line for people.
    pub fn describe(&self) -> String {
        let governor = self.governor.as_deref().unwrap_or("unknown");
        self.facts.describe(&format!(", governor {governor}"))
    }
}
