//! `rseq-cmpxchg` and `rseq-inc-check`: the document's two experiments, in critical sections. So
//! neither needs a lock prefix, as in the kernel. x86-64 only.
//!
//! * `rseq-cmpxchg` loads the difference, computes, and commits by `cmpxchg`. The kernel's
//!   `cmpxchg_local` does the same.
//! * `rseq-inc-check` commits by one `add` to memory, and tests the difference afterwards. The
//!   document's `local_inc` does the same. The fold is a second section, out of line.
//!
//! The document's differences are bytes. It names a race that can overflow them: between an
//! increment and its fold, other increments may come. Here a difference has four bytes, so an
//! overflow would need two thousand million such increments.

use super::subject::Subject;
use super::zone::Zone;
use crate::Padded;
use std::arch::asm;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicI32, AtomicI64};

/// The words of one CPU. Only critical sections on that CPU change them.
#[derive(Default)]
#[repr(C)]
struct Local {
    difference: AtomicI32,
    /// 8 bytes behind the beginning, as the sections expect.
    events: AtomicI64,
}

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
                cpus = in(reg) $item.locals.len(),
                locals = in(reg) $item.locals.as_ptr(),
                $($operands)*
                options(nostack),
            );
        }
        // SAFETY: `at` is null, or the address of one of the item's `Local`s.
        unsafe { at.as_ref() }
    }};
}

/// An item with its differences.
struct Sectioned {
    place: Place,
    threshold: i32,
    zone: Zone,
    locals: Box<[Padded<Local>]>,
}

impl Sectioned {
    fn new(place: Place, threshold: i32) -> Sectioned {
        Sectioned {
            place,
            threshold,
            zone: Zone::default(),
            locals: super::subject::for_each_cpu(),
        }
    }

    /// Adds `more` and the current CPU's difference to the totals, and leaves the difference half a
    /// threshold on the other side.
    #[cold]
    #[inline(never)]
    fn fold(&self, by: i32, more: i32) {
        let new = -by * (self.threshold / 2);
        let mut old = 0;
        let local = section!(
            self,
            ["mov {old:e}, dword ptr [{at}]", "mov dword ptr [{at}], {new:e}"],
            old = inout(reg) old,
            new = in(reg) new,
        );
        let folded = if local.is_some() { old - new } else { 0 };
        self.zone.add(i64::from(folded) + i64::from(more));
    }

    #[inline(always)]
    fn event(&self) {
        if section!(self, ["inc qword ptr [{at} + 8]"],).is_none() {
            self.locals[0].0.events.fetch_add(1, Relaxed);
        }
    }

    fn total(&self) -> Option<i64> {
        let differences = self.locals.iter().map(|one| &one.0.difference);
        let sum: i64 = differences.map(|one| i64::from(one.load(Relaxed))).sum();
        Some(self.zone.read()? + sum)
    }

    fn events(&self) -> i64 {
        let events = self.locals.iter().map(|one| &one.0.events);
        events.map(|one| one.load(Relaxed)).sum()
    }
}

/// `rseq-cmpxchg`.
pub struct Cmpxchg(Sectioned);

impl Cmpxchg {
    pub fn new(place: Place, threshold: i32) -> Cmpxchg {
        Cmpxchg(Sectioned::new(place, threshold))
    }
}

impl Subject for Cmpxchg {
    #[inline]
    fn inc(&self) {
        let done = section!(
            self.0,
            [
                "mov eax, dword ptr [{at}]",
                "lea ecx, [rax + 1]",
                "cmp ecx, {limit:e}",
                "jg 6f",
                "cmpxchg dword ptr [{at}], ecx"
            ],
            limit = in(reg) self.0.threshold,
            out("eax") _,
            out("ecx") _,
        );
        if done.is_none() {
            self.0.fold(1, 1);
        }
    }

    #[inline]
    fn dec(&self) {
        let done = section!(
            self.0,
            [
                "mov eax, dword ptr [{at}]",
                "lea ecx, [rax - 1]",
                "cmp ecx, {limit:e}",
                "jl 6f",
                "cmpxchg dword ptr [{at}], ecx"
            ],
            limit = in(reg) -self.0.threshold,
            out("eax") _,
            out("ecx") _,
        );
        if done.is_none() {
            self.0.fold(-1, -1);
        }
    }

    #[inline]
    fn event(&self) {
        self.0.event();
    }

    fn total(&self) -> Option<i64> {
        self.0.total()
    }

    fn events(&self) -> i64 {
        self.0.events()
    }
}

/// `rseq-inc-check`.
pub struct IncCheck(Sectioned);

impl IncCheck {
    pub fn new(place: Place, threshold: i32) -> IncCheck {
        IncCheck(Sectioned::new(place, threshold))
    }
}

impl Subject for IncCheck {
    #[inline]
    fn inc(&self) {
        match section!(self.0, ["inc dword ptr [{at}]"],) {
            Some(local) if local.difference.load(Relaxed) <= self.0.threshold => {}
            Some(_) => self.0.fold(1, 0),
            None => self.0.fold(1, 1),
        }
    }

    #[inline]
    fn dec(&self) {
        match section!(self.0, ["dec dword ptr [{at}]"],) {
            Some(local) if local.difference.load(Relaxed) >= -self.0.threshold => {}
            Some(_) => self.0.fold(-1, 0),
            None => self.0.fold(-1, -1),
        }
    }

    #[inline]
    fn event(&self) {
        self.0.event();
    }

    fn total(&self) -> Option<i64> {
        self.0.total()
    }

    fn events(&self) -> i64 {
        self.0.events()
    }
}
