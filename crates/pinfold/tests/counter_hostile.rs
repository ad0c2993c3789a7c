//! Counters where it hurts: signal handlers that count what they interrupted, forks in the middle of everything, no memory.

mod common;

use common::{Random, StopAtEnd, pin};
use pinfold::counter::{EventCounter, PercpuCounter};
use pinfold::vmstat::{VmStat, Zone};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64};
use std::time::{Duration, Instant};

pinfold::vmstat_items! { enum Item { Here = "here" } }

static COUNTER: PercpuCounter = PercpuCounter::new();
static SMALL: PercpuCounter = PercpuCounter::with_batch_of::<3>(0);
static DRIFTING: PercpuCounter = PercpuCounter::with_max_drift_of::<100>(0);
static EVENTS: EventCounter = EventCounter::new();
static ITEMS: VmStat<Item> = VmStat::new();

static HANDLED: AtomicU64 = AtomicU64::new(0);
/// What handlers have added to the counters in all.
static ADDED: AtomicI64 = AtomicI64::new(0);

/// Counts the same things as the code it interrupts, by amounts within and beyond the batch, and reads and sums them.
extern "C" fn on_timer(_: libc::c_int) {
    let turn = HANDLED.fetch_add(1, Relaxed);
    let n = match turn % 8 {
        0 => 1000,
        1 => -700,
        2..=4 => 1,
        _ => -1,
    };
    for counter in [&COUNTER, &SMALL, &DRIFTING] {
        counter.add(n);
    }
    ITEMS.add(Zone::normal(0), Item::Here, n);
    ADDED.fetch_add(n, Relaxed);
    EVENTS.inc();
    if turn.is_multiple_of(16) {
        for counter in [&COUNTER, &SMALL, &DRIFTING] {
            counter.sum();
            counter.read();
            counter.bounds();
            counter.fold();
        }
    }
}

/// A timer that interrupts the process 20,000 times a second of its own time.
fn arm() {
    // SAFETY: the handler is async-signal-safe: it counts.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_timer as *const () as usize;
        action.sa_flags = libc::SA_RESTART;
        libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut());
        let mut event: libc::sigevent = std::mem::zeroed();
        event.sigev_notify = libc::SIGEV_SIGNAL;
        event.sigev_signo = libc::SIGUSR1;
        let mut timer: libc::timer_t = std::mem::zeroed();
        let made = libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer);
        assert_eq!(made, 0);
        let every = libc::timespec {
            tv_sec: 0,
            tv_nsec: 50_000,
        };
        let times = libc::itimerspec {
            it_interval: every,
            it_value: every,
        };
        libc::timer_settime(timer, 0, &raw const times, std::ptr::null_mut());
    }
}

#[test]
fn handlers_nested_in_increments_lose_nothing() {
    arm();
    let begin = Instant::now();
    let (added, events) = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3)
            .map(|seed| {
                scope.spawn(move || {
                    let mut random = Random::new(seed);
                    let (mut added, mut events) = (0, 0);
                    while begin.elapsed() < Duration::from_secs(3) {
                        for _ in 0..100 {
                            let n = random.below(7) as i64 - 3;
                            for counter in [&COUNTER, &SMALL, &DRIFTING] {
                                counter.add(n);
                            }
                            ITEMS.add(Zone::normal(0), Item::Here, n);
                            EVENTS.inc();
                            added += n;
                            events += 1;
                        }
                        if random.below(100) == 0 {
                            pin(random.below(64) as usize);
                        }
                    }
                    (added, events)
                })
            })
            .collect();
        threads.into_iter().fold((0, 0), |(a, b), thread| {
            let (c, d) = thread.join().unwrap();
            (a + c, b + d)
        })
    });
    // SAFETY: ignoring a signal is always allowed; a handler that runs is done before this thread's next line or another's join.
    unsafe { libc::signal(libc::SIGUSR1, libc::SIG_IGN) };
    std::thread::sleep(Duration::from_millis(50));
    let handled = HANDLED.load(SeqCst);
    println!("{handled} handlers in {:?}", begin.elapsed());
    assert!(handled > 5_000, "{handled}: the storm did not blow");
    let truth = added + ADDED.load(SeqCst);
    for counter in [&COUNTER, &SMALL, &DRIFTING] {
        assert_eq!(counter.sum(), truth);
        // No shard is further from its mark than its batch: a difference beyond its type would show here.
        assert!(counter.read().abs_diff(truth) <= counter.error_bound());
        while counter.read() != truth {
            counter.fold();
        }
    }
    assert_eq!(ITEMS.snapshot(Item::Here), truth);
    assert!(ITEMS.read(Item::Here).abs_diff(truth) <= ITEMS.error_bound(Item::Here));
    assert_eq!(EVENTS.sum(), events + handled);
}

/// Forks while threads add, fold, sum, swap and change batches. The child, alone, must find a counter that is consistent and
/// works.
#[test]
fn a_child_finds_counters_consistent() {
    let counters: Vec<_> = [1, 4, 100]
        .map(|batch| PercpuCounter::with_batch(0, batch).unwrap())
        .into_iter()
        .chain([PercpuCounter::with_max_drift(0, 50).unwrap()])
        .collect();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        for seed in 0..3 {
            let (counters, stop) = (&counters, &stop);
            scope.spawn(move || {
                let mut random = Random::new(seed);
                while !stop.load(Relaxed) {
                    let counter = &counters[random.below(4) as usize];
                    for _ in 0..random.below(50) {
                        counter.add(random.below(9) as i64 - 4);
                    }
                    match random.below(8) {
                        0 => drop(counter.fold()),
                        1 => drop(counter.swap(5)),
                        2 => drop(counter.sum()),
                        3 if seed == 0 => drop(counter.set_batch(1 + random.below(60))),
                        4 => pin(random.below(64) as usize),
                        _ => {}
                    }
                }
            });
        }
        for round in 0..200 {
            // SAFETY: the child works on counters only, and exits.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // Whoever waits for a lock that nobody will give back ends here.
                // SAFETY: no preconditions.
                unsafe { libc::alarm(10) };
                let fine = counters.iter().all(works_alone);
                // SAFETY: no preconditions.
                unsafe { libc::_exit(i32::from(!fine)) };
            }
            let mut status = 0;
            // SAFETY: `status` is writable.
            unsafe { libc::waitpid(child, &raw mut status, 0) };
            assert_eq!(status, 0, "child {round}");
        }
    });
}

/// What must hold of a counter that nobody else uses.
fn works_alone(counter: &PercpuCounter) -> bool {
    let before = counter.sum();
    let within = |truth: i64| counter.read().abs_diff(truth) <= counter.error_bound();
    let mut fine = within(before) && counter.bounds() == (before, before);
    for n in 1..=300 {
        counter.inc();
        fine &= within(before + n);
    }
    fine &= counter.sum() == before + 300;
    // No gate of a thread that is gone keeps adds from the shards: folding finds them there, whole.
    counter.fold();
    fine &= counter.read() == before + 300;
    fine && counter.swap(1) == before + 300 && counter.sum() == 1 && counter.limited_add(2, 1)
}

/// Without address space for per-CPU memory, counters are atomics, and exact.
#[test]
fn no_memory_means_atomics() {
    // SAFETY: the child works on counters only, and exits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let none = libc::rlimit {
            rlim_cur: 0,
            rlim_max: libc::RLIM_INFINITY,
        };
        // SAFETY: the limit is readable. Nothing can be mapped from here on.
        unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const none) };
        let counter = PercpuCounter::with_batch(5, 10).unwrap();
        let events = EventCounter::new();
        for _ in 0..1000 {
            counter.inc();
            events.inc();
        }
        let fine = counter.sum() == 1005
            && counter.read().abs_diff(1005) <= counter.error_bound()
            && counter.swap(0) == 1005
            && counter.limited_add(1, 1)
            && !counter.limited_add(1, 1)
            && events.sum() == 1000;
        // SAFETY: no preconditions.
        unsafe { libc::_exit(i32::from(!fine)) };
    }
    let mut status = 0;
    // SAFETY: `status` is writable.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0);
}
