//! `cmpxchg`: the CPU's difference, changed by a compare-exchange, as the kernel does with
//! `this_cpu_try_cmpxchg`.
//!
//! The kernel's needs no lock prefix: it addresses the CPU's data and exchanges in one instruction.
//! Here the thread may move between reading the index and the exchange, and a thread on another CPU
//! may change the same difference. So the exchange has a lock prefix.

use super::subject::Subject;
use super::zone::Zone;
use pinfold_benchkit::Padded;
use std::sync::atomic::AtomicI8;
use std::sync::atomic::Ordering::Relaxed;

pub struct Cmpxchg {
    threshold: i8,
    zone: Zone,
    differences: Box<[Padded<AtomicI8>]>,
}

impl Cmpxchg {
    pub fn new(threshold: i8) -> Cmpxchg {
        Cmpxchg {
            threshold,
            zone: Zone::default(),
            differences: super::subject::for_each_cpu(),
        }
    }
}

impl Subject for Cmpxchg {
    #[inline]
    fn inc(&self) {
        let difference = &self.differences[pinfold_rseq::current()].0;
        let mut old = difference.load(Relaxed);
        let fold = loop {
            let sum = old + 1;
            let overstep = self.threshold / 2;
            let (new, fold) = if sum > self.threshold {
                (-overstep, i64::from(sum) + i64::from(overstep))
            } else {
                (sum, 0)
            };
            match difference.compare_exchange_weak(old, new, Relaxed, Relaxed) {
                Ok(_) => break fold,
                Err(found) => old = found,
            }
        };
        if fold != 0 {
            self.zone.add(fold);
        }
    }

    fn total(&self) -> Option<i64> {
        let differences = self.differences.iter();
        let sum: i64 = differences.map(|one| i64::from(one.0.load(Relaxed))).sum();
        Some(self.zone.read()? + sum)
    }
}
