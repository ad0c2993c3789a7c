//! Thresholds follow the CPUs that are online. Per-CPU variables, lists and rings keep their
//! contents while CPUs go offline and come back.

mod common;

use common::Random;
use common::machine::{
    Off, housekeeping, listed, move_to, quiet_cpus, to_switch, try_move_to, wait_until, wander,
    while_cpus_come_and_go,
};
use pinfold::percpu::{Node, PerCpu, PerCpuList, PerCpuRing};
use pinfold::shepherd::{self, Shepherd};
use pinfold::vmstat::{VmStat, Zone, normal_threshold};
use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::sync::Mutex;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64};
use std::time::Duration;

pinfold::vmstat_items! {
    enum Pool {
        Used = "nr_used",
        Dirty = "nr_dirty",
    }
}

const ZONE: Zone = Zone::normal(0);

/// Returns the bytes of memory of the first node.
fn memory() -> u64 {
    let text = fs::read_to_string("/sys/devices/system/node/node0/meminfo").unwrap();
    let kibibytes = text.lines().find_map(|line| {
        let (_, rest) = line.split_once("MemTotal:")?;
        rest.split_whitespace().next()?.parse::<u64>().ok()
    });
    kibibytes.unwrap() << 10
}

/// Returns the kernel's threshold for the memory of the first node and the CPUs that are online.
fn normal() -> u64 {
    normal_threshold(listed("online").len(), memory())
}

/// Switches CPUs off until the normal threshold is lower than before.
fn fewer_cpus() -> Vec<Off> {
    let before = normal();
    let mut off = Vec::new();
    for cpu in to_switch() {
        if normal() == before {
            off.push(Off::new(cpu));
        }
    }
    assert!(normal() < before, "no machine for this test");
    off
}

fn add_on(cpu: usize, stat: &VmStat<Pool>, n: i64) {
    move_to(0, &[cpu]);
    stat.add(ZONE, Pool::Used, n);
    stat.add(ZONE, Pool::Dirty, -n);
    move_to(0, &housekeeping());
}

#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn thresholds_follow_the_cpus_that_are_online() {
    let (stat, with_quiet) = (VmStat::<Pool>::new(), VmStat::<Pool>::new());
    move_to(0, &housekeeping());
    let (all, before) = (housekeeping(), normal());
    let running = Shepherd::new()
        .interval(Duration::from_millis(5))
        .start()
        .unwrap();
    shepherd::watch(&stat).unwrap();
    shepherd::watch(&with_quiet).unwrap();
    let expect = |wanted| {
        // The shepherd sets the batch of one shard after another.
        for zone in [ZONE, Zone::huge(0)] {
            wait_until("the threshold", || stat.threshold(zone) == wanted);
        }
    };
    let quiet = quiet_cpus();
    let mut truth = 0;
    for _ in 0..3 {
        expect(before);
        for &cpu in &all {
            add_on(cpu, &stat, 1 + cpu as i64);
            truth += 1 + cpu as i64;
        }
        quiet.iter().for_each(|&cpu| add_on(cpu, &with_quiet, 1));
        let off = fewer_cpus();
        expect(normal());
        assert!(stat.threshold(ZONE) < before);
        // The counts of the CPUs that went are in the totals.
        assert_eq!(stat.sum(Pool::Used), truth);
        assert_eq!(stat.sum(Pool::Dirty), -truth);
        wait_until("folding", || stat.read(Pool::Used) == truth);
        let bound = stat.error_bound(Pool::Used);
        assert!(bound <= 4 * stat.threshold(ZONE) * listed("possible").len() as u64);
        // The shepherd does not interrupt an isolated CPU that has counted. The program may.
        if !quiet.is_empty() {
            assert_eq!(with_quiet.threshold(ZONE), before);
            with_quiet.set_normal_threshold().unwrap();
            assert_eq!(with_quiet.threshold(ZONE), normal());
        }
        drop(off);
        expect(before);
        wait_until("raising", || with_quiet.threshold(ZONE) == before);
    }
    running.stop();
}

#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn no_count_is_lost_while_thresholds_change() {
    let stat = VmStat::<Pool>::new();
    let running = Shepherd::new()
        .interval(Duration::from_millis(5))
        .start()
        .unwrap();
    shepherd::watch(&stat).unwrap();
    // Not the isolated CPUs: the threshold of what they count stays.
    let cpus = housekeeping();
    // The adds that have begun, and the adds that have ended. A sum lies between these two.
    let (begun, done) = (AtomicI64::new(0), AtomicI64::new(0));
    let seen = Mutex::new(BTreeSet::new());
    let work = |nth, stop: &AtomicBool| {
        let mut random = Random::new(nth);
        while !stop.load(Relaxed) {
            for _ in 0..200 {
                begun.fetch_add(1, SeqCst);
                stat.inc(ZONE, Pool::Used);
                stat.dec(ZONE, Pool::Dirty);
                done.fetch_add(1, SeqCst);
            }
            if random.below(20) == 0 {
                let cpu = cpus[random.below(cpus.len() as u64) as usize];
                if !try_move_to(&[cpu]) {
                    try_move_to(&cpus);
                }
            }
        }
    };
    let look = || {
        let least = done.load(SeqCst);
        let sum = stat.sum(Pool::Used);
        let most = begun.load(SeqCst);
        assert!((least..=most).contains(&sum), "{least} {sum} {most}");
        // Lets the shepherd's thread look at the CPUs.
        std::thread::sleep(Duration::from_millis(2500));
        seen.lock().unwrap().insert(stat.threshold(ZONE));
    };
    while_cpus_come_and_go(15, work, look);
    running.stop();
    let truth = done.load(SeqCst);
    assert!(truth > 1000);
    assert_eq!(stat.sum(Pool::Used), truth);
    assert_eq!(stat.sum(Pool::Dirty), -truth);
    assert_eq!(stat.lost(), 0);
    let seen = seen.into_inner().unwrap();
    println!("thresholds: {seen:?}");
    // Two CPUs fewer make a lower threshold only on some machines.
    let fewer = listed("online").len() - 2;
    let lower = normal_threshold(fewer, memory());
    assert!(lower == normal() || seen.len() > 1, "{seen:?}");
}

type Item = &'static mut Node<AtomicU64>;

fn item(number: u64) -> Item {
    Box::leak(Box::new(Node::new(AtomicU64::new(number))))
}

#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn the_data_of_an_offline_cpu_is_reached_from_afar() {
    static WORD: PerCpu<u64> = PerCpu::new();
    static LIST: PerCpuList<AtomicU64> = PerCpuList::new();
    static RING: PerCpuRing<2, 64> = PerCpuRing::new();
    let mut added = 0;
    for (turn, cpu) in (0u64..).zip(to_switch()) {
        let fill = |from: u64| {
            move_to(0, &[cpu]);
            for number in from..from + 10 {
                WORD.add(number);
                LIST.push(item(number));
                RING.push([number, !number]).unwrap();
            }
            move_to(0, &[0]);
        };
        let reach = |from: u64| {
            let mut numbers = vec![];
            LIST.take_all(|node| numbers.push(*node.value.get_mut()))
                .unwrap();
            numbers.sort_unstable();
            assert!(numbers.iter().copied().eq(from..from + 10), "{numbers:?}");
            let mut records = vec![];
            RING.drain(|at, [number, check]| {
                assert_eq!((at, check), (cpu, !number));
                records.push(number);
            });
            assert!(records.into_iter().eq(from..from + 10));
        };
        let from = turn * 1000;
        fill(from);
        added += (from..from + 10).sum::<u64>();
        let off = Off::new(cpu);
        assert_eq!(WORD.sum(), added);
        let mut here = None;
        WORD.for_each_cpu(|at, value| here = here.or((at == Some(cpu)).then_some(value)));
        assert_eq!(here, Some((from..from + 10).sum()));
        reach(from);
        drop(off);
        // The CPU goes on with the same copies.
        fill(from + 10);
        added += (from + 10..from + 20).sum::<u64>();
        assert_eq!(WORD.sum(), added);
        reach(from + 10);
    }
    assert!(added > 0);
}

/// The records that were read from the rings.
#[derive(Default)]
struct Read {
    /// For each CPU and writer, the number read last.
    last: HashMap<(usize, u64), u64>,
    records: u64,
}

impl Read {
    fn drain(&mut self, ring: &PerCpuRing<4, 256>) {
        ring.drain(|cpu, [writer, number, check, again]| {
            assert!(check == writer ^ number.rotate_left(17) && again == !number);
            let before = self.last.insert((cpu, writer), number);
            assert!(before.is_none_or(|before| before < number), "out of order");
            self.records += 1;
        });
    }
}

#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn lists_rings_and_variables_stay_whole_while_cpus_come_and_go() {
    const NODES: usize = 64;
    static WORD: PerCpu<u64> = PerCpu::new();
    static LIST: PerCpuList<AtomicU64> = PerCpuList::new();
    static RING: PerCpuRing<4, 256> = PerCpuRing::new();
    (0..NODES).for_each(|_| LIST.push(item(1)));
    // Marks an item as taken, and puts it back.
    let pass = |node: Item| {
        assert_eq!(node.value.swap(0, SeqCst), 1, "an item was taken twice");
        node.value.store(1, SeqCst);
        LIST.push(node);
    };
    let (turns, pushed) = (AtomicU64::new(0), AtomicU64::new(0));
    let work = |nth: u64, stop: &AtomicBool| {
        let mut random = Random::new(nth);
        let mut number = 0;
        while !stop.load(Relaxed) {
            for _ in 0..100 {
                WORD.inc();
                LIST.pop().into_iter().for_each(pass);
                number += 1;
                let record = [nth, number, nth ^ number.rotate_left(17), !number];
                pushed.fetch_add(u64::from(RING.push(record).is_ok()), Relaxed);
                turns.fetch_add(1, Relaxed);
            }
            if random.below(20) == 0 {
                wander(&mut random);
            }
        }
    };
    let read = Mutex::new(Read::default());
    let look = || {
        read.lock().unwrap().drain(&RING);
        let mut nodes = vec![];
        LIST.take_all(|node| nodes.push(node)).unwrap();
        assert!(nodes.len() <= NODES);
        nodes.into_iter().for_each(pass);
        assert!(WORD.sum() <= turns.load(SeqCst) + 6);
    };
    while_cpus_come_and_go(8, work, look);
    let mut read = read.into_inner().unwrap();
    read.drain(&RING);
    assert!(read.records > 0);
    assert_eq!(read.records, pushed.load(SeqCst));
    assert_eq!(WORD.sum(), turns.load(SeqCst));
    let mut left = 0;
    LIST.take_all(|node| left += *node.value.get_mut()).unwrap();
    assert_eq!(left, NODES as u64);
    assert!(LIST.pop().is_none());
}

/// Switches on the CPUs that a failed test has left off. Runs last, by its name.
#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn zz_all_cpus_are_on_again() {
    assert_eq!(listed("online"), listed("present"));
}
