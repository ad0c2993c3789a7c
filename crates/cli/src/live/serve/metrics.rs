//! The page for Prometheus, in the OpenMetrics text format.

use super::{Snapshot, Source};
use pinfold::segment::SlabEvent;
use pinfold_bridges::families::{
    ACTIVE, ALLOCATED, CACHE_FLUSHES, CACHE_OBJECTS, CACHE_REFILLS, CACHE_REMOTE_FREES,
    CACHE_SLABS, CACHE_SLOW_CALLS, DIRTY, HELD, HELD_PEAK, MAPPED, METADATA, RESIDENT, RETURNED,
};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

pub const KIND: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

type Labels = Vec<(&'static str, String)>;
type Gauges = Family<Labels, Gauge>;
type Counters = Family<Labels, Counter>;

/// All families of metrics.
#[derive(Default)]
struct Families {
    allocated: Gauges,
    active: Gauges,
    dirty: Gauges,
    held: Gauges,
    held_peak: Gauges,
    metadata: Gauges,
    allocator_resident: Gauges,
    mapped: Gauges,
    returned: Counters,
    objects: Gauges,
    slabs: Gauges,
    refills: Counters,
    flushes: Counters,
    slow: Counters,
    remote: Counters,
    counter_events: Counters,
    counter_levels: Gauges,
    resident: Gauges,
    virtual_memory: Gauges,
    open_fds: Gauges,
    max_fds: Gauges,
    cpu: Family<Labels, Counter<f64, std::sync::atomic::AtomicU64>>,
    start: Family<Labels, Gauge<f64, std::sync::atomic::AtomicU64>>,
}

/// Returns the page.
pub fn text(processes: &[(&Source, Snapshot)]) -> String {
    let families = Families::default();
    for (source, snapshot) in processes {
        families.add(source, snapshot);
    }
    let mut registry = Registry::default();
    families.register(&mut registry);
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = encode(&mut text, &registry);
    text
}

/// A gauge holds signed numbers, and a hostile segment may hold any.
fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

impl Families {
    fn add(&self, source: &Source, snapshot: &Snapshot) {
        let process = vec![("pid", source.pid.to_string()), ("process", source.name())];
        let with = |name: &'static str, value: &str| {
            let mut labels = process.clone();
            labels.push((name, value.to_owned()));
            labels
        };
        let set = |family: &Gauges, labels: &Labels, value: u64| {
            family.get_or_create(labels).set(signed(value));
        };
        // Several caches may have the same name: they are one to a scraper.
        let add = |family: &Gauges, labels: &Labels, value: u64| {
            family.get_or_create(labels).inc_by(signed(value));
        };
        let slabs = snapshot.of_caches(|cache| cache.slabs().saturating_mul(cache.slab));
        let objects = snapshot.of_caches(|cache| cache.out().saturating_mul(cache.size));
        let large = snapshot.used().saturating_sub(slabs);
        set(&self.allocated, &process, objects.saturating_add(large));
        set(&self.active, &process, snapshot.used());
        set(&self.held, &process, snapshot.held);
        set(&self.held_peak, &process, snapshot.held_peak);
        set(&self.metadata, &process, snapshot.metadata);
        let resident = snapshot.held.saturating_add(snapshot.metadata);
        set(&self.allocator_resident, &process, resident);
        let mapped = snapshot.mapped.saturating_add(snapshot.huge);
        set(
            &self.mapped,
            &process,
            mapped.saturating_add(snapshot.metadata),
        );
        self.returned
            .get_or_create(&process)
            .inc_by(snapshot.returned);
        for (node, memory) in snapshot.nodes.iter().enumerate() {
            set(&self.dirty, &with("node", &node.to_string()), memory.dirty);
        }
        for cache in snapshot.caches.iter().filter(|cache| cache.refilled() > 0) {
            let labels = with("cache", &cache.name);
            for (state, count) in [
                ("active", cache.out()),
                ("free", cache.total().saturating_sub(cache.out())),
            ] {
                let mut labels = labels.clone();
                labels.push(("state", state.to_owned()));
                add(&self.objects, &labels, count);
            }
            add(&self.slabs, &labels, cache.slabs());
            for (family, count) in [
                (&self.refills, cache.refilled()),
                (&self.flushes, cache.count(SlabEvent::Flushed)),
                (&self.slow, cache.slow()),
                (&self.remote, cache.count(SlabEvent::FreeRemote)),
            ] {
                family.get_or_create(&labels).inc_by(count);
            }
        }
        for counter in &snapshot.counters {
            let labels = with("name", &counter.name);
            if counter.is_level {
                let value = counter.value.cast_signed();
                self.counter_levels.get_or_create(&labels).set(value);
            } else {
                let events = self.counter_events.get_or_create(&labels);
                events.inc_by(counter.value);
            }
        }
        self.add_standard(source, &process);
    }

    /// Adds the metrics that Prometheus' own clients have for a process.
    fn add_standard(&self, source: &Source, process: &Labels) {
        /// How many descriptors of a process are counted.
        const DESCRIPTORS: usize = 1 << 20;
        let files = source.process();
        let status = files.status().ok();
        let kib = |field: &str| i64::try_from(status.as_ref()?.number(field)?).ok();
        for (family, field) in [
            (&self.resident, "VmRSS:"),
            (&self.virtual_memory, "VmSize:"),
        ] {
            if let Some(kib) = kib(field) {
                family.get_or_create(process).set(kib.saturating_mul(1024));
            }
        }
        let limits = files.fields("limits").ok();
        let limit = limits.and_then(|limits| limits.number("Max open files"));
        if let Some(limit) = limit.and_then(|limit| i64::try_from(limit).ok()) {
            self.max_fds.get_or_create(process).set(limit);
        }
        if let Some(seconds) = source.cpu_seconds() {
            self.cpu.get_or_create(process).inc_by(seconds);
        }
        if let Ok(descriptors) = files.descriptors(DESCRIPTORS) {
            let count = i64::try_from(descriptors.len()).unwrap_or(i64::MAX);
            self.open_fds.get_or_create(process).set(count);
        }
        if let Some(start) = source.start_seconds() {
            self.start.get_or_create(process).set(start);
        }
    }

    fn register(self, registry: &mut Registry) {
        let bytes = || Unit::Bytes;
        for (name, help, family) in [
            (ALLOCATED.name, ALLOCATED.help, self.allocated),
            (ACTIVE.name, ACTIVE.help, self.active),
            (DIRTY.name, DIRTY.help, self.dirty),
            (HELD.name, HELD.help, self.held),
            (HELD_PEAK.name, HELD_PEAK.help, self.held_peak),
            (METADATA.name, METADATA.help, self.metadata),
            (RESIDENT.name, RESIDENT.help, self.allocator_resident),
            (MAPPED.name, MAPPED.help, self.mapped),
            (
                "process_resident_memory",
                "Resident memory size in bytes",
                self.resident,
            ),
            (
                "process_virtual_memory",
                "Virtual memory size in bytes",
                self.virtual_memory,
            ),
        ] {
            registry.register_with_unit(name, help, bytes(), family);
        }
        registry.register_with_unit(RETURNED.name, RETURNED.help, bytes(), self.returned);
        registry.register(CACHE_OBJECTS.name, CACHE_OBJECTS.help, self.objects);
        registry.register(
            "pinfold_counter",
            "Levels that the program counts by name",
            self.counter_levels,
        );
        registry.register(CACHE_SLABS.name, CACHE_SLABS.help, self.slabs);
        for (name, help, family) in [
            (CACHE_REFILLS.name, CACHE_REFILLS.help, self.refills),
            (CACHE_FLUSHES.name, CACHE_FLUSHES.help, self.flushes),
            (CACHE_SLOW_CALLS.name, CACHE_SLOW_CALLS.help, self.slow),
            (
                "pinfold_counter_events",
                "Events that the program counts by name",
                self.counter_events,
            ),
            (
                CACHE_REMOTE_FREES.name,
                CACHE_REMOTE_FREES.help,
                self.remote,
            ),
        ] {
            registry.register(name, help, family);
        }
        registry.register(
            "process_open_fds",
            "Number of open file descriptors",
            self.open_fds,
        );
        registry.register(
            "process_max_fds",
            "Maximum number of open file descriptors",
            self.max_fds,
        );
        registry.register_with_unit(
            "process_cpu",
            "Total user and system CPU time spent in seconds",
            Unit::Seconds,
            self.cpu,
        );
        registry.register_with_unit(
            "process_start_time",
            "Start time of the process since the epoch in seconds",
            Unit::Seconds,
            self.start,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
        let text = text(&[(&Source::of_this_process(), snapshot)]);
        let value = |family: &str| {
            let mut lines = text.lines().filter(|line| line.starts_with(family));
            let line = lines.next().expect(&text);
            assert_eq!(lines.next(), None);
            line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()
        };
        assert_eq!(value("pinfold_cache_slabs{"), 3.0);
        assert_eq!(value("pinfold_cache_refills_total{"), 100.0);
    }
}
