//! The page for Prometheus.

use super::exposition::{Family, Kind, Labels, Samples, Value};
use super::look::{Look, Reading};
use super::request::Format;
use pinfold::internal::segment::SlabEvent;
use pinfold_bridges::families::{
    self, ACTIVE, ALLOCATED, CACHE_FLUSHES, CACHE_OBJECTS, CACHE_REFILLS, CACHE_REMOTE_FREES,
    CACHE_SLABS, CACHE_SLOW_CALLS, DIRTY, HELD, HELD_PEAK, MAPPED, METADATA, RESIDENT, RETURNED,
};

/// Returns the value of the header `Content-Type`.
pub fn kind(format: Format) -> &'static str {
    match format {
        Format::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        Format::Text => "text/plain; version=0.0.4; charset=utf-8",
    }
}

const fn family(name: &'static str, unit: &'static str, kind: Kind, help: &'static str) -> Family {
    Family {
        name,
        unit,
        kind,
        help,
    }
}

fn bytes(of: families::Family) -> Family {
    family(of.name, "bytes", Kind::Gauge, of.help)
}

fn gauge(of: families::Family) -> Family {
    family(of.name, "", Kind::Gauge, of.help)
}

fn counter(of: families::Family) -> Family {
    family(of.name, "", Kind::Counter, of.help)
}

/// Declares families by their kinds, names, units and what they mean.
macro_rules! families {
    ($($family:ident = $kind:ident $name:literal $unit:literal $help:literal;)+) => {
        $(const $family: Family = family($name, $unit, Kind::$kind, $help);)+
    };
}

families! {
    INFO = Gauge "pinfold_process_info" ""
        "Always 1, with the cgroup of a process, and its command line if serve was asked for it";
    UNREAD = Gauge "pinfold_unread_processes" "" "Processes that are left out, by reason";
    COUNTER_EVENTS = Counter "pinfold_counter_events" "" "Events that the program counts by name";
    COUNTER_LEVELS = Gauge "pinfold_counter" "" "Levels that the program counts by name";
    // The metrics that Prometheus' own clients have for a process.
    RESIDENT_MEMORY = Gauge "process_resident_memory" "bytes" "Resident memory size in bytes";
    VIRTUAL_MEMORY = Gauge "process_virtual_memory" "bytes" "Virtual memory size in bytes";
    OPEN_FILES = Gauge "process_open_fds" "" "Number of open file descriptors";
    MAX_FILES = Gauge "process_max_fds" "" "Maximum number of open file descriptors";
    CPU = Counter "process_cpu" "seconds" "Total user and system CPU time spent in seconds";
    START_TIME = Gauge "process_start_time" "seconds"
        "Start time of the process since the epoch in seconds";
}

/// Returns the page. Without caches, it has some tens of lines for each process.
pub fn text(look: &Look, format: Format, with_caches: bool) -> String {
    let mut samples = Samples::default();
    for reading in &look.readings {
        add(&mut samples, reading, with_caches);
    }
    for (reason, count) in look.unread.by_reason() {
        let labels = Labels::default().with("reason", reason);
        samples.add(UNREAD, &labels, u64::try_from(count).unwrap_or(u64::MAX));
    }
    samples.text(format)
}

fn add(samples: &mut Samples, reading: &Reading, with_caches: bool) {
    let snapshot = &reading.snapshot;
    let pid = reading.pid.to_string();
    let process = Labels::default().with("pid", &pid);
    let process = process.with("process", &reading.name);
    let slabs = snapshot.of_caches(|cache| cache.slabs().saturating_mul(cache.slab));
    let objects = snapshot.of_caches(|cache| cache.out().saturating_mul(cache.size));
    let large = snapshot.used().saturating_sub(slabs);
    let mapped = snapshot.mapped.saturating_add(snapshot.huge);
    let metadata = snapshot.metadata;
    for (of, value) in [
        (ALLOCATED, objects.saturating_add(large)),
        (ACTIVE, snapshot.used()),
        (HELD, snapshot.held),
        (HELD_PEAK, snapshot.held_peak),
        (METADATA, metadata),
        (RESIDENT, snapshot.held.saturating_add(metadata)),
        (MAPPED, mapped.saturating_add(metadata)),
    ] {
        samples.add(bytes(of), &process, value);
    }
    let returned = family(RETURNED.name, "bytes", Kind::Counter, RETURNED.help);
    samples.add(returned, &process, snapshot.returned);
    for (node, memory) in snapshot.nodes.iter().enumerate() {
        let labels = process.with("node", &node.to_string());
        samples.add(bytes(DIRTY), &labels, memory.dirty);
    }
    let info = process.with("cgroup", reading.cgroup.as_deref().unwrap_or(""));
    let info = match &reading.command {
        Some(command) => info.with("cmdline", command),
        None => info,
    };
    samples.add(INFO, &info, 1_u64);
    // Several caches may have the same name: they are one to a scraper.
    let caches = snapshot.caches.iter().filter(|_| with_caches);
    for cache in caches.filter(|cache| cache.refilled() > 0) {
        let labels = process.with("cache", &cache.name);
        let free = cache.total().saturating_sub(cache.out());
        for (state, count) in [("active", cache.out()), ("free", free)] {
            let labels = labels.with("state", state);
            samples.add(gauge(CACHE_OBJECTS), &labels, count);
        }
        samples.add(gauge(CACHE_SLABS), &labels, cache.slabs());
        for (of, count) in [
            (CACHE_REFILLS, cache.refilled()),
            (CACHE_FLUSHES, cache.count(SlabEvent::Flushed)),
            (CACHE_SLOW_CALLS, cache.slow()),
            (CACHE_REMOTE_FREES, cache.count(SlabEvent::FreeRemote)),
        ] {
            samples.add(counter(of), &labels, count);
        }
    }
    for counter in &snapshot.counters {
        let labels = process.with("name", &counter.name);
        match counter.is_level {
            true => samples.add(COUNTER_LEVELS, &labels, counter.value.cast_signed()),
            false => samples.add(COUNTER_EVENTS, &labels, counter.value),
        }
    }
    let system = &reading.system;
    for (family, value) in [
        (RESIDENT_MEMORY, system.resident.map(Value::from)),
        (VIRTUAL_MEMORY, system.virtual_memory.map(Value::from)),
        (OPEN_FILES, system.open_files.map(Value::from)),
        (MAX_FILES, system.max_files.map(Value::from)),
        (CPU, system.cpu_seconds.map(Value::from)),
        (START_TIME, system.start_seconds.map(Value::from)),
    ] {
        if let Some(value) = value {
            samples.add(family, &process, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::live::list::Unread;
    use crate::live::snapshot::Snapshot;
    use crate::live::snapshot::tests::{segment, set_event};

    #[test]
    fn caches_with_the_same_name_are_added_up() {
        let mut bytes = segment(0);
        for nth in [1, 2] {
            set_event(&mut bytes, nth, 0, SlabEvent::Refilled, 50);
            set_event(&mut bytes, nth, 0, SlabEvent::SlabAlloc, nth);
        }
        let mut snapshot = Snapshot::parse(&bytes).unwrap();
        snapshot.caches[2].name = snapshot.caches[1].name.clone();
        let look = Look {
            readings: vec![Reading::with(snapshot)],
            unread: Unread {
                late: 3,
                ..Unread::default()
            },
        };
        let text = text(&look, Format::Text, true);
        let value = |family: &str| {
            let mut lines = text.lines().filter(|line| line.starts_with(family));
            let line = lines.next().expect(&text);
            assert_eq!(lines.next(), None);
            line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()
        };
        assert_eq!(value("pinfold_cache_slabs{"), 3.0);
        assert_eq!(value("pinfold_cache_refills_total{"), 100.0);
        assert_eq!(value("pinfold_unread_processes{reason=\"time\"}"), 3.0);
        assert_eq!(value("pinfold_unread_processes{reason=\"error\"}"), 0.0);
    }
}
