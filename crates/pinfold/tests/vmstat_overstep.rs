//! Oversteps: folds of a `VmStat` that add half a threshold beyond what was counted.

mod common;

use common::{Random, pin};
use pinfold::vmstat::{VmStat, Zone};
use std::sync::{Mutex, MutexGuard, PoisonError};

pinfold::vmstat_items! {
    enum Pool {
        Free = "nr_free",
        Dirty = "nr_dirty",
        Hit = "pool_hit",
    }
}

/// Keeps the tests apart. Counters share locks, and a fold leaves out a shard whose lock another
/// thread holds.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Has another thread count while this one runs, until two CPUs have counted. Returns false if that
/// does not happen on this machine.
fn count_on_two_cpus(pool: &VmStat<Pool>, item: Pool) -> bool {
    for cpu in (0..64).cycle().take(640) {
        pool.inc(Zone::normal(0), item);
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                pin(cpu);
                pool.dec(Zone::normal(0), item);
            });
            // This thread runs meanwhile, so that the two have different concurrency ids.
            while !other.is_finished() {
                std::hint::spin_loop();
            }
        });
        if pool.error_bound(item) > pool.threshold(Zone::normal(0)) {
            pool.fold();
            return true;
        }
    }
    false
}

/// Counts in one direction on one CPU, after two CPUs have counted. The total must change once for
/// each one and a half thresholds, and never be further from the value than the bound says.
#[test]
fn a_one_way_count_folds_every_one_and_a_half_thresholds() {
    const THRESHOLD: i64 = 40;
    const FOLDS: i64 = 100;
    let _alone = alone();
    let pool: VmStat<Pool> = VmStat::new();
    pool.set_threshold(THRESHOLD as u64).unwrap();
    for (by, item) in [(1, Pool::Free), (-1, Pool::Dirty)] {
        let several = count_on_two_cpus(&pool, item);
        // On atomics, folds do not overstep.
        let oversteps = several && pinfold_rseq::backend() != pinfold_rseq::Backend::Atomic;
        let apart = if oversteps {
            THRESHOLD * 3 / 2
        } else {
            THRESHOLD
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                pin(0);
                let folds = folds_of(&pool, item, by, FOLDS * apart);
                // The thread may be interrupted at the moment of a fold, which then does not
                // overstep.
                let about = FOLDS - 1..=FOLDS + 3;
                assert!(about.contains(&folds), "{folds} folds");
            });
        });
        pool.fold();
        assert_eq!(pool.read(item), FOLDS * apart * by, "exact after a fold");
    }
}

/// Counts `n` times by `by`. Returns how often the total changed.
fn folds_of(pool: &VmStat<Pool>, item: Pool, by: i64, n: i64) -> i64 {
    let (mut before, mut folds) = (0, 0);
    for n in 1..=n {
        pool.add(Zone::normal(0), item, by);
        let read = pool.read(item);
        assert!(read.abs_diff(n * by) <= pool.error_bound(item), "{n}");
        folds += i64::from(read != before);
        before = read;
    }
    folds
}

/// Threads count in one direction and then in the other, by amounts of many sizes. So oversteps in
/// both directions follow each other, beside folds from afar.
#[test]
fn oversteps_keep_the_bound_beside_folds_from_afar() {
    static POOL: VmStat<Pool> = VmStat::new();
    let _alone = alone();
    POOL.set_threshold(16).unwrap();
    for round in 0..300 {
        std::thread::scope(|scope| {
            for thread in 0..3 {
                scope.spawn(move || {
                    let mut random = Random::new(round * 3 + thread);
                    pin(random.below(64) as usize);
                    let sign = if random.below(2) == 0 { 1 } else { -1 };
                    for _ in 0..random.below(300) {
                        let most = if random.below(7) == 0 { 16 } else { 2 };
                        let amount = 1 + random.below(most) as i64;
                        POOL.add(Zone::normal(0), Pool::Hit, sign * amount);
                    }
                });
            }
            if round % 2 == 0 {
                POOL.fold();
            }
        });
        // No thread counts now, so the bound must hold for the exact value.
        let (read, exact) = (POOL.read(Pool::Hit), POOL.sum(Pool::Hit));
        let bound = POOL.error_bound(Pool::Hit);
        assert!(read.abs_diff(exact) <= bound, "{read} for {exact}, {bound}");
        if round % 5 == 0 {
            POOL.fold();
            assert_eq!(POOL.read(Pool::Hit), exact);
        }
    }
}
