//! A compare-exchange of two words, for the transaction ids.

use core::arch::asm;
use std::sync::atomic::AtomicU64;

/// Two words that are exchanged together. Their address is a multiple of 16.
#[repr(C, align(16))]
pub struct Pair(pub [AtomicU64; 2]);

/// Returns why this CPU cannot exchange two words, or `None` if it can.
#[cfg(target_arch = "x86_64")]
pub fn missing() -> Option<&'static str> {
    let has = std::arch::is_x86_feature_detected!("cmpxchg16b");
    (!has).then_some("this CPU has no cmpxchg16b")
}

/// Returns why this CPU cannot exchange two words, or `None` if it can: every aarch64 CPU can.
#[cfg(target_arch = "aarch64")]
pub fn missing() -> Option<&'static str> {
    None
}

impl Pair {
    /// Replaces both words by `new` if they equal `seen`. The CPU must not be [`missing`] the
    /// instruction.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub fn replace(&self, seen: [u64; 2], new: [u64; 2]) -> bool {
        let done: u8;
        // SAFETY: the two words are 16 bytes at an address aligned to 16, and are changed only by
        // this instruction while they are shared. The caller has checked that the CPU has it. The
        // compiler may reserve rbx, so the code restores rbx.
        unsafe {
            asm!(
                "xchg {low}, rbx",
                "lock cmpxchg16b xmmword ptr [rdi]",
                "sete r8b",
                "mov rbx, {low}",
                low = inout(reg) new[0] => _,
                in("rcx") new[1],
                inout("rax") seen[0] => _,
                inout("rdx") seen[1] => _,
                in("rdi") self,
                out("r8b") done,
                options(nostack),
            );
        }
        done != 0
    }

    /// Replaces both words by `new` if they equal `seen`: by one instruction (`caspal`) where the
    /// CPU has it, and otherwise by an exclusive load and store.
    #[cfg(target_arch = "aarch64")]
    #[inline(always)]
    pub fn replace(&self, seen: [u64; 2], new: [u64; 2]) -> bool {
        match std::arch::is_aarch64_feature_detected!("lse") {
            true => self.replace_at_once(seen, new),
            false => self.replace_exclusively(seen, new),
        }
    }

    #[cfg(target_arch = "aarch64")]
    #[inline(always)]
    fn replace_at_once(&self, seen: [u64; 2], new: [u64; 2]) -> bool {
        let found: [u64; 2];
        let (first, second);
        // SAFETY: the two words are 16 bytes at an address aligned to 16, and are changed only by
        // atomic instructions while they are shared. `replace` has checked that the CPU has the
        // instruction, which wants pairs of registers that begin with an even one.
        unsafe {
            asm!(
                ".arch_extension lse",
                "caspal x4, x5, x6, x7, [{pair}]",
                pair = in(reg) self,
                inout("x4") seen[0] => first,
                inout("x5") seen[1] => second,
                in("x6") new[0],
                in("x7") new[1],
                options(nostack),
            );
        }
        found = [first, second];
        found == seen
    }

    #[cfg(target_arch = "aarch64")]
    #[inline(always)]
    fn replace_exclusively(&self, seen: [u64; 2], new: [u64; 2]) -> bool {
        let done: u64;
        // SAFETY: the two words are 16 bytes at an address aligned to 16, and are changed only by
        // atomic instructions while they are shared. The store succeeds only if no other CPU wrote
        // the words after the load. `stlxp` and `cbnz` leave the flags of the comparison as they
        // are.
        unsafe {
            asm!(
                "2: ldaxp {first}, {second}, [{pair}]",
                "cmp {first}, {seen0}",
                "ccmp {second}, {seen1}, #0, eq",
                "b.ne 3f",
                "stlxp {done:w}, {new0}, {new1}, [{pair}]",
                "cbnz {done:w}, 2b",
                "3: cset {done:w}, eq",
                pair = in(reg) self,
                first = out(reg) _,
                second = out(reg) _,
                seen0 = in(reg) seen[0],
                seen1 = in(reg) seen[1],
                new0 = in(reg) new[0],
                new1 = in(reg) new[1],
                done = out(reg) done,
                options(nostack),
            );
        }
        done != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering::{Acquire, Relaxed};

    const THREADS: u64 = 4;
    const TURNS: u64 = 50_000;

    /// Lets threads count both words up by `replace`.
    fn lose_no_update(replace: impl Fn(&Pair, [u64; 2], [u64; 2]) -> bool + Sync) {
        let pair = Pair([const { AtomicU64::new(0) }; 2]);
        let increment = || {
            let second = pair.0[1].load(Acquire);
            let first = pair.0[0].load(Relaxed);
            replace(&pair, [first, second], [first + 3, second + 1])
        };
        let work = || (0..TURNS).for_each(|_| while !increment() {});
        std::thread::scope(|scope| (0..THREADS).for_each(|_| drop(scope.spawn(work))));
        let counted = pair.0.map(AtomicU64::into_inner);
        assert_eq!(counted, [3 * THREADS * TURNS, THREADS * TURNS]);
    }

    #[test]
    fn concurrent_exchanges_lose_no_update() {
        if missing().is_none() {
            lose_no_update(Pair::replace);
        }
    }

    #[test]
    #[cfg(target_arch = "aarch64")]
    fn exclusive_loads_and_stores_lose_no_update() {
        lose_no_update(Pair::replace_exclusively);
    }

    #[test]
    fn one_different_word_forbids_the_exchange() {
        if missing().is_some() {
            return;
        }
        let pair = Pair([1, 2].map(AtomicU64::new));
        assert!(!pair.replace([1, 3], [7, 7]) && !pair.replace([3, 2], [7, 7]));
        assert!(pair.replace([1, 2], [7, 8]));
        assert_eq!(pair.0.map(AtomicU64::into_inner), [7, 8]);
    }
}
