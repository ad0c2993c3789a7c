//! The critical sections. This file has what all architectures share: the name, the operands and
//! the contract of each section. One file per architecture has the instructions.
//!
//! `docs/rseq.md` gives every section in pseudocode. In an architecture's file, the macro `body!`
//! is the table of the sections' bodies, and the macro `template!` turns a body into a section. A
//! section first stores the address of its descriptor, which tells the kernel where the section
//! begins and ends. Then it runs the body. After an abort it starts again from the store.
//!
//! # Safety
//!
//! Every section demands this from its caller:
//!
//! * The fields of the [`Area`] are what their documentation says.
//! * Every unit has a word at `offset`, which is a multiple of 8 and at least
//!   [`UNIT_HEADER`](crate::UNIT_HEADER). The documentation of a section says which other words or
//!   memory it needs.
//!
//! In return, a section writes only `rseq_cs`, `ABORTS`, and the words and memory that its
//! documentation names. What it writes before its commit has no meaning until then, so an abort
//! does no harm.
#![allow(unsafe_code, reason = "this is where the assembly lives")]
#![cfg_attr(
    not(any(target_arch = "x86_64", target_arch = "aarch64")),
    allow(unused, reason = "there are no instructions for the operands")
)]

use crate::shard::{Claim, DISTANCE_BITS};
use crate::stack::STACK_ALIGN;
use crate::stuck::{ABORTS, PATIENCE};
use crate::units::{FIRST, MAX_INDEX};
use crate::words::{MISSING, RING_SLOTS, RING_TAIL};
use core::arch::asm;

#[cfg(target_arch = "x86_64")]
#[macro_use]
mod x86_64;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::*;

#[cfg(target_arch = "aarch64")]
#[macro_use]
mod aarch64;
#[cfg(target_arch = "aarch64")]
pub(crate) use aarch64::*;

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
#[macro_use]
mod none;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(crate) use none::*;

// The thread's own area (`crate::registration`): `OWN_SIZE` bytes that no id fits. The state of the
// thread and its tag follow. In stable Rust, only assembly can define a thread-local variable that
// is read without a call: at an offset from the thread pointer that the loader sets.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
core::arch::global_asm!(
    ".pushsection .tdata.pinfold_rseq_own, \"awT\", @progbits",
    ".balign {size}",
    ".hidden pinfold_rseq_own",
    ".globl pinfold_rseq_own",
    ".type pinfold_rseq_own, @tls_object",
    "pinfold_rseq_own:",
    ".long 0, -1", // cpu_id_start, cpu_id
    ".quad 0",     // rseq_cs
    ".long 0, 0",  // flags, node_id
    ".long -1, 0", // mm_cid, reserved
    ".zero {size} - 32",
    ".long 0", // the state: `FRESH`
    ".long 0", // the thread's tag
    ".size pinfold_rseq_own, {size} + 8",
    ".popsection",
    size = const crate::registration::OWN_SIZE,
);

/// Where critical sections find the current unit. See [`Units::area`](crate::Units::area).
#[derive(Clone, Copy, Debug)]
pub struct Area {
    /// The offset of `rseq_cs` from the thread pointer, in the thread's registered *rseq area*,
    /// which the kernel knows.
    pub(crate) cs: isize,
    /// The offset of the index from the thread pointer: of an id field in the same area.
    pub(crate) index: isize,
    /// The table of units. [`MAX_INDEX`] entries stand behind its first [`FIRST`] bytes.
    pub(crate) table: *const *mut u8,
}

/// Defines a section.
///
/// | result | the section returns |
/// |---|---|
/// | `-> bool` | true if it has committed |
/// | `-> Option` | the word as it was, or `None` if there is no unit |
/// | `-> register: Type` | what the body leaves in the register |
///
/// Operands that are not arguments follow the result.
macro_rules! section {
    (
        $(#[$doc:meta])*
        $vis:vis $name:ident($($arg:ident: $type:ty),*) -> bool $(, $($more:tt)*)?
    ) => {
        $(#[$doc])*
        #[inline(always)]
        $vis unsafe fn $name(self, offset: usize $(, $arg: $type)*) -> bool {
            // SAFETY: the caller keeps the contract of the module and of this section.
            unsafe {
                body!($name {
                    cs = in(reg) self.cs,
                    index = in(reg) self.index,
                    table = in(reg) self.table,
                    offset = in(reg) offset,
                    $($arg = in(reg) $arg,)*
                    $($($more)*)?
                    fail = label { return false },
                });
            }
            true
        }
    };
    ($(#[$doc:meta])* $vis:vis $name:ident($($arg:ident: $type:ty),*) -> Option) => {
        $(#[$doc])*
        #[inline(always)]
        $vis unsafe fn $name(self, offset: usize $(, $arg: $type)*) -> Option<u64> {
            let (old, done): (u64, u64);
            // SAFETY: the caller keeps the contract of the module and of this section.
            unsafe {
                body!($name {
                    cs = in(reg) self.cs,
                    index = in(reg) self.index,
                    table = in(reg) self.table,
                    offset = in(reg) offset,
                    $($arg = in(reg) $arg,)*
                    old = out(reg) old,
                    done = out(reg) done,
                });
            }
            (done != 0).then_some(old)
        }
    };
    (
        $(#[$doc:meta])*
        $vis:vis $name:ident $(<const $count:ident>)? ($($arg:ident: $type:ty),*)
            -> $result:ident: $of:ty $(, $($more:tt)*)?
    ) => {
        $(#[$doc])*
        #[inline(always)]
        $vis unsafe fn $name $(<const $count: usize>)? (
            self,
            offset: usize
            $(, $arg: $type)*
        ) -> $of {
            let $result: $of;
            // SAFETY: the caller keeps the contract of the module and of this section.
            unsafe {
                body!($name {
                    cs = in(reg) self.cs,
                    index = in(reg) self.index,
                    table = in(reg) self.table,
                    offset = in(reg) offset,
                    $($arg = in(reg) $arg,)*
                    $result = out(reg) $result,
                    $($($more)*)?
                });
            }
            $result
        }
    };
}

/// The critical sections. Each except `pop_counted` serves the operation of [`Units`](crate::Units)
/// with the same name.
impl Area {
    section!(pub(crate) add(n: u64) -> bool);
    section!(
        /// Needs a whole shard at `offset`.
        pub(crate) count_up(n: i64) -> left: i64, most = out(reg) _, bits = const DISTANCE_BITS,
    );
    section!(
        /// Needs a whole shard at `offset`.
        pub(crate) count_down(n: i64) -> left: i64, most = out(reg) _, bits = const DISTANCE_BITS,
    );
    /// Needs a whole shard at `offset`.
    #[inline(always)]
    pub(crate) unsafe fn claim(self, offset: usize, token: u64) -> Option<Claim> {
        let (shard, net, folded, batch): (*mut u8, u64, u64, u64);
        // SAFETY: the caller keeps the contract of the module and of this section.
        unsafe {
            body!(claim {
                cs = in(reg) self.cs,
                index = in(reg) self.index,
                table = in(reg) self.table,
                offset = in(reg) offset,
                token = in(reg) token,
                shard = out(reg) shard,
                net = out(reg) net,
                folded = out(reg) folded,
                batch = out(reg) batch,
            });
        }
        Claim::new(shard, [net, folded, batch])
    }
    section!(
        /// `gate` is readable. The section reads it once.
        pub(crate) add_gated(n: u64, gate: *const usize) -> bool
    );
    section!(pub(crate) store_if_equal(expected: u64, new: u64) -> bool);
    section!(
        /// Takes the top pointer off the [`stack`](crate::stack) at `offset`, as
        /// [`Units::pop`](crate::Units::pop) does.
        ///
        /// # Safety
        ///
        /// The same as for [`Units::pop`](crate::Units::pop).
        pub pop() -> item: *mut u8
    );
    section!(
        /// Takes the top pointer off as [`pop`](Self::pop) does, and subtracts `n` from the word at
        /// `COUNT` of the unit. Returns null if `pop` would, or if the word, a signed number, is
        /// `n` or less.
        ///
        /// Costs one critical section. It ends with two stores: first to the word at `COUNT`, then
        /// to the stack. If the thread is interrupted between these stores, the section starts
        /// again, and subtracts `n` once more, or returns null. So the word may be less than the
        /// exact difference.
        ///
        /// # Safety
        ///
        /// * The same as for [`pop`](Self::pop).
        /// * `COUNT` is a multiple of 8, is at least [`UNIT_HEADER`](crate::UNIT_HEADER) and at
        ///   most 32760, and leaves 8 bytes in every installed unit.
        pub pop_counted<const COUNT>(n: i64) -> item: *mut u8, count = const COUNT,
    );
    section!(
        /// Puts `item`, which is not null, on the stack at `offset`, as
        /// [`Units::push`](crate::Units::push) does.
        ///
        /// A top at a multiple of [`STACK_ALIGN`](crate::STACK_ALIGN) means full or missing. Any
        /// other top is the address of a free slot. The section may write that slot and then abort.
        ///
        /// # Safety
        ///
        /// The same as for [`pop`](Self::pop).
        pub push(item: *mut u8) -> bool, full = const STACK_ALIGN - 1,
    );
    section!(
        /// Writes at most `room` pointers to `items`, which is writable for them. `room` is not 0.
        /// After an abort, the section writes `items` again from the start.
        pub(crate) pop_batch(items: *mut *mut u8, room: usize) -> taken: usize,
        item = out(reg) _,
    );
    section!(
        /// Reads at most `count` pointers from `items`, which is readable for them. None is null,
        /// and `count` is not 0. Before the commit the section writes only free slots.
        pub(crate) push_batch(items: *const *mut u8, count: usize) -> put: usize,
        item = out(reg) _,
        full = const STACK_ALIGN - 1,
    );
    section!(pub(crate) store(operand: u64) -> bool);
    section!(pub(crate) and(operand: u64) -> bool);
    section!(pub(crate) or(operand: u64) -> bool);
    section!(pub(crate) fetch_add(operand: u64) -> Option);
    section!(pub(crate) swap(operand: u64) -> Option);
    section!(pub(crate) compare_exchange(expected: u64, new: u64) -> Option);
    section!(
        /// Needs also the next word. `offset` is a multiple of 16, and every unit is aligned to 16
        /// bytes.
        pub(crate) compare_exchange_pair(
            first_expected: u64,
            second_expected: u64,
            first_new: u64,
            second_new: u64
        ) -> bool
    );
    section!(
        /// Needs also the next word, as `compare_exchange_pair` does.
        pub(crate) add_pair(n0: u64, n1: u64) -> bool
    );
    section!(
        /// Needs also the word at `other`. The section may write that word and then abort.
        pub(crate) store_two_if_equal(expected: u64, new: u64, other: usize, value: u64) -> bool
    );
    section!(
        /// Needs also the word at `other`.
        pub(crate) store_if_both_equal(
            expected: u64,
            new: u64,
            other: usize,
            other_expected: u64
        ) -> bool
    );
    section!(
        /// `item` is writable for 8 bytes and belongs to the caller, so a write to `item` before an
        /// abort does no harm.
        pub(crate) list_push(item: *mut u8) -> bool
    );
    section!(
        /// The word is 0 or the head of a list whose items are mapped while they are in it. The
        /// head cannot change between the section's loads, so the item is still in the list when
        /// the section reads its first word.
        pub(crate) list_pop() -> item: *mut u8
    );
    section!(
        /// Needs the whole ring. `mask` is one less than the bytes of all slots, and `step` the
        /// bytes of one slot. `words` words at `from` are readable and fit in a slot. `words` is
        /// not 0. The head selects a slot that lies in the ring. Before the commit the section
        /// writes only that slot, which is free.
        pub(crate) append(mask: usize, from: *const u64, words: usize, step: usize) -> left: u64,
        word = out(reg) _,
        tail = const RING_TAIL,
        slots = const RING_SLOTS,
        missing = const MISSING,
    );
    #[cfg(debug_assertions)]
    section!(
        /// Holds the unit for `rounds`, which is not 0: writes `token`, and reads it again and
        /// again. Returns 0, or how many rounds were left when there was another value. The word
        /// at `offset` is the header's [`OWNER`](crate::owner::OWNER).
        pub(crate) hold(token: u64, rounds: u64) -> left: u64
    );
}
