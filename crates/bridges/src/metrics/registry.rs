//! The series, by their Prometheus names. Used when a key is seen for the first time, for
//! descriptions, and to read all series.
//!
//! Prometheus refuses a page that shows a series or a name twice. So two rules hold:
//!
//! * Keys share a metric if their names and labels differ only in characters that Prometheus does
//!   not allow, or in the order of the labels.
//! * A name belongs to the kind that was first registered under it. A metric of another kind under
//!   that name counts, but is not shown.

use super::builder::Settings;
use super::names::{label_name, metric_name};
use super::series::{Counter, Histogram, Metric, Tracked};
use crate::kinds::{Buckets, Extremes, FloatGauge, FloatSum};
use ::metrics::{Key, Unit};
use pinfold::counter::PerCpuHistogram;
use pinfold::export;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// Label names and values, sorted by name.
pub type Labels = Vec<(String, String)>;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Counter,
    Gauge,
    Histogram,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        }
    }
}

/// All series with one name.
#[derive(Clone)]
pub struct Family {
    pub kind: Kind,
    pub series: BTreeMap<Labels, Metric>,
    /// Other kinds that were registered under the name, and are not shown.
    pub hidden: BTreeSet<Kind>,
}

#[derive(Clone, Debug)]
pub struct Description {
    pub unit: Option<Unit>,
    pub help: String,
}

#[derive(Default)]
pub struct Registry {
    pub families: BTreeMap<String, Family>,
    pub descriptions: BTreeMap<String, Description>,
}

impl Registry {
    /// Describes a name. The first description of a name stays.
    pub fn describe(&mut self, name: &str, unit: Option<Unit>, help: String) {
        (self.descriptions)
            .entry(metric_name(name))
            .or_insert(Description { unit, help });
    }

    /// Returns the metric of `key`, which is made if it does not exist.
    pub fn metric(&mut self, key: &Key, kind: Kind, settings: &Settings) -> Metric {
        let name = metric_name(key.name());
        let unit = self.descriptions.get(&name).and_then(|known| known.unit);
        let new = || new_metric(kind, key.name(), unit, settings);
        let family = self.families.entry(name).or_insert_with(|| Family {
            kind,
            series: BTreeMap::new(),
            hidden: BTreeSet::new(),
        });
        if family.kind != kind {
            family.hidden.insert(kind);
            return new();
        }
        let series = family.series.entry(labels(key, settings));
        let made = || {
            let metric = new();
            if let (Metric::Counter(counter), true) = (&metric, settings.shows_counters) {
                show(key, counter);
            }
            metric
        };
        series.or_insert_with(made).clone()
    }

    /// Returns the families, without the series that were idle for longer than the settings allow.
    /// `now` is the time since the recorder was made.
    pub fn present(&self, now: Duration, settings: &Settings) -> BTreeMap<String, Family> {
        let mut families = self.families.clone();
        if let Some(limit) = settings.idle_after {
            families.retain(|_, family| {
                family
                    .series
                    .retain(|_, metric| !metric.is_idle(now, limit));
                !family.series.is_empty()
            });
        }
        families
    }
}

/// Shows a counter without labels in the process's statistics. Leaves out a counter that cannot be
/// shown.
fn show(key: &Key, counter: &Arc<Tracked<Counter>>) {
    if key.labels().len() > 0 {
        return;
    }
    // A shown counter must live until the process ends. There are few, because the statistics have
    // room for few.
    let counter: &'static Arc<_> = Box::leak(Box::new(Arc::clone(counter)));
    let _ = export::show(key.name(), counter.metric().events());
}

fn labels(key: &Key, settings: &Settings) -> Labels {
    let own = key.labels().map(|label| (label.key(), label.value()));
    let global = (settings.labels.iter()).map(|(name, value)| (name.as_str(), value.as_str()));
    // Of two labels with one name, the map keeps the later one: a metric's own.
    let all: BTreeMap<_, _> = (global.chain(own))
        .map(|(name, value)| (label_name(name), value.to_owned()))
        .collect();
    all.into_iter().collect()
}

fn new_metric(kind: Kind, name: &str, unit: Option<Unit>, settings: &Settings) -> Metric {
    match kind {
        Kind::Counter => Metric::Counter(Arc::new(Tracked::new(Counter::new()))),
        Kind::Gauge => Metric::Gauge(Arc::new(Tracked::new(FloatGauge::default()))),
        Kind::Histogram => {
            let histogram = match settings.buckets(name) {
                Some(bounds) => Histogram::Buckets(Buckets::new(bounds.iter().copied())),
                None => Histogram::Quantiles {
                    scaled: Box::new(PerCpuHistogram::new()),
                    scale: settings.scale(unit),
                    sum: FloatSum::default(),
                    extremes: Extremes::default(),
                    shown: Arc::clone(&settings.quantiles),
                },
            };
            Metric::Histogram(Arc::new(Tracked::new(histogram)))
        }
    }
}
