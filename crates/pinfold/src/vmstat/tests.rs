use super::*;
use crate::shepherd::{self, Shepherd};
use crate::topology::{CpuSet, Topology, facts};
use std::thread;

/// 256 items: giving each counter its block takes as long as another thread needs to come in
/// between.
#[derive(Clone, Copy)]
struct Many(usize);

impl Item for Many {
    const NAMES: &'static [&'static str] = &["item"; 256];
    fn index(self) -> usize {
        self.0
    }
}

const FIRST: Many = Many(0);
const LAST: Many = Many(255);
const ROUNDS: usize = 300;
const THREADS: usize = 2;

/// Two threads count for the first time at once. No count is lost, and the fast path is open
/// afterwards.
#[test]
fn a_race_for_the_first_count_ends_on_the_fast_path() {
    for round in 0..ROUNDS {
        let stat: VmStat<Many> = VmStat::new();
        let there = AtomicUsize::new(0);
        thread::scope(|scope| {
            for thread in 0..THREADS {
                let (stat, there) = (&stat, &there);
                scope.spawn(move || {
                    there.fetch_add(1, Relaxed);
                    while there.load(Relaxed) < THREADS {
                        core::hint::spin_loop();
                    }
                    // The second thread is later in each round, so that the threads meet in every
                    // step.
                    for _ in 0..thread * round * 4 {
                        core::hint::spin_loop();
                    }
                    stat.inc(Zone::huge(0), LAST);
                    stat.inc(Zone::normal(0), FIRST);
                });
            }
        });
        assert_ne!(stat.run.load(Acquire), 0, "slow after round {round}");
        let counted = [stat.sum(FIRST), stat.sum(LAST)];
        assert_eq!(counted, [THREADS as i64; 2]);
        assert_eq!(stat.lost(), 0);
    }
}

/// A thread may end after any step. Other threads finish what it began.
#[test]
fn another_thread_finishes_what_one_began() {
    let stat: VmStat<Many> = VmStat::new();
    stat.make_counters().unwrap();
    stat.counters()[LAST.0].add_to_base(5);
    let run = stat.claim(stat.counters()).unwrap();
    assert!(stat.counters()[0].adopt(run));
    assert_eq!(stat.run.load(Acquire), 0);
    // There is only one row.
    assert_eq!(stat.claim(stat.counters()), Some(run));

    assert!(stat.init());
    assert_eq!(stat.run.load(Acquire), run);
    stat.inc(Zone::normal(0), LAST);
    assert_eq!(stat.sum(LAST), 6);
}

/// A machine with 240 possible CPUs, two of them online, and 64 GiB.
#[test]
fn the_threshold_follows_the_cpus_that_are_online() {
    assert_eq!(normal_threshold(2, 64 << 30), 44);
    assert_eq!(normal_threshold(240, 64 << 30), MAX_THRESHOLD);
}

#[test]
fn thresholds_rise_when_cpus_come_online() {
    let stat: VmStat<Many> = VmStat::new();
    let zone = Zone::normal(0);
    let before = stat.threshold(zone);
    assert_eq!(
        before,
        normal_threshold(facts::look_at_cpus(), open::memory_of(0))
    );
    let mut machine = Topology::read_below(b"/").unwrap();
    machine.online = CpuSet::parse(b"0-199").unwrap();
    let more = normal_threshold(200, open::memory_of(0));
    assert!(more > before, "no machine has so many CPUs");
    // A shepherd of another test may look at the real CPUs meanwhile, or hold one of the locks.
    let begin = std::time::Instant::now();
    while stat.threshold(zone) != more && begin.elapsed().as_secs() < 10 {
        facts::follow(&machine);
        for _ in 0..10 * more {
            stat.inc(zone, FIRST);
        }
    }
    assert_eq!(stat.threshold(zone), more);
    assert_eq!(stat.threshold(Zone::huge(0)), more);

    // A choice of the program stays.
    assert_eq!(stat.set_threshold(more + 1), Ok(()));
    machine.online = CpuSet::parse(b"0-255").unwrap();
    facts::follow(&machine);
    for _ in 0..10 * more {
        stat.inc(zone, FIRST);
    }
    assert_eq!(stat.threshold(zone), more + 1);
    facts::look_at_cpus();
}

/// A shepherd's tick lowers the thresholds of watched counts after CPUs went offline, and raises
/// them again. Counts stay.
#[test]
fn thresholds_of_watched_counts_fall_when_cpus_go_offline() {
    let stat: VmStat<Many> = VmStat::new();
    let zone = Zone::normal(0);
    let shepherd = Shepherd::new();
    let mut machine = Topology::read_below(b"/").unwrap();
    let mut tick_with = |cpus: &[u8]| {
        machine.online = CpuSet::parse(cpus).unwrap();
        let wanted = normal_threshold(machine.online.len(), open::memory_of(0));
        // A shepherd of another test may look at the real CPUs meanwhile, or hold the lock.
        let begin = std::time::Instant::now();
        while stat.threshold(zone) != wanted && begin.elapsed().as_secs() < 10 {
            facts::follow(&machine);
            shepherd.tick();
        }
        assert_eq!(stat.threshold(zone), wanted);
    };
    shepherd::watch(&stat).unwrap();
    shepherd::watch(&stat).unwrap();
    tick_with(b"0-199");
    stat.inc(zone, FIRST);
    thread::scope(|scope| scope.spawn(|| stat.add(zone, LAST, 3)).join().unwrap());
    tick_with(b"0");
    assert_eq!([stat.sum(FIRST), stat.sum(LAST)], [1, 3]);
    tick_with(b"0-63");

    // A choice of the program stays.
    stat.set_threshold(77).unwrap();
    for _ in 0..20 {
        facts::look_at_cpus();
        shepherd.tick();
        assert_eq!(stat.threshold(zone), 77);
    }
    // A table that is gone is in the list no more.
    drop(stat);
    shepherd.tick();
}

/// Items whose number has no name read as 0, as the documentation of `read` says.
#[test]
fn reads_of_items_without_a_name_are_zero() {
    #[derive(Clone, Copy, Debug)]
    struct Nameless(usize);
    impl Item for Nameless {
        const NAMES: &'static [&'static str] = &[];
        fn index(self) -> usize {
            self.0
        }
    }
    #[derive(Clone, Copy, Debug)]
    struct Foreign(usize);
    impl Item for Foreign {
        const NAMES: &'static [&'static str] = &["one", "two"];
        fn index(self) -> usize {
            self.0
        }
    }
    let (none, zone): (VmStat<Nameless>, _) = (VmStat::new(), Zone::normal(0));
    none.init();
    assert_eq!((none.read(Nameless(0)), none.sum(Nameless(1))), (0, 0));
    assert_eq!((none.read_zone(zone, Nameless(0)), none.zones()), (0, 0));
    let two: VmStat<Foreign> = VmStat::new();
    for at in 0..2 {
        two.add(Zone::huge(0), Foreign(at), 5);
        two.add(zone, Foreign(at), 5);
    }
    for at in 2..6 {
        assert_eq!(
            (two.read(Foreign(at)), two.error_bound(Foreign(at))),
            (0, 0)
        );
        assert_eq!(two.read_zone(zone, Foreign(at)), 0);
        assert_eq!(two.sum_zone(zone, Foreign(at)), 0);
    }
}
