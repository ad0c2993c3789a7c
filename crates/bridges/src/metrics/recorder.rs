//! The recorder.

use super::builder::{Builder, Settings};
use super::handles::Handles;
use super::registry::{Family, Kind, Registry};
use super::render;
use super::series::{Counter, Histogram, Metric, Sample};
use super::tree::Tree;
use crate::kinds::{FloatGauge, lock};
use ::metrics::{Key, KeyName, Metadata, Recorder, SharedString, Unit};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Keeps the metrics of the crate `metrics` in per-CPU counters. A clone is the same recorder.
///
/// A series stays for as long as the recorder does, unless [`Builder::idle_after`] is set. The
/// [module](super) installs a recorder.
///
/// ```
/// use pinfold_bridges::metrics::PinfoldRecorder;
///
/// let recorder = PinfoldRecorder::new();
/// let page = recorder.clone();
/// metrics::with_local_recorder(&recorder, || metrics::gauge!("depth").set(1.5));
/// assert!(page.render().contains("depth 1.5\n"));
/// ```
#[derive(Clone)]
pub struct PinfoldRecorder(Arc<Inner>);

struct Inner {
    counters: Tree<Handles<Counter>>,
    gauges: Tree<Handles<FloatGauge>>,
    histograms: Tree<Handles<Histogram>>,
    /// The series by their Prometheus names. Used only when a key is new, for descriptions, and to
    /// read all series.
    registry: Mutex<Registry>,
    settings: Settings,
    made: Instant,
}

impl PinfoldRecorder {
    /// Makes a recorder with the default settings.
    ///
    /// ```
    /// use pinfold_bridges::metrics::PinfoldRecorder;
    ///
    /// let recorder = PinfoldRecorder::new();
    /// metrics::with_local_recorder(&recorder, || metrics::counter!("jobs").increment(1));
    /// assert!(recorder.render().contains("jobs 1\n"));
    /// ```
    #[expect(
        clippy::new_without_default,
        reason = "a recorder is made to be installed, not filled in"
    )]
    pub fn new() -> Self {
        PinfoldRecorder::with(Builder::new().settings())
    }

    /// Returns a builder for a recorder with other settings.
    ///
    /// ```
    /// use pinfold_bridges::metrics::PinfoldRecorder;
    ///
    /// let recorder = PinfoldRecorder::builder().quantiles([0.5, 0.99]).build()?;
    /// # Ok::<(), pinfold_bridges::metrics::BuildError>(())
    /// ```
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
            made: Instant::now(),
        }))
    }

    /// Makes this the recorder of the macros of `metrics`, for the whole process.
    ///
    /// # Errors
    ///
    /// [`InstallError`] if the process has a recorder already.
    pub fn install(&self) -> Result<(), InstallError> {
        ::metrics::set_global_recorder(self.clone()).map_err(|_| InstallError)
    }

    /// Returns all metrics in the text format of Prometheus, version 0.0.4, sorted by name. Sums
    /// each metric over the CPUs.
    pub fn render(&self) -> String {
        // Copies under the lock, and sums without it, so that a thread that registers a new metric
        // does not wait for the sums.
        let (families, descriptions) = {
            let registry = lock(&self.0.registry);
            (self.present(&registry), registry.descriptions.clone())
        };
        render::page(&families, &descriptions, &self.0.settings)
    }

    /// Returns all series with their present values, sorted by name and labels.
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
        let families = self.present(&lock(&self.0.registry));
        families.into_iter().flat_map(|(name, family)| {
            (family.series.into_iter()).map(move |(labels, metric)| Sample {
                name: name.clone(),
                labels,
                value: metric.value(),
            })
        })
    }

    fn present(&self, registry: &Registry) -> BTreeMap<String, Family> {
        registry.present(self.0.made.elapsed(), &self.0.settings)
    }

    /// Returns the metric of a key that is not in the tree yet.
    fn metric(&self, key: &Key, kind: Kind) -> Metric {
        lock(&self.0.registry).metric(key, kind, &self.0.settings)
    }
}

/// Defines the functions of [`Recorder`] for each kind of metric.
macro_rules! kinds {
    ($($describe:ident, $register:ident, $tree:ident, $kind:ident;)*) => {$(
        fn $describe(&self, key: KeyName, unit: Option<Unit>, description: SharedString) {
            lock(&self.0.registry).describe(key.as_str(), unit, description.into_owned());
        }

        fn $register(&self, key: &Key, _: &Metadata<'_>) -> ::metrics::$kind {
            let tree = &self.0.$tree;
            let handles = tree.find(key).unwrap_or_else(|| {
                let Metric::$kind(metric) = self.metric(key, Kind::$kind) else {
                    unreachable!("the registry returns a metric of this kind")
                };
                tree.insert(key, Handles::new(metric))
            });
            ::metrics::$kind::from_arc(handles.here())
        }
    )*};
}

impl Recorder for PinfoldRecorder {
    kinds! {
        describe_counter, register_counter, counters, Counter;
        describe_gauge, register_gauge, gauges, Gauge;
        describe_histogram, register_histogram, histograms, Histogram;
    }
}

impl fmt::Debug for PinfoldRecorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinfoldRecorder").finish_non_exhaustive()
    }
}

/// The error of [`PinfoldRecorder::install`]: the process has a recorder already.
///
/// ```
/// use pinfold_bridges::metrics::{InstallError, PinfoldRecorder};
///
/// PinfoldRecorder::new().install()?;
/// assert_eq!(PinfoldRecorder::new().install(), Err(InstallError));
/// # Ok::<(), InstallError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InstallError;

impl fmt::Display for InstallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("`metrics` has a recorder already: install Pinfold's first, and no other")
    }
}

impl std::error::Error for InstallError {}
