//! The CPUs of a process: which threads run where, and, in a process that counts every call, which
//! CPU serves how many calls.

use crate::foreign::Process;
use crate::live::per_second;
use crate::live::snapshot::Snapshot;
use std::collections::BTreeMap;

/// One CPU, or one concurrency id.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Cpu {
    pub name: String,
    /// The threads that ran on this CPU last. `None` for a concurrency id.
    pub threads: Option<u64>,
    /// The time that these threads ran, in percent of a CPU's time.
    pub busy: Option<f64>,
    /// The calls a second, where each call is counted.
    pub calls: Option<Rates>,
}

/// Calls a second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    pub allocated: f64,
    pub freed: f64,
}

/// What a later reading is compared with.
#[derive(Default)]
pub struct Before {
    /// Each thread's CPU time, in the kernel's ticks, by the thread's number and start: a later
    /// thread may have the number of one that has ended.
    times: BTreeMap<(u64, u64), u64>,
    units: Vec<(u64, u64)>,
}

/// Reads the CPUs of a process, and replaces `before`.
pub fn read(
    process: Option<&Process>,
    snapshot: &Snapshot,
    seconds: Option<f64>,
    before: &mut Before,
) -> Vec<Cpu> {
    let rate = |before, now| per_second(seconds, before, now);
    // SAFETY: `sysconf` has no preconditions.
    let hertz = unsafe { libc::sysconf(libc::_SC_CLK_TCK) }.max(1) as f64;
    let mut cpus: BTreeMap<u64, Cpu> = BTreeMap::new();
    let mut times = BTreeMap::new();
    for task in tasks(process) {
        let cpu = cpus.entry(task.cpu).or_default();
        *cpu.threads.get_or_insert(0) += 1;
        let earlier = before.times.get(&task.id).copied().unwrap_or(task.time);
        *cpu.busy.get_or_insert(0.0) += 100.0 * rate(earlier, task.time) / hertz;
        times.insert(task.id, task.time);
    }
    let units = snapshot.calls.iter().flat_map(|calls| &calls.units);
    let units: Vec<(u64, u64)> = units.map(|unit| (unit.allocated, unit.freed)).collect();
    let calls = units.iter().enumerate().map(|(nth, &now)| {
        let earlier = before.units.get(nth).copied().unwrap_or(now);
        let allocated = rate(earlier.0, now.0);
        let freed = rate(earlier.1, now.1);
        Rates { allocated, freed }
    });
    let calls: Vec<Rates> = calls.collect();
    *before = Before { times, units };
    let by_cpu = snapshot.backend == 1;
    let shared = calls.len().saturating_sub(1);
    let mut rows = Vec::new();
    for (number, mut cpu) in cpus {
        cpu.name = format!("cpu {number}");
        if by_cpu {
            cpu.calls = calls.get(number as usize).copied();
        }
        rows.push(cpu);
    }
    for (nth, &rates) in calls.iter().enumerate() {
        let name = match nth {
            _ if nth == shared => "all CPUs".to_owned(),
            _ if by_cpu => format!("cpu {nth}"),
            _ => format!("cid {nth}"),
        };
        let is_there = rows.iter().any(|row| row.name == name);
        if !is_there && rates != Rates::default() {
            let calls = Some(rates);
            rows.push(Cpu {
                name,
                calls,
                ..Cpu::default()
            });
        }
    }
    rows
}

/// Returns how many threads of a process ran on each CPU last.
pub fn threads_by_cpu(process: &Process, snapshot: &Snapshot) -> Vec<(String, u64)> {
    let cpus = read(Some(process), snapshot, None, &mut Before::default());
    let cpus = cpus.into_iter();
    cpus.filter_map(|cpu| Some((cpu.name, cpu.threads?)))
        .collect()
}

struct Task {
    /// Its number, and when it was started.
    id: (u64, u64),
    /// The CPU on which the thread ran last.
    cpu: u64,
    /// The thread's CPU time, in the kernel's ticks.
    time: u64,
}

/// The most threads of a process that are read.
const MOST_THREADS: usize = 2000;

fn tasks(process: Option<&Process>) -> Vec<Task> {
    let tasks = process.map(Process::tasks).and_then(Result::ok);
    let tasks = tasks.into_iter().flatten().flatten().take(MOST_THREADS);
    tasks.filter_map(|task| self::task(&task)).collect()
}

/// Reads a thread's last CPU and its CPU time, from its `stat` file.
fn task(task: &Process) -> Option<Task> {
    let stat = task.stat().ok()?;
    Some(Task {
        id: (u64::from(task.pid()), stat.number(22)?),
        cpu: stat.number(39)?,
        time: stat.number(14)?.checked_add(stat.number(15)?)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::live::snapshot::tests::segment;

    #[test]
    fn this_process_has_threads_on_cpus() {
        let snapshot = Snapshot::parse(&segment(0)).unwrap();
        let cpus = read(
            Some(&Process::own().unwrap()),
            &snapshot,
            Some(1.0),
            &mut Before::default(),
        );
        let threads: u64 = cpus.iter().filter_map(|cpu| cpu.threads).sum();
        assert!(threads >= 1 && cpus.iter().all(|cpu| cpu.calls.is_none()));
    }

    #[test]
    fn calls_belong_to_a_cpu_or_to_a_concurrency_id() {
        for (backend, name) in [(1, "cpu "), (2, "cid ")] {
            let mut snapshot = Snapshot::parse(&segment(3)).unwrap();
            snapshot.backend = backend;
            let mut before = Before::default();
            read(None, &snapshot, None, &mut before);
            let units = &mut snapshot.calls.as_mut().unwrap().units;
            units[1].allocated = 30;
            units[2].freed = 8;
            let cpus = read(None, &snapshot, Some(2.0), &mut before);
            let names: Vec<_> = cpus.iter().map(|cpu| cpu.name.as_str()).collect();
            assert_eq!(names, [format!("{name}1").as_str(), "all CPUs"]);
            assert_eq!(cpus[0].calls.unwrap().allocated, 15.0);
            assert_eq!(cpus[1].calls.unwrap().freed, 4.0);
        }
    }
}
