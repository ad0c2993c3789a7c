//! The counter of the models: the real files of `counter/`, and small modules in the place of those
//! that loom cannot run.
//!
//! # What is mirrored
//!
//! `model_mirrors.rs` fails when one of these functions changes.
//!
//! | step | mirrors | fingerprint |
//! |---|---|---|
//! | `PerCpuCounter::add` | `pinfold/src/counter/percpu_counter.rs` `PerCpuCounter::add` | `89e3a3342136e1b6` |
//! | `PerCpuCounter::shards` | `pinfold/src/counter/percpu_counter.rs` `PerCpuCounter::shards` | `a9f7f0420826b309` |
//! | `PerCpuCounter::shards_or_alloc` | `pinfold/src/counter/percpu_counter.rs` `PerCpuCounter::shards_or_alloc` | `5aefea1fddfc60f7` |
//! | `PerCpuCounter::fold_in_background` | `pinfold/src/counter/watch.rs` `fold_watched` | `1490a646fbef47c9` |
//! | `PerCpuCounter::fold_in_background` | `pinfold/src/counter/watch.rs` `fold_word` | `c192a207f76c252c` |
//! | `try_hold` | `pinfold/src/counter/stripe.rs` `try_hold` | `7dbb1584f10d3b27` |
//! | `try_hold` | `pinfold/src/counter/stripe.rs` `try_lock` | `ed260b9e75a9e5fe` |
//! | `Held::drop` | `pinfold/src/counter/stripe.rs` `Held::drop` | `1b0eb05151ef44df` |
//! | `Held::drop` | `pinfold/src/counter/stripe.rs` `AllHeld::drop` | `2ed2f5a5adb10016` |
//! | `try_hold_all` | `pinfold/src/counter/stripe.rs` `try_hold_all` | `3d3cb239b6165036` |
//! | `hold_all` | `pinfold/src/counter/stripe.rs` `hold_all` | `64b100eca558ab1b` |
//! | `hold_all` | `pinfold/src/counter/stripe.rs` `AllHeld::add_all` | `9bcce8ded2af114b` |
//! | `hold_all_or_refuse` | `pinfold/src/counter/stripe.rs` `hold_all_or_refuse` | `02068a35180d12dd` |
//! | `pause` | `pinfold/src/counter/stripe.rs` `pause` | `5b12a7d1db03c34b` |
//! | `enter` | `pinfold/src/counter/freezers.rs` `enter` | `27bcf2ef38ee956a` |
//! | `leave_adders_alone` | `pinfold/src/counter/pace.rs` `leave_adders_alone` | `c313523c9dfe7af3` |

#[path = "../../src/counter/error.rs"]
mod error;
#[path = "../../src/counter/estimate.rs"]
mod estimate;
#[path = "../../src/counter/exact.rs"]
mod exact;
/// The model has no forks.
mod fork {
    use pinfold_rseq::shard::TOKEN;

    pub fn outlast<T>(f: impl FnOnce() -> Option<T>) -> Option<T> {
        f()
    }

    pub fn token() -> u64 {
        TOKEN + 1
    }

    pub fn has_happened() -> bool {
        false
    }

    pub fn is_stale(_token: u64) -> bool {
        false
    }
}
#[path = "../../src/counter/freeze.rs"]
mod freeze;
#[path = "../../src/counter/read.rs"]
mod read;
#[path = "../../src/counter/shards.rs"]
pub mod shards;
#[path = "../../src/counter/slow_add.rs"]
mod slow_add;

use crate::counter_units::{self, BLOCK, NOWHERE, move_to};
use loom::sync::Arc;
use loom::sync::atomic::AtomicI64;
use shards::{Direction, Shards};
use stripe::AllHeld;

/// The handle of a counter that has its block.
pub struct PerCpuCounter {
    pub base: AtomicI64,
    seen: core::sync::atomic::AtomicU64,
}

impl PerCpuCounter {
    pub fn with_batch(batch: u64) -> Arc<Self> {
        let counter = PerCpuCounter {
            base: Default::default(),
            seen: Default::default(),
        };
        counter.of().open(batch);
        Arc::new(counter)
    }

    /// Returns the counter's shards.
    pub fn of(&self) -> Shards {
        // SAFETY: every unit has the four words of the block.
        unsafe { Shards::at(BLOCK) }
    }

    fn shards(&self) -> Option<Shards> {
        Some(self.of())
    }

    fn shards_or_closed(&self) -> Shards {
        self.of()
    }

    fn shards_or_alloc(&self) -> Option<Shards> {
        Some(self.of())
    }

    fn max_drift(&self) -> Option<u64> {
        None
    }

    /// The hint by which large adds skip the look at the shard. The model's adds always look.
    fn expect_batch(&self, _: u64) {}

    /// Adds as the real function does, but always looks at the shard first. The real function sends
    /// an add above the batch to the base without this look.
    pub fn add(&self, n: i64) {
        let left = self.of().add(Direction::of(n), n.abs());
        if left < 0 {
            self.finish_add(self.of(), n, left);
        }
    }

    /// Moves the thread to `cpu`, adds `n` there, and moves away.
    pub fn add_on(&self, cpu: usize, n: i64) {
        move_to(cpu);
        self.add(n);
        move_to(NOWHERE);
    }

    /// Activates the shards of all CPUs.
    pub fn activate_all(&self) {
        let held = self.hold_all();
        let shards = self.of();
        counter_units::used().for_each(|unit| shards.activate(&held, unit, shards.batch()));
    }

    /// Sums while the counter is frozen.
    pub fn sum_frozen_now(&self) -> i64 {
        self.sum_frozen(self.of())
    }

    /// Returns the sum if no word moved during the call.
    pub fn sum_at_once(&self) -> Option<i64> {
        let (low, high) = self.bounds();
        (low == high).then_some(low)
    }

    pub fn hold_all(&self) -> AllHeld {
        stripe::hold_all(BLOCK)
    }

    /// Estimates as `watch::fold_watched` does. Leaves out the look before the estimate: the look
    /// writes nothing, and whatever it decides, a thread that always estimates goes through the
    /// same orders of writes.
    pub fn fold_in_background(&self) {
        self.of().estimate(&|_| true, || true);
    }
}

mod primitive {
    use crate::counter_units::{Fault, cpus, fault};
    use loom::sync::atomic::Ordering;
    use pinfold_rseq::{Backend, Index};

    pub use crate::counter_units::Claim;
    pub use crate::counter_units::current_alone as current;
    pub use loom::sync::atomic::AtomicU64;

    pub fn backend() -> Backend {
        Backend::Rseq(Index::Cpu)
    }

    pub fn possible() -> usize {
        cpus()
    }

    pub fn can_fence() -> bool {
        true
    }

    pub fn fence_index(_unit: usize) -> Result<(), ()> {
        unreachable!("no model spares a CPU")
    }

    pub fn fence_is_refused() -> bool {
        false
    }

    pub fn fence(order: Ordering) {
        if fault() != Fault::NoOwnFence {
            loom::sync::atomic::fence(order);
        }
    }
}

/// Stands for `counter/stripe.rs`: a lock for each shard.
mod stripe {
    use super::counter_units::{lock_of, used};
    use loom::sync::atomic::AtomicU64;
    use loom::sync::atomic::Ordering::{Acquire, Relaxed, Release};
    use loom::thread;

    pub struct Held(&'static AtomicU64);

    pub fn try_hold(unit: usize, _offset: usize) -> Option<Held> {
        let lock = lock_of(unit);
        let taken = lock.compare_exchange(0, 1, Acquire, Relaxed);
        taken.is_ok().then(|| Held(lock))
    }

    impl Drop for Held {
        fn drop(&mut self) {
            self.0.store(0, Release);
        }
    }

    pub struct AllHeld(#[expect(dead_code, reason = "dropping it unlocks")] Vec<Held>);

    pub fn try_hold_all(offset: usize) -> Option<AllHeld> {
        let held: Option<_> = used().map(|unit| try_hold(unit, offset)).collect();
        held.map(AllHeld)
    }

    pub fn hold_all(offset: usize) -> AllHeld {
        let hold = |unit| {
            loop {
                match try_hold(unit, offset) {
                    Some(held) => return held,
                    None => thread::yield_now(),
                }
            }
        };
        AllHeld(used().map(hold).collect())
    }

    pub fn hold_all_or_refuse(offset: usize) -> Option<AllHeld> {
        Some(hold_all(offset))
    }

    pub fn give_way() {}

    pub fn pause(_looks: &mut u32) {
        thread::yield_now();
    }
}

/// Stands for `counter/freezers.rs`: no thread forks.
mod freezers {
    pub fn enter() -> Option<()> {
        Some(())
    }
}

/// Stands for `counter/pace.rs`: sums do not wait for adds.
mod pace {
    pub fn leave_adders_alone(_seen: &core::sync::atomic::AtomicU64, _sum: u64) {}
}
