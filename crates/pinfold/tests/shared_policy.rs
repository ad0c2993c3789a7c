//! Policies by range against a plain array, and readers beside writers.

mod common;

use common::{Random, StopAtEnd};
use pinfold::mempolicy::{Mempolicy, RangeError, SharedPolicy};
use pinfold::topology::NodeSet;
use std::ops::Range;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};

/// Returns the policy number `number`. Every 16 of its nodes hold the number in binary, every
/// second time inverted, so that a mixture of two policies is found.
fn policy(number: usize) -> Mempolicy {
    let nodes = (0..1024).filter(|node| (number >> (node % 16) & 1 == 1) == (node / 16 % 2 == 0));
    Mempolicy::interleave(nodes.collect()).unwrap()
}

fn number_of(policy: &Mempolicy) -> usize {
    let nodes = policy.nodes();
    (0..16)
        .filter(|&node| nodes.contains(node))
        .map(|node| 1 << node)
        .sum()
}

/// What the map must contain, page by page: the number of the page's policy, if any.
struct Plain {
    pages: Vec<Option<usize>>,
    /// The map's page for a page of the array.
    place: fn(usize) -> u64,
}

impl Plain {
    fn range(&self, from: usize, to: usize) -> Range<u64> {
        (self.place)(from)..(self.place)(to)
    }

    /// Returns the ranges. Ranges that touch and have the same policy are joined.
    fn ranges(&self) -> Vec<(Range<u64>, usize)> {
        let mut ranges: Vec<(Range<u64>, usize)> = Vec::new();
        for (at, number) in self.pages.iter().enumerate() {
            let Some(number) = *number else { continue };
            let range = self.range(at, at + 1);
            match ranges.last_mut() {
                Some((last, same)) if *same == number && last.end == range.start => {
                    last.end = range.end;
                }
                _ => ranges.push((range, number)),
            }
        }
        ranges
    }

    /// Sets and looks up random pages, `steps` times, with `kinds` different policies.
    fn run(mut self, seed: u64, steps: usize, kinds: usize) {
        let policies: Vec<_> = (0..kinds).map(policy).collect();
        let shared = SharedPolicy::new();
        let mut random = Random::new(seed);
        let size = self.pages.len() as u64;
        for step in 0..steps {
            let page = random.below(size) as usize;
            if step % 2 == 0 {
                // Mostly short ranges, sometimes all pages that are left.
                let most = if random.below(50) == 0 { size } else { 12 };
                let to = (page + 1 + random.below(most) as usize).min(self.pages.len());
                let number = random.below(kinds as u64 + kinds as u64 / 2) as usize;
                let number = (number < kinds).then_some(number);
                let set = shared.set(self.range(page, to), number.map(|number| &policies[number]));
                assert_eq!(set, Ok(()));
                self.pages[page..to].fill(number);
            } else {
                let range = self.range(page, page + 1);
                let within = range.start + random.below(range.end - range.start);
                for at in [range.start, within, range.end - 1] {
                    let found = shared.lookup(at);
                    assert_eq!(
                        found.as_ref(),
                        self.pages[page].map(|number| &policies[number])
                    );
                }
            }
            if step % 5000 == 0 {
                let all = shared.ranges().unwrap();
                let all: Vec<_> = all
                    .map(|(range, found)| (range, number_of(&found)))
                    .collect();
                assert_eq!(all, self.ranges());
                assert_eq!(shared.len(), all.len());
            }
        }
    }
}

#[test]
fn a_million_sets_and_lookups_agree_with_an_array() {
    let place = |page| page as u64;
    for (seed, pages, kinds, steps) in [
        (1, 100, 2, 300_000),
        (2, 300, 5, 500_000),
        (3, 700, 40, 200_000),
    ] {
        Plain {
            pages: vec![None; pages],
            place,
        }
        .run(seed, steps, kinds);
    }
}

#[test]
fn sets_and_lookups_agree_with_an_array_of_pages_far_apart() {
    // The array's last page ends at u64::MAX.
    let place = |page| page as u64 * (u64::MAX / 255);
    Plain {
        pages: vec![None; 255],
        place,
    }
    .run(4, 300_000, 6);
}

/// A fault of the kernel in 2008: a private and a shared range had the same policy, and the first
/// that dropped it freed it for both.
#[test]
fn the_map_keeps_copies() {
    let shared = SharedPolicy::new();
    let mut mine = Mempolicy::parse("bind=relative:0-1").unwrap();
    shared.set(0..10, Some(&mine)).unwrap();
    shared.set(20..30, Some(&mine)).unwrap();
    let mut found = shared.lookup(5).unwrap();
    mine.rebind(&"7".parse().unwrap());
    found.rebind(&"8".parse().unwrap());
    assert_eq!(shared.lookup(5).unwrap().nodes().to_string(), "0-1");
    shared.set(0..10, None).unwrap();
    assert_eq!(found.nodes().to_string(), "8");
    assert_eq!(shared.lookup(25).unwrap().nodes().to_string(), "0-1");
    let ranges = shared.ranges().unwrap();
    drop(shared);
    assert_eq!(ranges.count(), 1);
}

/// CVE-2022-49080: the second half of a split range had a reference count that was never set. Here,
/// both halves can be cleared in any order, many times, while other threads look up pages.
#[test]
fn halves_of_a_split_range_are_independent() {
    let shared = SharedPolicy::new();
    let (outer, inner) = (policy(1), policy(2));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        for _ in 0..2 {
            scope.spawn(|| {
                let mut page = 0;
                while !stop.load(Relaxed) {
                    page = (page + 7) % 30;
                    if let Some(found) = shared.lookup(page) {
                        let inside = (10..20).contains(&page);
                        assert!(found == outer || inside && found == inner);
                    }
                }
            });
        }
        for round in 0..20_000 {
            shared.set(0..30, Some(&outer)).unwrap();
            shared
                .set(10..20, (round % 2 == 0).then_some(&inner))
                .unwrap();
            let (first, second) = if round % 4 < 2 { (0, 20) } else { (20, 0) };
            shared.set(first..first + 10, None).unwrap();
            assert_eq!(shared.lookup(first + 9), None);
            assert_eq!(shared.lookup(second), Some(outer.clone()));
            assert_eq!(shared.lookup(second + 9), Some(outer.clone()));
            shared.set(second..second + 10, None).unwrap();
            assert_eq!(shared.len(), usize::from(round % 2 == 0));
        }
    });
}

/// The writer only replaces policies by ones with larger numbers. So a reader finds no gap, no
/// mixture, no policy that was not set, and none older than one that it knows to be set.
#[test]
fn readers_see_complete_policies_in_order() {
    const PAGES: u64 = 200;
    let shared = SharedPolicy::new();
    let policies: Vec<_> = (0..4000).map(policy).collect();
    shared.set(0..PAGES, Some(&policies[0])).unwrap();
    let stop = AtomicBool::new(false);
    // `known` is in force on all pages; `begun` may be in force on some.
    let (known, begun) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        for seed in 0..3 {
            let (shared, policies, known, begun, stop) =
                (&shared, &policies, &known, &begun, &stop);
            scope.spawn(move || {
                let mut random = Random::new(seed);
                let mut newest = vec![0; PAGES as usize];
                while !stop.load(Relaxed) {
                    let page = random.below(PAGES);
                    // Acquire: pairs with the writer's release, so that the lookup sees at least
                    // what the writer had set.
                    let least = known.load(Acquire) as usize;
                    let found = shared.lookup(page).expect("no range covers the page");
                    let number = number_of(&found);
                    assert!(found == policies[number], "torn: {found}");
                    let newest = &mut newest[page as usize];
                    assert!(
                        number >= least && number >= *newest,
                        "{number} after {least}, {newest}"
                    );
                    assert!(
                        number as u64 <= begun.load(Relaxed),
                        "{number} was never set"
                    );
                    *newest = number;
                }
            });
        }
        let mut random = Random::new(9);
        for (number, policy) in policies.iter().enumerate().skip(1) {
            begun.store(number as u64, Relaxed);
            for _ in 0..5 {
                let start = random.below(PAGES);
                let end = (start + 1 + random.below(40)).min(PAGES);
                shared.set(start..end, Some(policy)).unwrap();
            }
            if number % 3 == 0 {
                shared.set(0..PAGES, Some(policy)).unwrap();
                known.store(number as u64, Release);
            }
        }
    });
}

/// All ranges are from one moment, and so is the printed text: the two halves of this map never
/// differ.
#[test]
fn all_ranges_are_from_one_moment() {
    let shared = SharedPolicy::new();
    let policies: Vec<_> = (0..100).map(policy).collect();
    shared.set(0..50, Some(&policies[0])).unwrap();
    shared.set(60..110, Some(&policies[0])).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        scope.spawn(|| {
            let nodes = |n: usize| [n, n + 1].into_iter().collect::<NodeSet>();
            for n in (0..200).cycle().take_while(|_| !stop.load(Relaxed)) {
                shared.rebind(&nodes(n)).unwrap();
            }
        });
        for _ in 0..2000 {
            let ranges: Vec<_> = shared.ranges().unwrap().collect();
            assert_eq!((&ranges[0].0, &ranges[1].0), (&(0..50), &(60..110)));
            assert_eq!(ranges[0].1, ranges[1].1);
            assert_eq!(shared.to_string().lines().count(), 2);
        }
    });
}

#[test]
fn empty_maps_empty_ranges_and_the_last_page() {
    let shared = SharedPolicy::default();
    assert_eq!(
        (shared.len(), shared.is_empty(), shared.to_string().as_str()),
        (0, true, "")
    );
    assert_eq!(shared.lookup(0), None);
    assert_eq!(shared.rebind(&NodeSet::EMPTY), Ok(()));
    let local = Mempolicy::local();
    #[expect(clippy::reversed_empty_ranges, reason = "the map refuses these ranges")]
    for refused in [5..5, 6..5, u64::MAX..0, u64::MAX..u64::MAX] {
        assert_eq!(shared.set(refused.clone(), None), Err(RangeError::Empty));
        assert_eq!(shared.set(refused, Some(&local)), Err(RangeError::Empty));
    }
    shared.set(0..u64::MAX, Some(&local)).unwrap();
    assert_eq!(shared.lookup(u64::MAX - 1), Some(local.clone()));
    assert_eq!(shared.lookup(u64::MAX), None);
    // A `default` policy is the same as none, as in the kernel.
    shared.set(5..6, Some(&Mempolicy::default())).unwrap();
    assert_eq!(
        shared.to_string(),
        "0-5 local\n6-18446744073709551615 local\n"
    );
    assert_eq!(format!("{shared:?}"), "SharedPolicy { ranges: 2, .. }");
    shared.set(5..6, Some(&local)).unwrap();
    assert_eq!(shared.len(), 1);
}

/// As on a mounted tmpfs: a range's policy, else the map's default, else the thread's, else the
/// system's.
#[test]
fn pages_without_a_range_take_the_maps_default() {
    let shared = SharedPolicy::new();
    let parsed = |text| Mempolicy::parse(text).unwrap();
    let (mount, range, thread) = (
        parsed("interleave:0-3"),
        parsed("bind:1"),
        parsed("prefer:2"),
    );
    assert_eq!(shared.set_default(None), Ok(()));
    assert_eq!((shared.lookup(0), shared.default_policy()), (None, None));
    assert_eq!(shared.effective(0, None), Mempolicy::local());
    assert_eq!(shared.effective(0, Some(&thread)), thread);
    shared.set_default(Some(&mount)).unwrap();
    shared.set(5..9, Some(&range)).unwrap();
    for (page, wanted) in [
        (4, &mount),
        (5, &range),
        (8, &range),
        (9, &mount),
        (u64::MAX, &mount),
    ] {
        assert_eq!(shared.lookup(page).as_ref(), Some(wanted), "page {page}");
        assert_eq!(
            &shared.effective(page, Some(&thread)),
            wanted,
            "page {page}"
        );
    }
    assert_eq!(
        (shared.len(), shared.default_policy()),
        (1, Some(mount.clone()))
    );
    assert_eq!(shared.to_string(), "5-9 bind:1\notherwise interleave:0-3\n");
    // A removed range falls back to the default, and not to the thread.
    shared.set(0..100, None).unwrap();
    assert_eq!((shared.lookup(6), shared.is_empty()), (Some(mount), true));
    // A policy `default` removes the default.
    shared.set_default(Some(&Mempolicy::default())).unwrap();
    assert_eq!(shared.effective(6, Some(&thread)), thread);
    assert_eq!(shared.to_string(), "");
}

#[test]
fn the_maps_default_is_bound_again_together_with_its_ranges() {
    let shared = SharedPolicy::new();
    let policy = Mempolicy::parse("interleave=relative:0-1").unwrap();
    shared.set_default(Some(&policy)).unwrap();
    let nodes = |page| shared.lookup(page).unwrap().nodes().to_string();
    shared.rebind(&"4-7".parse().unwrap()).unwrap();
    assert_eq!(nodes(0), "4-5");
    shared.set(0..1, Some(&policy)).unwrap();
    shared.rebind(&"2-3".parse().unwrap()).unwrap();
    assert_eq!((nodes(0), nodes(1)), ("2-3".to_owned(), "2-3".to_owned()));
}

/// While a thread replaces the default, readers find one of the two policies, whole.
#[test]
fn readers_beside_changes_of_the_default_see_whole_policies() {
    let shared = SharedPolicy::new();
    let (one, other) = (policy(0x1234), policy(0x4321));
    shared.set_default(Some(&one)).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        scope.spawn(|| {
            while !stop.load(Relaxed) {
                let found = shared.lookup(7).expect("the map has a default");
                assert!(found == one || found == other, "torn: {found}");
            }
        });
        for round in 0..50_000 {
            let next = if round % 2 == 0 { &other } else { &one };
            shared.set_default(Some(next)).unwrap();
        }
    });
}
