//! Plans are sound, and the oracle follows them.

use super::plan::{self, Plan, Style, UNIT, place_in};
use super::recording::{Call, Event, Recording};
use super::replay::{self, Libraries};
use crate::whole::prepare::Cache;
use crate::whole::subjects::Subject;
use crate::whole::{Settings, launch, programs};
use std::collections::{BTreeMap, HashMap};

const FRESH: u64 = 1 << 32;
const CONTESTED: u64 = 1 << 33;
const KIND: u64 = 3 << 62;
const FREE: u64 = 3 << 62;

/// Makes a recording of random calls by `threads` threads, which free each other's objects. The
/// second half of the threads begins when the first half has ended.
fn random_calls(threads: u16, count: u32) -> Recording {
    let mut random = 1_u64;
    let mut below = |most: usize| {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (random >> 33) as usize % most
    };
    let mut live: Vec<u32> = Vec::new();
    let mut events = Vec::new();
    for now in 0..count {
        let half = usize::from(threads.div_ceil(2));
        let first = if threads > 1 && now >= count / 2 {
            half
        } else {
            0
        };
        let thread = (first + below(half)) as u16;
        let size = [24, 100, 1000, 9000][below(4)] + below(40) as u32;
        let (call, size) = match below(5) {
            0 | 1 if !live.is_empty() => {
                let object = live.swap_remove(below(live.len()));
                (Call::Free { object }, 0)
            }
            2 if !live.is_empty() => {
                let object = live[below(live.len())];
                (Call::Reallocate { object }, size)
            }
            _ => {
                live.push(now);
                let alignment = [16, 16, 16, 64, 4096][below(5)];
                (Call::Allocate { alignment }, size)
            }
        };
        events.push(Event { thread, call, size });
    }
    Recording {
        process: 1,
        uses_size: false,
        names: (1..=u64::from(threads)).collect(),
        events,
    }
}

/// Follows a plan, and checks that live objects do not overlap, that memory called fresh was never
/// used, that alignments hold, and that a slot that is not contested is taken by one thread.
fn check(recording: &Recording, plan: &Plan) {
    let mut lanes: Vec<_> = plan.lanes.iter().map(|lane| lane.entries.iter()).collect();
    // The starts and ends of live objects.
    let mut live: BTreeMap<u64, u64> = BTreeMap::new();
    let mut places = HashMap::new();
    let mut takers = HashMap::new();
    let mut used = vec![false; plan.bytes as usize / UNIT as usize + 1];
    for (now, event) in recording.events.iter().enumerate() {
        let lane = &mut lanes[usize::from(event.thread)];
        let (object, alignment) = match event.call {
            Call::Allocate { alignment } => (now as u32, alignment),
            Call::Reallocate { object } => (object, UNIT),
            Call::Free { object } => {
                let start = places.remove(&object).unwrap();
                if !plan.shared {
                    assert_eq!(lane.next().unwrap() & KIND, FREE);
                }
                live.remove(&start);
                continue;
            }
        };
        let entry = *lane.next().unwrap();
        assert_eq!(entry as u32, event.size);
        let start = u64::from(place_in(entry)) * u64::from(UNIT);
        let end = start + u64::from(event.size.max(1));
        let before = places.insert(object, start);
        if before.is_some_and(|before| before != start) && !plan.shared {
            assert_eq!(lane.next().unwrap() & KIND, FREE);
        }
        // Before it gives the old place back, an object that moves has both.
        if before == Some(start) {
            live.remove(&start);
        }
        // A tag needs room in front of the object.
        let first = start - if plan.tagged { 8 } else { 0 };
        let previous = live.range(..end).next_back().map_or(0, |(_, &end)| end);
        assert!(previous <= first, "{event:?} at {start} overlaps");
        assert!(start.is_multiple_of(u64::from(alignment)) && end <= plan.bytes);
        let units = &mut used[(start / 16) as usize..end.div_ceil(16) as usize];
        assert!(entry & FRESH == 0 || before.is_some() || !units.contains(&true));
        units.fill(true);
        if plan.shared && before != Some(start) && entry & CONTESTED == 0 {
            assert_eq!(*takers.entry(start).or_insert(event.thread), event.thread);
        }
        live.insert(start, end);
        if let Some(old) = before.filter(|&old| old != start) {
            live.remove(&old);
        }
    }
    assert!(lanes.iter_mut().all(|lane| lane.next().is_none()));
}

#[test]
fn objects_of_one_thread_do_not_overlap() {
    let mut recording = random_calls(1, 20_000);
    for uses_size in [false, true] {
        recording.uses_size = uses_size;
        for style in [Style::Packed, Style::Recent] {
            let plan = plan::plan(&recording, style).unwrap();
            assert!(!plan.shared);
            check(&recording, &plan);
        }
    }
}

#[test]
fn objects_of_several_threads_do_not_overlap() {
    let recording = random_calls(6, 40_000);
    let plan = plan::plan(&recording, Style::Recent).unwrap();
    assert!(plan.shared && plan.tagged);
    check(&recording, &plan);
    let entries = || plan.lanes.iter().flat_map(|lane| &lane.entries);
    assert!(entries().any(|entry| entry & CONTESTED != 0));
    assert!(plan::plan(&recording, Style::Packed).is_err());
}

/// A dense plan needs little more than what is live.
#[test]
fn packed_objects_are_dense() {
    let mut recording = random_calls(1, 50_000);
    for event in &mut recording.events {
        if let Call::Allocate { alignment } = &mut event.call {
            *alignment = UNIT;
        }
    }
    let plan = plan::plan(&recording, Style::Packed).unwrap();
    let ratio = plan.bytes as f64 / recording.peak_live() as f64;
    assert!((1.0..1.5).contains(&ratio), "{ratio}");
}

/// The growth of a buffer that is known in advance needs no move.
#[test]
fn an_object_has_room_for_its_largest_size() {
    let event = |call, size| Event {
        thread: 0,
        call,
        size,
    };
    let grow = Call::Reallocate { object: 0 };
    let recording = Recording {
        names: vec![1],
        events: vec![
            event(Call::Allocate { alignment: 16 }, 10),
            event(Call::Allocate { alignment: 16 }, 10),
            event(grow, 5000),
            event(Call::Free { object: 0 }, 0),
        ],
        ..Recording::default()
    };
    assert_eq!(recording.peak_live(), 5010);
    for style in [Style::Packed, Style::Recent] {
        let plan = plan::plan(&recording, style).unwrap();
        let entries = &plan.lanes[0].entries;
        assert_eq!(place_in(entries[0]), place_in(entries[2]));
        check(&recording, &plan);
    }
}

/// Loads write the same output under the oracle, and their plans serve all allocations.
#[test]
fn the_oracle_serves_what_the_recorder_saw() {
    let root = std::env::temp_dir().join(format!("pinfold-limit-{}", std::process::id()));
    let cache = Cache::open(Some(&root)).unwrap();
    let libraries = Libraries::prepare(&cache).unwrap();
    let settings = Settings {
        threads: 2,
        limit: 60,
        settle: 0.0,
    };
    let plain = Subject {
        name: "none".to_owned(),
        library: "-".into(),
        is_pinfold: false,
        variables: &[],
    };
    let names = ["realloc", "cache-thrash"].map(str::to_owned);
    for program in programs::choose(&names).unwrap() {
        program.prepare(&cache).unwrap();
        let expected = launch::once(&cache, &program, &plain, settings).unwrap();
        let recorded = replay::record(&cache, &libraries, &program, settings).unwrap();
        assert_eq!(recorded.note, None);
        assert!(recorded.peak_live > 0 && recorded.allocations > 1000);
        for oracle in &recorded.oracles {
            let run = oracle.once(&cache, &program, settings, recorded.allocations);
            let (sample, served) = run.unwrap();
            assert_eq!(sample.output, expected.output, "{}", oracle.name());
            assert!(served.share == 1.0, "{} {}", program.name, oracle.name());
            assert!(served.beside_heap < 16 << 20, "{served:?}");
        }
    }
    std::fs::remove_dir_all(root).unwrap();
}
