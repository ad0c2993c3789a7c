use super::super::tree::{FANOUT, Node, is_inner, untagged};
use super::*;
use crate::sys;
use core::sync::atomic::AtomicBool;
use core::sync::atomic::Ordering::{Relaxed, Release};
use std::vec::Vec;

type Map = Ranges<4>;

fn words(n: u64) -> [u64; 4] {
    [n, !n, n.rotate_left(17), n ^ 0x5555]
}

fn all(map: &Map) -> Vec<(u64, u64, u64)> {
    let records = map.snapshot().unwrap();
    (0..)
        .map_while(|at| records.record(at))
        .map(|record| {
            assert_eq!(record.words, words(record.words[0]));
            (record.start, record.end, record.words[0])
        })
        .collect()
}

#[test]
fn an_empty_map_has_no_memory() {
    let map = Map::new();
    assert!(map.lookup_all(0).is_none());
    assert_eq!(map.set(0, u64::MAX, None), Ok(()));
    assert_eq!(map.update(|_| unreachable!()), Ok(()));
    assert_eq!((map.len(), map.next_from(0)), (0, None));
    assert!(all(&map).is_empty());
    assert!(map.latch.active().is_null() && map.latch.spare().is_null());
}

#[test]
fn trims_splits_deletes_and_merges() {
    let map = Map::new();
    map.set(10, 20, Some(&words(1))).unwrap();
    map.set(12, 15, Some(&words(2))).unwrap();
    assert_eq!(all(&map), [(10, 12, 1), (12, 15, 2), (15, 20, 1)]);
    map.set(11, 13, None).unwrap();
    assert_eq!(all(&map), [(10, 11, 1), (13, 15, 2), (15, 20, 1)]);
    map.set(11, 13, Some(&words(1))).unwrap();
    assert_eq!(all(&map), [(10, 13, 1), (13, 15, 2), (15, 20, 1)]);
    map.set(13, 15, Some(&words(1))).unwrap();
    assert_eq!(all(&map), [(10, 20, 1)]);
    map.set(0, u64::MAX, Some(&words(3))).unwrap();
    assert_eq!(all(&map), [(0, u64::MAX, 3)]);
    assert!(map.lookup(u64::MAX - 1, []).is_some());
    assert!(map.lookup(u64::MAX, []).is_none());
    map.set(5, u64::MAX, None).unwrap();
    assert_eq!(all(&map), [(0, 5, 3)]);
    map.set(0, 5, None).unwrap();
    assert!(all(&map).is_empty());
}

#[test]
fn an_update_merges_ranges_that_became_equal() {
    let map = Map::new();
    for page in 0..10 {
        map.set(page, page + 1, Some(&words(page))).unwrap();
    }
    map.update(|w| {
        *w = words(w[0] / 5);
        Ok(())
    })
    .unwrap();
    assert_eq!(all(&map), [(0, 5, 0), (5, 10, 1)]);
}

#[test]
fn lookup_copies_the_wanted_words() {
    let map = Map::new();
    map.set(1, 2, Some(&[10, 11, 12, 13])).unwrap();
    assert_eq!(map.lookup(1, [1, 3]), Some([11, 13]));
    assert_eq!(map.lookup(1, [3, 4, usize::MAX]), Some([13, 0, 0]));
    assert_eq!(map.lookup(2, [0]), None);
    assert_eq!(map.next_from(0).unwrap().words, [10, 11, 12, 13]);
    assert_eq!(map.next_from(2), None);
}

#[test]
fn empty_ranges_and_the_locks_holder_are_refused() {
    let map = Map::new();
    for (start, end) in [(0, 0), (5, 5), (6, 5), (u64::MAX, 0), (u64::MAX, u64::MAX)] {
        assert_eq!(map.set(start, end, Some(&words(1))), Err(RangeError::Empty));
        assert_eq!(map.set(start, end, None), Err(RangeError::Empty));
    }
    map.set(1, 3, Some(&words(1))).unwrap();
    let held = WRITER.lock();
    assert_eq!(map.set(1, 2, None), Err(RangeError::Busy));
    assert_eq!(map.update(|_| Ok(())), Err(RangeError::Busy));
    // A handler that interrupted a set can still look up pages.
    assert!(map.lookup(1, []).is_some());
    assert_eq!(all(&map), [(1, 3, 1)]);
    drop(held);
    assert_eq!(map.set(1, 2, None), Ok(()));
}

#[test]
fn thousands_of_ranges_are_found_and_removed() {
    let map = Map::new();
    for n in 0..5000 {
        map.set(n * 3, n * 3 + 2, Some(&words(n))).unwrap();
    }
    assert_eq!(map.len(), 5000);
    for page in 0..15_000 {
        let covered = page % 3 < 2;
        assert_eq!(map.lookup(page, [0]), covered.then_some([page / 3]));
    }
    map.set(0, 14_000, None).unwrap();
    assert_eq!(map.len(), 333);
    // Up to the last page, which is also the start in unused entries of nodes.
    map.set(14_500, u64::MAX, None).unwrap();
    assert_eq!(map.len(), 167);
    assert!(map.lookup(u64::MAX, [0]).is_none());
    assert_eq!(map.next_from(14_500), None);
}

/// Lookups work while the map and its buffers are read-only.
#[test]
fn lookups_write_nothing() {
    let size = sys::page_size();
    let place = sys::map_memory(size).unwrap().cast::<Map>();
    // SAFETY: the page is fresh, writable, large enough for a `Map`, and aligned.
    let map = unsafe {
        place.write(Map::new());
        place.as_ref()
    };
    for n in 0..100 {
        map.set(n * 3, n * 3 + 2, Some(&words(n))).unwrap();
    }
    let mut regions = std::vec![(place.as_ptr().cast(), size)];
    // SAFETY: no other thread uses the map.
    let pools = unsafe { &*map.pools.get() };
    pools.chunks.for_each(|at, bytes| regions.push((at, bytes)));
    assert!(regions.len() > 2);
    let protect = |how: libc::c_int| {
        for &(at, size) in &regions {
            // SAFETY: the regions are whole mappings of this test, and the test does not write them
            // while they are read-only.
            assert_eq!(unsafe { libc::mprotect(at.cast(), size, how) }, 0);
        }
    };
    protect(libc::PROT_READ);
    for page in 0..300 {
        let covered = page % 3 < 2;
        assert_eq!(map.lookup_all(page), covered.then_some(words(page / 3)));
    }
    assert_eq!((map.len(), map.next_from(299)), (100, None));
    protect(libc::PROT_READ | libc::PROT_WRITE);
    // SAFETY: `place` holds the `Map` that was written above. It is dropped once, and the page is
    // not used afterwards.
    unsafe {
        place.drop_in_place();
        sys::unmap(place.as_ptr().cast(), size);
    }
}

/// While a writer moves the borders of ranges, readers always find each page covered, by words that
/// belong together and that were set.
#[test]
fn readers_see_no_gap_and_nothing_torn() {
    let map = Map::new();
    let pages = 64;
    map.set(0, pages, Some(&words(0))).unwrap();
    let done = AtomicBool::new(false);
    let newest = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let (map, done, newest) = (&map, &done, &newest);
            scope.spawn(move || {
                let mut page = thread;
                while !done.load(Relaxed) {
                    page = (page * 5 + 1) % pages;
                    let got = map.lookup_all(page).expect("no range covers the page");
                    assert_eq!(got, words(got[0]));
                    assert!(got[0] <= newest.load(Relaxed) + 1);
                }
            });
        }
        let rounds = if cfg!(debug_assertions) {
            30_000
        } else {
            300_000
        };
        for round in 1..rounds {
            let start = round * 7 % pages;
            let end = (start + 1 + round % 13).min(pages);
            map.set(start, end, Some(&words(round))).unwrap();
            newest.store(round, Release);
            if round % 50 == 0 {
                map.set(0, pages, Some(&words(round))).unwrap();
            }
        }
        done.store(true, Relaxed);
    });
}

/// What a walk through a tree counts.
#[derive(Default, Debug, PartialEq, Eq)]
struct Census {
    ranges: usize,
    leaves: usize,
    inners: usize,
    /// Nodes with a sibling that have less than a quarter of their entries.
    sparse: usize,
}

/// Walks the tree below `at`, checks that it is one, and returns the start of its first range.
fn walk(at: *mut Node, depth: usize, leaf_depth: &mut Option<usize>, seen: &mut Census) -> u64 {
    // SAFETY: `at` is a node of a map that the caller borrows.
    let node = unsafe { &*untagged(at) };
    assert!((1..=FANOUT).contains(&node.len()));
    let entries: Vec<_> = (0..node.len()).map(|n| node.entry(n).unwrap()).collect();
    assert!(entries.windows(2).all(|two| two[0].start < two[1].start));
    seen.sparse += usize::from(depth > 0 && node.len() < FANOUT / 4);
    if is_inner(at) {
        seen.inners += 1;
        for entry in &entries {
            assert_eq!(walk(entry.below, depth + 1, leaf_depth, seen), entry.start);
        }
    } else {
        seen.leaves += 1;
        seen.ranges += entries.len();
        assert!(entries.iter().all(|entry| entry.start < entry.end));
        assert_eq!(
            *leaf_depth.get_or_insert(depth),
            depth,
            "a leaf is not as deep"
        );
    }
    entries[0].start
}

/// Checks the whole map, and that no unit was lost: what the pools handed out is in the tree.
fn check(map: &Map) -> Census {
    let (mut seen, top) = (Census::default(), map.active().top());
    if !top.is_null() {
        walk(top, 0, &mut None, &mut seen);
    }
    assert_eq!(seen.ranges, map.len());
    // SAFETY: no other thread uses the map.
    let in_use = unsafe { &*map.pools.get() }.in_use();
    let words = seen.ranges + usize::from(map.default().is_some());
    assert_eq!(in_use, [words, seen.leaves, seen.inners]);
    seen
}

/// Thousands of ranges against an ordinary map from each page to its number, with changes of single
/// pages, of long stretches and of everything, and updates.
#[test]
fn random_changes_agree_with_a_simple_map() {
    const PAGES: u64 = 20_000;
    let (map, mut plain) = (Map::new(), std::vec![0u64; PAGES as usize]);
    let mut random = 1u64;
    let mut below = |most: u64| {
        random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (random >> 33) % most
    };
    let (mut deepest, mut most) = (0, 0);
    for step in 0..120_000 {
        let start = below(PAGES);
        let longest = match below(1000) {
            0 => PAGES,
            1..10 => 2000,
            _ => 4,
        };
        let end = (start + 1 + below(longest)).min(PAGES);
        // More removals in some phases, so that the tree also shrinks.
        let removes = below(10) < if step / 20_000 % 2 == 0 { 2 } else { 8 };
        let number = if removes { 0 } else { 1 + below(3) };
        let new = words(number);
        let new = (number > 0).then_some(&new);
        map.set(start, end, new).unwrap();
        plain[start as usize..end as usize].fill(number);
        let page = below(PAGES);
        let found = map.lookup_all(page);
        let wanted = plain[page as usize];
        assert_eq!(
            found,
            (wanted > 0).then(|| words(wanted)),
            "page {page}, step {step}"
        );
        if step % 5000 == 0 || step % 7 == 0 && step < 2000 {
            let seen = check(&map);
            (deepest, most) = (deepest.max(seen.inners), most.max(seen.ranges));
            assert!(seen.sparse * 20 <= seen.leaves + 20, "{seen:?}");
            same(&map, &plain);
        }
        if step % 30_000 == 29_999 {
            map.update(|w| {
                *w = words(w[0] % 3 + 1);
                Ok(())
            })
            .unwrap();
            plain
                .iter_mut()
                .filter(|n| **n > 0)
                .for_each(|n| *n = *n % 3 + 1);
            same(&map, &plain);
            check(&map);
        }
    }
    // The test has seen trees of three levels.
    assert!(most > 1500 && deepest > 2, "{most} {deepest}");
    map.set(0, PAGES, None).unwrap();
    assert_eq!(check(&map), Census::default());
}

/// Compares all ranges with those of the plain array.
fn same(map: &Map, plain: &[u64]) {
    let mut wanted: Vec<(u64, u64, u64)> = Vec::new();
    for (page, &number) in (0u64..).zip(plain) {
        match wanted.last_mut() {
            Some(last) if last.1 == page && last.2 == number => last.1 += 1,
            _ => wanted.push((page, page + 1, number)),
        }
    }
    wanted.retain(|range| range.2 > 0);
    assert_eq!(all(map), wanted);
}

/// A map takes no more memory while ranges come and go.
#[test]
fn memory_is_used_again() {
    let map = Map::new();
    let bytes = || {
        let mut all = 0;
        // SAFETY: no other thread uses the map.
        unsafe { &*map.pools.get() }
            .chunks
            .for_each(|_, bytes| all += bytes);
        all
    };
    let mut early = 0;
    for round in 0..40 {
        let default = words(round);
        map.set_default((round % 3 > 0).then_some(&default))
            .unwrap();
        for n in 0..500 {
            map.set(n * 3, n * 3 + 2, Some(&words(n + round))).unwrap();
        }
        map.update(|w| {
            *w = words(w[0] + 1);
            Ok(())
        })
        .unwrap();
        let refused = map.update(|w| match w[0] {
            0..480 => Ok(()),
            _ => Err(RangeError::UnknownNodes),
        });
        assert_eq!(refused, Err(RangeError::UnknownNodes));
        check(&map);
        map.set(0, 1400, None).unwrap();
        check(&map);
        if round == 3 {
            early = bytes();
        }
    }
    assert_eq!(bytes(), early);
}
