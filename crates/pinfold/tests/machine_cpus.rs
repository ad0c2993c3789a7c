//! CPUs that go offline and come back, and isolated CPUs.

mod common;

use common::Random;
use common::machine::{
    Off, affinity, housekeeping, listed, move_to, quiet_cpus, switch, to_switch, wait_until,
    wander, while_cpus_come_and_go,
};
use pinfold::counter::{EventCounter, PerCpuCounter};
use pinfold::shepherd::{self, Running, Shepherd};
use pinfold::slab::KmemCache;
use pinfold::topology::{CpuSet, Topology};
use std::alloc::Layout;
use std::fs;
use std::ptr::NonNull;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicI64};
use std::time::{Duration, Instant};

#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn sums_stay_exact_while_cpus_come_and_go() {
    static EVENTS: EventCounter = EventCounter::new();
    let counter = PerCpuCounter::new().with_batch(64);
    // The adds that have begun, and the adds that have ended. A sum lies between these two.
    let (begun, done) = (AtomicI64::new(0), AtomicI64::new(0));
    let work = |nth, stop: &AtomicBool| {
        let mut random = Random::new(nth);
        while !stop.load(Relaxed) {
            for _ in 0..200 {
                begun.fetch_add(1, SeqCst);
                counter.add(1);
                done.fetch_add(1, SeqCst);
                EVENTS.inc();
            }
            if random.below(20) == 0 {
                wander(&mut random);
            }
        }
    };
    let look = || {
        let least = done.load(SeqCst);
        let sum = counter.sum();
        let most = begun.load(SeqCst);
        assert!((least..=most).contains(&sum), "{least} {sum} {most}");
        let (least, read) = (done.load(SeqCst), counter.read());
        let most = begun.load(SeqCst);
        let bound = counter.error_bound() as i64;
        assert!(
            (least - bound..=most + bound).contains(&read),
            "{least} {read} {most}"
        );
    };
    while_cpus_come_and_go(8, work, look);
    let truth = done.load(SeqCst);
    assert!(truth > 1000);
    assert_eq!((counter.sum(), EVENTS.sum() as i64), (truth, truth));
}

#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn counts_of_an_offline_cpu_are_folded() {
    let counter = PerCpuCounter::new().with_batch(1 << 20);
    let shepherd = Shepherd::new();
    shepherd::watch(&counter).unwrap();
    let cpu = to_switch()[0];
    move_to(0, &[cpu]);
    counter.add(1000);
    let off = Off::new(cpu);
    assert_eq!((counter.read(), counter.sum()), (0, 1000));
    shepherd.tick();
    assert_eq!(counter.read(), 1000);
    drop(off);
    move_to(0, &[cpu]);
    counter.add(1);
    shepherd.tick();
    assert_eq!((counter.read(), counter.sum()), (1001, 1001));
}

fn cache(size: usize) -> KmemCache {
    KmemCache::new("switched", Layout::from_size_align(size, 8).unwrap()).unwrap()
}

#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn caches_work_while_cpus_come_and_go() {
    let cache = cache(64);
    let work = |nth, stop: &AtomicBool| {
        let mut random = Random::new(nth);
        let mut held: Vec<NonNull<u64>> = Vec::new();
        let give = |object: NonNull<u64>| {
            // SAFETY: this thread has allocated the 64-byte object from `cache`, and uses it no
            // more after the free.
            unsafe {
                assert_eq!(object.read(), object.as_ptr() as u64 ^ nth);
                object.write(0);
                cache.free(object.cast());
            }
        };
        while !stop.load(Relaxed) {
            for _ in 0..random.below(300) {
                let object = cache.alloc().unwrap().cast::<u64>();
                // SAFETY: `alloc` returned the object to this thread, and it is 64 bytes large.
                unsafe { object.write(object.as_ptr() as u64 ^ nth) };
                held.push(object);
            }
            let kept = random.below(300) as usize;
            held.drain(kept.min(held.len())..).for_each(give);
            if random.below(20) == 0 {
                wander(&mut random);
            }
        }
        held.into_iter().for_each(give);
    };
    while_cpus_come_and_go(8, work, || {
        cache.validate().unwrap();
        cache.shrink().unwrap();
    });
    cache.validate().unwrap();
    cache.destroy().unwrap();
}

#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn objects_cached_by_an_offline_cpu_are_taken_back() {
    let cache = cache(256);
    for cpu in to_switch() {
        move_to(0, &[cpu]);
        let objects: Vec<_> = (0..1000).map(|_| cache.alloc().unwrap()).collect();
        for object in objects {
            // SAFETY: each object came from `cache` and is not used afterwards.
            unsafe { cache.free(object) };
        }
        assert!(cache.statistics().slabs > 0);
        let _off = Off::new(cpu);
        cache.shrink().unwrap();
        assert_eq!(cache.statistics().slabs, 0, "CPU {cpu}");
    }
    cache.destroy().unwrap();
}

#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn the_topology_sees_cpus_go_and_come() {
    let here = |set: fn(&Topology) -> &CpuSet, cpu| {
        set(&Topology::system().unwrap())
            .iter()
            .any(|other| other == cpu)
    };
    for cpu in to_switch() {
        move_to(0, &listed("possible"));
        let off = Off::new(cpu);
        assert!(!here(|machine| &machine.online, cpu) && !here(|machine| &machine.allowed, cpu));
        assert!(here(|machine| &machine.possible, cpu));
        drop(off);
        assert!(here(|machine| &machine.online, cpu) && here(|machine| &machine.allowed, cpu));
    }
    let machine = Topology::system().unwrap();
    let quiet: Vec<_> = machine.housekeeping().iter().collect();
    assert_eq!(quiet, housekeeping());
}

fn quick() -> Shepherd {
    Shepherd::new().interval(Duration::from_millis(5))
}

/// Returns the id of the shepherd's thread.
fn thread() -> i32 {
    let named = || {
        fs::read_dir("/proc/self/task").unwrap().find_map(|task| {
            let task = task.ok()?;
            let name = fs::read_to_string(task.path().join("comm")).ok()?;
            (name.trim() == "pinfold").then(|| task.file_name().to_str()?.parse().ok())?
        })
    };
    wait_until("the thread", || named().is_some());
    named().unwrap()
}

/// Returns the CPU that a thread runs on, or ran on last.
fn cpu_of(thread: i32) -> usize {
    let stat = fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap();
    let after_name = stat.rsplit_once(')').unwrap().1;
    after_name
        .split_whitespace()
        .nth(36)
        .unwrap()
        .parse()
        .unwrap()
}

/// A shepherd and a counter that it folds, to check that the shepherd works.
struct Watched {
    running: Running,
    counter: PerCpuCounter,
}

impl Watched {
    fn new(shepherd: Shepherd) -> Self {
        // The thread that adds may be on an isolated CPU.
        let running = shepherd.fold_isolated().start().unwrap();
        let counter = PerCpuCounter::new().with_batch(1 << 20);
        shepherd::watch(&counter).unwrap();
        Watched { running, counter }
    }

    fn still_folds(&self) {
        let before = self.counter.sum();
        self.counter.add(1);
        wait_until("folding", || self.counter.read() == before + 1);
    }

    fn ends_up_on(&self, cpus: &[usize]) {
        let begin = Instant::now();
        // Looks for the thread each time: the first one found may be that of an earlier shepherd,
        // which the kernel still lists although it was joined.
        let affinity_now = || affinity(thread());
        let mut found = affinity_now();
        while found != cpus {
            let waited = begin.elapsed();
            assert!(waited < Duration::from_secs(20), "{found:?}, not {cpus:?}");
            std::thread::sleep(Duration::from_millis(20));
            found = affinity_now();
        }
        self.still_folds();
        assert!(cpus.contains(&cpu_of(thread())));
    }
}

#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn the_shepherd_runs_on_no_isolated_cpu() {
    move_to(0, &listed("online"));
    let watched = Watched::new(quick());
    watched.ends_up_on(&housekeeping());
    let (thread, quiet) = (thread(), quiet_cpus());
    // Changes the shepherd's affinity from outside.
    for cpus in [&[2][..], &[0, 1]] {
        move_to(thread, &[cpus, &quiet].concat());
        watched.ends_up_on(cpus);
    }
    move_to(thread, &listed("online"));
    watched.ends_up_on(&housekeeping());
    for _ in 0..1000 {
        assert!(!quiet.contains(&cpu_of(thread)));
        watched.counter.add(1);
        std::thread::sleep(Duration::from_millis(1));
    }
    watched.running.stop();
}

#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn the_shepherd_leaves_cpus_that_go_offline() {
    move_to(0, &listed("online"));
    let set = |cpus: &str| cpus.parse::<CpuSet>().unwrap();
    let without = |cpu| -> Vec<_> {
        housekeeping()
            .into_iter()
            .filter(|&other| other != cpu)
            .collect()
    };
    // One of the shepherd's CPUs goes offline, and others are left.
    let watched = Watched::new(quick().on(set("1-3")));
    watched.ends_up_on(&[1, 2, 3]);
    let off = Off::new(2);
    watched.ends_up_on(&[1, 3]);
    // The shepherd uses the CPU again as soon as it is online, because the affinity was not changed
    // from outside.
    drop(off);
    watched.ends_up_on(&[1, 2, 3]);
    watched.running.stop();
    // The shepherd's only CPU goes offline.
    let watched = Watched::new(quick().on(set("3")));
    watched.ends_up_on(&[3]);
    let off = Off::new(3);
    watched.ends_up_on(&without(3));
    drop(off);
    watched.still_folds();
    watched.running.stop();
    // The CPU that the shepherd runs on goes offline.
    let watched = Watched::new(quick());
    watched.ends_up_on(&housekeeping());
    let thread = thread();
    for _ in 0..5 {
        let cpu = cpu_of(thread);
        if cpu != 0 {
            let _off = Off::new(cpu);
            watched.ends_up_on(&without(cpu));
        }
        watched.still_folds();
    }
    watched.running.stop();
}

/// A cgroup that contains this process. The process leaves the cgroup when this is dropped.
struct Group;

impl Group {
    const ROOT: &str = "/sys/fs/cgroup";

    fn new() -> Self {
        let write = |file: &str, text: &str| {
            let file = format!("{}/{file}", Self::ROOT);
            fs::write(&file, text).expect(&file);
        };
        write("cgroup.subtree_control", "+cpuset");
        fs::create_dir_all(format!("{}/fold", Self::ROOT)).unwrap();
        write("fold/cgroup.procs", "0");
        Group
    }

    fn cpus(&self, list: &str) {
        fs::write(format!("{}/fold/cpuset.cpus", Self::ROOT), list).unwrap();
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::write(format!("{}/cgroup.procs", Self::ROOT), "0");
        let _ = fs::remove_dir(format!("{}/fold", Self::ROOT));
    }
}

#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn the_shepherd_follows_its_cgroup() {
    move_to(0, &listed("online"));
    let watched = Watched::new(quick());
    watched.ends_up_on(&housekeeping());
    let group = Group::new();
    group.cpus("1-2");
    watched.ends_up_on(&[1, 2]);
    group.cpus("3-4");
    watched.ends_up_on(&[3, 4]);
    if let [first, ..] = quiet_cpus()[..] {
        group.cpus(&format!("1,{first}"));
        watched.ends_up_on(&[1]);
        // On a cgroup of isolated CPUs only, the shepherd runs there.
        group.cpus(&first.to_string());
        watched.ends_up_on(&[first]);
    }
    drop(group);
    watched.ends_up_on(&housekeeping());
    watched.running.stop();
}

/// Returns how often this thread was switched away from, plus how often another CPU interrupted CPU
/// `cpu`.
fn disturbances(cpu: usize) -> u64 {
    let status = fs::read_to_string("/proc/thread-self/status").unwrap();
    let switches = status.lines().filter(|line| line.contains("ctxt_switches"));
    let switches: u64 = switches
        .filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok())
        .sum();
    let interrupts = fs::read_to_string("/proc/interrupts").unwrap();
    let mut lines = interrupts.lines();
    let name = format!("CPU{cpu}");
    let column = lines
        .next()
        .unwrap()
        .split_whitespace()
        .position(|word| word == name)
        .unwrap();
    let asked = lines.filter(|line| {
        let kind = line.trim_start();
        ["RES:", "CAL:", "TLB:"]
            .iter()
            .any(|name| kind.starts_with(name))
    });
    let asked =
        asked.filter_map(|line| line.split_whitespace().nth(column + 1)?.parse::<u64>().ok());
    switches + asked.sum::<u64>()
}

#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn folding_an_isolated_cpu_does_not_disturb_it() {
    let [cpu, ..] = quiet_cpus()[..] else {
        return;
    };
    move_to(0, &housekeeping());
    let counter = PerCpuCounter::new().with_batch(1 << 40);
    // Adds without a pause on the isolated CPU. Returns the disturbances meanwhile, and how often
    // the total had changed.
    let spin = || {
        std::thread::scope(|scope| {
            let adder = scope.spawn(|| {
                move_to(0, &[cpu]);
                // Lets the disturbances of the move itself end.
                let settled = Instant::now();
                while settled.elapsed() < Duration::from_millis(300) {
                    counter.add(1);
                }
                disturbances(cpu);
                let (before, mut moves, mut last) = (disturbances(cpu), 0, counter.read());
                let begin = Instant::now();
                while begin.elapsed() < Duration::from_secs(3) {
                    for _ in 0..1000 {
                        counter.add(1);
                    }
                    let read = counter.read();
                    moves += u64::from(read != last);
                    last = read;
                }
                (disturbances(cpu) - before, moves)
            });
            adder.join().unwrap()
        })
    };
    let (alone, moves) = spin();
    assert_eq!(moves, 0);
    let running = quick().fold_isolated().start().unwrap();
    shepherd::watch(&counter).unwrap();
    let (folded, moves) = spin();
    running.stop();
    println!("{alone} disturbances without folding, {folded} with {moves} folds");
    assert!(moves > 20, "{moves}");
    // Other things disturb an emulated CPU a few times. Folding that disturbed it would do so each
    // time.
    assert!(
        folded <= alone + 3 + moves / 10,
        "{folded} disturbances, {alone} without folding"
    );
    assert_eq!(counter.sum(), {
        counter.fold();
        counter.read()
    });
}

/// Switches on the CPUs that a failed test has left off. Runs last, by its name.
#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn zz_all_cpus_are_on_again() {
    listed("present")
        .into_iter()
        .filter(|&cpu| cpu != 0)
        .for_each(|cpu| switch(cpu, true));
    assert_eq!(listed("online"), listed("present"));
}
