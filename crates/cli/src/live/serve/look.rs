//! Looks at the processes that are served.
//!
//! A process may do all it can to be slow to read, or to be misread. So:
//! - Each look has a deadline. The processes that were quick the last time are read first.
//! - A process in which a read hangs is left out until that read ends.
//! - A process leaves the list only when it has ended, or runs another program. Any other error
//!   leaves it out of one look.

use super::once::Once;
use crate::foreign::{Deadline, Identity, Process};
use crate::live::list::{self, Unread};
use crate::live::snapshot::{Memory, Snapshot};
use crate::live::source::{Source, Unreadable};
use crate::live::top::threads_by_cpu;
use crate::live::{locked, status};
use crate::output;
use rustix::fs::{AtFlags, statat};
use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How long a list of all processes is used before the next is made.
const LIST_AGE: Duration = Duration::from_secs(5);
/// How long a look waits for a new list. Until then, the old one is used.
const LISTING: Duration = Duration::from_millis(300);
/// How long processes are read in one look. The last one may take longer.
const READING: Duration = Duration::from_millis(600);
/// How long a client waits for a look, and before that for the first list of all processes.
const PATIENCE: Duration = Duration::from_secs(4);
/// How long one process may be read. Those that take longer are left out.
const EACH: Duration = Duration::from_millis(500);
/// The most memory for the numbers of all processes, and for the page that is made of them.
const MEMORY: usize = 256 << 20;
/// The bytes of a command line that are served.
const COMMAND: usize = 128;
/// The most descriptors that are counted one by one.
const MOST_LISTED: usize = 10_000;
/// A read of one process that takes longer hangs.
const HANGS: Duration = Duration::from_secs(2);
/// A look that takes longer hangs: more than a read, and less than a client waits.
const LOOK_HANGS: Duration = Duration::from_secs(3);
/// The making of a list that takes longer hangs. It has a deadline of its own.
const LISTING_HANGS: Duration = Duration::from_secs(20);

/// What all processes show at one moment.
#[derive(Debug)]
pub struct Look {
    pub readings: Vec<Reading>,
    pub unread: Unread,
}

impl Unread {
    /// Returns the counts, with the names of the reasons.
    pub fn by_reason(self) -> [(&'static str, usize); 4] {
        [
            ("error", self.failed),
            ("time", self.late),
            ("limit", self.beyond),
            ("permission", self.untraceable),
        ]
    }

    fn count(&mut self, why: &Unreadable) {
        match why {
            why if why.is_late() => self.late += 1,
            Unreadable::Untraceable => self.untraceable += 1,
            _ => self.failed += 1,
        }
    }
}

/// What one process shows.
#[derive(Debug)]
pub struct Reading {
    pub pid: u32,
    /// The name of the program, escaped.
    pub name: String,
    pub snapshot: Snapshot,
    pub system: System,
    /// The path of its cgroup.
    pub cgroup: Option<String>,
    /// The first bytes of its command line, if the user asked for that.
    pub command: Option<String>,
    /// How many threads ran on each CPU last, if that was asked for.
    pub cpus: Vec<(String, u64)>,
}

/// What the kernel says of a process. The numbers are `None` if it does not say them.
#[derive(Debug, Default)]
pub struct System {
    pub resident: Option<u64>,
    pub virtual_memory: Option<u64>,
    pub open_files: Option<u64>,
    pub max_files: Option<u64>,
    pub cpu_seconds: Option<f64>,
    pub start_seconds: Option<f64>,
    /// The same in the kernel's ticks since the machine's start.
    pub start_ticks: Option<u64>,
}

struct Entry {
    source: Source,
    /// Microseconds that the last read took.
    cost: AtomicU64,
    /// When a read began that has not ended.
    reading: Mutex<Option<Instant>>,
}

pub struct Processes {
    list: Arc<List>,
    all: Option<Arc<Once<()>>>,
    numbers: Arc<Once<Look>>,
    with_threads: Arc<Once<Look>>,
}

struct List {
    entries: Mutex<Vec<Arc<Entry>>>,
    /// The most processes that are held open.
    most: usize,
    /// The processes that could not be held or opened at the last listing.
    unlisted: Mutex<Unread>,
    /// Whether the user named the processes.
    is_named: bool,
    /// Whether command lines are read.
    with_commands: bool,
}

impl Processes {
    /// Serves the processes in `named`, or all processes if it is empty: at most `most`.
    pub fn new(named: Vec<Source>, most: usize, with_commands: bool) -> Processes {
        let is_named = !named.is_empty();
        let named = named.into_iter();
        let list = Arc::new(List {
            entries: Mutex::new(named.map(Entry::new).collect()),
            most,
            unlisted: Mutex::default(),
            is_named,
            with_commands,
        });
        let all = (!is_named).then(|| {
            let list = Arc::clone(&list);
            Once::new(LISTING_HANGS, move || list.find())
        });
        let look = |with_threads: bool| {
            let (list, all) = (Arc::clone(&list), all.clone());
            Once::new(LOOK_HANGS, move || {
                if let Some(all) = &all {
                    let now = Instant::now();
                    all.get(now.checked_sub(LIST_AGE).unwrap_or(now), LISTING);
                }
                list.look(with_threads)
            })
        };
        let (numbers, threads) = (look(false), look(true));
        Processes {
            all,
            numbers,
            with_threads: threads,
            list,
        }
    }

    /// Looks at all processes. Returns `None` if that takes too long.
    pub fn look(&self, with_threads: bool) -> Option<Arc<Look>> {
        if let Some(all) = &self.all
            && locked(&self.list.entries).is_empty()
        {
            // The first list takes longer than a later one may.
            let now = Instant::now();
            all.get(now.checked_sub(LIST_AGE).unwrap_or(now), PATIENCE);
        }
        let look = match with_threads {
            true => &self.with_threads,
            false => &self.numbers,
        };
        look.get(Instant::now(), PATIENCE)
    }

    /// Returns whether all named processes have ended.
    pub fn have_ended(&self) -> bool {
        self.list.is_named && self.list.living().is_empty()
    }
}

impl List {
    /// Takes processes that have ended out of the list, and returns the others.
    fn living(&self) -> Vec<Arc<Entry>> {
        let mut entries = locked(&self.entries).clone();
        entries.retain(|entry| {
            let has_ended = entry.has_ended();
            if has_ended {
                self.replace(entry, None);
            }
            !has_ended
        });
        entries
    }

    /// Adds all processes that are not in the list.
    fn find(&self) {
        // Where /proc cannot be read, the list stays.
        let Ok(found) = list::sources() else {
            return;
        };
        let mut unlisted = found.unread();
        let known = self.living();
        let known: HashSet<u32> = known.iter().map(|entry| entry.process().pid()).collect();
        for source in found.sources {
            if known.contains(&source.pid) {
                continue;
            }
            let mut entries = locked(&self.entries);
            match entries.len() < self.most {
                true => entries.push(Entry::new(source)),
                false => unlisted.beyond += 1,
            }
        }
        *locked(&self.unlisted) = unlisted;
    }

    fn look(&self, with_threads: bool) -> Look {
        let mut entries = locked(&self.entries).clone();
        entries.sort_by_key(|entry| entry.cost.load(Relaxed));
        let end = Instant::now() + READING;
        let mut look = Look {
            readings: Vec::new(),
            unread: *locked(&self.unlisted),
        };
        let mut memory = 0_usize;
        for (nth, entry) in entries.iter().enumerate() {
            let is_late = nth > 0 && Instant::now() > end;
            let read = |entry: &Entry| entry.read(with_threads, self.with_commands);
            let this = (!is_late).then(|| read(entry)).flatten();
            match this {
                Some(Err(Unreadable::Gone)) if entry.has_ended() => self.replace(entry, None),
                Some(Err(why @ (Unreadable::Gone | Unreadable::Replaced))) => {
                    // It runs another program, which may show its statistics, at once or soon. A
                    // process of which that is not sure stays.
                    let stays = self.is_named || matches!(why, Unreadable::Gone);
                    match entry.opened_anew() {
                        Some(next) => {
                            look.take(read(&next), &mut memory);
                            self.replace(entry, Some(next));
                        }
                        None if stays => look.unread.failed += 1,
                        None => self.replace(entry, None),
                    }
                }
                this => look.take(this, &mut memory),
            }
        }
        look.readings.sort_by_key(|reading| reading.pid);
        look
    }

    /// Takes a process out of the list, and puts another in.
    fn replace(&self, entry: &Arc<Entry>, next: Option<Arc<Entry>>) {
        let mut entries = locked(&self.entries);
        let before = entries.len();
        entries.retain(|other| !Arc::ptr_eq(other, entry));
        // Another look may have done this already.
        if entries.len() < before {
            entries.extend(next);
        }
    }
}

impl Entry {
    fn new(source: Source) -> Arc<Entry> {
        Arc::new(Entry {
            source,
            cost: AtomicU64::new(0),
            reading: Mutex::new(None),
        })
    }

    fn process(&self) -> &Process {
        self.source.process()
    }

    /// Returns an entry for the statistics that the process shows now.
    fn opened_anew(&self) -> Option<Arc<Entry>> {
        let next = Entry::new(Source::open(self.process().pid()).ok()?);
        (next.process().started() == self.process().started()).then_some(next)
    }

    /// Returns whether the process has ended, as far as that can be told.
    fn has_ended(&self) -> bool {
        self.process().has_ended().unwrap_or(false)
    }

    /// Reads the process. Returns `None` if an earlier read hangs.
    fn read(&self, with_threads: bool, with_commands: bool) -> Option<Result<Reading, Unreadable>> {
        let begin = Instant::now();
        {
            let mut reading = locked(&self.reading);
            if reading.is_some_and(|earlier| earlier.elapsed() > HANGS) {
                return None;
            }
            reading.get_or_insert(begin);
        }
        let _each = Deadline::after(EACH);
        let read = self.source.read().map(|snapshot| Reading {
            pid: self.process().pid(),
            name: self.name(),
            system: self.system(),
            cgroup: self.process().cgroup(),
            command: with_commands.then(|| self.process().command(COMMAND)),
            cpus: match with_threads {
                true => threads_by_cpu(self.process(), &snapshot),
                false => Vec::new(),
            },
            snapshot,
        });
        *locked(&self.reading) = None;
        let cost = u64::try_from(begin.elapsed().as_micros());
        self.cost.store(cost.unwrap_or(u64::MAX), Relaxed);
        Some(read)
    }

    fn name(&self) -> String {
        let name = self.process().read("comm", 1 << 10).unwrap_or_default();
        let name = name.strip_suffix(b"\n").unwrap_or(&name);
        output::escaped(&String::from_utf8_lossy(name)).into_owned()
    }

    fn system(&self) -> System {
        let process = self.process();
        let status = process.status().ok();
        let bytes = |field| status.as_ref()?.number(field)?.checked_mul(1024);
        System {
            resident: bytes("VmRSS:"),
            virtual_memory: bytes("VmSize:"),
            open_files: self.open_files(),
            max_files: process
                .fields("limits")
                .ok()
                .and_then(|limits| limits.number("Max open files")),
            cpu_seconds: self.source.cpu_seconds(),
            start_seconds: process.start_seconds(),
            start_ticks: process.start_ticks(),
        }
    }

    /// Returns the number of descriptors. From Linux 6.2 on, the kernel says it as the folder's
    /// size. Older kernels list them, which takes long for a process with many.
    fn open_files(&self) -> Option<u64> {
        let folder = statat(self.process().folder(), "fd", AtFlags::empty()).ok()?;
        match u64::try_from(folder.st_size) {
            Ok(count @ 1..) => Some(count),
            _ => {
                let listed = self.process().descriptors(MOST_LISTED).ok()?;
                u64::try_from(listed.len()).ok()
            }
        }
    }
}

impl Look {
    /// Takes what reading a process gave, or counts why it gave nothing.
    fn take(&mut self, read: Option<Result<Reading, Unreadable>>, memory: &mut usize) {
        match read {
            Some(Ok(reading)) => self.keep(reading, memory),
            Some(Err(why)) => self.unread.count(&why),
            None => self.unread.late += 1,
        }
    }

    /// Takes what a process shows, if all readings together take at most [`MEMORY`]. `memory` is
    /// how much the readings so far take.
    fn keep(&mut self, reading: Reading, memory: &mut usize) {
        let with_it = memory.saturating_add(reading.memory());
        if with_it <= MEMORY {
            *memory = with_it;
            self.readings.push(reading);
        } else {
            self.unread.beyond += 1;
        }
    }
}

impl Reading {
    /// Returns what the page for people shows.
    pub fn status(&self) -> status::Process {
        let process = Identity {
            command: self.command.clone(),
            started_seconds: self.system.start_seconds,
            started_ticks: self.system.start_ticks,
            ..Identity::named(self.pid, self.name.clone())
        };
        status::Process::of(process, &self.snapshot, &self.cpus)
    }

    /// Returns about how much memory the numbers take, together with their lines on the page for
    /// Prometheus.
    fn memory(&self) -> usize {
        const LINES: usize = 2 << 10;
        const LINE: usize = 512;
        let snapshot = &self.snapshot;
        let caches = snapshot.caches.iter();
        let caches = caches.map(|cache| LINES + size_of_val(&cache.nodes[..]));
        let nodes = (size_of::<Memory>() + LINE) * snapshot.nodes.len();
        caches.sum::<usize>() + nodes + LINE * snapshot.counters.len() + 2 * LINES
    }
}

#[cfg(test)]
impl Reading {
    /// Returns what a process would show with this snapshot.
    pub fn with(snapshot: Snapshot) -> Reading {
        Reading {
            pid: std::process::id(),
            name: "test".to_owned(),
            snapshot,
            system: System::default(),
            cgroup: None,
            command: None,
            cpus: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::live::snapshot::tests::segment;

    /// Otherwise a user with many processes, each of which shows the most that the layout allows,
    /// could make the server take any amount of memory.
    #[test]
    fn processes_beyond_the_memory_of_a_look_are_counted() {
        let reading = || Reading::with(Snapshot::parse(&segment(0)).unwrap());
        assert!(reading().memory() > 2 << 10);
        let mut look = Look {
            readings: Vec::new(),
            unread: Unread::default(),
        };
        let mut memory = MEMORY - reading().memory();
        look.keep(reading(), &mut memory);
        look.keep(reading(), &mut memory);
        assert_eq!(memory, MEMORY);
        assert_eq!(look.readings.len(), 1);
        assert_eq!(look.unread.by_reason()[2], ("limit", 1));
        let count = |(_, count)| count;
        assert_eq!(look.unread.by_reason().map(count).iter().sum::<usize>(), 1);
    }
}
