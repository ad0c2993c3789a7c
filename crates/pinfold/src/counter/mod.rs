//! Counters that many CPUs add to without slowing each other down.
//!
//! An atomic that all CPUs add to moves its cache line from CPU to CPU with every add. These
//! counters give each CPU words of its own instead:
//!
//! * [`EventCounter`] only counts up. It has one word per CPU.
//! * [`EventPair`] counts two things in one critical section.
//! * [`PerCpuCounter`] goes up and down. [`read`](PerCpuCounter::read) returns an approximate total
//!   at once, off by at most [`error_bound`](PerCpuCounter::error_bound).
//!   [`sum`](PerCpuCounter::sum) is exact, even while other threads add.
//! * [`CounterTree`] goes up and down too. Its read is nearer on a machine with many CPUs, because
//!   amounts go through a tree before they reach the total.
//! * [`Counters`] holds thousands of [`PerCpuCounter`]s, packed together.
//! * [`SharedCounters`] are counters in a file that several processes map.
//! * [`PerCpuHistogram`] counts how often values of each size occurred.
//!
//! An add is one critical section on the CPU's own words. It takes no lock and makes no system
//! call. With restartable sequences it uses no atomic read-modify-write. Folding these words into
//! totals runs in any thread and interrupts no CPU.
//!
//! All operations work in signal handlers, except where their documentation says otherwise. The
//! counters can be statics. After `fork`, the child has a copy of each count and goes on from
//! there.
//!
//! # Vocabulary
//!
//! * **shard**: the words of one [`PerCpuCounter`] on one CPU.
//! * **total**: words that all CPUs share. [`read`](PerCpuCounter::read) loads them.
//! * **fold**: adds to the total what a shard has counted since its last fold.
//! * **batch**: how much a shard may count before it is folded.
//! * **base**: one atomic word that all CPUs share. It counts the adds that use no shard.
//!
//! `docs/error-bound.md` in the repository proves the bounds. `shards.rs` states the protocol.
//!
//! ```
//! use pinfold::counter::{EventCounter, PerCpuCounter};
//!
//! static REQUESTS: EventCounter = EventCounter::new();
//! static OPEN: PerCpuCounter = PerCpuCounter::new();
//!
//! REQUESTS.inc();
//! OPEN.add(3);
//! OPEN.dec();
//! assert_eq!(REQUESTS.sum(), 1);
//! assert_eq!(OPEN.sum(), 2);
//! assert!(OPEN.read().abs_diff(2) <= OPEN.error_bound());
//! ```

mod climb;
mod counters;
mod error;
mod estimate;
mod event;
mod event_pair;
mod exact;
mod fork;
mod freeze;
mod freezers;
mod histogram;
mod in_shared;
mod pace;
mod percpu_counter;
mod read;
pub(crate) mod shards;
mod slow_add;
mod snapshot;
mod stripe;
mod tree;
mod watch;

pub use counters::Counters;
pub use error::CounterError;
pub use event::EventCounter;
pub use event_pair::EventPair;
pub(crate) use exact::order_own_adds;
pub(crate) use fork::{outlast as outlast_fork, register as register_fork};
pub use histogram::PerCpuHistogram;
pub use in_shared::{SharedCounters, SharedError};
pub use percpu_counter::PerCpuCounter;
pub use snapshot::Snapshot;
pub use tree::CounterTree;
pub(crate) use watch::{fold_watched, fold_watched_here, watch_block};

/// What the protocol of the shards needs from the system. The models in loom replace this module.
mod primitive {
    pub(super) use core::sync::atomic::{AtomicU64, fence};
    pub(super) use pinfold_rseq::shard::Claim;
    pub(super) use pinfold_rseq::{
        backend, can_fence, current, fence_index, fence_is_refused, possible,
    };
}
