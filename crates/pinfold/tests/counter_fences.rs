//! Which operations on counters fence. In a thread that cannot fence, the operations that need no
//! fence must succeed.
#![cfg(target_arch = "x86_64")]

mod common;

use common::{cpus, forbid, pin};
use pinfold::counter::{CounterError, PerCpuCounter};

/// Lowers the counter's batch. Returns whether that succeeded. It fails exactly if it would need a
/// fence, and it needs a fence exactly if `set` does.
fn lowers(counter: &PerCpuCounter) -> bool {
    let batch = counter.batch();
    match counter.set_batch(batch / 2) {
        Ok(()) => true,
        Err(error) => {
            assert_eq!(error, CounterError::Fence);
            false
        }
    }
}

#[test]
fn only_adds_of_other_cpus_need_a_fence() {
    let counters = [(); 2].map(|()| PerCpuCounter::new().with_batch(1 << 20));
    let [own, shared] = &counters;
    let several = cpus() > 1 && pinfold_rseq::backend() != pinfold_rseq::Backend::Atomic;
    pin(1);
    shared.add(3);
    pin(0);
    for counter in &counters {
        counter.add(4);
    }
    assert_eq!((own.swap(1), shared.swap(1)), (4, 7));
    forbid(&[libc::SYS_membarrier], libc::ENOSYS);
    assert!(lowers(own), "fenced, although no other CPU has added");
    // With concurrency ids, a thread that is alone may have the same id on every CPU.
    let by_cpu = pinfold_rseq::backend() == pinfold_rseq::Backend::Rseq(pinfold_rseq::Index::Cpu);
    if several && by_cpu {
        assert!(!lowers(shared), "no fence, although another CPU has added");
    }
    assert_eq!((own.sum(), shared.sum()), (1, 1));
    assert_eq!((own.swap(0), shared.swap(0)), (1, 1));
    for counter in &counters {
        counter.inc();
        assert_eq!(counter.sum(), 1);
    }
    a_batch_stays_within_each_cpus_share();
}

/// Where the kernel cannot fence, a counter that widens its batch keeps room for every CPU, because
/// nothing could make room later.
///
/// The process remembers that the kernel refused, so that this cannot be a test of its own.
fn a_batch_stays_within_each_cpus_share() {
    const DRIFT: u64 = 100_000;
    let counter = PerCpuCounter::new().with_max_drift(DRIFT);
    for cpu in 0..cpus().min(2) {
        pin(cpu);
        (0..100_000).for_each(|_| counter.inc());
    }
    let possible = pinfold_rseq::possible() as u64;
    if pinfold_rseq::backend() != pinfold_rseq::Backend::Atomic {
        assert!(counter.batch() <= (DRIFT / possible).max(1));
    }
    assert!(counter.error_bound() <= DRIFT);
    assert_eq!(counter.sum(), 100_000 * cpus().min(2) as i64);
}
