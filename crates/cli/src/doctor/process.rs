//! `pinfold doctor PID`: what is good and what is bad for a running process, and what to do.
//!
//! The checks use the process's segment and its files in `/proc`. A check whose files cannot be
//! read says so, and is no problem. What the user asked for by a variable, or the program left out,
//! is a note.

use super::{Check, Report, State, check};
use crate::foreign::{self, Identity, Mapping};
use crate::live::{Snapshot, Source, backend_name};
use anyhow::{Context, Result};
use pinfold::internal::segment::{Call, SlabEvent};
use pinfold::internal::with_tightest_cgroup;
use pinfold_malloc::settings::{MEMORY_LIMIT, RSEQ, SHEPHERD, STATS, THP};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Bytes in huge pages above which huge pages that hold little are a problem.
const MUCH_HUGE: u64 = 64 << 20;

/// Returns a check without its name.
fn verdict(state: State, found: impl Into<String>, advice: &str) -> Check {
    check("", state, found, advice)
}

fn problem(found: impl Into<String>, advice: &str) -> Check {
    verdict(State::Problem, found, advice)
}

fn good(found: impl Into<String>) -> Check {
    verdict(State::Ok, found, "nothing to do")
}

fn judge(is_problem: bool, found: String, advice: &str) -> Check {
    if is_problem {
        problem(found, advice)
    } else {
        good(found)
    }
}

/// A process: its numbers, and its files in `/proc`.
struct Process {
    files: foreign::Process,
    snapshot: Snapshot,
    /// The variables with which the process was started, if they may be read.
    environment: Vec<String>,
    cgroup: Option<Cgroup>,
}

/// The limit of a process's memory cgroup, in bytes.
struct Cgroup {
    limit: u64,
    used: u64,
    /// How often the kernel ended a process for lack of memory.
    kills: u64,
}

pub fn report(pid: u32) -> Result<Report> {
    let source = Source::open(pid).with_context(|| format!("process {pid}"))?;
    let files = foreign::Process::open(pid).with_context(|| format!("process {pid}"))?;
    let environment = files.read_start("environ", ENVIRONMENT).unwrap_or_default();
    let environment = environment.split(|&byte| byte == 0);
    let process = Process {
        snapshot: source.read().with_context(|| format!("process {pid}"))?,
        environment: environment
            .map(|variable| String::from_utf8_lossy(variable).into_owned())
            .collect(),
        cgroup: Cgroup::of(pid, b""),
        files,
    };
    let checks = [
        ("backend", process.backend()),
        ("counting", process.counting()),
        ("memory limit", process.limit()),
        ("refused memory", process.refused()),
        ("huge pages", process.huge_pages()),
        ("sheaves", process.sheaves()),
        ("kept memory", process.kept()),
        ("remote frees", process.remote_frees()),
        ("nodes", process.nodes()),
        ("shepherd", process.shepherd()),
        ("isolated CPUs", process.isolated()),
        ("mappings", process.mappings()),
    ];
    let checks = checks.map(|(name, check)| Check { name, ..check });
    let identity = Identity::of(source.process());
    Ok(Report::new(Some(identity), checks.into()))
}

/// How many bytes of a process's environment are searched.
const ENVIRONMENT: usize = 1 << 20;
/// How many bytes of a process's list of mappings are counted.
const MAPS: usize = 64 << 20;

fn text(path: &Path) -> String {
    let text = foreign::system_fields(path).map(|file| file.text());
    text.unwrap_or_default()
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", crate::live::mib(bytes))
}

/// Returns `part` of `whole` in percent, 0 of nothing.
fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        return 0.0;
    }
    100.0 * part as f64 / whole as f64
}

/// Returns the bytes of file pages that the kernel drops first when memory is short, by a cgroup's
/// file `memory.stat`. Version 1 has the sum with the cgroups below in a line of its own.
fn droppable(stat: &str) -> u64 {
    let of = |name: &str| {
        let line = stat.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().parse().ok()
    };
    of("total_inactive_file ")
        .or_else(|| of("inactive_file "))
        .unwrap_or(0)
}

impl Cgroup {
    /// Returns the tightest limit above process `pid`, or `None` without a limit. `root` stands in
    /// front of every path.
    fn of(pid: u32, root: &[u8]) -> Option<Cgroup> {
        let list = format!("/proc/{pid}/cgroup");
        with_tightest_cgroup(root, list.as_bytes(), |limit, folder| {
            // A file that only the other version has is empty here.
            let text = |file: &str| text(&Path::new(OsStr::from_bytes(folder)).join(file));
            let used = text("memory.current") + &text("memory.usage_in_bytes");
            let events = text("memory.events") + &text("memory.oom_control");
            let kills = events
                .lines()
                .find_map(|line| line.strip_prefix("oom_kill "));
            let used: u64 = used.trim().parse().unwrap_or(0);
            Cgroup {
                limit: limit as u64,
                used: used.saturating_sub(droppable(&text("memory.stat"))),
                kills: kills.and_then(|n| n.parse().ok()).unwrap_or(0),
            }
        })
    }

    /// Returns whether less than a tenth of the limit is free.
    fn is_near(&self) -> bool {
        self.used > self.limit / 10 * 9
    }
}

impl Process {
    /// Returns the value of a variable with which the process was started.
    fn variable(&self, name: &str) -> Option<&str> {
        let mut values = self.environment.iter();
        values.find_map(|variable| variable.strip_prefix(name)?.strip_prefix('='))
    }

    /// Returns the number of kibibytes behind `field` in a file of the process, in bytes.
    fn bytes_in(&self, file: &str, field: &str) -> Option<u64> {
        let kib = self.files.fields(file).ok()?.number(field)?;
        kib.checked_mul(1024)
    }

    fn count(&self, event: SlabEvent) -> u64 {
        self.snapshot.of_caches(|cache| cache.count(event))
    }

    fn backend(&self) -> Check {
        let name = backend_name(self.snapshot.backend);
        let is_off = self.variable(RSEQ) == Some("off");
        match (self.snapshot.backend, is_off) {
            (0, true) => verdict(
                State::Note,
                format!("{name}, because the process was started with {RSEQ}=off"),
                "malloc and free use atomic instructions, which are slower: start it without this setting",
            ),
            (0, false) => problem(
                format!("{name}: restartable sequences are missing"),
                "malloc and free use atomic instructions, which are slower: `pinfold doctor` in the same container says what is missing",
            ),
            _ => verdict(State::Ok, name, "most calls take no lock: nothing to do"),
        }
    }

    fn counting(&self) -> Check {
        if self.snapshot.calls.is_some() || self.variable(STATS).is_some_and(|v| !v.is_empty()) {
            return verdict(
                State::Note,
                "every call is counted",
                "no call takes the fast path: start the program without --stats for speed",
            );
        }
        good("calls of the fast path are not counted")
    }

    fn limit(&self) -> Check {
        let held = self.snapshot.held;
        let soft = self
            .variable(MEMORY_LIMIT)
            .filter(|value| !value.is_empty());
        let soft = soft.map_or(String::new(), |value| format!("; {MEMORY_LIMIT}={value}"));
        let Some(cgroup) = &self.cgroup else {
            let found = format!("{} held, the cgroup has no limit{soft}", mib(held));
            return good(found);
        };
        let found = format!(
            "{} held; the cgroup uses {} of {}, and the kernel ended {} of its processes{soft}",
            mib(held),
            mib(cgroup.used),
            mib(cgroup.limit),
            cgroup.kills,
        );
        match (cgroup.is_near(), cgroup.kills) {
            (true, _) => problem(
                found,
                "less than a tenth is left: raise the cgroup's limit, or have the program use less",
            ),
            (_, 1..) => problem(
                found,
                "raise the cgroup's limit, or set PINFOLD_MEMORY_LIMIT so that free memory goes back earlier",
            ),
            _ => good(found),
        }
    }

    fn refused(&self) -> Check {
        let lost = self.count(SlabEvent::FreeRcuSheafFail);
        let failed = self
            .snapshot
            .calls
            .as_ref()
            .map(|calls| calls.count(Call::FAILED));
        let failed_text = failed.map_or_else(
            || "failed calls are known only under --stats".to_owned(),
            |count| format!("{count} failed calls"),
        );
        let found = format!("{failed_text}; {lost} deferred frees without memory");
        let problem = lost > 0 || failed.unwrap_or(0) > 0;
        let advice = "the system refused memory: look at the limits above, and at ulimit -v and -d";
        judge(problem, found, advice)
    }

    fn huge_pages(&self) -> Check {
        let Some(huge) = self.bytes_in("smaps_rollup", "AnonHugePages:") else {
            let found = "the process's pages may not be read";
            return verdict(
                State::Note,
                found,
                "run this as the process's owner or as root",
            );
        };
        let resident = self.bytes_in("smaps_rollup", "Rss:").unwrap_or(0);
        let setting = self.variable(THP).unwrap_or("auto");
        let found = format!(
            "{} of {} resident are in huge pages, with {THP}={setting}",
            mib(huge),
            mib(resident)
        );
        let is_near = self.cgroup.as_ref().is_some_and(Cgroup::is_near);
        if huge > 0 && is_near {
            let advice = "the cgroup's limit is near, and a huge page takes 2 MiB for its first byte: start it with PINFOLD_THP=never";
            return problem(found, advice);
        }
        let used = self.snapshot.in_use();
        if huge > MUCH_HUGE && used < huge / 2 {
            let found = format!("{found}; only {} are in use", mib(used));
            let advice = "the huge pages hold little: pinfold set PID thp=never and pinfold trim PID, or start it with PINFOLD_THP=never";
            return problem(found, advice);
        }
        good(found)
    }

    fn sheaves(&self) -> Check {
        let out = |cache: &crate::live::Cache| cache.out().saturating_mul(cache.size);
        let out = self.snapshot.of_caches(out);
        // Each CPU has a main and a spare sheaf of each cache, and no more objects than are out.
        let cpus = pinfold_rseq::possible() as u64;
        let most = self.snapshot.of_caches(|cache| {
            let room = cache.sheaf_capacity.saturating_mul(2).saturating_mul(cpus);
            room.min(cache.out()).saturating_mul(cache.size)
        });
        let share = percent(most, self.snapshot.held);
        let found = format!(
            "at most {} of {} of objects are in the sheaves of {cpus} CPUs, {share:.0} % of what is held",
            mib(most),
            mib(out)
        );
        // A small program has most of its memory in sheaves, which is no problem.
        let problem = share > 50.0 && most > 64 << 20;
        let advice = match self.has_library() {
            Some(false) => "call Shepherd::start, which takes idle sheaves back from all CPUs",
            _ => "start it with PINFOLD_SHEPHERD=on, which takes idle sheaves back from all CPUs",
        };
        judge(problem, found, advice)
    }

    fn kept(&self) -> Check {
        let dirty = self.snapshot.dirty();
        let share = percent(dirty, self.snapshot.held);
        let found = format!(
            "{} of free memory are kept for the next use, {share:.0} % of what is held; {} went back to the system so far",
            mib(dirty),
            mib(self.snapshot.returned)
        );
        let problem = share > 25.0 && dirty > 64 << 20;
        let advice = match self.has_library() {
            Some(false) => {
                "set PINFOLD_MEMORY_LIMIT, or call Shepherd::start, so that free memory goes back"
            }
            _ => {
                "set PINFOLD_MEMORY_LIMIT, or start it with PINFOLD_SHEPHERD=on, so that free memory goes back"
            }
        };
        judge(problem, found, advice)
    }

    fn remote_frees(&self) -> Check {
        let remote = self.count(SlabEvent::FreeRemote);
        let flushed = self.count(SlabEvent::Flushed);
        let share = percent(remote, flushed);
        let found = format!(
            "{remote} objects were freed on another node than their own, {share:.0} % of {flushed} that went back to slabs"
        );
        let problem = remote > 100_000 && share > 20.0;
        let advice = "free objects on the node that allocated them, or keep producers and consumers on one node";
        judge(problem, found, advice)
    }

    fn nodes(&self) -> Check {
        let nodes = self.snapshot.nodes.len();
        let elsewhere = self.count(SlabEvent::AllocNodeMismatch);
        let refilled = self.count(SlabEvent::Refilled);
        let share = percent(elsewhere, refilled);
        let found = format!(
            "{nodes} with memory; {elsewhere} objects came from another node than wanted, {share:.0} % of {refilled} that left slabs"
        );
        let problem = elsewhere > 100_000 && share > 5.0;
        let advice = "a node has no free memory: `pinfold numastat PID` shows which; choose a policy with pinfold run --policy";
        judge(problem, found, advice)
    }

    fn shepherd(&self) -> Check {
        let shepherds = || {
            let tasks = self.files.tasks().into_iter().flatten().flatten();
            let mut threads = 0;
            let tasks = tasks.inspect(|_| threads += 1);
            let found: Vec<u32> = tasks.filter(is_shepherd).map(|task| task.pid()).collect();
            (threads, found)
        };
        let (threads, mut found) = shepherds();
        if !found.is_empty() {
            // A thread that has just been made, or makes one, blocks all signals for a moment.
            std::thread::sleep(MOMENT);
            let (_, again) = shepherds();
            found.retain(|thread| again.contains(thread));
        }
        let is_there = !found.is_empty();
        let setting = self.variable(SHEPHERD).unwrap_or("auto");
        let library = self.has_library();
        let found = format!(
            "{}, {threads} threads{}",
            if is_there { "there" } else { "not there" },
            match library {
                // Such a program does not read the variable.
                Some(false) => String::new(),
                _ => format!(", {SHEPHERD}={setting}"),
            }
        );
        if !is_there && threads > 1 {
            let (state, advice) = match (library, setting) {
                (None, _) => (
                    State::Note,
                    "its mappings may not be read, so it is not known whether the program contains Pinfold and starts shepherds itself",
                ),
                (Some(false), _) => (
                    State::Note,
                    "idle memory stays on CPUs that no thread uses any more: the program contains Pinfold, which starts no thread then; call Shepherd::start or pinfold_shepherd_start",
                ),
                (Some(true), "off") => (
                    State::Note,
                    "idle memory stays on CPUs that no thread uses any more: start it without PINFOLD_SHEPHERD=off",
                ),
                (Some(true), _) => (
                    State::Problem,
                    "idle memory stays on CPUs that no thread uses any more: docs/limits.md says where the automatic thread is missing; start it with PINFOLD_SHEPHERD=on",
                ),
            };
            return verdict(state, found, advice);
        }
        let advice = if is_there {
            "idle memory goes back: nothing to do"
        } else {
            "a program with one thread needs none: nothing to do"
        };
        verdict(State::Ok, found, advice)
    }

    /// Returns whether the process has a shared library with the name of Pinfold's, which starts a
    /// shepherd by itself. Returns `None` if the mappings cannot be read.
    fn has_library(&self) -> Option<bool> {
        let is_library = |mapping: Mapping| {
            let name = mapping.path.rsplit(|&byte| byte == b'/').next();
            name.is_some_and(|name| name.starts_with(b"libpinfold"))
        };
        for mapping in self.files.maps().ok()? {
            if is_library(mapping.ok()?) {
                return Some(true);
            }
        }
        Some(false)
    }

    fn isolated(&self) -> Check {
        let cpus = &self.snapshot.isolated;
        if cpus.is_empty() {
            return good("no thread has isolated its CPU");
        }
        let each = cpus.iter().map(|of| {
            let disturbed = [
                (of.fences, "fences"),
                (of.given_back, "calls that gave memory back"),
                (of.folds, "folds"),
                (of.drains, "drains"),
            ];
            let disturbed = disturbed.iter().filter(|(count, _)| *count > 0);
            let disturbed: Vec<_> = disturbed.map(|(n, what)| format!("{n} {what}")).collect();
            match disturbed.is_empty() {
                true => format!("CPU {} is undisturbed", of.cpu),
                false => format!("CPU {} was disturbed by {}", of.cpu, disturbed.join(", ")),
            }
        });
        let found = each.collect::<Vec<_>>().join("; ");
        let advice = "other threads of the program did what cannot wait: docs/isolation.md says what causes each";
        judge(found.contains("disturbed by"), found, advice)
    }

    fn mappings(&self) -> Check {
        let most = text(Path::new("/proc/sys/vm/max_map_count"));
        let most: u64 = most.trim().parse().unwrap_or(65_530);
        let maps = self.files.read_start("maps", MAPS).unwrap_or_default();
        let count = maps.iter().filter(|&&byte| byte == b'\n').count() as u64;
        let limits = self.files.fields("limits").ok();
        let space = limits.and_then(|limits| limits.number("Max address space"));
        let size = self.bytes_in("status", "VmSize:").unwrap_or(0);
        let limit = space.map_or_else(|| "no limit".to_owned(), mib);
        let found = format!(
            "{count} of {most} mappings; {} of addresses, {limit} (ulimit -v)",
            mib(size)
        );
        let is_near = |used: u64, most: u64| used > most / 10 * 8;
        let (state, advice) = if is_near(count, most) {
            (
                State::Problem,
                "raise vm.max_map_count: beyond it, allocations fail",
            )
        } else if space.is_some_and(|space| is_near(size, space)) {
            (
                State::Problem,
                "raise ulimit -v: beyond it, allocations fail",
            )
        } else {
            (State::Ok, "nothing to do")
        };
        verdict(state, found, advice)
    }
}

/// The time after which a thread is looked at again.
const MOMENT: std::time::Duration = std::time::Duration::from_millis(50);

/// Returns whether a thread is a shepherd's: it has the name `pinfold`, or blocks every signal that
/// can be blocked, as the thread does that a preloaded Pinfold starts by itself.
fn is_shepherd(task: &foreign::Process) -> bool {
    if task.name().is_ok_and(|name| name == "pinfold") {
        return true;
    }
    let status = task.status().ok();
    let blocked = status.as_ref().and_then(|status| status.field("SigBlk:"));
    let blocked = blocked.and_then(|mask| u64::from_str_radix(str::from_utf8(mask).ok()?, 16).ok());
    // The first 31 signals, without SIGKILL, SIGSTOP and those of faults.
    blocked.is_some_and(|mask| mask & ORDINARY == ORDINARY)
}

/// The signals 1 to 31, without those that no thread can block, and without those of faults.
const ORDINARY: u64 = {
    let mut mask = (1 << 31) - 1;
    let left_out = [
        libc::SIGKILL,
        libc::SIGSTOP,
        libc::SIGSEGV,
        libc::SIGBUS,
        libc::SIGFPE,
        libc::SIGILL,
        libc::SIGTRAP,
        libc::SIGSYS,
        libc::SIGABRT,
    ];
    let mut nth = 0;
    while nth < left_out.len() {
        mask &= !(1 << (left_out[nth] - 1));
        nth += 1;
    }
    mask
};

#[cfg(test)]
mod tests;
