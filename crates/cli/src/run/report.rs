//! The report of `run --stats`; docs/stats.md explains every line.

use super::statistics::{Process, Report, hit_rate};
use crate::complain;
use std::fmt;
use std::fs::File;
use std::io::Write;

impl Report {
    /// Prints on standard error; one that is closed stops nothing.
    pub fn print(&self) {
        let _ = std::io::stderr().write_all(self.to_string().as_bytes());
    }

    /// Writes the same for programs. The command has ended already, so its status stands, whatever happens here.
    pub fn write_json(&self, mut file: File) {
        let text = serde_json::to_string_pretty(self).unwrap_or_default() + "\n";
        if let Err(error) = file.write_all(text.as_bytes()) {
            complain(format_args!("the statistics could not be written: {error}"));
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.process {
            Some(process) => describe(f, process)?,
            None => writeln!(
                f,
                "pinfold: no statistics: the command's process left none; it ended before it allocated, or what it started by exec is static or setuid or was given another environment"
            )?,
        }
        if !self.others.is_empty() {
            let calls = sum(self.others.iter().map(Process::calls));
            let peaks = self.others.iter().map(|process| process.held_peak);
            let processes = match self.others.len() {
                1 => "1 further process".to_owned(),
                n => format!("{} further processes", grouped(n as u64)),
            };
            writeln!(
                f,
                "  {processes}: {} calls, largest peak {}",
                grouped(calls),
                bytes(peaks.max().unwrap_or(0))
            )?;
        }
        Ok(())
    }
}

/// Segments may hold any number, so nothing here may overflow.
fn sum(numbers: impl Iterator<Item = u64>) -> u64 {
    numbers.fold(0, u64::saturating_add)
}

impl Process {
    fn allocations(&self) -> u64 {
        sum(self.classes.iter().map(|class| class.alloc)).saturating_add(self.large_alloc)
    }

    fn frees(&self) -> u64 {
        sum(self.classes.iter().map(|class| class.free)).saturating_add(self.large_free)
    }

    fn calls(&self) -> u64 {
        self.allocations().saturating_add(self.frees())
    }

    fn live(&self) -> u64 {
        let small = self
            .classes
            .iter()
            .map(|class| class.live().saturating_mul(class.size));
        sum(small).saturating_add(self.large_live)
    }
}

fn describe(f: &mut fmt::Formatter<'_>, process: &Process) -> fmt::Result {
    let small = sum(process.classes.iter().map(|class| class.calls()));
    let slow = sum(process.classes.iter().map(|class| class.slowpath));
    let lines = [
        (
            "calls",
            format!(
                "{} allocations, {} frees, {} reallocs, {} failed",
                grouped(process.allocations()),
                grouped(process.frees()),
                grouped(process.realloc),
                grouped(process.failed)
            ),
        ),
        ("requested", bytes(process.requested)),
        ("live", format!("{} at the end", bytes(process.live()))),
        (
            "held",
            format!(
                "{} at the end ({} huge), {} at the peak",
                bytes(process.held),
                bytes(process.huge),
                bytes(process.held_peak)
            ),
        ),
        (
            "returned",
            format!("{} to the system", bytes(process.returned)),
        ),
        ("sheaf hits", percent(hit_rate(small, slow))),
    ];
    writeln!(f, "pinfold: process {} on {}", process.pid, process.backend)?;
    for (name, value) in lines {
        writeln!(f, "  {name:<12}{value}")?;
    }
    classes(f, process)
}

fn classes(f: &mut fmt::Formatter<'_>, process: &Process) -> fmt::Result {
    writeln!(
        f,
        "  {:>7} {:>14} {:>14} {:>12} {:>8} {:>12} {:>12} {:>9} {:>9}",
        "size", "allocated", "freed", "live", "hits", "refilled", "flushed", "slabs", "given back"
    )?;
    for class in process.classes.iter().filter(|class| class.calls() > 0) {
        writeln!(
            f,
            "  {:>7} {:>14} {:>14} {:>12} {:>8} {:>12} {:>12} {:>9} {:>9}",
            class.size,
            grouped(class.alloc),
            grouped(class.free),
            grouped(class.live()),
            percent(class.hit_rate()),
            grouped(class.refilled),
            grouped(class.flushed),
            grouped(class.slab_alloc),
            grouped(class.slab_free)
        )?;
    }
    if process.large_alloc > 0 {
        writeln!(
            f,
            "  {:>7} {:>14} {:>14} {:>12}",
            "larger",
            grouped(process.large_alloc),
            grouped(process.large_free),
            grouped(process.large_alloc.saturating_sub(process.large_free))
        )?;
    }
    Ok(())
}

fn percent(rate: Option<f64>) -> String {
    rate.map_or_else(|| "-".to_owned(), |rate| format!("{:.2} %", 100.0 * rate))
}

/// 1234567 as 1,234,567.
fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (nth, digit) in digits.chars().enumerate() {
        if nth > 0 && (digits.len() - nth).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Bytes with a unit of powers of 1024.
fn bytes(n: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if n < 1024 {
        return format!("{n} B");
    }
    let power = (n.ilog2() / 10).min(UNITS.len() as u32);
    format!(
        "{:.1} {}",
        n as f64 / 1024f64.powi(power as i32),
        UNITS[power as usize - 1]
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(999), "999");
        assert_eq!(grouped(1_234_567), "1,234,567");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(u64::MAX), "16777216.0 TiB");
        assert_eq!(percent(None), "-");
    }
}
