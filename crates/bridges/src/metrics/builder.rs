//! What a recorder can be told.

use super::names::metric_name;
use super::recorder::PinfoldRecorder;
use ::metrics::Unit;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// As metrics-exporter-prometheus shows them.
const QUANTILES: [f64; 7] = [0.0, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0];

/// Values without a unit are taken for seconds, as `metrics` turns a `Duration` into them, and kept to the nanosecond.
const SCALE: f64 = 1e9;

/// How a recorder behaves.
#[derive(Clone)]
pub struct Settings {
    pub labels: BTreeMap<String, String>,
    pub quantiles: Arc<[f64]>,
    pub recommended_naming: bool,
    scale: f64,
    buckets: Option<Vec<f64>>,
    buckets_by_name: BTreeMap<String, Vec<f64>>,
}

impl Settings {
    /// The bounds for histograms of this name, if they have buckets.
    pub fn buckets(&self, name: &str) -> Option<&[f64]> {
        let own = self.buckets_by_name.get(&metric_name(name));
        own.or(self.buckets.as_ref()).map(Vec::as_slice)
    }

    /// What values of this unit are multiplied by before they become whole numbers: durations are kept in nanoseconds, bytes and
    /// counts as they are.
    pub fn scale(&self, unit: Option<Unit>) -> f64 {
        match unit {
            Some(Unit::Seconds) => 1e9,
            Some(Unit::Milliseconds) => 1e6,
            Some(Unit::Microseconds) => 1e3,
            Some(Unit::Nanoseconds | Unit::Bytes | Unit::Count) => 1.0,
            _ => self.scale,
        }
    }
}

/// Makes a [`PinfoldRecorder`] that differs from the usual one.
///
/// ```
/// use pinfold_bridges::metrics::PinfoldRecorder;
///
/// let recorder = PinfoldRecorder::builder()
///     .label("service", "shop")
///     .buckets_for("request_seconds", [0.01, 0.1, 1.0])
///     .recommended_naming(true)
///     .build()?;
/// # Ok::<(), pinfold_bridges::metrics::BuildError>(())
/// ```
#[derive(Clone)]
#[must_use]
pub struct Builder(Settings);

impl Builder {
    pub(super) fn new() -> Self {
        Builder(Settings {
            labels: BTreeMap::new(),
            quantiles: QUANTILES.into(),
            recommended_naming: false,
            scale: SCALE,
            buckets: None,
            buckets_by_name: BTreeMap::new(),
        })
    }

    /// What was chosen so far.
    pub(super) fn settings(self) -> Settings {
        self.0
    }

    /// Gives every series this label. A metric's own label of the same name takes precedence.
    pub fn label(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.0.labels.insert(name.into(), value.into());
        self
    }

    /// Which quantiles histograms show, from 0 to 1. Usually 0, 0.5, 0.9, 0.95, 0.99, 0.999 and 1.
    pub fn quantiles(mut self, quantiles: impl IntoIterator<Item = f64>) -> Self {
        self.0.quantiles = quantiles.into_iter().collect();
        self
    }

    /// Has all histograms count below these bounds instead of showing quantiles.
    pub fn buckets(mut self, bounds: impl IntoIterator<Item = f64>) -> Self {
        self.0.buckets = Some(bounds.into_iter().collect());
        self
    }

    /// The same for the histograms of one name.
    pub fn buckets_for(mut self, name: &str, bounds: impl IntoIterator<Item = f64>) -> Self {
        let bounds = bounds.into_iter().collect();
        self.0.buckets_by_name.insert(metric_name(name), bounds);
        self
    }

    /// What values of histograms with quantiles are multiplied by to become whole numbers, where the metric's description
    /// gives no unit that decides it. Usually 10^9: values down to a billionth are told apart, and those above 1.8 · 10^10
    /// are not. For sizes in bytes use 1, or describe the metric with its unit.
    pub fn scale(mut self, scale: f64) -> Self {
        self.0.scale = scale;
        self
    }

    /// Appends units and, to counters, `_total` to the names, as Prometheus recommends. Usually names stay as they are.
    pub fn recommended_naming(mut self, recommended: bool) -> Self {
        self.0.recommended_naming = recommended;
        self
    }

    /// The recorder.
    ///
    /// # Errors
    ///
    /// For a quantile, a scale or bounds that make no sense.
    pub fn build(self) -> Result<PinfoldRecorder, BuildError> {
        let settings = &self.0;
        if let Some(&bad) = (settings.quantiles.iter()).find(|at| !(0.0..=1.0).contains(*at)) {
            return Err(BuildError::Quantile(bad));
        }
        if !(settings.scale.is_normal() && settings.scale > 0.0) {
            return Err(BuildError::Scale(settings.scale));
        }
        let all = settings
            .buckets
            .iter()
            .map(|bounds| ("all histograms", bounds));
        let named = (settings.buckets_by_name.iter()).map(|(name, bounds)| (name.as_str(), bounds));
        for (name, bounds) in all.chain(named) {
            if !bounds.iter().any(|bound| bound.is_finite()) {
                return Err(BuildError::Buckets(name.to_owned()));
            }
        }
        Ok(PinfoldRecorder::with(self.0))
    }
}

/// What a [`Builder`] was told wrong.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum BuildError {
    /// A quantile outside 0 to 1.
    Quantile(f64),
    /// A scale that is not a positive number.
    Scale(f64),
    /// No finite bound for the histograms named.
    Buckets(String),
}

impl fmt::Display for BuildError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BuildError::Quantile(at) => {
                write!(f, "quantile {at}: give a number from 0 to 1, as 0.99")
            }
            BuildError::Scale(scale) => write!(f, "scale {scale}: give a number above 0, as 1e9"),
            BuildError::Buckets(name) => {
                write!(
                    f,
                    "buckets for {name}: give at least one finite upper bound"
                )
            }
        }
    }
}

impl std::error::Error for BuildError {}
