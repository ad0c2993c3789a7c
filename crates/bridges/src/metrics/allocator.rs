//! The metrics of the process's own allocator, for any recorder.

use crate::allocator::{COUNTERS, Reading};
use crate::families::{CACHE_OBJECTS, CACHE_SLABS, Family, RETURNED};
use ::metrics::{counter, describe_counter, describe_gauge, gauge};

/// Hands the figures of the process's own allocator to the recorder of `metrics`: the families of
/// [`crate::families`], under the names of `pinfold serve`. Works with any recorder.
///
/// ```
/// use pinfold_bridges::metrics::{AllocatorCollector, PinfoldRecorder};
///
/// let recorder = PinfoldRecorder::new();
/// metrics::with_local_recorder(&recorder, || {
///     AllocatorCollector.describe(); // once
///     AllocatorCollector.collect(); // before each page
/// });
/// assert!(recorder.render().contains("pinfold_held_bytes "));
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct AllocatorCollector;

fn bytes(family: Family) -> String {
    format!("{}_bytes", family.name)
}

fn total(name: &str) -> String {
    format!("{name}_total")
}

impl AllocatorCollector {
    /// Describes the metrics.
    pub fn describe(&self) {
        for (family, _) in Reading::now().gauges {
            describe_gauge!(bytes(family), family.help);
        }
        describe_counter!(total(&bytes(RETURNED)), RETURNED.help);
        for family in [CACHE_OBJECTS, CACHE_SLABS] {
            describe_gauge!(family.name, family.help);
        }
        for (family, _) in COUNTERS {
            describe_counter!(total(family.name), family.help);
        }
    }

    /// Sets the metrics to the present figures.
    ///
    /// Takes each node's lock for each cache that the program has used, and allocates a few KiB.
    /// Exports 512 caches at most. The objects of caches are counted when they leave or enter their
    /// slabs, so objects in sheaves count as active.
    pub fn collect(&self) {
        let reading = Reading::now();
        for (family, value) in reading.gauges {
            gauge!(bytes(family)).set(value as f64);
        }
        counter!(total(&bytes(RETURNED))).absolute(reading.returned);
        for cache in &reading.caches {
            let name = cache.info.name().to_owned();
            for (state, count) in cache.objects() {
                gauge!(CACHE_OBJECTS.name, "cache" => name.clone(), "state" => state)
                    .set(count as f64);
            }
            gauge!(CACHE_SLABS.name, "cache" => name.clone()).set(cache.counts.slabs as f64);
            for (family, count) in COUNTERS {
                counter!(total(family.name), "cache" => name.clone())
                    .absolute(count(&cache.counts));
            }
        }
    }
}
