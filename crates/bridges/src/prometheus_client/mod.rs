//! The metric types of the crate `prometheus-client`, counting per CPU.
//!
//! The paths are that crate's, so that a `use` line is all that changes:
//!
//! ```
//! use pinfold_bridges::prometheus_client::metrics::counter::Counter; // was: prometheus_client::metrics::counter::Counter
//! use prometheus_client::encoding::text::encode;
//! use prometheus_client::registry::Registry;
//!
//! let mut registry = Registry::default();
//! let requests = Counter::<u64>::default();
//! registry.register("requests", "Requests served", requests.clone());
//! requests.inc();
//!
//! let mut text = String::new();
//! encode(&mut text, &registry)?;
//! assert!(text.contains("requests_total 1\n"));
//! # Ok::<(), std::fmt::Error>(())
//! ```
//!
//! What differs: `inc`, `inc_by`, `dec` and `dec_by` return nothing, since the previous value of a counter that lies on many CPUs
//! is not known without summing; there is no `inner`.

pub mod metrics;
