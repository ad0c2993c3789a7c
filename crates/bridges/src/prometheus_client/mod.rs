//! The metric types of the crate `prometheus-client`, counting per CPU.
//!
//! The paths are that crate's, so that a `use` line is all that changes:
//!
//! ```
//! // Before: use prometheus_client::metrics::counter::Counter;
//! use pinfold_bridges::prometheus_client::metrics::counter::Counter;
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
//! [`AllocatorCollector`] exports the process's own allocator.
//!
//! Two things differ. `inc`, `inc_by`, `dec` and `dec_by` return nothing, because the previous
//! value of a counter on many CPUs is not known without summing. There is no `inner`.

mod allocator;
pub mod metrics;

pub use allocator::AllocatorCollector;
