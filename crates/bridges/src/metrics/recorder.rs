//! The recorder itself.

use super::builder::{Builder, Settings};
use super::handles::Handles;
use super::registry::{Kind, Registry};
use super::render;
use super::series::{Counter, Histogram, Metric, Sample};
use super::tree::Tree;
use crate::kinds::{FloatGauge, lock};
use ::metrics::{Key, KeyName, Metadata, Recorder, SharedString, Unit};
use std::fmt;
use std::sync::{Arc, Mutex};

/// Keeps the metrics of the crate `metrics` in per-CPU counters. Clones are the same recorder.
///
/// See the [module](super) for an example. Series stay for as long as the recorder does.
#[derive(Clone)]
pub struct PinfoldRecorder(Arc<Inner>);

struct Inner {
    counters: Tree<Handles<Counter>>,
    gauges: Tree<Handles<FloatGauge>>,
    histograms: Tree<Handles<Histogram>>,
    /// Not touched once a key is in its tree, but to render.
    registry: Mutex<Registry>,
    settings: Settings,
}

impl PinfoldRecorder {
    /// The usual recorder.
    #[expect(
        clippy::new_without_default,
        reason = "a recorder is made to be installed, not filled in"
    )]
    pub fn new() -> Self {
        PinfoldRecorder::with(Builder::new().settings())
    }

    /// To make a recorder that differs from the usual one.
    pub fn builder() -> Builder {
        Builder::new()
    }

    pub(super) fn with(settings: Settings) -> Self {
        PinfoldRecorder(Arc::new(Inner {
            counters: Tree::new(),
            gauges: Tree::new(),
            histograms: Tree::new(),
            registry: Mutex::default(),
            settings,
        }))
    }

    /// Makes this the recorder that the macros of `metrics` use, for the whole process.
    ///
    /// # Errors
    ///
    /// When there is one already.
    pub fn install(&self) -> Result<(), InstallError> {
        ::metrics::set_global_recorder(self.clone()).map_err(|_| InstallError)
    }

    /// All metrics in the text format of Prometheus, version 0.0.4, sorted by name.
    pub fn render(&self) -> String {
        // Copied, so that summing over the CPUs holds up no thread that comes with a new key.
        let (families, descriptions) = {
            let registry = lock(&self.0.registry);
            (registry.families.clone(), registry.descriptions.clone())
        };
        render::page(&families, &descriptions, &self.0.settings)
    }

    /// All series with their present values, sorted by name and labels.
    ///
    /// ```
    /// use pinfold_bridges::metrics::{PinfoldRecorder, Value};
    ///
    /// let recorder = PinfoldRecorder::new();
    /// metrics::with_local_recorder(&recorder, || {
    ///     metrics::counter!("jobs", "queue" => "mail").increment(3);
    /// });
    /// let jobs = recorder.snapshot().next().expect("a series");
    /// assert_eq!((jobs.name.as_str(), jobs.value), ("jobs", Value::Counter(3)));
    /// ```
    pub fn snapshot(&self) -> impl Iterator<Item = Sample> + use<> {
        let families = lock(&self.0.registry).families.clone();
        families.into_iter().flat_map(|(name, family)| {
            (family.series.into_iter()).map(move |(labels, metric)| Sample {
                name: name.clone(),
                labels,
                value: metric.value(),
            })
        })
    }

    fn metric(&self, key: &Key, kind: Kind) -> Metric {
        lock(&self.0.registry).metric(key, kind, &self.0.settings)
    }
}

impl Recorder for PinfoldRecorder {
    fn describe_counter(&self, key: KeyName, unit: Option<Unit>, description: SharedString) {
        lock(&self.0.registry).describe(key.as_str(), unit, description.into_owned());
    }

    fn describe_gauge(&self, key: KeyName, unit: Option<Unit>, description: SharedString) {
        lock(&self.0.registry).describe(key.as_str(), unit, description.into_owned());
    }

    fn describe_histogram(&self, key: KeyName, unit: Option<Unit>, description: SharedString) {
        lock(&self.0.registry).describe(key.as_str(), unit, description.into_owned());
    }

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> ::metrics::Counter {
        let counters = &self.0.counters;
        let handles = counters.find(key).unwrap_or_else(|| {
            let Metric::Counter(metric) = self.metric(key, Kind::Counter) else {
                unreachable!("a counter was asked for")
            };
            counters.insert(key, Handles::new(metric))
        });
        ::metrics::Counter::from_arc(handles.here())
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> ::metrics::Gauge {
        let gauges = &self.0.gauges;
        let handles = gauges.find(key).unwrap_or_else(|| {
            let Metric::Gauge(metric) = self.metric(key, Kind::Gauge) else {
                unreachable!("a gauge was asked for")
            };
            gauges.insert(key, Handles::new(metric))
        });
        ::metrics::Gauge::from_arc(handles.here())
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> ::metrics::Histogram {
        let histograms = &self.0.histograms;
        let handles = histograms.find(key).unwrap_or_else(|| {
            let Metric::Histogram(metric) = self.metric(key, Kind::Histogram) else {
                unreachable!("a histogram was asked for")
            };
            histograms.insert(key, Handles::new(metric))
        });
        ::metrics::Histogram::from_arc(handles.here())
    }
}

impl fmt::Debug for PinfoldRecorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinfoldRecorder").finish_non_exhaustive()
    }
}

/// The process has a recorder already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InstallError;

impl fmt::Display for InstallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("`metrics` has a recorder already: install Pinfold's first, and no other")
    }
}

impl std::error::Error for InstallError {}
