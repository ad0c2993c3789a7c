//! Models of the counter's protocol, explored by loom: `RUSTFLAGS="--cfg loom" cargo test --release --test model_counter`.
//!
//! loom's types cannot stand in statics, so this is the protocol of `counter/shards.rs` and `counter/exact.rs` written again, step
//! by step. A critical section says that its CPU is in it: each model has one thread on a CPU, but threads on other CPUs
//! see its loads and its store as the separate steps they are. The fence waits until it has seen each CPU outside of one.
#![cfg(loom)]

use loom::sync::Arc;
use loom::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use loom::sync::atomic::{AtomicU64, AtomicUsize};
use loom::thread;

const GATE: u64 = 1 << 52;
const CPUS: usize = 2;

/// A word and its limit. Who writes one of them knows what is there without a load: the CPU its word, the lock's holder the limit.
/// (A load right before a store would hide from loom that the store conflicts with others' loads.)
#[derive(Default)]
struct Word {
    word: AtomicU64,
    own_word: std::sync::atomic::AtomicU64,
    limit: AtomicU64,
    own_limit: std::sync::atomic::AtomicU64,
}

impl Word {
    fn set_limit(&self, limit: u64) {
        self.own_limit.store(limit, Relaxed);
        self.limit.store(limit, Release);
    }

    fn own_limit(&self) -> u64 {
        self.own_limit.load(Relaxed)
    }
}

struct Shard {
    running: AtomicUsize,
    lock: Lock,
    up: Word,
    down: Word,
}

/// A lock that is tried, or waited for by turns.
#[derive(Default)]
struct Lock(AtomicUsize);

struct Held<'l>(&'l Lock);

impl Lock {
    fn try_lock(&self) -> Option<Held<'_>> {
        let taken = self.0.compare_exchange(0, 1, Acquire, Relaxed);
        taken.is_ok().then(|| Held(self))
    }

    fn lock(&self) -> Held<'_> {
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

struct Counter {
    shards: [Shard; CPUS],
    folded: [AtomicU64; 2],
    base: AtomicU64,
    drift: AtomicU64,
    batch: AtomicU64,
}

impl Counter {
    fn new(batch: u64, granted: bool) -> Arc<Counter> {
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

    fn grant(&self, cpu: usize) {
        let batch = self.batch.load(Relaxed);
        self.drift.fetch_add(batch, AcqRel);
        self.shards[cpu].down.set_limit(batch);
        self.shards[cpu].up.set_limit(batch);
    }

    fn word(&self, cpu: usize, down: bool) -> &Word {
        let shard = &self.shards[cpu];
        if down { &shard.down } else { &shard.up }
    }

    /// One critical section.
    fn section(&self, cpu: usize, down: bool, n: u64) -> bool {
        // An exchange: a fence that comes before it is seen with all that came before the fence.
        self.shards[cpu].running.swap(1, AcqRel);
        let word = self.word(cpu, down);
        let now = word.own_word.load(Relaxed);
        // The machine orders this load before the store that depends on it; the language needs an acquire for that.
        let fits = word.limit.load(Acquire).wrapping_sub(now) as i64 >= n as i64;
        if fits {
            word.own_word.store(now + n, Relaxed);
            word.word.store(now + n, Release);
        }
        self.shards[cpu].running.swap(0, AcqRel);
        fits
    }

    fn add(&self, cpu: usize, down: bool, n: u64) {
        if self.section(cpu, down, n) {
            return;
        }
        let room = match self.shards[cpu].lock.try_lock() {
            Some(_held) if n <= self.batch.load(Relaxed) => {
                match self.shards[cpu].up.own_limit() {
                    0 => self.grant(cpu),
                    _ => self.fold(cpu),
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

    fn fold(&self, cpu: usize) {
        self.fold_under(cpu, self.batch.load(Relaxed), 0);
    }

    fn fold_under(&self, cpu: usize, after: u64, gate: u64) {
        let before = self.batch.load(Relaxed);
        let moved = [false, true].map(|down| {
            let word = self.word(cpu, down);
            let mark = word.own_limit().wrapping_add(gate).wrapping_sub(before);
            word.word.load(Acquire).wrapping_sub(mark)
        });
        let both = moved[0].min(moved[1]);
        for down in [false, true] {
            let word = self.word(cpu, down);
            word.set_limit(word.own_limit().wrapping_add(both));
        }
        for down in [false, true] {
            let rest = moved[usize::from(down)] - both;
            let word = self.word(cpu, down);
            // The total first.
            self.folded[usize::from(down)].fetch_add(rest, Release);
            let mark = word.own_limit().wrapping_add(rest).wrapping_sub(before);
            word.set_limit(mark.wrapping_add(after));
        }
    }

    fn read(&self) -> i64 {
        let folded = || self.folded.each_ref().map(|total| total.load(Acquire));
        loop {
            let first = folded();
            let base = self.base.load(Acquire);
            if folded() == first {
                return base.wrapping_add(first[0]).wrapping_sub(first[1]) as i64;
            }
            thread::yield_now();
        }
    }

    fn collect(&self) -> (u64, u64) {
        self.shards.iter().fold((0, 0), |(up, down), shard| {
            (
                up + shard.up.word.load(Acquire),
                down + shard.down.word.load(Acquire),
            )
        })
    }

    fn try_sum(&self) -> Option<i64> {
        let first = self.collect();
        let base = self.base.load(Acquire);
        let second = self.collect();
        let sum = base.wrapping_add(first.0).wrapping_sub(first.1) as i64;
        (first == second).then_some(sum)
    }

    fn hold_all(&self) -> [Held<'_>; CPUS] {
        self.shards.each_ref().map(|shard| shard.lock.lock())
    }

    fn change_limits(&self, by: u64) {
        for cpu in 0..CPUS {
            for down in [false, true] {
                let word = self.word(cpu, down);
                word.set_limit(word.own_limit().wrapping_add(by));
            }
        }
    }

    fn gate(&self) {
        self.change_limits(GATE.wrapping_neg());
    }

    fn ungate(&self) {
        self.change_limits(GATE);
    }

    /// The fence: whoever was in a section is done, or starts again.
    fn quiesce(&self) {
        for shard in &self.shards {
            while shard.running.fetch_add(0, AcqRel) != 0 {
                thread::yield_now();
            }
        }
    }

    fn sum_gated(&self) -> i64 {
        let _held = self.hold_all();
        self.gate();
        let sum = loop {
            if let Some(sum) = self.try_sum() {
                break sum;
            }
            thread::yield_now();
        };
        self.ungate();
        sum
    }

    fn swap(&self, value: u64) -> i64 {
        let _held = self.hold_all();
        self.gate();
        self.quiesce();
        let moved = self.collect();
        let net = moved.0.wrapping_sub(moved.1);
        let fresh = value.wrapping_sub(net);
        let old = self.base.swap(fresh, AcqRel).wrapping_add(net);
        let batch = self.batch.load(Relaxed);
        (0..CPUS).for_each(|cpu| self.fold_under(cpu, batch, GATE));
        self.ungate();
        old as i64
    }

    fn lower(&self, batch: u64) {
        let _held = self.hold_all();
        self.gate();
        self.quiesce();
        (0..CPUS).for_each(|cpu| self.fold_under(cpu, batch, GATE));
        self.batch.store(batch, Relaxed);
        self.drift.store(batch * CPUS as u64, Release);
        self.ungate();
    }

    fn limited_add(&self, limit: i64, amount: u64) -> bool {
        let _held = self.hold_all();
        self.gate();
        self.quiesce();
        let moved = self.collect();
        let net = moved.0.wrapping_sub(moved.1);
        let update = self.base.fetch_update(AcqRel, Acquire, |base| {
            let after = base.wrapping_add(net).wrapping_add(amount);
            (after as i64 <= limit).then(|| base.wrapping_add(amount))
        });
        self.ungate();
        update.is_ok()
    }

    fn at_rest(&self) -> i64 {
        self.try_sum().unwrap()
    }
}

fn explore(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

/// Adds on one CPU, folds from afar, and reads: every read is within the drift of a value that the counter had.
#[test]
fn reads_are_within_the_drift() {
    explore(|| {
        // One shard in use: the drift is 1.
        let counter = Counter::new(1, false);
        counter.grant(0);
        let adder = thread::spawn({
            let counter = counter.clone();
            move || (0..2).for_each(|_| counter.add(0, false, 1))
        });
        let folder = thread::spawn({
            let counter = counter.clone();
            move || {
                if let Some(_held) = counter.shards[0].lock.try_lock() {
                    counter.fold(0);
                }
            }
        });
        // Before the read at most what it can have missed has been added, after it at least what it has seen.
        let least = counter.try_sum();
        let read = counter.read();
        let most = counter.try_sum();
        let drift = counter.drift.load(Acquire) as i64;
        if let (Some(least), Some(most)) = (least, most) {
            let within = least - drift..=most + drift;
            assert!(within.contains(&read), "{read} {within:?}");
        }
        adder.join().unwrap();
        folder.join().unwrap();
        assert_eq!(counter.at_rest(), 2);
        assert!((counter.read() - 2).abs() <= drift);
    });
}

/// A thread adds 1 on one CPU, moves, and takes 1 away on the other: the value is always 0 or 1.
fn transfer(counter: &Arc<Counter>) -> thread::JoinHandle<()> {
    let counter = counter.clone();
    thread::spawn(move || {
        counter.add(0, false, 1);
        counter.add(1, true, 1);
    })
}

#[test]
fn sums_see_values_that_were() {
    explore(|| {
        let counter = Counter::new(2, true);
        let moving = transfer(&counter);
        if let Some(sum) = counter.try_sum() {
            assert!((0..=1).contains(&sum), "{sum}");
        }
        moving.join().unwrap();
        assert_eq!(counter.at_rest(), 0);
    });
}

/// What the model is worth: walking over the shards once, as the kernel does, it finds the wrong sum.
#[test]
#[should_panic(expected = "was never the value")]
fn a_single_collection_does_not() {
    explore(|| {
        let counter = Counter::new(2, true);
        let moving = transfer(&counter);
        let once = counter.collect();
        let sum = once.0 as i64 - once.1 as i64;
        assert!((0..=1).contains(&sum), "{sum} was never the value");
        moving.join().unwrap();
    });
}

#[test]
fn a_gated_sum_sees_a_value_that_was_and_loses_nothing() {
    explore(|| {
        let counter = Counter::new(1, true);
        let moving = transfer(&counter);
        let sum = counter.sum_gated();
        assert!((0..=1).contains(&sum), "{sum}");
        moving.join().unwrap();
        assert_eq!(counter.at_rest(), 0);
    });
}

#[test]
fn what_a_swap_takes_and_leaves_is_what_was_added() {
    explore(|| {
        let counter = Counter::new(1, true);
        let adder = thread::spawn({
            let counter = counter.clone();
            move || (0..2).for_each(|_| counter.add(0, false, 1))
        });
        let taken = counter.swap(0);
        adder.join().unwrap();
        assert_eq!(taken + counter.at_rest(), 2);
        assert!((counter.read() - counter.at_rest()).abs() <= 2);
    });
}

/// Whoever has added and finds the base untouched has added before the limited add: that must then see it.
#[test]
fn a_limited_add_never_passes_its_limit() {
    explore(|| {
        let counter = Counter::new(2, true);
        let adder = thread::spawn({
            let counter = counter.clone();
            move || {
                counter.add(0, false, 1);
                counter.base.fetch_add(0, AcqRel) == 0
            }
        });
        let granted = counter.limited_add(1, 1);
        let came_first = adder.join().unwrap();
        assert!(!(came_first && granted), "added beyond the limit");
        assert_eq!(counter.at_rest(), 1 + i64::from(granted));
        assert!(!counter.limited_add(1, 1));
    });
}

/// A limit at which the other's add makes the difference: whoever comes second is refused or goes past by an ordinary add.
#[test]
fn a_limited_add_sees_what_was_added_before() {
    explore(|| {
        let counter = Counter::new(2, true);
        let added = Arc::new(AtomicUsize::new(0));
        let adder = thread::spawn({
            let (counter, added) = (counter.clone(), added.clone());
            move || {
                counter.add(1, false, 1);
                added.store(1, Release);
            }
        });
        let seen = added.load(Acquire);
        let granted = counter.limited_add(1, 1);
        // An add that was over when the limited one began fills the limit.
        assert!(!(seen == 1 && granted));
        adder.join().unwrap();
    });
}

#[test]
fn words_stay_between_mark_and_limit_when_the_batch_is_lowered() {
    explore(|| {
        let counter = Counter::new(3, true);
        let adder = thread::spawn({
            let counter = counter.clone();
            move || (0..2).for_each(|_| counter.add(0, false, 1))
        });
        counter.lower(1);
        adder.join().unwrap();
        for cpu in 0..CPUS {
            for down in [false, true] {
                let Word { word, limit, .. } = counter.word(cpu, down);
                let (word, limit) = (word.load(Acquire), limit.load(Acquire));
                let room = limit.wrapping_sub(word) as i64;
                assert!((0..=1).contains(&room), "{room}");
            }
        }
        assert_eq!(counter.at_rest(), 2);
        assert!((counter.read() - 2).unsigned_abs() <= counter.drift.load(Acquire));
    });
}

/// A shard's first add: its batch is in the drift before it can keep anything to itself.
#[test]
fn a_new_shard_counts_its_drift_first() {
    explore(|| {
        let counter = Counter::new(1, false);
        let adder = thread::spawn({
            let counter = counter.clone();
            move || counter.add(0, false, 1)
        });
        let sum = counter.try_sum();
        let read = counter.read();
        let drift = counter.drift.load(Acquire) as i64;
        if let Some(sum) = sum {
            assert!(read >= sum - drift, "read {read} of {sum}, drift {drift}");
        }
        adder.join().unwrap();
        assert_eq!(counter.at_rest(), 1);
    });
}

/// Ups and downs that cancel in the shard stay within the drift at every step.
#[test]
fn cancelling_keeps_the_bound() {
    explore(|| {
        let counter = Counter::new(1, true);
        let adder = thread::spawn({
            let counter = counter.clone();
            move || {
                counter.add(0, false, 1);
                counter.add(0, true, 1);
                counter.add(0, false, 1);
            }
        });
        if let Some(_held) = counter.shards[0].lock.try_lock() {
            counter.fold(0);
        }
        let read = counter.read();
        // The value is 0 or 1 all the time, and one shard is in use.
        assert!((-1..=2).contains(&read), "{read}");
        adder.join().unwrap();
        assert_eq!(counter.at_rest(), 1);
    });
}
