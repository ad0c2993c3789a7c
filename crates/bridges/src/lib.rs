//! Pinfold's per-CPU counters behind the interfaces that Rust services already use.
//!
//! * Feature `metrics`: `metrics::PinfoldRecorder`, a recorder for the macros of the crate
//!   `metrics`.
//! * Feature `prometheus-client`: `prometheus_client`, with types of the same names as that crate's
//!   `Counter`, `Gauge` and `Histogram`, for that crate's `Registry` and `Family`.
//!
//! No feature is on by default. `docs/bridges.md` says what each kind of metric becomes, what it
//! costs, and how it differs from the original.
#![forbid(unsafe_code)]

#[cfg(any(feature = "metrics", feature = "prometheus-client"))]
mod allocator;
pub mod families;
#[cfg(any(feature = "metrics", feature = "prometheus-client"))]
mod kinds;
#[cfg(feature = "metrics")]
pub mod metrics;
#[cfg(feature = "prometheus-client")]
pub mod prometheus_client;

/// Runs the examples of the users' documentation as tests.
#[cfg(all(doctest, feature = "metrics", feature = "prometheus-client"))]
#[doc = include_str!("../../../docs/bridges.md")]
struct Guide;

/// Runs the README's example as a test.
#[cfg(all(doctest, feature = "metrics"))]
#[doc = include_str!("../README.md")]
struct Readme;
