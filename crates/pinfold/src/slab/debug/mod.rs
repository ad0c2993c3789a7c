//! Debugging of caches, as the kernel's `slab_debug` does it: red zones, poison, owners,
//! consistency checks and a trace.
//!
//! # The slot of an object
//!
//! ```text
//!  ┌───────────┬────────┬────────────┬───────────┬────────────┬───────────┬──────────────────┐
//!  │  left     │ object │ right      │ requested │ last alloc │ last free │ padding          │
//!  │  red zone │        │ red zone   │           │            │           │ to the next slot │
//!  └───────────┴────────┴────────────┴───────────┴────────────┴───────────┴──────────────────┘
//!   Z: its               Z: up to a   Z or U      U: a track   U: a track
//!   alignment            whole word
//! ```
//!
//! A debugged cache has no sheaves. Every allocation and every free is checked, and goes to the
//! slab under the node's lock. The cache's words in the units stay empty, so the fast paths fail on
//! their own. Other caches pay nothing.
//!
//! The bytes are the kernel's: a red zone holds 0xbb while the object is free and 0xcc while it is
//! in use. A free object holds 0x6b, and 0xa5 as its last byte. Padding holds 0x5a.

mod flags;
mod node;
mod parse;
mod paths;
mod plan;
mod report;
mod settings;
mod track;

pub use flags::DebugFlags;
pub use parse::{ParseError, check as check_settings};
pub(super) use paths::{Fault, Faults};
pub(super) use plan::Plan;
pub use plan::{Found, Part};
pub use report::{Kind, Report, Verdict, on_report, symbolize_with};
pub(super) use report::{raise, silently};
pub(super) use settings::for_cache;
pub use track::Track;
