//! The counter's protocol, step by step. `counter/shards.rs` and `counter/exact.rs` explain the
//! steps.

use loom::sync::Arc;
use loom::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use loom::sync::atomic::{AtomicU64, AtomicUsize};
use loom::thread;

const GATE: u64 = 1 << 44;
const PARK: u64 = 1 << 62;
pub const CPUS: usize = 2;

/// A word and its limit.
///
/// Only its own CPU writes a word, and keeps a copy of it in `own_word`, so that it need not load
/// the word. A load right before a store would hide from loom that the store conflicts with other
/// threads' loads.
#[derive(Default)]
pub struct Word {
    pub word: AtomicU64,
    pub own_word: std::sync::atomic::AtomicU64,
    pub limit: AtomicU64,
}

impl Word {
    /// Moves the limit by `by`.
    pub fn move_limit(&self, by: u64) {
        self.limit.fetch_add(by, Release);
    }

    /// Returns whether the word's shard is parked.
    pub fn is_parked(&self) -> bool {
        let behind = self
            .word
            .load(Acquire)
            .wrapping_sub(self.limit.load(Relaxed));
        behind as i64 >= (PARK / 2) as i64
    }

    /// Returns how far the word is from its limit, apart from gates.
    pub fn room(&self) -> u64 {
        let limit = self.limit.load(Relaxed);
        let behind = self.word.load(Acquire).wrapping_sub(limit) as i64;
        let gates = u64::try_from(behind).map_or(0, |behind| behind.div_ceil(GATE));
        (gates * GATE).wrapping_sub(behind as u64)
    }
}

/// The shard of one CPU.
pub struct Shard {
    /// 1 while the CPU is in a critical section.
    pub running: AtomicUsize,
    pub lock: Lock,
    pub up: Word,
    pub down: Word,
}

/// A lock that a thread tries, or waits for while other threads run.
#[derive(Default)]
pub struct Lock(AtomicUsize);

pub struct Held<'l>(&'l Lock);

impl Lock {
    pub fn try_lock(&self) -> Option<Held<'_>> {
        let taken = self.0.compare_exchange(0, 1, Acquire, Relaxed);
        taken.is_ok().then(|| Held(self))
    }

    pub fn lock(&self) -> Held<'_> {
        loop {
            match self.try_lock() {
                Some(held) => return held,
                None => thread::yield_now(),
            }
        }
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.0.store(0, Release);
    }
}

/// The counter, with the names of `counter/shards.rs`.
pub struct Counter {
    pub shards: [Shard; CPUS],
    pub folded: [AtomicU64; 2],
    pub base: AtomicU64,
    pub drift: AtomicU64,
    pub batch: AtomicU64,
}

impl Counter {
    pub fn new(batch: u64, granted: bool) -> Arc<Counter> {
        let counter = Counter {
            shards: std::array::from_fn(|_| Shard {
                running: AtomicUsize::new(0),
                lock: Lock::default(),
                up: Word::default(),
                down: Word::default(),
            }),
            folded: [AtomicU64::new(0), AtomicU64::new(0)],
            base: AtomicU64::new(0),
            drift: AtomicU64::new(0),
            batch: AtomicU64::new(batch),
        };
        if granted {
            (0..CPUS).for_each(|cpu| counter.grant(cpu));
        }
        Arc::new(counter)
    }

    pub fn grant(&self, cpu: usize) {
        let batch = self.batch.load(Relaxed);
        self.drift.fetch_add(batch, AcqRel);
        self.shards[cpu].down.move_limit(batch);
        self.shards[cpu].up.move_limit(batch);
    }

    pub fn word(&self, cpu: usize, down: bool) -> &Word {
        let shard = &self.shards[cpu];
        if down { &shard.down } else { &shard.up }
    }

    /// Runs one critical section: adds `n` to the word if there is room.
    pub fn section(&self, cpu: usize, down: bool, n: u64) -> bool {
        // An exchange, so that a fence that came before is seen with everything that came before
        // the fence.
        self.shards[cpu].running.swap(1, AcqRel);
        let word = self.word(cpu, down);
        let now = word.own_word.load(Relaxed);
        // The machine orders this load before the store, which depends on it. The language needs an
        // acquire for that.
        let fits = word.limit.load(Acquire).wrapping_sub(now) as i64 >= n as i64;
        if fits {
            word.own_word.store(now + n, Relaxed);
            word.word.store(now + n, Release);
        }
        self.shards[cpu].running.swap(0, AcqRel);
        fits
    }

    /// Adds `n` to the word or, without room, to the base.
    pub fn add(&self, cpu: usize, down: bool, n: u64) {
        if self.section(cpu, down, n) {
            return;
        }
        let room = match self.shards[cpu].lock.try_lock() {
            Some(_held) if n <= self.batch.load(Relaxed) => {
                if self.shards[cpu].up.is_parked() {
                    self.move_limits(std::array::from_fn(|at| at == cpu), PARK);
                }
                if self.is_granted(cpu) {
                    self.fold(cpu);
                } else {
                    self.grant(cpu);
                }
                true
            }
            _ => false,
        };
        if !(room && self.section(cpu, down, n)) {
            let n = if down { n.wrapping_neg() } else { n };
            self.base.fetch_add(n, AcqRel);
        }
    }

    pub fn is_granted(&self, cpu: usize) -> bool {
        let words = [false, true].map(|down| self.word(cpu, down));
        words
            .iter()
            .any(|word| word.limit.load(Relaxed) != 0 || word.word.load(Relaxed) != 0)
    }

    pub fn fold(&self, cpu: usize) {
        self.fold_for(cpu, self.batch.load(Relaxed));
    }

    pub fn fold_for(&self, cpu: usize, after: u64) {
        let before = self.batch.load(Relaxed);
        let moved = [false, true].map(|down| before - self.word(cpu, down).room());
        let both = moved[0].min(moved[1]);
        for down in [false, true] {
            self.word(cpu, down).move_limit(both);
        }
        for down in [false, true] {
            let rest = moved[usize::from(down)] - both;
            // First the total, then the limit.
            self.folded[usize::from(down)].fetch_add(rest, Release);
            let by = rest.wrapping_add(after).wrapping_sub(before);
            self.word(cpu, down).move_limit(by);
        }
    }

    pub fn read(&self) -> i64 {
        self.read_with_bound().0
    }

    pub fn read_with_bound(&self) -> (i64, u64) {
        let folded = || self.folded.each_ref().map(|total| total.load(Acquire));
        loop {
            let first = folded();
            let base = self.base.load(Acquire);
            let bound = self.drift.load(Acquire);
            if folded() == first {
                let read = base.wrapping_add(first[0]).wrapping_sub(first[1]);
                return (read as i64, bound);
            }
            thread::yield_now();
        }
    }

    pub fn collect(&self) -> (u64, u64) {
        self.shards.iter().fold((0, 0), |(up, down), shard| {
            (
                up + shard.up.word.load(Acquire),
                down + shard.down.word.load(Acquire),
            )
        })
    }

    pub fn try_sum(&self) -> Option<i64> {
        let first = self.collect();
        let base = self.base.load(Acquire);
        let second = self.collect();
        let sum = base.wrapping_add(first.0).wrapping_sub(first.1) as i64;
        (first == second).then_some(sum)
    }

    pub fn hold_all(&self) -> [Held<'_>; CPUS] {
        self.shards.each_ref().map(|shard| shard.lock.lock())
    }

    pub fn move_limits(&self, closed: [bool; CPUS], by: u64) {
        for cpu in (0..CPUS).filter(|&cpu| closed[cpu]) {
            self.word(cpu, true).move_limit(by);
            self.word(cpu, false).move_limit(by);
        }
    }

    /// Closes a gate for the granted shards. Returns which these are.
    pub fn gate(&self) -> [bool; CPUS] {
        let closed = std::array::from_fn(|cpu| self.is_granted(cpu));
        self.move_limits(closed, GATE.wrapping_neg());
        closed
    }

    pub fn ungate(&self, closed: [bool; CPUS]) {
        self.move_limits(closed, GATE);
    }

    /// The fence: waits until each CPU was seen outside of a section. A section that begins later
    /// finds the gate.
    pub fn quiesce(&self) {
        for shard in &self.shards {
            while shard.running.fetch_add(0, AcqRel) != 0 {
                thread::yield_now();
            }
        }
    }

    pub fn sum_gated(&self) -> i64 {
        let closed = self.gate();
        let sum = loop {
            if let Some(sum) = self.try_sum() {
                break sum;
            }
            thread::yield_now();
        };
        self.ungate(closed);
        sum
    }

    pub fn swap(&self, value: u64) -> i64 {
        self.swap_fencing(value, |counter| {
            let parked = |shard: &Shard| shard.up.is_parked();
            if !counter.shards.iter().all(parked) {
                counter.quiesce();
            }
        })
    }

    /// Swaps, with `fence` in the place of the fence, and parks the shards.
    pub fn swap_fencing(&self, value: u64, fence: impl Fn(&Counter)) -> i64 {
        let _held = self.hold_all();
        let closed = self.gate();
        fence(self);
        let moved = self.collect();
        let net = moved.0.wrapping_sub(moved.1);
        let fresh = value.wrapping_sub(net);
        let old = self.base.swap(fresh, AcqRel).wrapping_add(net);
        let batch = self.batch.load(Relaxed);
        (0..CPUS).for_each(|cpu| self.fold_for(cpu, batch));
        let open = std::array::from_fn(|cpu| closed[cpu] && !self.shards[cpu].up.is_parked());
        self.move_limits(open, PARK.wrapping_neg());
        self.ungate(closed);
        old as i64
    }

    pub fn lower(&self, batch: u64) {
        let _held = self.hold_all();
        let closed = self.gate();
        self.quiesce();
        (0..CPUS).for_each(|cpu| self.fold_for(cpu, batch));
        self.batch.store(batch, Relaxed);
        for total in &self.folded {
            total.fetch_add(1, Release);
        }
        self.drift.store(batch * CPUS as u64, Release);
        self.ungate(closed);
    }

    pub fn limited_add(&self, limit: i64, amount: u64) -> bool {
        let _held = self.hold_all();
        let closed = self.gate();
        self.quiesce();
        let moved = self.collect();
        let net = moved.0.wrapping_sub(moved.1);
        let update = self.base.fetch_update(AcqRel, Acquire, |base| {
            let after = base.wrapping_add(net).wrapping_add(amount);
            (after as i64 <= limit).then(|| base.wrapping_add(amount))
        });
        self.ungate(closed);
        update.is_ok()
    }

    /// Returns the value, at a time when no thread uses the counter.
    pub fn at_rest(&self) -> i64 {
        self.try_sum().unwrap()
    }
}
