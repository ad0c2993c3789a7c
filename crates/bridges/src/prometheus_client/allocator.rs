//! The metrics of the process's own allocator.

use crate::allocator::{COUNTERS, Reading};
use crate::families::{CACHE_OBJECTS, CACHE_SLABS, Family, RETURNED};
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
        let Reading {
            gauges,
            returned,
            caches,
        } = Reading::now();
        for (family, bytes) in gauges {
            gauge(&mut encoder, family, bytes)?;
        }
        let returned = ConstCounter::new(returned);
        let unit = Some(&Unit::Bytes);
        let (name, help) = (RETURNED.name, RETURNED.help);
        returned.encode(encoder.encode_descriptor(name, help, unit, MetricType::Counter)?)?;

        let (name, help) = (CACHE_OBJECTS.name, CACHE_OBJECTS.help);
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for cache in &caches {
            for (state, count) in cache.objects() {
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
        for (of, count) in COUNTERS {
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
