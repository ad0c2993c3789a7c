//! The heap: blocks of any size and alignment, for `malloc` and its relatives.
//!
//! A call takes the first of these ways that serves it:
//!
//! | way | module | taken |
//! |---|---|---|
//! | the fast path | `gate` | if the CPU's sheaf has a block, and the path is open |
//! | the path that counts | `gate` | while samples are taken and none is due |
//! | a sampled or guarded block | `sampled` | if a sample is due |
//! | a block of a heap that the program made | `scope` | in a scope |
//! | a plain block | `plain` | otherwise |
//!
//! Blocks without pointers, as the program says, take the same ways (`data`), except the path that
//! counts.
//!
//! `mode` has the words that open and close the ways. `start` starts the heap at the first call.
//!
//! # Floors
//!
//! A module uses only modules of its own floor and of those below. `cargo xtask tidy` checks this.
//!
//! | floor | modules |
//! |---|---|
//! | resizing | `realloc` |
//! | the entry points; blocks of heaps; sizes | `entry`, `data`, `scope`, `sizes` |
//! | the first call; unusual blocks | `start`; `sampled` |
//! | when samples are taken; plain blocks | `sampling`; `plain` |
//! | lost blocks; who keeps free blocks | `lost`; `fragments` |
//! | fast paths; facts and counts of blocks | `gate`; `blocks`, `counted` |
//! | the words | `mode` |

mod blocks;
mod counted;
mod data;
mod entry;
pub mod fragments;
mod gate;
pub mod lost;
mod mode;
mod plain;
mod realloc;
mod sampled;
pub mod sampling;
pub mod scope;
mod sizes;
mod start;

pub use crate::slab::kmalloc::any_checks as checks;
pub use blocks::{ALIGN, SIZED_FREE, fits, parse_sized_free, usable_size, usable_size_checked};
pub use data::{
    Content, alloc_data, alloc_data_aligned, alloc_data_fast, alloc_data_slow, alloc_data_zeroed,
};
pub use entry::{alloc, alloc_aligned, alloc_aligned_zeroed, alloc_slow, alloc_zeroed, free};
pub use gate::alloc_fast;
pub use mode::{counts_calls, is_changing, is_sampling};
pub use realloc::{realloc, realloc_as, realloc_exact};
pub use sizes::good_size;
pub use start::ready;
