//! `pinfold numastat`: on which nodes the pages of processes and of the system lie.

pub mod maps;
mod process;
mod system;
mod table;

use crate::foreign::Identity;
use crate::output;
use anyhow::Result;
use pinfold::internal::topology_below;
use pinfold::topology::NodeSet;
pub use process::Process;
use serde::Serialize;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use system::System;
use table::Form;

/// Show on which nodes the memory of processes and of the system lies, as `numastat` does
///
/// Without a process, shows the kernel's counts of page allocations by node.
///
/// Huge counts reserved huge pages. Heap and Stack count what the kernel marks as such. Private
/// counts everything else, including the program, its libraries, mapped files and shared memory.
/// All values are in MiB, which numastat calls MBs, and with `--json` in bytes.
#[derive(clap::Args)]
pub struct Args {
    /// Process ids, or parts of the command lines of processes
    #[arg(value_name = "PID|NAME", value_parser = subject)]
    subjects: Vec<Subject>,

    /// Show the memory of the system by node, as /proc/meminfo does
    #[arg(short = 'm')]
    memory: bool,

    /// Show the kernel's counts of page allocations in MiB
    #[arg(short = 'n')]
    allocations: bool,

    /// Show processes; the default if any are named
    #[arg(short = 'p', requires = "subjects")]
    processes: bool,

    /// Narrow columns, and whole numbers
    #[arg(short = 'c')]
    compact: bool,

    /// Sort the processes by their memory, or by that on one node
    #[arg(short = 's', value_name = "NODE", num_args = 0..=1, require_equals = true)]
    sort: Option<Option<usize>>,

    /// Print one table per process instead of one for all, if several are given
    #[arg(short = 'v')]
    verbose: bool,

    /// Leave out rows and columns of zeroes
    #[arg(short = 'z')]
    skip_zeroes: bool,

    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,

    /// Read the files below this folder instead of /
    #[arg(long, value_name = "FOLDER", default_value = "/", hide = true)]
    root: PathBuf,
}

/// The processes that a word names.
#[derive(Clone)]
enum Subject {
    Pid(u32),
    /// Those whose command line contains the text.
    Name(String),
}

fn subject(text: &str) -> Result<Subject, &'static str> {
    let looks_like_number = text.bytes().all(|byte| byte.is_ascii_digit());
    let number = crate::policy::number(text).filter(|&number| number > 0);
    match number {
        Some(pid) => Ok(Subject::Pid(pid)),
        None if looks_like_number => Err("give a process id, like 1234, or a name"),
        None => Ok(Subject::Name(text.to_owned())),
    }
}

struct Answer {
    processes: Vec<Report>,
    /// The system, if it was asked for.
    system: Option<System>,
}

/// What is printed for programs.
#[derive(Serialize)]
struct Shown<'a> {
    processes: Vec<ShownProcess<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    system: Option<&'a System>,
}

#[derive(Serialize)]
struct ShownProcess<'a> {
    #[serde(flatten)]
    process: &'a Identity,
    nodes: Vec<ShownNode>,
}

#[derive(Serialize)]
struct ShownNode {
    node: usize,
    huge_bytes: u64,
    heap_bytes: u64,
    stack_bytes: u64,
    private_bytes: u64,
    total_bytes: u64,
}

impl Report {
    fn shown(&self) -> ShownProcess<'_> {
        let nodes = self.nodes.iter().enumerate();
        let nodes = nodes.map(|(nth, &node)| ShownNode {
            node,
            huge_bytes: self.huge[nth],
            heap_bytes: self.heap[nth],
            stack_bytes: self.stack[nth],
            private_bytes: self.private[nth],
            total_bytes: self.total[nth],
        });
        ShownProcess {
            process: &self.process,
            nodes: nodes.collect(),
        }
    }
}

impl Answer {
    fn text(&self, args: &Args, form: Form) -> String {
        let mut text = String::new();
        if let Some(system) = &self.system {
            if args.memory {
                text += &system.memory(form);
            }
            if args.allocations {
                text += &system.pages_in_mib(form);
            }
            if !args.memory && !args.allocations {
                text += &system.pages();
            }
        }
        match &self.processes[..] {
            all @ [_, _, ..] if !args.verbose => text += &table::of_all(all, form),
            each => text.extend(each.iter().map(|report| table::of(report, form))),
        }
        text
    }
}

/// One process's bytes by node, in the order of `nodes`.
struct Report {
    process: Identity,
    nodes: Vec<usize>,
    huge: Vec<u64>,
    heap: Vec<u64>,
    stack: Vec<u64>,
    private: Vec<u64>,
    total: Vec<u64>,
}

pub fn main(args: Args) -> Result<ExitCode> {
    let online = topology_below(args.root.as_os_str().as_bytes())?.nodes;
    let mut reports = Vec::new();
    let mut code = ExitCode::SUCCESS;
    let mut pids = Vec::new();
    for subject in &args.subjects {
        match subject {
            Subject::Pid(pid) => pids.push(*pid),
            Subject::Name(name) => {
                let found = system::matching(&args.root, name)?;
                if found.is_empty() {
                    let words = format_args!("no process has {name:?} in its command line");
                    output::note(words);
                    code = ExitCode::from(2);
                }
                pids.extend(found);
            }
        }
    }
    pids.sort_unstable();
    pids.dedup();
    for pid in pids {
        match usage(&args.root, pid) {
            Ok((process, usage)) => reports.push(Report::of(process, &usage, &online)),
            // Goes on: the other processes' tables are still useful.
            Err(error) => {
                output::note(format_args!("{error:#}"));
                code = ExitCode::from(2);
            }
        }
    }
    if let Some(node) = args.sort {
        reports.sort_by_key(|report| std::cmp::Reverse(report.bytes_on(node)));
    }
    let form = Form {
        compact: args.compact,
        skip_zeroes: args.skip_zeroes,
    };
    let is_asked = args.memory || args.allocations || args.subjects.is_empty();
    let system = is_asked.then(|| System::read(&args.root, &online));
    let system = system.transpose()?;
    let answer = Answer {
        processes: reports,
        system,
    };
    let shown = Shown {
        processes: answer.processes.iter().map(Report::shown).collect(),
        system: answer.system.as_ref(),
    };
    output::show(args.json, "numastat", &shown, || answer.text(&args, form))?;
    Ok(code)
}

/// Reads where the pages of a process below `root` lie.
fn usage(root: &Path, pid: u32) -> Result<(Identity, maps::Usage)> {
    let process = Process::open(root, pid)?;
    let (name, usage) = process.usage()?;
    Ok((process.identity(name), usage))
}

impl Report {
    /// Returns the bytes on `node`, or on all nodes if that is `None`.
    fn bytes_on(&self, node: Option<usize>) -> u64 {
        let rows = self.nodes.iter().zip(&self.total);
        let asked = rows.filter(|&(&own, _)| node.is_none_or(|node| node == own));
        asked.fold(0, |sum, (_, &bytes)| sum.saturating_add(bytes))
    }

    /// Makes a report for all online nodes, and all other nodes that have pages.
    fn of(process: Identity, usage: &maps::Usage, online: &NodeSet) -> Report {
        let nodes = online.or(&usage.nodes());
        let column = |kind| nodes.iter().map(|node| usage.bytes(kind, node)).collect();
        Report {
            process,
            huge: column(maps::Kind::Huge),
            heap: column(maps::Kind::Heap),
            stack: column(maps::Kind::Stack),
            private: column(maps::Kind::Private),
            total: nodes.iter().map(|node| usage.total(node)).collect(),
            nodes: nodes.iter().collect(),
        }
    }
}
