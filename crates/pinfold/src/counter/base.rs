//! The base of a counter, beside the reach of its shards ([`reach`](super::reach)).
//!
//! The two words are exchanged in one instruction, where the processor has one.

use super::reach::Reach;
use core::sync::atomic::AtomicI64;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// The base of a counter, and the reach of its shards.
#[derive(Debug)]
#[repr(C, align(16))]
pub(super) struct Base {
    pub(super) value: AtomicI64,
    reach: AtomicU64,
}

impl Base {
    pub(super) const fn new(value: i64) -> Base {
        Base {
            value: AtomicI64::new(value),
            reach: AtomicU64::new(0),
        }
    }

    #[inline]
    pub(super) fn reach(&self) -> Reach {
        Reach(self.reach.load(Relaxed))
    }

    /// States another reach. The caller holds all locks of the counter, and makes sure that the
    /// statement is true.
    pub(super) fn state(&self, reach: Reach) {
        // Release: a limited add that finds this reach also finds the folds that the reach allows
        // for.
        self.reach.store(reach.0, Release);
    }

    /// Adds `amount` if a reach is stated, and `judge` accepts the base and the reach. Returns
    /// whether it did.
    #[inline]
    pub(super) fn add_if(&self, amount: i64, judge: impl Fn(i64, Reach) -> bool) -> bool {
        loop {
            // The two loads need not happen at one moment, because the exchange checks both words.
            let (base, reach) = (self.value.load(Acquire), self.reach());
            if reach == Reach::NONE || !judge(base, reach) {
                return false;
            }
            if self.exchange(base, reach, base.wrapping_add(amount)) {
                return true;
            }
        }
    }

    /// Replaces the base by `fresh` if the base is `base` and the reach is `reach`, in one atomic
    /// step that acquires and releases.
    #[cfg(target_arch = "x86_64")]
    #[inline]
    fn exchange(&self, base: i64, reach: Reach, fresh: i64) -> bool {
        let done: u64;
        // SAFETY: `self` is 16 bytes at a multiple of 16. The processor has the instruction: only
        // `add_if` calls this, after it has seen a reach, and a reach is only stated where
        // `is_supported` says so. The compiler reserves rbx, so its old value is put back.
        unsafe {
            core::arch::asm!(
                "xchg rsi, rbx",
                "lock cmpxchg16b xmmword ptr [rdi]",
                "mov rbx, rsi",
                "sete cl",
                in("rdi") core::ptr::from_ref(self),
                inout("rsi") fresh => _,
                inout("rcx") reach.0 => done,
                inout("rax") base => _,
                inout("rdx") reach.0 => _,
                options(nostack),
            );
        }
        done as u8 != 0
    }

    #[cfg(target_arch = "aarch64")]
    #[inline]
    fn exchange(&self, base: i64, reach: Reach, fresh: i64) -> bool {
        let done: u64;
        // SAFETY: `self` is 16 bytes at a multiple of 16, as the exclusive pair instructions
        // require.
        unsafe {
            core::arch::asm!(
                "2:",
                "ldaxp {seen}, {also}, [{pair}]",
                "cmp {seen}, {base}",
                "ccmp {also}, {reach}, #0, eq",
                "b.ne 3f",
                "stlxp {failed:w}, {fresh}, {reach}, [{pair}]",
                "cbnz {failed:w}, 2b",
                "3:",
                "cset {failed:w}, eq",
                pair = in(reg) core::ptr::from_ref(self),
                base = in(reg) base,
                reach = in(reg) reach.0,
                fresh = in(reg) fresh,
                seen = out(reg) _,
                also = out(reg) _,
                failed = out(reg) done,
                options(nostack),
            );
        }
        done as u8 != 0
    }

    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    fn exchange(&self, _base: i64, _reach: Reach, _fresh: i64) -> bool {
        false
    }
}

/// Returns whether the processor can exchange two words at once. Every x86-64 processor since 2006
/// can.
pub(super) fn is_supported() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        const CMPXCHG16B: u32 = 1 << 13;
        // SAFETY: every x86-64 processor has the instruction, and it only reads.
        #[allow(unused_unsafe, reason = "Rust 1.89 has the function as unsafe")]
        let features = unsafe { core::arch::x86_64::__cpuid(1) };
        features.ecx & CMPXCHG16B != 0
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        cfg!(target_arch = "aarch64")
    }
}
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exchange_needs_both_words() {
        let base = Base::new(5);
        let reach = Reach::around(0, 64);
        assert!(!base.add_if(1, |_, _| true), "no reach is stated");
        base.state(reach);
        assert!(!base.exchange(4, reach, 9));
        assert!(!base.exchange(5, Reach::around(64, 64), 9));
        assert_eq!(base.value.load(Relaxed), 5);
        assert!(base.add_if(-7, |value, seen| (value, seen) == (5, reach)));
        assert!(!base.add_if(1, |_, _| false));
        assert_eq!((base.value.load(Relaxed), base.reach()), (-2, reach));
    }
}
