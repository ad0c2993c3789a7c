//! Keeps the heap profiles of processes that end without writing one, for `--leaks`.
//!
//! A process writes its profile when it ends by `exit`. A process that a signal or `_exit` ends
//! cannot write one, and the library installs no signal handlers, because they belong to the
//! program. This command cannot always act before the signal either: a terminal and `timeout` send
//! it to the program and to this command at the same time, and SIGKILL and a crash come unseen.
//!
//! So a thread looks at the processes of the run all the time:
//!
//! 1. The thread lists the child and its descendants, ten times a second, more often at first, and
//!    less often if there are many.
//! 2. It opens the file without a name that holds the profile's numbers. The file stays readable
//!    until this command closes it, also after the process has ended.
//! 3. At each look, it reads the process's mappings again, which tell where its code is. Mappings
//!    that the process made after the last look before its end are not known, so addresses in them
//!    have no names.
//!
//! A forked child that has not started another program has its profile in private memory, which
//! ends with it. Such a child leaves a profile only if it ends by `exit`.

use crate::foreign::{Deadline, Process, number};
use crate::heap::Kept;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle, sleep};
use std::time::{Duration, Instant};

/// The time between two looks: first, and later.
const PAUSES: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(100)];
/// One part in this many of a CPU's time is used for looks at most.
const SHARE: u32 = 20;
/// How long one look may take.
const LONGEST_LOOK: Duration = Duration::from_secs(1);
/// The most processes that one look visits, and the most profiles that are kept at once.
const MOST: usize = 256;
/// The most bytes of a thread's list of children.
const CHILDREN: usize = 64 << 10;
/// How long [`Watch::end`] waits for the other processes that the same signal ends.
const LAST_WAIT: Duration = Duration::from_secs(1);

/// The thread that looks.
pub struct Watch {
    /// Dropping this ends the thread.
    stop: Sender<()>,
    thread: JoinHandle<Vec<Kept>>,
}

impl Watch {
    /// Starts to look at process `root` and its descendants. `has_written` tells whether a process
    /// has written a profile itself.
    pub fn start(root: u32, has_written: impl Fn(u32) -> bool + Send + 'static) -> Watch {
        let (stop, stopped) = channel();
        let thread = thread::spawn(move || {
            let mut kept = Vec::new();
            let [mut pause, longest] = PAUSES;
            loop {
                let begin = Instant::now();
                look(root, &mut kept, &has_written);
                let rest = pause.max(begin.elapsed() * SHARE);
                if stopped.recv_timeout(rest) != Err(RecvTimeoutError::Timeout) {
                    return kept;
                }
                pause = (pause * 2).min(longest);
            }
        });
        Watch { stop, thread }
    }

    /// Stops, and returns the profiles of the processes that have ended. If a signal ended the
    /// child, waits for the end of the others for a second: the signal may have been sent to all of
    /// them, and the child is only the first to end.
    pub fn end(self, by_signal: bool) -> Vec<Kept> {
        drop(self.stop);
        let mut kept = self.thread.join().unwrap_or_default();
        let is_alive = |kept: &Kept| !kept.process().has_ended().unwrap_or(true);
        let begin = Instant::now();
        while by_signal && begin.elapsed() < LAST_WAIT && kept.iter().any(is_alive) {
            sleep(Duration::from_millis(5));
        }
        kept.retain(|kept| !is_alive(kept));
        kept
    }
}

/// Opens the profiles of new processes, and reads the mappings of the others again.
fn look(root: u32, kept: &mut Vec<Kept>, has_written: impl Fn(u32) -> bool) {
    let _deadline = Deadline::after(LONGEST_LOOK);
    kept.retain_mut(|kept| {
        let is_alive = !kept.process().has_ended().unwrap_or(false);
        if is_alive {
            kept.refresh()
        } else {
            !has_written(kept.process().pid())
        }
    });
    for process in descendants(root) {
        let is_same = |kept: &Kept| {
            let known = kept.process();
            (known.pid(), known.started()) == (process.pid(), process.started())
        };
        if kept.len() < MOST && !kept.iter().any(is_same) {
            kept.extend(Kept::of(process));
        }
    }
}

/// Returns a process and its descendants, at most [`MOST`].
fn descendants(root: u32) -> Vec<Process> {
    let mut found: Vec<Process> = Process::open(root).into_iter().collect();
    let mut next = 0;
    while let Some(process) = found.get(next) {
        let tasks = process.tasks().into_iter().flatten().flatten();
        let lists = tasks.filter_map(|task| task.read("children", CHILDREN).ok());
        let children = lists.flat_map(|list| {
            let pids = list.split(u8::is_ascii_whitespace).filter_map(number);
            pids.collect::<Vec<u32>>()
        });
        let opened: Vec<Process> = children
            .take(MOST - found.len())
            .filter_map(|pid| Process::open(pid).ok())
            .collect();
        found.extend(opened);
        next += 1;
    }
    found
}
