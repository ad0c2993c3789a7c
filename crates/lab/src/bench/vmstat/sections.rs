//! `rseq-cmpxchg` and `rseq-inc-check`: the two experiments of docs/seeds/000-vmstat.md, in
//! critical sections. So neither needs a lock prefix, as in the kernel. x86-64 only.
//!
//! * `rseq-cmpxchg` loads the difference, computes, and commits by `cmpxchg`. The kernel's
//!   `cmpxchg_local` does the same.
//! * `rseq-inc-check` commits by one `inc` or `dec` of memory, and tests the difference afterwards.
//!   The document's `local_inc` does the same. The fold is a second section, out of line.
//!
//! The document's differences are bytes. It names a race that can overflow them: between an
//! increment and its fold, other increments may come. Here a difference has four bytes, so an
//! overflow would need two thousand million such increments.

use super::peers::{Peer, Unprotected};
use super::subject::{Op, Subject};
use crate::Padded;
use std::arch::asm;
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::Relaxed;

/// The words of one CPU. Only critical sections on that CPU change them. The events are 8 bytes
/// behind the beginning, as the sections expect.
type Local = Unprotected<AtomicI32>;

const _: () = assert!(size_of::<Padded<Local>>() == 1 << 7);

/// Where the fields of the rseq area are, as offsets from the thread pointer.
#[derive(Clone, Copy)]
pub struct Place {
    cs: isize,
    index: isize,
}

impl Place {
    /// Returns the place, or `None` if this process has no restartable sequences.
    pub fn find() -> Option<Place> {
        static UNITS: pinfold_rseq::Units = pinfold_rseq::Units::new();
        let (cs, index) = UNITS.learn()?;
        Some(Place { cs, index })
    }
}

/// Runs a critical section. On entry to the body, the operand `at` holds the address of the current
/// CPU's [`Local`]. The body ends with its commit, or jumps to label 6, which clears `at`.
macro_rules! section {
    ($item:expr, [$($body:literal),*], $($operands:tt)*) => {{
        let at: *const Local;
        // SAFETY: `Place::find` found the fields of this thread's registered area. The section
        // checks the index, so `at` is one of the item's `Local`s. The body changes only that
        // `Local`.
        unsafe {
            asm!(
                // The descriptor: version, flags, start, length, abort address.
                ".pushsection __rseq_cs, \"aw\", @progbits",
                ".balign 32",
                "9:",
                ".long 0, 0",
                ".quad 3f, 4f - 3f, 5f",
                ".popsection",
                "2:",
                "lea {at}, [rip + 9b]",
                "mov qword ptr fs:[{cs}], {at}",
                "3:",
                "mov {at:e}, dword ptr fs:[{index}]",
                "cmp {at}, {cpus}",
                "jae 6f",
                "shl {at}, 7",
                "add {at}, {locals}",
                $($body,)*
                "4:",
                ".pushsection .text.unlikely.pinfold_bench, \"ax\", @progbits",
                // The signature before the abort handler, as the operand of a `ud1`.
                ".byte 0x0f, 0xb9, 0x3d",
                ".long 0x53053053",
                "5:",
                "jmp 2b",
                "6:",
                "xor {at:e}, {at:e}",
                "jmp 4b",
                ".popsection",
                at = out(reg) at,
                cs = in(reg) $item.place.cs,
                index = in(reg) $item.place.index,
                cpus = in(reg) $item.item.locals.len(),
                locals = in(reg) $item.item.locals.as_ptr(),
                $($operands)*
                options(nostack),
            );
        }
        // SAFETY: `at` is null, or the address of one of the item's `Local`s.
        unsafe { at.as_ref() }
    }};
}

/// Changes the difference by `cmpxchg`, unless the sum passes the limit.
macro_rules! compare_exchange {
    ($item:expr, $sum:literal, $beyond:literal, $limit:expr) => {
        section!(
            $item,
            [
                "mov eax, dword ptr [{at}]",
                $sum,
                "cmp ecx, {limit:e}",
                $beyond,
                "cmpxchg dword ptr [{at}], ecx"
            ],
            limit = in(reg) $limit,
            out("eax") _,
            out("ecx") _,
        )
    };
}

/// `rseq-cmpxchg`, or `rseq-inc-check` if not `CMPXCHG`.
pub struct Sectioned<const CMPXCHG: bool> {
    place: Place,
    item: Peer<Local>,
}

impl<const CMPXCHG: bool> Sectioned<CMPXCHG> {
    pub fn new(place: Place, threshold: i8) -> Self {
        let item = Peer::new(threshold);
        Sectioned { place, item }
    }

    #[inline(always)]
    fn threshold(&self) -> i32 {
        self.item.threshold.into()
    }

    /// Adds `more` and the current CPU's difference to the totals, and leaves the difference half a
    /// threshold on the other side.
    #[cold]
    #[inline(never)]
    fn fold(&self, by: i32, more: i32) {
        let new = -by * (self.threshold() / 2);
        let mut old = 0;
        let local = section!(
            self,
            ["mov {old:e}, dword ptr [{at}]", "mov dword ptr [{at}], {new:e}"],
            old = inout(reg) old,
            new = in(reg) new,
        );
        let folded = if local.is_some() { old - new } else { 0 };
        self.item.zone.add(i64::from(folded) + i64::from(more));
    }
}

impl<const CMPXCHG: bool> Subject for Sectioned<CMPXCHG> {
    #[inline(always)]
    fn change(&self, op: Op) {
        let by = op.by() as i32;
        let limit = by * self.threshold();
        let local = match (op, CMPXCHG) {
            (Op::Inc, true) => compare_exchange!(self, "lea ecx, [rax + 1]", "jg 6f", limit),
            (Op::Dec, true) => compare_exchange!(self, "lea ecx, [rax - 1]", "jl 6f", limit),
            (Op::Inc, false) => section!(self, ["inc dword ptr [{at}]"],),
            (Op::Dec, false) => section!(self, ["dec dword ptr [{at}]"],),
            (Op::Event, _) => {
                if section!(self, ["inc qword ptr [{at} + 8]"],).is_none() {
                    self.item.locals[0].0.events.fetch_add(1, Relaxed);
                }
                return;
            }
        };
        match local {
            Some(_) if CMPXCHG => {}
            Some(local) if by * local.difference.load(Relaxed) <= by * limit => {}
            Some(_) => self.fold(by, 0),
            None => self.fold(by, by),
        }
    }

    fn total(&self) -> Option<i64> {
        self.item.total()
    }

    fn events(&self) -> i64 {
        self.item.events()
    }
}
