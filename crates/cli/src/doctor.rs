//! `pinfold doctor`: what this machine offers, and what that means for Pinfold. With a process id:
//! what is good and bad for that process.

use crate::foreign::Identity;
use crate::output::{self, Lines};
use anyhow::Result;
use pinfold::internal::{topology_below, with_tightest_cgroup};
use pinfold::topology::{NodeId, Topology};
use pinfold_malloc::settings::{MEMORY_LIMIT, RSEQ, THP};
use pinfold_rseq::{Backend, Index, Missing, abi};
use serde::Serialize;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

mod policies;
mod probe;
mod process;

/// Report what this machine offers Pinfold; with a PID, what is good and bad for that process
///
/// Each check says what was found and what follows from it, after one of three words. `problem`:
/// calls fail or may fail, or cost more time or memory than they need, and something can be done.
/// `note`: a setting or the system changes how Pinfold works. `ok`: anything else.
#[derive(clap::Args)]
pub struct Args {
    /// Report on this process
    #[arg(value_name = "PID", value_parser = crate::live::pid)]
    pid: Option<u32>,

    /// Print one JSON object instead of lines
    #[arg(long)]
    json: bool,

    /// Exit with status 1 if there is a problem, for tests of images and for monitoring
    #[arg(long)]
    check: bool,

    /// Read the files below this folder instead of /
    #[arg(long, value_name = "FOLDER", default_value = "/", hide = true)]
    root: PathBuf,
}

/// How one check came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    Ok,
    Note,
    Problem,
}

impl State {
    /// Returns [`State::Ok`], or `otherwise` if `ok` is false.
    fn ok_or(ok: bool, otherwise: State) -> State {
        if ok { State::Ok } else { otherwise }
    }

    fn word(self) -> &'static str {
        match self {
            State::Ok => "ok",
            State::Note => "note",
            State::Problem => "problem",
        }
    }
}

/// The result of one check.
#[derive(Serialize)]
struct Check {
    name: &'static str,
    state: State,
    found: String,
    /// What follows from it, or what to do.
    follows: String,
}

/// All checks of the machine, or of a process.
#[derive(Serialize)]
struct Report {
    /// The process that is checked.
    #[serde(skip_serializing_if = "Option::is_none")]
    process: Option<Identity>,
    problems: usize,
    checks: Vec<Check>,
}

impl Report {
    fn new(process: Option<Identity>, checks: Vec<Check>) -> Report {
        let is_problem = |check: &&Check| check.state == State::Problem;
        Report {
            process,
            problems: checks.iter().filter(is_problem).count(),
            checks,
        }
    }

    fn text(&self) -> String {
        let subject = match &self.process {
            Some(process) => format!("process {} ({})", process.pid, process.name),
            None => "this machine".to_owned(),
        };
        let mut lines = Lines::default();
        lines.add(format_args!(
            "{subject}: {} of {} checks found a problem",
            self.problems,
            self.checks.len()
        ));
        for check in &self.checks {
            let (name, word, found) = (check.name, check.state.word(), &check.found);
            lines.add(format_args!("{name:<16}{word:<9}{found}"));
            lines.add(format_args!("{:<25}{}", "", check.follows));
        }
        lines.to_string()
    }
}

pub fn main(args: Args) -> Result<ExitCode> {
    let report = match args.pid {
        Some(pid) => process::report(pid)?,
        None => Report::new(None, machine(&args.root)),
    };
    output::show(args.json, "doctor", &report, || report.text())?;
    let has_failed = args.check && report.problems > 0;
    Ok(ExitCode::from(u8::from(has_failed)))
}

/// Checks the machine whose files are below `root`.
fn machine(root: &Path) -> Vec<Check> {
    let topology = if root == Path::new("/") {
        Topology::system()
    } else {
        topology_below(root.as_os_str().as_bytes())
    };
    let mut checks = vec![rseq(), concurrency_ids(), backend(), membarrier()];
    match &topology {
        Ok(topology) => checks.extend([
            cpus(topology),
            nodes(topology),
            policies::policies(&topology.with_memory),
            isolated(topology),
        ]),
        Err(error) => checks.push(check(
            "topology",
            State::Problem,
            error.to_string(),
            "Pinfold assumes one memory node",
        )),
    }
    checks.extend([
        huge_pages(root),
        overcommit(root),
        address_space(root),
        memory_limit(root),
    ]);
    checks
}

fn check(
    name: &'static str,
    state: State,
    found: impl Into<String>,
    follows: impl Into<String>,
) -> Check {
    Check {
        name,
        state,
        found: found.into(),
        follows: follows.into(),
    }
}

fn rseq() -> Check {
    pinfold_rseq::init(Index::Cid);
    let test = pinfold_rseq::selftest();
    let (found, follows) = if test.passed() {
        let who = match pinfold_rseq::registers_threads() {
            true => "Pinfold itself",
            false => "the C library",
        };
        (
            format!("{who} has registered this thread, and the kernel aborts preempted sequences"),
            match pinfold_rseq::missing() {
                Missing::Disabled => format!("not used, because {RSEQ}=off is set"),
                Missing::Kernel => format!("not used: {}", Missing::Kernel),
                _ => "malloc and free need no lock and no atomic read-modify-write in most calls"
                    .into(),
            },
        )
    } else if !test.registered {
        (
            format!("not registered: {}", why_not_registered()),
            "Pinfold uses atomic instructions instead, which are slower".into(),
        )
    } else if !test.operations {
        (
            "registered, but a restartable sequence gave a wrong result".into(),
            "Pinfold uses atomic instructions instead, which are slower; please report this kernel"
                .into(),
        )
    } else {
        (
            "registered, but the kernel did not abort a preempted sequence".into(),
            match pinfold_rseq::missing() {
                Missing::Kernel => format!("not used: {}", Missing::Kernel),
                _ => format!("set {RSEQ}=off: restartable sequences could corrupt memory here"),
            },
        )
    };
    let state = State::ok_or(test.passed(), State::Problem);
    check("rseq", state, found, follows)
}

/// Returns the first reason, in the order in which they would have stopped the registration.
fn why_not_registered() -> String {
    if !cfg!(any(target_arch = "x86_64", target_arch = "aarch64")) {
        return "Pinfold has no restartable sequences for this architecture".into();
    }
    if let Err(errno) = probe::rseq_call() {
        return refused("rseq", "4.18", errno);
    }
    "the kernel offers it, but other code has registered this thread".into()
}

/// Explains the failure of a system call that Linux has since version `since`.
#[expect(clippy::disallowed_methods, reason = "a file of the kernel's own")]
fn refused(call: &str, since: &str, errno: i32) -> String {
    let filtered = fs::read_to_string("/proc/self/status")
        .is_ok_and(|status| status.lines().any(|line| line == "Seccomp:\t2"));
    if filtered {
        format!(
            "{call} failed (errno {errno}), and a seccomp filter is in force: allow {call} in it"
        )
    } else {
        format!(
            "{call} failed (errno {errno}): it needs Linux {since}, and a sandbox that allows it"
        )
    }
}

fn concurrency_ids() -> Check {
    let offered = probe::feature_size() >= abi::FEATURE_SIZE_MM_CID;
    let usable = pinfold_rseq::has_concurrency_ids();
    let found = match (offered, usable) {
        (_, true) => "the kernel provides them",
        (true, false) => "the kernel provides them, but they cannot be used without rseq",
        (false, false) => "need Linux 6.3",
    };
    let follows = if usable {
        "a program that runs few threads at a time uses few per-CPU caches, on however many CPUs"
    } else {
        "a program uses a per-CPU cache for each CPU that it runs on"
    };
    let state = State::ok_or(usable, State::Note);
    check("concurrency ids", state, found, follows)
}

fn backend() -> Check {
    let found = match pinfold_rseq::init(Index::Cid) {
        Backend::Rseq(Index::Cpu) => "restartable sequences, by CPU number".to_owned(),
        Backend::Rseq(Index::Cid) => {
            "restartable sequences, by concurrency id (by CPU number on more than one node, or with \
             isolated CPUs)"
                .to_owned()
        }
        Backend::Atomic => match pinfold_rseq::missing() {
            Missing::Registration => "atomics, because rseq is not registered".to_owned(),
            why => format!("atomics: {why}"),
        },
    };
    // Whoever set the variable wanted atomics.
    let state = match (pinfold_rseq::backend(), pinfold_rseq::missing()) {
        (Backend::Rseq(_), _) => State::Ok,
        (Backend::Atomic, Missing::Disabled) => State::Note,
        (Backend::Atomic, _) => State::Problem,
    };
    check(
        "backend",
        state,
        found,
        format!("{RSEQ}=off, cpu or cid chooses another"),
    )
}

fn membarrier() -> Check {
    let found = match probe::fence() {
        // On the atomic backend the library has nothing to fence, so it does not ask for the fence.
        Ok(()) => pinfold_rseq::fence().map_err(|error| error.to_string()),
        Err(0) => {
            Err("the kernel cannot fence restartable sequences; that needs Linux 5.10".into())
        }
        Err(errno) => Err(refused("membarrier", "5.10", errno)),
    };
    let follows = if pinfold_rseq::backend() == Backend::Atomic {
        "not needed: atomic instructions need no fence on other CPUs"
    } else if found.is_ok() {
        "malloc_trim and shrink also give back what other CPUs have cached"
    } else {
        "what other CPUs have cached stays there, and object caches cannot be destroyed"
    };
    let state = match (&found, pinfold_rseq::backend()) {
        (Ok(()), _) => State::Ok,
        (Err(_), Backend::Atomic) => State::Note,
        (Err(_), Backend::Rseq(_)) => State::Problem,
    };
    let found = found.map_or_else(
        |why| why,
        |()| "restartable sequences on other CPUs can be fenced".to_owned(),
    );
    check("membarrier", state, found, follows)
}

fn cpus(topology: &Topology) -> Check {
    let found = format!(
        "{} allowed ({}), {} online, {} possible",
        topology.allowed.len(),
        topology.allowed,
        topology.online.len(),
        topology.possible.len()
    );
    let restricted = topology.allowed != topology.online;
    let follows = if restricted {
        "affinity or a cpuset keeps this process from some CPUs; Pinfold uses no memory for those"
    } else {
        "this process may use every CPU"
    };
    check("CPUs", State::Ok, found, follows)
}

fn nodes(topology: &Topology) -> Check {
    let with_memory = topology.with_memory.len();
    let mut found = format!(
        "{} ({}), {with_memory} with memory",
        topology.nodes.len(),
        topology.nodes
    );
    if topology.nodes.len() > 1 {
        let from = NodeId(topology.nodes.iter().next().unwrap_or(0));
        let row: Vec<String> = topology
            .nodes
            .iter()
            .map(|to| topology.distance(from, NodeId(to)).to_string())
            .collect();
        found += &format!("; distances from node {}: {}", from.0, row.join(" "));
    }
    let follows = if with_memory > 1 {
        "freed memory goes back to the node that it came from"
    } else {
        "all memory is local"
    };
    check("nodes", State::Ok, found, follows)
}

fn isolated(topology: &Topology) -> Check {
    let quiet = !topology.isolated.is_empty() || !topology.nohz_full.is_empty();
    let found = if quiet {
        format!(
            "isolated: {}; without a tick: {}",
            topology.isolated, topology.nohz_full
        )
    } else {
        "none".to_owned()
    };
    let follows = if quiet {
        format!(
            "background threads stay on CPUs {}",
            topology.housekeeping()
        )
    } else {
        "background threads may run on any CPU".to_owned()
    };
    check("isolated CPUs", State::Ok, found, follows)
}

fn huge_pages(root: &Path) -> Check {
    let modes = text(root, "sys/kernel/mm/transparent_hugepage/enabled");
    let chosen = modes
        .split(['[', ']'])
        .nth(1)
        .unwrap_or(match root.join("sys/kernel").is_dir() {
            true => "not offered",
            false => "/sys cannot be read",
        })
        .to_owned();
    let follows = match chosen.as_str() {
        "always" => format!(
            "small objects beyond their first 32 MiB, blocks from 4 MiB on that the program fills, and blocks from 62 MiB on come in pages of 2 MiB ({THP} changes all but the last)"
        ),
        "madvise" => format!(
            "small objects beyond their first 32 MiB, and blocks from 4 MiB on that the program fills, come in pages of 2 MiB ({THP} changes this)"
        ),
        _ => "all memory comes in ordinary pages".into(),
    };
    let offered = matches!(chosen.as_str(), "always" | "madvise");
    let reserved = text(root, "proc/sys/vm/nr_hugepages");
    let mut found = format!("transparent huge pages: {chosen}");
    if !matches!(reserved.as_str(), "" | "0") {
        found += &format!("; {reserved} reserved huge pages, which Pinfold does not use");
    }
    let state = State::ok_or(offered, State::Note);
    check("huge pages", state, found, follows)
}

fn overcommit(root: &Path) -> Check {
    let mode = text(root, "proc/sys/vm/overcommit_memory");
    let found = match mode.as_str() {
        "2" => "vm.overcommit_memory is 2: every mapping is charged when it is made".to_owned(),
        "0" | "1" => format!("vm.overcommit_memory is {mode}: untouched memory costs nothing"),
        "" => "vm.overcommit_memory cannot be read".to_owned(),
        mode => format!("vm.overcommit_memory is {mode:?}, which is not a known mode"),
    };
    let is_strict = mode == "2";
    let why = match is_strict {
        true => "so that little is charged before it is used",
        false => "as it is needed",
    };
    let follows = format!("memory is mapped in steps of 256 KiB to 2 MiB, {why}");
    let state = State::ok_or(!is_strict, State::Note);
    check("overcommit", state, found, follows)
}

/// Returns the soft limit in the line of `limits` that begins with `name`.
fn soft_limit(root: &Path, name: &str) -> Option<String> {
    let limits = text(root, "proc/self/limits");
    let line = limits.lines().find(|line| line.starts_with(name))?;
    line.split_whitespace().nth(3).map(str::to_owned)
}

fn address_space(root: &Path) -> Check {
    let soft = soft_limit(root, "Max address space");
    let soft = soft.unwrap_or_else(|| "unlimited".to_owned());
    let free = soft == "unlimited";
    let follows = if free {
        "the address space of a program is not limited"
    } else {
        "near the limit, free memory goes back to the system; beyond it, allocations fail"
    };
    check(
        "address space",
        State::ok_or(free, State::Note),
        format!("RLIMIT_AS is {soft}{}", if free { "" } else { " bytes" }),
        follows,
    )
}

fn memory_limit(root: &Path) -> Check {
    let data = soft_limit(root, "Max data size").and_then(|soft| soft.parse::<usize>().ok());
    let root = root.as_os_str().as_bytes();
    let cgroup = with_tightest_cgroup(root, b"/proc/self/cgroup", |limit, _| limit);
    let soft = std::env::var(MEMORY_LIMIT).ok();
    let found: Vec<String> = [
        cgroup.map(|bytes| format!("the cgroup allows {} MiB", bytes >> 20)),
        data.map(|bytes| format!("RLIMIT_DATA is {} MiB", bytes >> 20)),
        soft.map(|value| format!("{MEMORY_LIMIT} is {value}")),
    ]
    .into_iter()
    .flatten()
    .collect();
    if found.is_empty() {
        return check(
            "memory limit",
            State::Ok,
            "none",
            "free memory is kept up to an eighth of what is in use, or 4 MiB if that is more",
        );
    }
    check(
        "memory limit",
        State::Note,
        found.join("; "),
        "free memory is kept up to a sixteenth of the tightest limit, and goes back near that limit",
    )
}

/// Returns a file's text without the final newline, or an empty string if the file cannot be read.
#[expect(clippy::disallowed_methods, reason = "a file of the kernel's own")]
fn text(root: &Path, file: &str) -> String {
    let text = fs::read_to_string(root.join(file)).unwrap_or_default();
    text.trim().to_owned()
}
