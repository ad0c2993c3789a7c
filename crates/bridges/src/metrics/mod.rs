//! A recorder for the macros of the crate `metrics`.
//!
//! ```
//! use metrics::{counter, gauge, histogram};
//! use pinfold_bridges::metrics::PinfoldRecorder;
//!
//! let recorder = PinfoldRecorder::new();
//! recorder.install()?;
//!
//! counter!("requests", "route" => "/").increment(1);
//! gauge!("connections").increment(2.0);
//! histogram!("seconds").record(0.004);
//!
//! let page = recorder.render(); // what Prometheus wants to scrape
//! assert!(page.contains("requests{route=\"/\"} 1\n"));
//! # Ok::<(), pinfold_bridges::metrics::InstallError>(())
//! ```
//!
//! # How a metric is found
//!
//! A macro asks the recorder for its metric at every call, unless the program keeps the handle. If
//! asking took a lock, or wrote to memory that all CPUs share, it would cost more than counting per
//! CPU saves. So asking takes two steps without either:
//!
//! 1. A tree that only grows leads from the key to the metric (`tree`).
//! 2. The CPU clones an `Arc` of its own (`handles`).
//!
//! Keys that Prometheus cannot tell apart share one metric (`registry`).

mod allocator;
mod builder;
mod handles;
mod names;
mod recorder;
mod registry;
mod render;
mod series;
mod tree;

pub use allocator::AllocatorCollector;
pub use builder::{BuildError, Builder};
pub use recorder::{InstallError, PinfoldRecorder};
pub use series::{Distribution, Sample, Value};

/// The content type of the page that [`PinfoldRecorder::render`] returns.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4";
