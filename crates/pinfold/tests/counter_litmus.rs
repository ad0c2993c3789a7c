//! Exactness under fire: sums taken while everybody adds, limits that nobody passes, bounds that hold wherever an adder stops.
//!
//! `PINFOLD_LITMUS` is how many sums, limited adds and bound checks each test makes (200,000 sums and a tenth of the others
//! by default).

mod common;

use common::{Random, StopAtEnd, cpus, from_environment, pin};
use pinfold::counter::{EventCounter, PercpuCounter};
use pinfold::vmstat::VmEvents;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64};
use std::time::Instant;

pinfold::vmstat_items! { enum Item { Here = "here", There = "there" } }

const ADDERS: i64 = 4;

fn rounds() -> u64 {
    from_environment("PINFOLD_LITMUS", 200_000)
}

/// A counter as the kernel's: a signed difference a CPU, summed up by walking over all possible CPUs once. As on a
/// kernel for many CPUs of which these few are there, far apart.
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
        // SAFETY: no preconditions.
        let cpu = unsafe { libc::sched_getcpu() } as usize;
        let place = cpu * (Self::POSSIBLE / cpus()) % Self::POSSIBLE;
        self.per_cpu[place][0].fetch_add(n, SeqCst);
    }

    fn sum(&self) -> i64 {
        self.per_cpu.iter().map(|cpu| cpu[0].load(SeqCst)).sum()
    }
}

/// Each adder adds 1 and takes 1 away for ever, moving between CPUs in between: the true value is always from 0 to ADDERS. A
/// sum that is not exact shows another sooner or later, as the kernel's way of summing up does beside it.
#[test]
fn every_sum_of_transfers_is_a_value_that_was() {
    let counter = PercpuCounter::with_batch(0, 4).unwrap();
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
    // Few rounds are for emulated machines, which switch between CPUs so rarely that they may show nothing.
    let few = rounds() < 10_000;
    assert!(
        outside > 0 || cpus() == 1 || few,
        "the litmus test shows nothing"
    );
    assert_eq!(counter.sum(), 0);
}

/// As above with resets: `swap` takes what is there, and puts it back.
#[test]
fn swaps_in_the_storm_lose_nothing() {
    let counter = PercpuCounter::with_batch(0, 4).unwrap();
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
            // Taken away and put back, the value leaves [0, ADDERS] by no more than is in hand.
            let taken = counter.swap(0);
            assert!((0..=ADDERS).contains(&taken), "took {taken}");
            counter.add(taken);
        }
    });
    assert_eq!(counter.sum(), 0);
}

/// Near the limit at all times: every CPU's batch could make the difference.
#[test]
fn no_limited_add_passes_its_limit() {
    storm_of_limited_adds(100, 16, 20);
}

/// Near the limit and far from it in turn, by adds with locks and without.
#[test]
fn no_limited_add_passes_a_limit_that_was_far() {
    storm_of_limited_adds(6000, 1, 2000);
}

fn storm_of_limited_adds(limit: i64, batch: u64, most: u64) {
    let counter = PercpuCounter::with_batch(0, batch).unwrap();
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
                    // Given back by ordinary adds, in small pieces, on whatever CPU this is now.
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

/// Set while adders shall stand still, wherever the signal found them.
static PAUSED: AtomicBool = AtomicBool::new(false);
static STANDING: AtomicU64 = AtomicU64::new(0);

extern "C" fn stand_still(_: libc::c_int) {
    STANDING.fetch_add(1, SeqCst);
    while PAUSED.load(SeqCst) {
        // SAFETY: no preconditions.
        unsafe { libc::sched_yield() };
    }
    STANDING.fetch_sub(1, SeqCst);
}

/// Lets everybody go on when the test ends, however it ends.
struct GoOnAtEnd;

impl Drop for GoOnAtEnd {
    fn drop(&mut self) {
        PAUSED.store(false, SeqCst);
    }
}

/// Adders are stopped by a signal wherever they are: in a critical section, in a fold, with a lock held. Then every read
/// must be within its bound of the truth, which stands still too.
#[test]
fn reads_are_within_their_bound_wherever_adders_stop() {
    // SAFETY: the handler is async-signal-safe.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = stand_still as *const () as usize;
        action.sa_flags = libc::SA_RESTART;
        libc::sigaction(libc::SIGUSR2, &raw const action, std::ptr::null_mut());
    }
    let batch = |batch| PercpuCounter::with_batch(0, batch).unwrap();
    let drift = |drift| PercpuCounter::with_max_drift(0, drift).unwrap();
    let counters = [
        batch(1),
        batch(2),
        batch(7),
        batch(32),
        batch(1000),
        drift(5),
        drift(100),
        drift(10_000),
        PercpuCounter::new(),
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
                // SAFETY: no preconditions.
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
                // SAFETY: the thread runs until `stop`.
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
        assert!(moved > checks / 100, "reads were hardly ever off");
    });
}

fn add_at_random(counters: &[PercpuCounter], seed: u64, stop: &AtomicBool) {
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

/// Waits until both of two threads came by for the `times`th time.
fn meet(seen: &AtomicU64, times: u64) {
    seen.fetch_add(1, SeqCst);
    while seen.load(SeqCst) < 2 * times {
        if cpus() == 1 {
            std::thread::yield_now();
        }
        std::hint::spin_loop();
    }
}

/// Two threads add at the same time and sum at once. Whose sum comes second sees both adds, though each add may
/// still be on its way out of the CPU that made it.
#[test]
fn of_two_who_add_and_sum_one_sees_both() {
    let rounds = rounds() / 4;
    let counter = PercpuCounter::with_batch(0, 1 << 30).unwrap();
    let events = EventCounter::new();
    let items: VmEvents<Item> = VmEvents::new();
    let seen = AtomicU64::new(0);
    let work = |me: usize| {
        pin(me);
        // Installs the unit: the first add to it is no plain store.
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
        assert_eq!(first.0.max(second.0), 2, "each missed the other's add");
        assert_eq!(first.1.max(second.1), 2, "each missed the other's item");
        // The other may be a round ahead with its event.
        assert!(first.2.max(second.2) >= 2, "each missed the other's event");
    }
}

/// Two CPUs add for the first time at once: either each finds that its batch fits beside the other's, or it goes without.
#[test]
fn first_adds_at_once_stay_within_the_drift() {
    const DRIFT: u64 = 10;
    let seen = AtomicU64::new(0);
    for round in 1..=(rounds() / 100) {
        let counter = PercpuCounter::with_max_drift(0, DRIFT).unwrap();
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
        assert!(bound <= DRIFT, "{bound} beyond what was asked for");
        assert_eq!(counter.sum(), 2);
    }
}

/// The value only grows, while the batch goes up and down: no comparison finds it below what a sum found before.
#[test]
fn comparisons_hold_while_the_batch_changes() {
    let counter = PercpuCounter::with_batch(0, 1000).unwrap();
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
                // Where nothing can fence, the batch stays.
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
