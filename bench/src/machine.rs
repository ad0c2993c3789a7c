//! The machine that a measurement ran on, and how the peers were built.

use crate::built::Built;
use pinfold_lab::machine::{self, line};
use serde::Serialize;
use std::fmt;

/// What a reader needs to judge the results.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    #[serde(flatten)]
    pub facts: machine::Machine,
    /// The governor of the CPU's frequency, if the system shows it.
    #[serde(skip_serializing_if = "Option::is_none")]
    governor: Option<String>,
    /// When the kernel uses transparent huge pages.
    #[serde(skip_serializing_if = "Option::is_none")]
    transparent_huge_pages: Option<String>,
    /// How the peers were built.
    #[serde(flatten)]
    built: Built,
}

impl Machine {
    /// Reads the facts and measures the machine's primitives. Takes about 0.2 s.
    pub fn read() -> Machine {
        Machine {
            facts: machine::Machine::read(),
            governor: line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
            transparent_huge_pages: line("/sys/kernel/mm/transparent_hugepage/enabled")
                .and_then(|modes| Some(modes.split_once('[')?.1.split_once(']')?.0.to_owned())),
            built: Built::read(),
        }
    }

    /// Warns on standard error about whatever makes the figures unfair.
    pub fn warn(&self) {
        for warning in self.built.warnings() {
            eprintln!("{warning}");
        }
    }
}

/// A line for people, and one with what the machine's primitives cost.
impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let governor = self.governor.as_deref().unwrap_or("unknown");
        writeln!(f, "{}, governor {governor}", self.facts)?;
        write!(f, "{}", self.facts.primitives)
    }
}
