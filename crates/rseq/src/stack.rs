//! The stacks that [`Units::pop`](crate::Units::pop) and [`Units::push`](crate::Units::push) work on.
//!
//! A stack is an array of non-null pointers whose end is a multiple of [`STACK_ALIGN`]:
//!
//! ```text
//!            guard    item 0   item 1            item n-1  free               end, a multiple of STACK_ALIGN
//!   ... ───┬────────┬────────┬────────┬── ... ──┬────────┬────────┬── ... ──┐
//!          │  null  │        │        │         │        │        │         │
//!          └────────┴────────┴────────┴── ... ──┴────────┴────────┴── ... ──┘
//!                     bottom                               top
//! ```
//!
//! A unit's word holds `top`, the address of the next free slot, or 0 for no stack. From the word alone follow:
//!
//! * empty: the slot below `top` is the null guard. So `pop` compares nothing with a per-stack bound.
//! * full: `top` is a multiple of [`STACK_ALIGN`]; so is 0, and a push to no stack fails by the same test.
//!
//! One word says all, so that one store commits a pop or a push, and exchanging the word exchanges the stack.

/// Where stacks end: a multiple of this many bytes. A stack has at most `STACK_ALIGN / 8 - 1` items.
pub const STACK_ALIGN: usize = 1024;
