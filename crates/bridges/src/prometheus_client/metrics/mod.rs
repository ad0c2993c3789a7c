//! The module `prometheus_client::metrics`, with types that count per CPU. All other types are that
//! crate's own.

pub mod counter;
pub mod gauge;
pub mod histogram;
mod store;

pub use ::prometheus_client::metrics::{MetricType, TypedMetric, exemplar, family, info};
