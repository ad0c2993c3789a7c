//! `pinfold numastat`: on which nodes a process's pages lie.

mod maps;
mod process;
mod table;

use anyhow::Result;
use pinfold::topology::{NodeSet, Topology};
use process::Process;
use serde::Serialize;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::ExitCode;

/// Show on which nodes the memory of processes lies, as `numastat -p` does
///
/// Huge counts reserved huge pages. Heap and Stack count what the kernel marks as such. Private
/// counts everything else, including the program, its libraries, mapped files and shared memory.
/// All values are in MiB, with `--json` in bytes.
#[derive(clap::Args)]
pub struct Args {
    /// The process ids
    #[arg(required = true, value_name = "PID", value_parser = pid)]
    pids: Vec<u32>,

    /// Ignored; accepted because numastat has it
    #[arg(short = 'p', hide = true)]
    processes: bool,

    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,

    /// Read the files below this folder instead of /
    #[arg(long, value_name = "FOLDER", default_value = "/", hide = true)]
    root: PathBuf,
}

fn pid(text: &str) -> Result<u32, &'static str> {
    let number = crate::policy::number(text).filter(|&number| number > 0);
    number.ok_or("give a process id, like 1234")
}

#[derive(Serialize)]
struct Answer {
    numastat: Vec<Report>,
}

/// One process's bytes by node, in the order of `nodes`.
#[derive(Serialize)]
struct Report {
    pid: u32,
    name: String,
    nodes: Vec<usize>,
    huge: Vec<u64>,
    heap: Vec<u64>,
    stack: Vec<u64>,
    private: Vec<u64>,
    total: Vec<u64>,
}

pub fn main(args: Args) -> Result<ExitCode> {
    let online = Topology::read(args.root.as_os_str().as_bytes())?.nodes;
    let mut reports = Vec::new();
    let mut code = ExitCode::SUCCESS;
    for &pid in &args.pids {
        match Process::read(&args.root, pid) {
            Ok(process) => reports.push(Report::of(&process, &online)),
            // Goes on: the other processes' tables are still useful.
            Err(error) => {
                eprintln!("pinfold: {error:#}");
                code = ExitCode::from(2);
            }
        }
    }
    let text = if args.json {
        serde_json::to_string_pretty(&Answer { numastat: reports })? + "\n"
    } else {
        let tables: Vec<String> = reports.iter().map(table::of).collect();
        tables.join("\n")
    };
    crate::figures::print(&text)?;
    Ok(code)
}

impl Report {
    /// Makes a report for all online nodes, and all other nodes that have pages.
    fn of(process: &Process, online: &NodeSet) -> Report {
        let usage = &process.usage;
        let nodes = online.or(&usage.nodes());
        let column = |kind| nodes.iter().map(|node| usage.bytes(kind, node)).collect();
        Report {
            pid: process.pid,
            name: process.name.clone(),
            huge: column(maps::Kind::Huge),
            heap: column(maps::Kind::Heap),
            stack: column(maps::Kind::Stack),
            private: column(maps::Kind::Private),
            total: nodes.iter().map(|node| usage.total(node)).collect(),
            nodes: nodes.iter().collect(),
        }
    }
}
