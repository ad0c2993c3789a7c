//! The laboratory: what measures Pinfold.
//!
//! The command runs [`mod@bench`] and [`jitter`]. The program in `bench/` measures other allocators
//! and counters beside Pinfold, by the same loops. [`output`] is how both of them, and the rest of
//! the command, write text and files.
//!
//! Both programs run the scenarios of slab_test, the kernel's benchmark for its slab allocators.
//! The figures of the two are comparable because both run the loops of this crate.
//!
//! - A *subject* ([`Subject`]) allocates and frees objects of one size.
//! - A *scenario* ([`Scenario`]) says which threads allocate and free, and what is timed.
//! - A *worker* is a thread that is pinned to a CPU. A [`Pool`] has a worker for each CPU.
//! - A *pass* goes through all objects of a scenario once. A measurement makes untimed passes and
//!   then a timed one.
//! - A *cycle* is a tick of the counter that [`cycles`] reads, not of the core.
//!
//! A subject is a type parameter, and its methods are `#[inline(always)]`. So each timed loop is
//! compiled for its subject, without calls through pointers. Only the call that starts a whole
//! scenario may go through a pointer.

pub mod bench;
pub mod cpus;
pub mod cycles;
pub mod figures;
pub mod jitter;
pub mod machine;
mod names;
pub mod output;
mod pool;
mod scenarios;
pub mod stats;
mod subjects;
mod wait;

pub use machine::Machine;
pub use names::Name;
pub use pool::{Desk, Pool};
pub use scenarios::{Measurable, Op, Scenario, Timing, at_depth, out_of_memory};
pub(crate) use subjects::cache_of;
pub use subjects::{CMalloc, MallocApi, PinfoldCache, PinfoldMalloc, Subject, cache};
pub use wait::{Barrier, Padded, spin_long_until, spin_until};
