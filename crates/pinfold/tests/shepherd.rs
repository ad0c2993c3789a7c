//! The shepherd as a program uses it.

mod common;

use common::machine::{affinity, move_to, wait_until};
use common::{Random, cpus, in_child, pin};
use pinfold::counter::{Counters, PerCpuCounter};
use pinfold::shepherd::{self, Reach, Shepherd, ShepherdError, register};
use pinfold::topology::CpuSet;
use pinfold::vmstat::{VmStat, Zone};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Waits until no other test of this file runs, and keeps the others waiting. Watched counters and
/// the shepherds' threads belong to the whole process.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn quick() -> Shepherd {
    Shepherd::new().interval(Duration::from_millis(5))
}

/// Returns the ids of the shepherds' threads.
fn threads() -> Vec<i32> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    tasks
        .filter_map(|task| {
            let task = task.ok()?;
            let name = std::fs::read_to_string(task.path().join("comm")).ok()?;
            (name.trim() == "pinfold").then(|| task.file_name().to_str()?.parse().ok())?
        })
        .collect()
}

#[test]
fn a_tick_folds_what_is_watched_and_nothing_else() {
    let _alone = alone();
    let watched = PerCpuCounter::new().with_batch(1000);
    let other = PerCpuCounter::new().with_batch(1000);
    let shepherd = Shepherd::new();
    shepherd::watch(&watched).unwrap();
    watched.add(5);
    other.add(5);
    assert!(shepherd.tick() >= 1);
    assert_eq!((watched.read(), other.read()), (5, 0));
    assert_eq!(shepherd.tick(), 0);
    shepherd::unwatch(&watched);
    watched.add(5);
    assert_eq!(shepherd.tick(), 0);
    assert_eq!((watched.read(), watched.sum()), (5, 10));
}

#[test]
fn a_tick_passes_over_a_shard_whose_adds_cancel() {
    let _alone = alone();
    pin(0);
    let counter = PerCpuCounter::new().with_batch(1000);
    let shepherd = Shepherd::new();
    shepherd::watch(&counter).unwrap();
    (0..4).for_each(|_| counter.add(100));
    (0..4).for_each(|_| counter.sub(100));
    assert_eq!((shepherd.tick(), counter.read()), (0, 0));
    counter.sub(3);
    assert_eq!((shepherd.tick(), counter.read()), (1, -3));
    // The shepherd left the room that these adds used up. The next adds make room themselves.
    (0..30).for_each(|_| counter.add(100));
    assert_eq!(counter.sum(), 2997);
    shepherd.tick();
    assert_eq!((shepherd.tick(), counter.read()), (0, 2997));
}

#[test]
fn a_thread_folds_counters_arrays_and_items() {
    let _alone = alone();
    pinfold::vmstat_items! { enum Item { Here = "here", There = "there" } }
    let single = PerCpuCounter::new().with_batch(1 << 20);
    let many = Counters::new(&[0; 100], 1 << 20).unwrap();
    let items: VmStat<Item> = VmStat::new();
    let running = quick().start().unwrap();
    shepherd::watch(&single).unwrap();
    shepherd::watch(&many).unwrap();
    shepherd::watch(&items).unwrap();
    wait_until("the thread", || threads().len() == 1);
    single.add(1);
    many.iter().for_each(|counter| counter.add(2));
    items.inc(Zone::normal(0), Item::There);
    wait_until("folding", || {
        single.read() == 1
            && many.iter().all(|counter| counter.read() == 2)
            && items.read(Item::There) == 1
    });
    // If an add finds its shard locked by the shepherd's thread, it goes to the counter's base, and
    // no fold counts it. So this loop keeps adding until enough folds are counted.
    wait_until("the count of folds", || {
        single.add(1);
        running.folds() >= 102
    });
    running.stop();
    assert_eq!(threads(), []);
}

/// A shepherd that would sleep for an hour follows a shorter interval at once, whether it is set
/// for this shepherd or for all of the process.
#[test]
fn a_new_interval_ends_a_long_sleep() {
    let _alone = alone();
    let counter = PerCpuCounter::new().with_batch(1 << 20);
    shepherd::watch(&counter).unwrap();
    let hour = Duration::from_secs(3600);
    let folds_again = |value| {
        counter.add(1);
        wait_until("a fold", || counter.read() == value);
    };
    let running = Shepherd::new().interval(hour).start().unwrap();
    // After its first tick it sleeps for an hour.
    until_it_sleeps(&counter);
    let before = counter.read();
    running.set_interval(Duration::from_millis(5)).unwrap();
    folds_again(before + 1);
    // With the interval of all shepherds, its own has no effect.
    shepherd::set_interval(Some(hour)).unwrap();
    until_it_sleeps(&counter);
    let before = counter.sum();
    shepherd::set_interval(Some(Duration::from_millis(5))).unwrap();
    folds_again(before + 1);
    running.set_interval(hour).unwrap();
    folds_again(before + 2);
    shepherd::set_interval(None).unwrap();
    assert_eq!(shepherd::interval(), None);
    for wrong in [Duration::ZERO, Duration::from_secs(86_401)] {
        assert_eq!(running.set_interval(wrong), Err(ShepherdError::Interval));
        let refused = shepherd::set_interval(Some(wrong));
        assert_eq!(refused, Err(ShepherdError::Interval));
    }
}

/// Adds until the shepherd's thread no longer folds, because it sleeps.
fn until_it_sleeps(counter: &PerCpuCounter) {
    wait_until("a long sleep", || {
        counter.add(1);
        std::thread::sleep(Duration::from_millis(50));
        counter.read() != counter.sum()
    });
    counter.fold();
}

#[test]
fn counters_may_be_dropped_and_made_while_the_shepherd_folds() {
    let _alone = alone();
    let _running = quick().interval(Duration::from_micros(50)).start().unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let stop = &stop;
            scope.spawn(move || {
                let mut random = Random::new(seed);
                while !stop.load(Ordering::Relaxed) {
                    let many = Counters::new(&[7; 20], 1000).unwrap();
                    let single = PerCpuCounter::new().with_value(7).with_batch(1000);
                    shepherd::watch(&many).unwrap();
                    shepherd::watch(&single).unwrap();
                    for n in 0..random.below(300) {
                        single.inc();
                        many[n as usize % 20].dec();
                        if n % 100 == 99 {
                            pin(random.below(64) as usize);
                        }
                    }
                    // A fold of a dropped counter would show here, if it reached the new counter at
                    // the same place.
                    for counter in many.iter().chain([&single]) {
                        let (read, truth) = (counter.read(), counter.sum());
                        assert!(read.abs_diff(truth) <= counter.error_bound());
                        counter.fold();
                    }
                }
            });
        }
        std::thread::sleep(Duration::from_secs(2));
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn bad_requests_are_refused() {
    let _alone = alone();
    let interval = |interval| Shepherd::new().interval(interval).start().map(|_| ());
    assert_eq!(interval(Duration::ZERO), Err(ShepherdError::Interval));
    assert_eq!(interval(Duration::MAX), Err(ShepherdError::Interval));
    let nowhere: CpuSet = "8000".parse().unwrap();
    assert_eq!(
        Shepherd::new().on(nowhere).start().map(|_| ()),
        Err(ShepherdError::NoCpu)
    );
    assert_eq!(threads(), []);
}

#[test]
fn registered_drains_are_called_once_a_tick() {
    static CALLS: AtomicUsize = AtomicUsize::new(0);
    fn drain(_: Reach) {
        CALLS.fetch_add(1, Ordering::Relaxed);
    }
    let _alone = alone();
    assert!(register(drain) && register(drain));
    let before = CALLS.load(Ordering::Relaxed);
    Shepherd::new().tick();
    assert_eq!(CALLS.load(Ordering::Relaxed), before + 1);
}

#[test]
fn the_thread_stays_where_others_move_it() {
    let _alone = alone();
    if cpus() < 2 {
        return;
    }
    let running = quick().on("0".parse().unwrap()).start().unwrap();
    wait_until("the thread", || threads().len() == 1);
    let thread = threads()[0];
    wait_until("moving", || affinity(thread) == [0]);
    // Another process, for example `taskset`, moves the thread. It stays there.
    move_to(thread, &[1]);
    std::thread::sleep(Duration::from_millis(1500));
    assert_eq!(affinity(thread), [1]);
    running.stop();
}

/// Returns how many reads of files the thread has made; `None` if the kernel does not count them.
fn reads(thread: i32) -> Option<u64> {
    let io = std::fs::read_to_string(format!("/proc/self/task/{thread}/io")).ok()?;
    io.lines()
        .find_map(|line| line.strip_prefix("syscr: ")?.parse().ok())
}

#[test]
fn the_thread_reads_no_file_while_the_machine_stays_as_it_is() {
    let _alone = alone();
    let running = quick().start().unwrap();
    let counter = PerCpuCounter::new().with_batch(1 << 20);
    shepherd::watch(&counter).unwrap();
    wait_until("the thread", || threads().len() == 1);
    let thread = threads()[0];
    // The thread reads the files at its first tick, and once more if it has moved.
    std::thread::sleep(Duration::from_millis(2500));
    let (Some(before), folds) = (reads(thread), running.folds()) else {
        return;
    };
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(3) {
        counter.add(1);
        std::thread::sleep(Duration::from_millis(5));
    }
    let (made, ticks) = (reads(thread).unwrap() - before, running.folds() - folds);
    assert!(ticks > 100, "{ticks}");
    assert!(made < 10, "{made} reads in {ticks} ticks");
}

#[test]
fn the_thread_lets_the_kernel_delay_its_timers() {
    let _alone = alone();
    for (interval, slack) in [(200, 20_000_000), (60_000, 100_000_000)] {
        let interval = Duration::from_millis(interval);
        let running = Shepherd::new().interval(interval).start().unwrap();
        wait_until("the thread", || threads().len() == 1);
        let file = format!("/proc/{}/timerslack_ns", threads()[0]);
        // Reading the slack of another thread needs a capability.
        let Ok(_) = std::fs::read_to_string(&file) else {
            return;
        };
        let now = || std::fs::read_to_string(&file).unwrap().trim().parse();
        wait_until("the slack", || now() == Ok(slack));
        running.stop();
    }
}

#[test]
fn a_child_after_fork_has_no_thread_but_can_tick() {
    let _alone = alone();
    let counter = PerCpuCounter::new().with_batch(1000);
    let mut running = Some(quick().start().unwrap());
    shepherd::watch(&counter).unwrap();
    in_child(30, || {
        let running = running.take().unwrap();
        counter.add(3);
        running.tick();
        let seen = counter.read() == 3;
        drop(running);
        seen
    });
    counter.add(1);
    wait_until("the parent's thread", || counter.read() == 1);
}
