//! The settings of a recorder.

use super::names::metric_name;
use super::recorder::PinfoldRecorder;
use ::metrics::Unit;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// The default quantiles, which are those of metrics-exporter-prometheus.
const QUANTILES: [f64; 7] = [0.0, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0];

/// The default scale. Values without a unit are taken for seconds, because `metrics` turns a
/// `Duration` into seconds. They are kept to the nanosecond.
const SCALE: f64 = 1e9;

/// The settings that a [`Builder`] has collected.
#[derive(Clone)]
pub struct Settings {
    pub labels: BTreeMap<String, String>,
    pub quantiles: Arc<[f64]>,
    pub recommended_naming: bool,
    pub idle_after: Option<Duration>,
    pub shows_counters: bool,
    scale: f64,
    buckets: Option<Vec<f64>>,
    buckets_by_name: BTreeMap<String, Vec<f64>>,
}

impl Settings {
    /// Returns the bounds of the buckets for histograms of this name, if these have buckets.
    pub fn buckets(&self, name: &str) -> Option<&[f64]> {
        let own = self.buckets_by_name.get(&metric_name(name));
        own.or(self.buckets.as_ref()).map(Vec::as_slice)
    }

    /// Returns the factor by which values of this unit are multiplied before they are rounded to
    /// whole numbers. Durations are kept in nanoseconds, bytes and counts unchanged.
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

/// Makes a [`PinfoldRecorder`] with other settings than the default ones.
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
            idle_after: None,
            shows_counters: false,
            scale: SCALE,
            buckets: None,
            buckets_by_name: BTreeMap::new(),
        })
    }

    /// Returns the settings chosen so far.
    pub(super) fn settings(self) -> Settings {
        self.0
    }

    /// Gives every series this label. If a metric has a label of the same name, the metric's label
    /// wins.
    pub fn label(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.0.labels.insert(name.into(), value.into());
        self
    }

    /// Sets the quantiles that histograms show, from 0 to 1.
    ///
    /// The default is 0, 0.5, 0.9, 0.95, 0.99, 0.999 and 1.
    pub fn quantiles(mut self, quantiles: impl IntoIterator<Item = f64>) -> Self {
        self.0.quantiles = quantiles.into_iter().collect();
        self
    }

    /// Has all histograms count values in buckets with these upper bounds, instead of showing
    /// quantiles.
    pub fn buckets(mut self, bounds: impl IntoIterator<Item = f64>) -> Self {
        self.0.buckets = Some(bounds.into_iter().collect());
        self
    }

    /// Has the histograms of one name count values in buckets with these upper bounds. For this
    /// name, these bounds replace those of [`buckets`](Self::buckets).
    pub fn buckets_for(mut self, name: &str, bounds: impl IntoIterator<Item = f64>) -> Self {
        let bounds = bounds.into_iter().collect();
        self.0.buckets_by_name.insert(metric_name(name), bounds);
        self
    }

    /// Sets the factor by which the values of a histogram with quantiles are multiplied before they
    /// are rounded to whole numbers. It applies to metrics whose description gives no unit that
    /// decides it.
    ///
    /// The default is 10^9. With it, quantiles distinguish values down to a billionth, but not
    /// values above 1.8 · 10^10. For sizes in bytes, use 1, or describe the metric with its unit.
    pub fn scale(mut self, scale: f64) -> Self {
        self.0.scale = scale;
        self
    }

    /// Appends units and, for counters, `_total` to the names, as Prometheus recommends. By
    /// default, names stay unchanged.
    pub fn recommended_naming(mut self, recommended: bool) -> Self {
        self.0.recommended_naming = recommended;
        self
    }

    /// Leaves out of the page and of snapshots each series that was not used for longer than
    /// `idle`. A series is used when a call counts, records or sets it. The time begins at the last
    /// page or snapshot that found the series used since the page or snapshot before. By default,
    /// all series stay.
    ///
    /// A series that is used again comes back with the count that it had. Handles that the program
    /// keeps stay valid. The memory of an idle series stays too, so that finding a metric takes no
    /// lock.
    pub fn idle_after(mut self, idle: Duration) -> Self {
        self.0.idle_after = Some(idle);
        self
    }

    /// Shows the counters without labels to other processes too: `pinfold vmstat PID` prints them.
    /// By default, they are not shown.
    ///
    /// A counter is left out if the process has no statistics, if there is no room for it, or if
    /// its name is longer than 32 bytes or is taken ([`pinfold::export::ShowError`]). The counters
    /// that were shown stay in memory when the recorder is dropped.
    pub fn show_counters(mut self, shown: bool) -> Self {
        self.0.shows_counters = shown;
        self
    }

    /// Makes the recorder.
    ///
    /// # Errors
    ///
    /// * [`BuildError::Quantile`] if a quantile is outside 0 to 1.
    /// * [`BuildError::Scale`] if the scale is not a positive, normal number.
    /// * [`BuildError::Buckets`] if none of the bounds for some histograms is finite.
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

/// The error of [`Builder::build`]: a setting that makes no sense.
///
/// ```
/// use pinfold_bridges::metrics::{BuildError, PinfoldRecorder};
///
/// let refused = PinfoldRecorder::builder().quantiles([95.0]).build();
/// assert_eq!(refused.unwrap_err(), BuildError::Quantile(95.0));
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum BuildError {
    /// The quantile is outside 0 to 1.
    Quantile(f64),
    /// The scale is not a positive, normal number.
    Scale(f64),
    /// The histograms with this name, or all histograms, have no finite bound.
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
