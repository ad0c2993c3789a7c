//! The report of `pinfold run --stats`. docs/stats.md explains every line.

use super::statistics::{Class, Process, Report, hit_rate};
use std::fmt::Write;

/// Prints the report to standard error. A closed standard error is not an error.
pub fn print(report: &Report) {
    let mut text = String::new();
    match &report.main {
        Some(process) => describe(&mut text, process),
        None => text.push_str(
            "pinfold: no statistics: the program left none (it may have cleared its environment, or ended before it allocated memory)\n",
        ),
    }
    if !report.others.is_empty() {
        let (calls, held) = report.others.iter().fold((0, 0), |(calls, held), process| {
            let calls = u64::saturating_add(calls, process.calls());
            (calls, held.max(process.held_peak))
        });
        let _ = writeln!(
            text,
            "  {} further processes: {} calls, largest peak {}",
            report.others.len(),
            grouped(calls),
            bytes(held)
        );
    }
    crate::output::report(&text);
}

// The program can have written any numbers, so sums stop at the largest number.
impl Process {
    /// Returns the sum of `of` over all classes.
    fn of_classes(&self, of: impl Fn(&Class) -> u64) -> u64 {
        self.classes.iter().map(of).fold(0, u64::saturating_add)
    }

    fn allocations(&self) -> u64 {
        let small = self.of_classes(|class| class.alloc);
        small.saturating_add(self.large_alloc)
    }

    fn frees(&self) -> u64 {
        let small = self.of_classes(|class| class.free);
        small.saturating_add(self.large_free)
    }

    fn calls(&self) -> u64 {
        self.allocations().saturating_add(self.frees())
    }

    fn live(&self) -> u64 {
        let small = self.of_classes(|class| class.live().saturating_mul(class.size));
        small.saturating_add(self.large_live)
    }
}

fn describe(text: &mut String, process: &Process) {
    let backend = match process.backend {
        1 => "restartable sequences, by CPU number",
        2 => "restartable sequences, by concurrency id",
        _ => "atomics",
    };
    let small = process.of_classes(Class::calls);
    let slow = process.of_classes(|class| class.slowpath);
    let _ = writeln!(text, "pinfold: process {} on {backend}", process.pid);
    let mut line = |name: &str, value: String| {
        let _ = writeln!(text, "  {name:<12}{value}");
    };
    line(
        "calls",
        format!(
            "{} allocations, {} frees, {} reallocs, {} failed",
            grouped(process.allocations()),
            grouped(process.frees()),
            grouped(process.realloc),
            grouped(process.failed)
        ),
    );
    line("requested", bytes(process.requested));
    line("live", format!("{} at the end", bytes(process.live())));
    line(
        "held",
        format!(
            "{} at the end ({} huge), {} at the peak",
            bytes(process.held),
            bytes(process.huge),
            bytes(process.held_peak)
        ),
    );
    line(
        "returned",
        format!("{} to the system", bytes(process.returned)),
    );
    line("cache hits", percent(hit_rate(small, slow)));
    classes(text, process);
}

fn classes(text: &mut String, process: &Process) {
    let _ = writeln!(
        text,
        "  {:>7} {:>14} {:>14} {:>12} {:>8} {:>12} {:>12} {:>9} {:>9}",
        "size", "allocated", "freed", "live", "hits", "refilled", "flushed", "slabs", "given back"
    );
    for class in process.classes.iter().filter(|class| class.calls() > 0) {
        let _ = writeln!(
            text,
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
        );
    }
    if process.large_alloc > 0 {
        let _ = writeln!(
            text,
            "  {:>7} {:>14} {:>14} {:>12}",
            "larger",
            grouped(process.large_alloc),
            grouped(process.large_free),
            grouped(process.large_alloc.saturating_sub(process.large_free))
        );
    }
}

fn percent(rate: Option<f64>) -> String {
    rate.map_or_else(|| "-".to_owned(), |rate| format!("{:.2} %", 100.0 * rate))
}

/// Formats 1234567 as 1,234,567.
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

/// Formats bytes with a unit that is a power of 1024.
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
    fn numbers_are_grouped_and_have_units() {
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(999), "999");
        assert_eq!(grouped(1_234_567), "1,234,567");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(u64::MAX), "16777216.0 TiB");
        assert_eq!(percent(None), "-");
    }

    #[test]
    fn false_numbers_have_sums() {
        let class = || Class {
            size: u64::MAX,
            alloc: u64::MAX,
            free: 7,
            slowpath: u64::MAX,
            ..Class::default()
        };
        let process = Process {
            classes: vec![class(), class()],
            large_alloc: 1,
            large_live: u64::MAX,
            ..Process::default()
        };
        let mut text = String::new();
        describe(&mut text, &process);
        assert!(
            text.contains("18,446,744,073,709,551,615 allocations"),
            "{text}"
        );
    }
}
