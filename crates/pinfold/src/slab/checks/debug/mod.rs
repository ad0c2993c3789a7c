//! Debugged caches. They check their objects as the kernel's `slab_debug` does: by red zones,
//! poison, records of owners, consistency checks and a trace.
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
//! A *slot* is the part of a slab that belongs to one object: the object, and what debugging keeps
//! around it. A debugged cache has no sheaves for allocations and frees. Each allocation and each
//! free takes the node's lock, checks the slot, and takes the slot from its slab or gives it back.
//! The cache's words in the units stay empty, so the fast paths fail on their own. Other caches pay
//! nothing.
//!
//! A red zone lies beside the object, and finds writes beyond the object. Poison fills a free
//! object, and finds writes after the free. A track records an allocation or a free: the thread,
//! the time and the callers. The bytes are the kernel's: a red zone holds 0xbb while the object is
//! free, and 0xcc while it is in use. A free object holds 0x6b, and 0xa5 as its last byte. Padding
//! holds 0x5a.

mod fault;
mod flags;
mod parse;
mod report;
mod settings;
mod slot_layout;
mod track;

pub(crate) use fault::{Fault, Faults};
pub use flags::DebugFlags;
pub use parse::{ParseError, check as check_settings};
pub use report::{Kind, Report, Verdict, on_report, symbolize_with};
pub(crate) use report::{StandardError, write_callers, write_frames};
pub(crate) use report::{raise, silently};
pub use settings::VARIABLE;
pub(crate) use settings::for_cache;
pub(crate) use slot_layout::SlotLayout;
pub use slot_layout::{Found, Part};
pub use track::Track;
