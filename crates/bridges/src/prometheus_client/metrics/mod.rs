//! As `prometheus_client::metrics`; what is not per CPU is that crate's own.

pub mod counter;
pub mod gauge;
pub mod histogram;

pub use ::prometheus_client::metrics::{MetricType, TypedMetric, exemplar, family, info};
