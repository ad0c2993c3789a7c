//! The report of `pinfold run --stats`. docs/stats.md explains every line.

use super::statistics::{Class, Process, Report, hit_rate};
use crate::foreign::Identity;
use crate::live::{Cache, backend_name};
use crate::output;
use anyhow::Result;
use pinfold::internal::kmalloc;
use pinfold::internal::segment::{Call, SlabEvent};
use serde::Serialize;
use std::fmt::Write;
use std::path::Path;

/// How the report is written.
pub enum Form {
    Text,
    /// One JSON object about this process.
    Json(Identity),
}

/// Writes the report to a file, or to standard error if that is `None`. A closed standard error is
/// not an error.
pub fn write(report: &Report, form: Form, file: Option<&Path>) -> Result<()> {
    let text = match form {
        Form::Text => text(report),
        Form::Json(process) => output::object("run --stats", Shown::of(process, report))?,
    };
    match file {
        Some(file) => output::write("the statistics", file, text.as_bytes()),
        None => {
            output::report(&text);
            Ok(())
        }
    }
}

fn text(report: &Report) -> String {
    let mut text = String::new();
    match &report.main {
        Some(process) => describe(&mut text, process),
        None => text.push_str(
            "pinfold: no statistics: the program left none (it may have cleared its environment, or ended before it allocated memory)\n",
        ),
    }
    if !report.others.is_empty() {
        let others = Others::of(&report.others);
        let _ = writeln!(
            text,
            "  {} further processes: {} calls, largest peak {}",
            others.processes,
            grouped(others.calls),
            bytes(others.held_peak_bytes)
        );
    }
    text
}

/// The report for programs.
#[derive(Serialize)]
struct Shown {
    process: Identity,
    /// What the last program of the process counted, if it left that.
    counts: Option<Counts>,
    others: Others,
}

#[derive(Serialize)]
struct Counts {
    backend: &'static str,
    allocations: u64,
    frees: u64,
    reallocs: u64,
    failed: u64,
    requested_bytes: u64,
    live_bytes: u64,
    held_bytes: u64,
    held_peak_bytes: u64,
    huge_bytes: u64,
    returned_bytes: u64,
    cache_hit_ratio: Option<f64>,
    /// The size classes that the program used.
    classes: Vec<Size>,
    /// The blocks that are larger than the largest class.
    larger: Larger,
}

#[derive(Serialize)]
struct Size {
    size_bytes: u64,
    aligned: bool,
    allocations: u64,
    frees: u64,
    live_objects: u64,
    cache_hit_ratio: Option<f64>,
    refills: u64,
    flushes: u64,
    slabs_made: u64,
    slabs_freed: u64,
}

#[derive(Serialize)]
struct Larger {
    allocations: u64,
    frees: u64,
    live_objects: u64,
}

/// All other programs: the earlier ones of the process, and those of further processes.
#[derive(Serialize)]
struct Others {
    processes: usize,
    calls: u64,
    /// The largest peak of one of them.
    held_peak_bytes: u64,
}

impl Shown {
    fn of(process: Identity, report: &Report) -> Shown {
        Shown {
            process,
            counts: report.main.as_ref().map(Counts::of),
            others: Others::of(&report.others),
        }
    }
}

impl Others {
    fn of(others: &[Process]) -> Others {
        let calls = others.iter().map(Process::calls);
        let peaks = others.iter().map(|process| process.snapshot.held_peak);
        Others {
            processes: others.len(),
            calls: calls.fold(0, u64::saturating_add),
            held_peak_bytes: peaks.max().unwrap_or(0),
        }
    }
}

impl Counts {
    fn of(process: &Process) -> Counts {
        let Process { snapshot, calls } = process;
        let small = process.of_classes(|class| class.calls());
        let [allocations, frees] =
            [Call::LARGE_ALLOC, Call::LARGE_FREE].map(|call| calls.count(call));
        Counts {
            backend: backend_name(snapshot.backend),
            allocations: process.allocations(),
            frees: process.frees(),
            reallocs: calls.count(Call::REALLOC),
            failed: calls.count(Call::FAILED),
            requested_bytes: calls.count(Call::REQUESTED),
            live_bytes: process.live(),
            held_bytes: snapshot.held,
            held_peak_bytes: snapshot.held_peak,
            huge_bytes: snapshot.huge,
            returned_bytes: snapshot.returned,
            cache_hit_ratio: hit_rate(small, snapshot.of_caches(Cache::slow)),
            classes: process
                .classes()
                .filter(|class| class.calls() > 0)
                .map(|class| Size {
                    size_bytes: class.cache.size,
                    aligned: kmalloc::is_aligned(class.cache.nth),
                    allocations: class.alloc,
                    frees: class.free,
                    live_objects: class.live(),
                    cache_hit_ratio: class.hit_rate(),
                    refills: class.cache.count(SlabEvent::Refilled),
                    flushes: class.cache.count(SlabEvent::Flushed),
                    slabs_made: class.cache.count(SlabEvent::SlabAlloc),
                    slabs_freed: class.cache.count(SlabEvent::SlabFree),
                })
                .collect(),
            larger: Larger {
                allocations,
                frees,
                live_objects: allocations.saturating_sub(frees),
            },
        }
    }
}

// The program can have written any numbers, so sums stop at the largest number.
impl Process {
    /// Returns the sum of `of` over all classes.
    fn of_classes(&self, of: impl Fn(Class<'_>) -> u64) -> u64 {
        self.classes().map(of).fold(0, u64::saturating_add)
    }

    fn allocations(&self) -> u64 {
        let small = self.of_classes(|class| class.alloc);
        small.saturating_add(self.calls.count(Call::LARGE_ALLOC))
    }

    fn frees(&self) -> u64 {
        let small = self.of_classes(|class| class.free);
        small.saturating_add(self.calls.count(Call::LARGE_FREE))
    }

    fn calls(&self) -> u64 {
        self.allocations().saturating_add(self.frees())
    }

    fn live(&self) -> u64 {
        let small = self.of_classes(|class| class.live().saturating_mul(class.cache.size));
        let large = self.calls.count(Call::LARGE_BYTES);
        let freed = self.calls.count(Call::LARGE_BYTES_FREED);
        small.saturating_add(large.saturating_sub(freed))
    }
}

fn describe(text: &mut String, process: &Process) {
    let Process { snapshot, calls } = process;
    let backend = match snapshot.backend {
        1 => "restartable sequences, by CPU number",
        2 => "restartable sequences, by concurrency id",
        _ => "atomics",
    };
    let small = process.of_classes(|class| class.calls());
    let slow = snapshot.of_caches(Cache::slow);
    let _ = writeln!(text, "pinfold: process {} on {backend}", snapshot.pid);
    let mut line = |name: &str, value: String| {
        let _ = writeln!(text, "  {name:<12}{value}");
    };
    line(
        "calls",
        format!(
            "{} allocations, {} frees, {} reallocs, {} failed",
            grouped(process.allocations()),
            grouped(process.frees()),
            grouped(calls.count(Call::REALLOC)),
            grouped(calls.count(Call::FAILED))
        ),
    );
    line("requested", bytes(calls.count(Call::REQUESTED)));
    line("live", format!("{} at the end", bytes(process.live())));
    line(
        "held",
        format!(
            "{} at the end ({} huge), {} at the peak",
            bytes(snapshot.held),
            bytes(snapshot.huge),
            bytes(snapshot.held_peak)
        ),
    );
    line(
        "returned",
        format!("{} to the system", bytes(snapshot.returned)),
    );
    line("cache hits", percent(hit_rate(small, slow)));
    classes(text, process);
}

fn classes(text: &mut String, process: &Process) {
    let mut row = |cells: [String; 9]| {
        let widths = [12, 14, 14, 12, 8, 12, 12, 9, 9];
        let cells = cells.iter().zip(widths);
        let cells: Vec<_> = cells
            .map(|(cell, width)| format!("{cell:>width$}"))
            .collect();
        let _ = writeln!(text, "  {}", cells.join(" "));
    };
    let heads = "size allocated freed live hits refilled flushed slabs given back";
    let mut heads = heads.splitn(9, ' ');
    row([(); 9].map(|()| heads.next().unwrap_or_default().to_owned()));
    for class in process.classes().filter(|class| class.calls() > 0) {
        let count = |event| grouped(class.cache.count(event));
        row([
            match kmalloc::is_aligned(class.cache.nth) {
                true => format!("{}-align", class.cache.size),
                false => class.cache.size.to_string(),
            },
            grouped(class.alloc),
            grouped(class.free),
            grouped(class.live()),
            percent(class.hit_rate()),
            count(SlabEvent::Refilled),
            count(SlabEvent::Flushed),
            count(SlabEvent::SlabAlloc),
            count(SlabEvent::SlabFree),
        ]);
    }
    let [alloc, free] = [Call::LARGE_ALLOC, Call::LARGE_FREE].map(|call| process.calls.count(call));
    if alloc > 0 {
        let _ = writeln!(
            text,
            "  {:>12} {:>14} {:>14} {:>12}",
            "larger",
            grouped(alloc),
            grouped(free),
            grouped(alloc.saturating_sub(free))
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
    use crate::live::{Snapshot, segment, set_call};

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
        let mut bytes = segment(1);
        for call in [Call::alloc(0), Call::alloc(1), Call::LARGE_ALLOC] {
            set_call(&mut bytes, 0, call, usize::MAX);
        }
        let mut snapshot = Snapshot::parse(&bytes).unwrap();
        let caches = snapshot.caches.iter_mut();
        caches.for_each(|cache| cache.size = u64::MAX);
        let calls = snapshot.calls.take().unwrap();
        let process = Process { snapshot, calls };
        let mut text = String::new();
        describe(&mut text, &process);
        assert!(
            text.contains("18,446,744,073,709,551,615 allocations"),
            "{text}"
        );
    }
}
