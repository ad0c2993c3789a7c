//! What the plugin counted in one run of a load, as it reports it and as it is saved.

use super::Cell;
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::fs;
use std::ops::Add;
use std::path::PathBuf;
use std::process::Command;

/// A line of the plugin's output.
pub type Report = Value;

/// The counts of all allocations, or of all frees, or of what the program did between them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub operations: u64,
    pub instructions: u64,
    /// Accesses to a line that another CPU changed.
    pub misses: u64,
    /// Writes to a line that other CPUs hold too.
    pub upgrades: u64,
    pub locked: u64,
    /// Locked instructions on a line that another CPU wrote last.
    pub handovers: u64,
    pub fences: u64,
    pub syscalls: u64,
    /// Transfers that the kernel caused.
    pub kernel: u64,
    /// Transfers by the program's first write to an object.
    pub touches: u64,
}

impl Counts {
    const NAMES: [&str; 10] = [
        "operations",
        "instructions",
        "misses",
        "upgrades",
        "locked",
        "handovers",
        "fences",
        "syscalls",
        "kernel",
        "touches",
    ];

    fn read(said: &Value) -> Counts {
        let count = |name: &str| said[name].as_u64().unwrap_or(0);
        let [
            operations,
            instructions,
            misses,
            upgrades,
            locked,
            handovers,
            fences,
            syscalls,
            kernel,
            touches,
        ] = Counts::NAMES.map(count);
        Counts {
            operations,
            instructions,
            misses,
            upgrades,
            locked,
            handovers,
            fences,
            syscalls,
            kernel,
            touches,
        }
    }

    fn values(self) -> [u64; 10] {
        [
            self.operations,
            self.instructions,
            self.misses,
            self.upgrades,
            self.locked,
            self.handovers,
            self.fences,
            self.syscalls,
            self.kernel,
            self.touches,
        ]
    }

    pub fn transfers(self) -> u64 {
        self.misses + self.upgrades
    }

    /// Returns a count for each operation.
    pub fn each(self, count: u64) -> f64 {
        count as f64 / self.operations.max(1) as f64
    }

    fn json(self) -> Value {
        let pairs = Counts::NAMES.into_iter().zip(self.values());
        pairs
            .map(|(name, value)| (name.to_owned(), json!(value)))
            .collect()
    }
}

impl Add for Counts {
    type Output = Counts;

    fn add(self, other: Counts) -> Counts {
        let sum = Counts::NAMES
            .into_iter()
            .zip(self.values().into_iter().zip(other.values()));
        let sum = sum.map(|(name, (one, two))| (name.to_owned(), json!(one + two)));
        Counts::read(&Value::Object(sum.collect()))
    }
}

/// An instruction of the allocator that caused transfers.
#[derive(Clone, Debug)]
pub struct Site {
    /// `alloc` or `free`.
    pub op: String,
    /// The file that contains the instruction, and the distance from the file's start.
    pub code: Code,
    /// The function and source line of the instruction, once they are known.
    pub name: String,
    pub transfers: u64,
    pub handovers: u64,
    /// System calls that the instruction called.
    pub syscalls: u64,
    /// How many lines these were, and the one that moved most often.
    pub lines: usize,
    pub line: u64,
    pub line_transfers: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Code {
    Allocator(u64),
    Libc(u64),
    Other(u64),
}

/// What was counted in one cell.
pub struct Row {
    pub load: &'static str,
    pub subject: String,
    pub size: Option<u32>,
    pub cpus: u32,
    pub alloc: Counts,
    pub free: Counts,
    pub program: Counts,
    /// Those that cause the most transfers come first.
    pub sites: Vec<Site>,
    /// The cycles of an allocation and a free by the model, and by the clock on this machine.
    pub model: Option<f64>,
    pub clock: Option<f64>,
}

/// The sites of a row that are kept.
const SITES: usize = 24;
/// Further than this from the start of a library, an address is not in it.
const LIBRARY: u64 = 64 << 20;

impl Row {
    /// Makes a row of the plugin's report. Returns `None` if it belongs to no cell.
    pub fn new(report: Report, cells: &[Cell], cpus: u32) -> Option<Row> {
        let cell = cells.get(usize::try_from(report["number"].as_u64()?).ok()?)?;
        let base = |name: &str| report[name].as_u64().unwrap_or(u64::MAX);
        let (allocator, libc) = (base("allocator"), base("libc"));
        let code = |address: u64| {
            let within = |base| {
                address
                    .checked_sub(base)
                    .filter(|&distance| distance < LIBRARY)
            };
            match (within(allocator), within(libc)) {
                // Where both fit, the library that begins later contains it.
                (Some(one), Some(two)) if two < one => Code::Libc(two),
                (Some(distance), _) => Code::Allocator(distance),
                (None, Some(distance)) => Code::Libc(distance),
                (None, None) => Code::Other(address),
            }
        };
        let mut sites: Vec<Site> = Vec::new();
        for site in report["sites"].as_array()? {
            let number = |at: usize| site[at].as_u64().unwrap_or(0);
            let (code, op) = (code(number(0)), site[2].as_str()?);
            let (line, transfers) = (number(1), number(3) + number(4));
            let (handovers, syscalls) = (number(5), number(6));
            match sites
                .iter_mut()
                .find(|site| site.code == code && site.op == op)
            {
                // The report begins with the line that moved most often.
                Some(site) => {
                    site.transfers += transfers;
                    site.handovers += handovers;
                    site.syscalls += syscalls;
                    site.lines += usize::from(transfers > 0);
                }
                None => sites.push(Site {
                    op: op.to_owned(),
                    code,
                    name: String::new(),
                    transfers,
                    handovers,
                    syscalls,
                    lines: usize::from(transfers > 0),
                    line,
                    line_transfers: transfers,
                }),
            }
        }
        sites.sort_by_key(|site| std::cmp::Reverse(site.transfers + site.syscalls));
        sites.truncate(SITES);
        Some(Row {
            load: cell.load,
            subject: cell.subject.clone(),
            size: cell.size,
            cpus,
            alloc: Counts::read(&report["alloc"]),
            free: Counts::read(&report["free"]),
            program: Counts::read(&report["program"]),
            sites,
            model: None,
            clock: None,
        })
    }

    /// Returns the counts of allocations and frees together.
    pub fn both(&self) -> Counts {
        self.alloc + self.free
    }

    fn json(&self) -> Value {
        let site = |site: &Site| {
            json!({
                "op": site.op,
                "code": site.name,
                "transfers": site.transfers,
                "handovers": site.handovers,
                "syscalls": site.syscalls,
                "lines": site.lines,
                "line": format!("{:#x}", site.line),
                "line_transfers": site.line_transfers,
            })
        };
        let both = self.both();
        json!({
            "subject": self.subject,
            "load": self.load,
            "size": self.size,
            "cpus": self.cpus,
            "transfers_of_125": 125.0 * both.each(both.transfers()),
            "handovers_of_125": 125.0 * both.each(both.handovers),
            "model_cycles": self.model,
            "clock_cycles": self.clock,
            "alloc": self.alloc.json(),
            "free": self.free.json(),
            "program": self.program.json(),
            "sites": self.sites.iter().map(site).collect::<Vec<_>>(),
        })
    }
}

/// Writes the rows to `bench/runs/<date>-many/<time>.json`, one a line, and the model's error as a
/// row of its own. Returns the path.
pub fn save(rows: &[Row], error: Option<f64>) -> Result<PathBuf> {
    let said = Command::new("date")
        .args(["-u", "+%F %H%M%S"])
        .output()
        .context("date")?;
    let now = String::from_utf8(said.stdout)?;
    let (day, time) = now.trim().split_once(' ').context("date prints no time")?;
    let folder = PathBuf::from(format!("bench/runs/{day}-many"));
    fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    let path = folder.join(format!("{time}.json"));
    let command: Vec<_> = std::env::args().skip(1).collect();
    let error = error.map(|factor| json!({"subject": "model", "factor": factor}));
    let lines = rows.iter().map(Row::json).chain(error);
    let lines: Vec<_> = lines.map(|row| row.to_string()).collect();
    let text = format!(
        "{{\"bench\":\"many\",\"command\":{},\"date\":{},\"rows\":[\n{}\n]}}\n",
        json!(format!("cargo xtask {}", command.join(" "))),
        json!(now.trim()),
        lines.join(",\n")
    );
    fs::write(&path, text).with_context(|| path.display().to_string())?;
    Ok(path)
}
