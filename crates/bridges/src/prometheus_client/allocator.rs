//! The metrics of the process's own allocator.

use crate::families::{
    ACTIVE, ALLOCATED, CACHE_FLUSHES, CACHE_OBJECTS, CACHE_REFILLS, CACHE_REMOTE_FREES,
    CACHE_SLABS, CACHE_SLOW_CALLS, DIRTY, Family, HELD, HELD_PEAK, MAPPED, METADATA, RESIDENT,
    RETURNED,
};
use pinfold::memory::{self, ArenaItem};
use pinfold::slab::{Info, Statistics, caches};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Unit;
use std::fmt;

/// Exports the process's own allocator: the families of [`crate::families`], as `pinfold serve`
/// exports those of other processes.
///
/// A scrape takes each node's lock for each cache that the program has used, and allocates a few
/// KiB. Exports 512 caches at most. The objects of caches are counted when they leave or enter
/// their slabs, so objects in sheaves count as active.
///
/// ```
/// use pinfold_bridges::prometheus_client::AllocatorCollector;
/// use prometheus_client::encoding::text::encode;
/// use prometheus_client::registry::Registry;
///
/// let mut registry = Registry::default();
/// registry.register_collector(Box::new(AllocatorCollector));
///
/// let mut text = String::new();
/// encode(&mut text, &registry)?;
/// assert!(text.contains("pinfold_held_bytes "));
/// # Ok::<(), std::fmt::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct AllocatorCollector;

/// The most caches that are exported.
const CACHES: usize = 512;

/// What a cache says.
struct Cache {
    info: Info,
    counts: Statistics,
    /// Bytes of an object, and how many of them a slab has.
    size: u64,
    per_slab: u64,
}

impl Cache {
    /// Reads a cache. Returns `None` for one that was never used.
    fn of(info: Info) -> Option<Cache> {
        let counts = info.statistics();
        (counts.refilled > 0).then(|| Cache {
            counts,
            size: info.attribute("slab_size").unwrap_or(0),
            per_slab: info.attribute("objs_per_slab").unwrap_or(0),
            info,
        })
    }

    /// Returns how many objects are out of their slabs.
    fn active(&self) -> u64 {
        self.counts.refilled.saturating_sub(self.counts.flushed)
    }

    fn free(&self) -> u64 {
        let all = (self.counts.slabs as u64).saturating_mul(self.per_slab);
        all.saturating_sub(self.active())
    }
}

/// Reads a count of a cache.
type Count = fn(&Statistics) -> u64;

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn gauge(encoder: &mut DescriptorEncoder<'_>, family: Family, bytes: u64) -> fmt::Result {
    let value = ConstGauge::new(signed(bytes));
    let unit = Some(&Unit::Bytes);
    let encoder = encoder.encode_descriptor(family.name, family.help, unit, value.metric_type())?;
    value.encode(encoder)
}

impl Collector for AllocatorCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let caches: Vec<Cache> = caches().filter_map(Cache::of).take(CACHES).collect();
        let objects = caches
            .iter()
            .map(|cache| cache.active().saturating_mul(cache.size));
        let large = (memory::large_in_use() + memory::huge_total()) as u64;
        let (held, dirty) = (memory::held(), memory::dirty());
        let allocated = objects.fold(large, u64::saturating_add);
        gauge(&mut encoder, ALLOCATED, allocated)?;
        gauge(&mut encoder, ACTIVE, held.saturating_sub(dirty))?;
        gauge(&mut encoder, DIRTY, dirty)?;
        gauge(&mut encoder, HELD, held)?;
        gauge(&mut encoder, HELD_PEAK, memory::held_peak())?;
        let metadata = memory::metadata_mapped();
        gauge(&mut encoder, METADATA, metadata)?;
        gauge(&mut encoder, RESIDENT, held.saturating_add(metadata))?;
        let mapped = memory::ARENA_STAT.read(ArenaItem::Mapped) + memory::huge_total() as u64;
        gauge(&mut encoder, MAPPED, mapped.saturating_add(metadata))?;
        let returned = ConstCounter::new(memory::returned());
        let unit = Some(&Unit::Bytes);
        let (name, help) = (RETURNED.name, RETURNED.help);
        returned.encode(encoder.encode_descriptor(name, help, unit, MetricType::Counter)?)?;

        let (name, help) = (CACHE_OBJECTS.name, CACHE_OBJECTS.help);
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for cache in &caches {
            for (state, count) in [("active", cache.active()), ("free", cache.free())] {
                let labels = [("cache", cache.info.name()), ("state", state)];
                ConstGauge::new(signed(count)).encode(family.encode_family(&labels)?)?;
            }
        }
        let (name, help) = (CACHE_SLABS.name, CACHE_SLABS.help);
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for cache in &caches {
            let slabs = ConstGauge::new(signed(cache.counts.slabs as u64));
            slabs.encode(family.encode_family(&[("cache", cache.info.name())])?)?;
        }
        let counters: [(Family, Count); 4] = [
            (CACHE_REFILLS, |counts| counts.refilled),
            (CACHE_FLUSHES, |counts| counts.flushed),
            (CACHE_SLOW_CALLS, |counts| {
                counts.alloc_slowpath.wrapping_add(counts.free_slowpath)
            }),
            (CACHE_REMOTE_FREES, |counts| counts.free_remote),
        ];
        for (of, count) in counters {
            let mut family =
                encoder.encode_descriptor(of.name, of.help, None, MetricType::Counter)?;
            for cache in &caches {
                let counter = ConstCounter::new(count(&cache.counts));
                counter.encode(family.encode_family(&[("cache", cache.info.name())])?)?;
            }
        }
        Ok(())
    }
}
