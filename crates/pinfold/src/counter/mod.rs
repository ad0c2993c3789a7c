//! Counters that many CPUs add to without meeting.
//!
//! * [`EventCounter`] counts up: one word per CPU, one add.
//! * [`PercpuCounter`] goes up and down, and keeps a total that [`read`](PercpuCounter::read) returns at once, off by at most
//!   [`error_bound`](PercpuCounter::error_bound), and an exact [`sum`](PercpuCounter::sum) that may be taken while
//!   everybody adds.
//! * [`Counters`]: thousands of [`PercpuCounter`]s, packed.
//! * [`PercpuHistogram`]: how often values of each size occurred.
//!
//! Adding takes no lock and no system call, and on restartable sequences no atomic read-modify-write: it is one critical
//! section on the CPU's own words. The folding of those words into totals runs anywhere and disturbs no CPU. All of it works
//! in signal handlers where it does not say otherwise, in statics, and across `fork`, where the child goes on
//! with copies of the counts.
//!
//! `docs/error-bound.md` in the repository proves the bounds; `shards.rs` states the protocol.
//!
//! ```
//! use pinfold::counter::{EventCounter, PercpuCounter};
//!
//! static REQUESTS: EventCounter = EventCounter::new();
//! static OPEN: PercpuCounter = PercpuCounter::new();
//!
//! REQUESTS.inc();
//! OPEN.add(3);
//! OPEN.dec();
//! assert_eq!(REQUESTS.sum(), 1);
//! assert_eq!(OPEN.sum(), 2);
//! assert!(OPEN.read().abs_diff(2) <= OPEN.error_bound());
//! ```

mod error;
mod event;
mod exact;
mod fork;
mod gate;
mod gates;
mod histogram;
mod many;
mod pace;
mod percpu_counter;
mod reach;
pub(crate) mod shards;
mod snapshot;
mod stripe;
mod watch;

pub use error::CounterError;
pub use event::EventCounter;
pub(crate) use exact::order_own_adds;
pub(crate) use fork::register as register_fork;
pub use histogram::PercpuHistogram;
pub use many::Counters;
pub use percpu_counter::PercpuCounter;
pub use snapshot::Snapshot;
pub(crate) use watch::{fold_watched, watch_block};
