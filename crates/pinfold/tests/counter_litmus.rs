//! Exactness under load: sums while all threads add, limits that no add may pass, and bounds that
//! hold wherever an adding thread stops.
//!
//! `PINFOLD_LITMUS` is the number of sums that a test makes: 200,000 by default. A test makes a
//! tenth as many limited adds or checks of bounds.

mod common;

use common::{Random, StopAtEnd, cpus, from_environment, pin};
use pinfold::counter::{EventCounter, PerCpuCounter};
use pinfold::vmstat::VmEvents;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64};
use std::time::Instant;

pinfold::vmstat_items! { enum Item { Here = "here", There = "there" } }

const ADDERS: i64 = 4;

fn rounds() -> u64 {
    from_environment("PINFOLD_LITMUS", 200_000)
}

/// A counter like the kernel's: each CPU has a signed difference, and a sum walks over all possible
/// CPUs once. The CPUs of this machine are far apart in it, as on a kernel for many CPUs.
struct KernelStyle {
    per_cpu: Vec<[AtomicI64; 16]>,
}

impl KernelStyle {
    const POSSIBLE: usize = 4096;

    fn new() -> Self {
        let zero = || std::array::from_fn(|_| AtomicI64::new(0));
        KernelStyle {
            per_cpu: (0..Self::POSSIBLE).map(|_| zero()).collect(),
        }
    }

    fn add(&self, n: i64) {
        // SAFETY: `sched_getcpu` has no preconditions.
        let cpu = unsafe { libc::sched_getcpu() } as usize;
        let place = cpu * (Self::POSSIBLE / cpus()) % Self::POSSIBLE;
        self.per_cpu[place][0].fetch_add(n, SeqCst);
    }

    fn sum(&self) -> i64 {
        self.per_cpu.iter().map(|cpu| cpu[0].load(SeqCst)).sum()
    }
}

/// Each thread adds 1 and subtracts 1, again and again, and moves between CPUs in between. So the
/// true value is always from 0 to ADDERS. A sum that is not exact returns another value sooner or
/// later, as the kernel's way of summing does in the same test.
#[test]
fn every_sum_of_transfers_was_the_value() {
    let counter = PerCpuCounter::new().with_batch(4);
    let kernel = KernelStyle::new();
    let stop = AtomicBool::new(false);
    let mut outside = 0u64;
    std::thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        for seed in 0..ADDERS as u64 {
            let (counter, kernel, stop) = (&counter, &kernel, &stop);
            scope.spawn(move || {
                let mut random = Random::new(seed);
                while !stop.load(Relaxed) {
                    if random.below(4) == 0 {
                        pin(random.below(64) as usize);
                    }
                    counter.inc();
                    kernel.add(1);
                    if random.below(4) == 0 {
                        pin(random.below(64) as usize);
                    }
                    kernel.add(-1);
                    counter.dec();
                    if random.below(64) == 0 {
                        counter.fold();
                    }
                }
            });
        }
        let begin = Instant::now();
        let mut done = 0;
        let wrong_soon = |seen| seen == 0 && cpus() > 1 && begin.elapsed().as_secs() < 30;
        while done < rounds() || wrong_soon(outside) {
            let sum = counter.sum();
            assert!((0..=ADDERS).contains(&sum), "sum {sum} was never the value");
            done += 1;
            if done % 16 == 0 {
                outside += u64::from(!(0..=ADDERS).contains(&kernel.sum()));
            }
        }
        println!("{done} sums in {:?}", begin.elapsed());
    });
    println!("kernel-style sums outside: {outside}");
    // Only emulated machines run few rounds. They switch between CPUs so rarely that they may show
    // nothing.
    let few = rounds() < 10_000;
    assert!(
        outside > 0 || cpus() == 1 || few,
        "the kernel's way of summing was never wrong, so that this test shows nothing"
    );
    assert_eq!(counter.sum(), 0);
}

/// Each thread adds 1 and subtracts 1, again and again. `swap` takes the value out meanwhile, and
/// an add puts it back.
#[test]
fn swaps_between_adds_lose_nothing() {
    let counter = PerCpuCounter::new().with_batch(4);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        for seed in 0..ADDERS as u64 {
            let (counter, stop) = (&counter, &stop);
            scope.spawn(move || {
                let mut random = Random::new(seed);
                while !stop.load(Relaxed) {
                    counter.inc();
                    if random.below(8) == 0 {
                        pin(random.below(64) as usize);
                    }
                    counter.dec();
                }
            });
        }
        for _ in 0..rounds() / 20 {
            // The value that the last round took out has been added again, so that the swap returns
            // the true value.
            let taken = counter.swap(0);
            assert!((0..=ADDERS).contains(&taken), "took {taken}");
            counter.add(taken);
        }
    });
    assert_eq!(counter.sum(), 0);
}

/// Stays near the limit, where every CPU's batch could make the difference.
#[test]
fn no_limited_add_passes_its_limit() {
    many_limited_adds(100, 16, 20);
    many_limited_adds(100, 128, 20);
}

/// Is near the limit and far from it in turn, so that adds with locks and without meet.
#[test]
fn no_limited_add_passes_a_limit_that_was_far() {
    many_limited_adds(6000, 1, 2000);
}

/// Adds up to `most` at a time with `limit`, in several threads, which subtract it again.
fn many_limited_adds(limit: i64, batch: u64, most: u64) {
    let counter = PerCpuCounter::new().with_batch(batch);
    let stop = AtomicBool::new(false);
    let granted = AtomicU64::new(0);
    let refused = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        for seed in 0..ADDERS as u64 {
            let (counter, stop, granted, refused) = (&counter, &stop, &granted, &refused);
            scope.spawn(move || {
                let mut random = Random::new(seed);
                let mut mine = 0;
                while !stop.load(Relaxed) {
                    let amount = 1 + random.below(most) as i64;
                    if counter.limited_add(limit, amount) {
                        mine += amount;
                        granted.fetch_add(1, Relaxed);
                    } else {
                        refused.fetch_add(1, Relaxed);
                    }
                    // Ordinary adds subtract it again in small pieces, on whatever CPU the thread
                    // is now.
                    if random.below(8) == 0 {
                        pin(random.below(64) as usize);
                    }
                    while mine > random.below(3 * most) as i64 {
                        let back = mine.min(1 + random.below(8 * batch) as i64);
                        counter.sub(back);
                        mine -= back;
                    }
                }
                counter.sub(mine);
            });
        }
        let mut done = 0;
        while done < rounds() / 10 || granted.load(Relaxed) == 0 || refused.load(Relaxed) == 0 {
            let sum = counter.sum();
            assert!((0..=limit).contains(&sum), "sum {sum} is past the limit");
            done += 1;
        }
    });
    assert_eq!(counter.sum(), 0);
}

/// True while the adding threads must stand still.
static PAUSED: AtomicBool = AtomicBool::new(false);
/// How many threads stand still.
static STANDING: AtomicU64 = AtomicU64::new(0);

/// Keeps the interrupted thread where it is, until `PAUSED` is cleared.
extern "C" fn stand_still(_: libc::c_int) {
    STANDING.fetch_add(1, SeqCst);
    while PAUSED.load(SeqCst) {
        // SAFETY: `sched_yield` has no preconditions.
        unsafe { libc::sched_yield() };
    }
    STANDING.fetch_sub(1, SeqCst);
}

/// Lets all threads go on when the test ends, even by a panic.
struct GoOnAtEnd;

impl Drop for GoOnAtEnd {
    fn drop(&mut self) {
        PAUSED.store(false, SeqCst);
    }
}

/// A signal stops the adding threads wherever they are: in a critical section, in a fold, or with a
/// lock held. Then the value stands still, and every read must be within its bound of the value.
#[test]
fn reads_are_within_their_bound_wherever_adding_threads_stop() {
    // SAFETY: the handler uses only atomics and a system call, which a signal handler may use.
    // Zeroes are a valid `sigaction`.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = stand_still as *const () as usize;
        action.sa_flags = libc::SA_RESTART;
        libc::sigaction(libc::SIGUSR2, &raw const action, std::ptr::null_mut());
    }
    let batch = |batch| PerCpuCounter::new().with_batch(batch);
    let drift = |drift| PerCpuCounter::new().with_max_drift(drift);
    let counters = [
        batch(1),
        batch(2),
        batch(7),
        batch(32),
        batch(1000),
        drift(5),
        drift(100),
        drift(10_000),
        PerCpuCounter::new(),
        batch(3),
    ];
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        let _go_on = GoOnAtEnd;
        let threads: Vec<_> = (0..ADDERS).map(|_| AtomicU64::new(0)).collect();
        let threads: &'static [AtomicU64] = threads.leak();
        for (seed, thread) in threads.iter().enumerate() {
            let (counters, stop) = (&counters, &stop);
            scope.spawn(move || {
                // SAFETY: `pthread_self` has no preconditions.
                thread.store(unsafe { libc::pthread_self() } as u64, SeqCst);
                add_at_random(counters, seed as u64, stop);
            });
        }
        while threads.iter().any(|thread| thread.load(SeqCst) == 0) {
            std::thread::yield_now();
        }
        let mut checks = 0;
        let mut moved = 0;
        while checks < rounds() / 10 {
            PAUSED.store(true, SeqCst);
            for thread in threads {
                // SAFETY: the thread has stored its id, and runs until `stop` is set at the end of
                // this scope.
                unsafe {
                    libc::pthread_kill(thread.load(SeqCst) as libc::pthread_t, libc::SIGUSR2)
                };
            }
            while STANDING.load(SeqCst) != ADDERS as u64 {
                std::thread::yield_now();
            }
            for counter in &counters {
                let (read, bound) = (counter.read(), counter.error_bound());
                let truth = counter.sum();
                assert!(
                    read.abs_diff(truth) <= bound,
                    "read {read}, truth {truth}, bound {bound}: {counter:?}"
                );
                assert_eq!(counter.bounds(), (truth, truth));
                moved += u64::from(read != truth);
                checks += 1;
            }
            PAUSED.store(false, SeqCst);
            while STANDING.load(SeqCst) != 0 {
                std::thread::yield_now();
            }
        }
        assert!(
            moved > checks / 100,
            "reads were off in {moved} of {checks}"
        );
    });
}

fn add_at_random(counters: &[PerCpuCounter], seed: u64, stop: &AtomicBool) {
    let mut random = Random::new(seed);
    while !stop.load(Relaxed) {
        let counter = &counters[random.below(counters.len() as u64) as usize];
        for _ in 0..random.below(100) {
            counter.add(random.below(12) as i64 - 5);
        }
        match random.below(64) {
            0 => pin(random.below(64) as usize),
            1 => drop(counter.fold()),
            2 => counter.add(random.below(1 << 20) as i64),
            _ => {}
        }
    }
}

/// Waits until both of two threads have called this for the `times`th time.
fn meet(seen: &AtomicU64, times: u64) {
    seen.fetch_add(1, SeqCst);
    while seen.load(SeqCst) < 2 * times {
        if cpus() == 1 {
            std::thread::yield_now();
        }
        std::hint::spin_loop();
    }
}

/// Two threads add at the same time and sum at once. The sum that comes second must see both adds,
/// although each add may still be in the store buffer of its CPU.
#[test]
fn of_two_threads_that_add_and_sum_one_sees_both() {
    let rounds = rounds() / 4;
    let counter = PerCpuCounter::new().with_batch(1 << 30);
    let events = EventCounter::new();
    let items: VmEvents<Item> = VmEvents::new();
    let seen = AtomicU64::new(0);
    let work = |me: usize| {
        pin(me);
        // Installs the unit. The first add to a unit is not a plain store.
        items.inc(Item::There);
        (0..rounds).map(|round| {
            meet(&seen, 3 * round + 1);
            counter.inc();
            let sum = counter.sum() - 2 * round as i64;
            meet(&seen, 3 * round + 2);
            items.inc(Item::Here);
            let items = items.sum(Item::Here) - 2 * round;
            meet(&seen, 3 * round + 3);
            events.inc();
            (sum, items, events.sum() - 2 * round)
        })
    };
    let both = std::thread::scope(|scope| {
        [0, 1]
            .map(|me| scope.spawn(move || work(me).collect::<Vec<_>>()))
            .map(|thread| thread.join().unwrap())
    });
    for (first, second) in both[0].iter().zip(&both[1]) {
        assert_eq!(first.0.max(second.0), 2, "both sums miss an add");
        assert_eq!(first.1.max(second.1), 2, "both sums miss an item");
        // The other thread's event may already be that of the next round.
        assert!(first.2.max(second.2) >= 2, "both sums miss an event");
    }
}

/// Two CPUs add for the first time at once. A CPU's batch is granted only if it fits beside the
/// other's.
#[test]
fn first_adds_at_once_stay_within_the_drift() {
    const DRIFT: u64 = 10;
    let seen = AtomicU64::new(0);
    for round in 1..=(rounds() / 100) {
        let counter = PerCpuCounter::new().with_max_drift(DRIFT);
        std::thread::scope(|scope| {
            for me in 0..2 {
                let (counter, seen) = (&counter, &seen);
                scope.spawn(move || {
                    pin(me);
                    meet(seen, round);
                    counter.inc();
                });
            }
        });
        let bound = counter.error_bound();
        assert!(bound <= DRIFT, "a bound of {bound} instead of {DRIFT}");
        assert_eq!(counter.sum(), 2);
    }
}

/// The value only grows, while the batch is raised and lowered. No comparison may find the value
/// below an earlier sum.
#[test]
fn comparisons_hold_while_the_batch_changes() {
    let counter = PerCpuCounter::new().with_batch(1000);
    pin(0);
    counter.add(500);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        scope.spawn(|| {
            pin(1);
            while !stop.load(Relaxed) {
                counter.set_batch(1000).unwrap();
                counter.add(900);
                // Where the kernel cannot fence, the batch stays.
                let _ = counter.set_batch(1);
            }
        });
        for _ in 0..rounds() * 10 {
            let least = counter.sum();
            assert_eq!(counter.compare(least - 1), std::cmp::Ordering::Greater);
            let (read, bound) = counter.read_with_bound();
            assert!(read + bound as i64 >= least, "{read} ± {bound} of {least}");
        }
    });
}
