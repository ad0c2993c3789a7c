//! Debugging of caches, as the kernel's `slab_debug` does: red zones, poison, owners, checks, trace.
//!
//! # The slot of an object
//!
//! ```text
//!  ┌───────────────┬─────────────┬────────────────┬───────────┬─────────────┬────────────┬─────────┐
//!  │ left red zone │ the object  │ right red zone │ requested │ last alloc  │ last free  │ padding │
//!  └───────────────┴─────────────┴────────────────┴───────────┴─────────────┴────────────┴─────────┘
//!   Z: as its alignment            Z: to a word       Z or U      U: a track    U: a track    to the next slot
//! ```
//!
//! A debugged cache keeps no sheaves: every allocation and every free is checked, and goes to the slab under the node's lock. Its CPU
//! words stay empty, so that the fast paths fail on their own, and other caches pay nothing.
//!
//! Bytes are the kernel's: a red zone is 0xbb while the object is free and 0xcc while it is in use; a free object is 0x6b with
//! 0xa5 at its end; padding is 0x5a.

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
