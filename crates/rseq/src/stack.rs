//! The stacks of pointers that [`Units::pop`](crate::Units::pop) and
//! [`Units::push`](crate::Units::push) work on.
//!
//! A stack is an array of non-null pointers whose end is a multiple of [`STACK_ALIGN`]:
//!
//! ```text
//!            guard    item 0   item 1            item n-1  free              end, a multiple of
//!   ... ───┬────────┬────────┬────────┬── ... ──┬────────┬────────┬── ... ──┐   STACK_ALIGN
//!          │  null  │        │        │         │        │        │         │
//!          └────────┴────────┴────────┴── ... ──┴────────┴────────┴── ... ──┘
//!                     bottom                               top
//! ```
//!
//! A word of a unit holds `top`, the address of the next free slot, or 0 if there is no stack. The
//! word alone tells an operation whether it can go on:
//!
//! * The stack is empty if the slot below `top` holds the null guard. So `pop` needs no bound to
//!   compare with.
//! * The stack is full if `top` is a multiple of [`STACK_ALIGN`]. 0 is such a multiple, so `push`
//!   fails by the same test if there is no stack.
//!
//! Because one word describes the stack, one store commits a pop or a push, and exchanging the word
//! exchanges the stack.

/// The end of each stack is a multiple of this many bytes. A stack holds at most
/// `STACK_ALIGN / 8 - 1` items.
pub const STACK_ALIGN: usize = 1024;
