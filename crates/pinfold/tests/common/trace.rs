//! The kernel's tracer (`ftrace`), in an instance of its own.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

const ROOT: &str = "/sys/kernel/tracing";

/// A recording of events on some CPUs. The recording ends when this is dropped.
pub struct Trace {
    folder: PathBuf,
}

/// One event.
#[derive(Debug)]
pub struct Event {
    /// The name of the thread that ran on the CPU.
    pub task: String,
    /// That thread's id.
    pub thread: i32,
    /// The time of the monotonic clock.
    pub time: Duration,
    pub name: String,
    pub details: String,
    /// The kernel's functions that led to the event, the innermost first, if
    /// [`Trace::record_stacks`] asked for them.
    pub stack: Vec<String>,
}

impl Trace {
    /// Begins to record `events` on `cpus`. Each pair names an event, by its folder below tracefs's
    /// `events`, and a filter for its fields, which may be empty.
    ///
    /// Returns an explanation if the kernel cannot trace these events.
    pub fn begin(name: &str, cpus: &[usize], events: &[(&str, &str)]) -> Result<Trace, String> {
        // SAFETY: all strings are literals that end with a NUL, and tracefs takes no data.
        unsafe {
            // Fails if it is mounted already, or if the kernel has none.
            let (kind, place) = (c"tracefs", c"/sys/kernel/tracing");
            libc::mount(
                kind.as_ptr(),
                place.as_ptr(),
                kind.as_ptr(),
                0,
                std::ptr::null(),
            );
        }
        let folder = PathBuf::from(format!("{ROOT}/instances/{name}"));
        fs::create_dir(&folder).map_err(|why| format!("{}: {why}", folder.display()))?;
        let trace = Trace { folder };
        let mask = cpus.iter().fold(0u64, |mask, cpu| mask | 1 << cpu);
        trace.set("tracing_cpumask", &format!("{mask:x}"))?;
        trace.set("trace_clock", "mono")?;
        for (event, filter) in events {
            if !filter.is_empty() {
                trace.set(&format!("events/{event}/filter"), filter)?;
            }
            trace.set(&format!("events/{event}/enable"), "1")?;
        }
        Ok(trace)
    }

    /// Records the kernel's stack at each of these events that the filter selects.
    pub fn record_stacks(&self, event: &str, filter: &str) -> Result<(), String> {
        self.set(
            &format!("events/{event}/trigger"),
            &format!("stacktrace if {filter}"),
        )
    }

    fn set(&self, file: &str, value: &str) -> Result<(), String> {
        fs::write(self.folder.join(file), value).map_err(|why| format!("{file}: {why}"))
    }

    /// Ends the recording.
    pub fn end(&self) {
        self.set("tracing_on", "0").unwrap();
    }

    /// Returns the events on a CPU, in their order. Panics if some were lost.
    pub fn events(&self, cpu: usize) -> Vec<Event> {
        let read = |file: &str| {
            let file = self.folder.join(format!("per_cpu/cpu{cpu}/{file}"));
            fs::read_to_string(&file).unwrap()
        };
        let stats = read("stats");
        let lost = stats
            .lines()
            .find_map(|line| line.strip_prefix("overrun: "));
        assert_eq!(lost, Some("0"), "{stats}");
        let mut events: Vec<Event> = Vec::new();
        for line in read("trace").lines() {
            if let Some(function) = line.trim_start().strip_prefix("=> ") {
                if let Some(of) = events.last_mut() {
                    of.stack.push(function.to_owned());
                }
            } else {
                events.extend(parsed(line));
            }
        }
        events
    }
}

/// Reads a line such as `name-17  [007] d..1.  12.345678: sched_switch: prev_comm=name ...`.
fn parsed(line: &str) -> Option<Event> {
    if line.starts_with('#') {
        return None;
    }
    let (task, rest) = line.split_once(" [")?;
    let mut words = rest.splitn(2, ": ");
    let time = words.next()?.split_whitespace().last()?;
    let (name, details) = words.next()?.split_once(':')?;
    let (task, thread) = task.rsplit_once('-')?;
    Some(Event {
        task: task.trim().to_owned(),
        thread: thread.trim().parse().ok()?,
        time: Duration::from_secs_f64(time.parse().ok()?),
        name: name.to_owned(),
        details: details.trim().to_owned(),
        stack: Vec::new(),
    })
}

impl Drop for Trace {
    fn drop(&mut self) {
        let _ = self.set("tracing_on", "0");
        let _ = fs::remove_dir(&self.folder);
    }
}

/// Returns the time of the monotonic clock.
pub fn now() -> Duration {
    // SAFETY: `timespec` consists of integers, and the call writes to one.
    let now = unsafe {
        let mut now: libc::timespec = std::mem::zeroed();
        libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now);
        now
    };
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}
