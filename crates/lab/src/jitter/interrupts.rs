//! The interrupts of a CPU, as a column of `/proc/interrupts` counts them.

use anyhow::{Context, Result};
use std::ops::Sub;

/// One CPU's counts since the machine started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Interrupts {
    /// All kinds except the local timer.
    pub all: u64,
    /// The local timer: the tick, and timers that programs or the kernel set on this CPU.
    pub timer: u64,
    /// Interrupts from other CPUs: rescheduling, function calls, TLB shootdowns. Included in `all`.
    pub between_cpus: u64,
}

impl Interrupts {
    /// Reads the CPU's column.
    pub fn of(cpu: usize) -> Result<Interrupts> {
        let path = "/proc/interrupts";
        let text = std::fs::read_to_string(path).with_context(|| format!("reading {path}"))?;
        parse(&text, cpu).with_context(|| format!("{path} has no column for CPU {cpu}"))
    }
}

impl Sub for Interrupts {
    type Output = Interrupts;
    fn sub(self, before: Interrupts) -> Interrupts {
        Interrupts {
            all: self.all.saturating_sub(before.all),
            timer: self.timer.saturating_sub(before.timer),
            between_cpus: self.between_cpus.saturating_sub(before.between_cpus),
        }
    }
}

/// Adds up the CPU's column. `None` if the heading does not name the CPU, which is offline then.
fn parse(text: &str, cpu: usize) -> Option<Interrupts> {
    let mut lines = text.lines();
    let heading = format!("CPU{cpu}");
    let column = lines
        .next()?
        .split_whitespace()
        .position(|name| name == heading)?;
    let mut sum = Interrupts::default();
    for line in lines {
        let Some((name, rest)) = line.trim_start().split_once(':') else {
            continue;
        };
        // These rows have one number, for the whole machine.
        if ["ERR", "MIS", "Err"].contains(&name) {
            continue;
        }
        let cell = rest.split_whitespace().nth(column);
        let count = cell.and_then(|cell| cell.parse().ok()).unwrap_or(0);
        match name {
            "LOC" => sum.timer += count,
            "RES" | "CAL" | "TLB" => {
                sum.between_cpus += count;
                sum.all += count;
            }
            _ if name.starts_with("IPI") => {
                sum.between_cpus += count;
                sum.all += count;
            }
            _ => sum.all += count,
        }
    }
    Some(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    const X86: &str = "           CPU0       CPU2
 24:          1         20  IO-APIC   5-edge      ACPI:Ged
LOC:        100        200   Local timer interrupts
RES:         10         30   Rescheduling interrupts
CAL:          3          5   Function call interrupts
TLB:          1          2   TLB shootdowns
ERR:          7
MIS:          9
";

    #[test]
    fn a_column_is_added_up() {
        let expected = Interrupts {
            all: 57,
            timer: 200,
            between_cpus: 37,
        };
        assert_eq!(parse(X86, 2), Some(expected));
        assert_eq!(parse(X86, 0).unwrap().all, 15);
        assert_eq!(parse(X86, 1), None);
        assert_eq!(parse("", 0), None);
    }

    #[test]
    fn arm_names_and_short_lines_are_understood() {
        let text =
            "     CPU0 CPU1\nIPI0:  4 5  Rescheduling interrupts\nIPI1: 1\n 9: x y\nnothing\n";
        assert_eq!(parse(text, 1).unwrap().between_cpus, 5);
        assert_eq!(parse(text, 0).unwrap().between_cpus, 5);
    }
}
