use super::*;
use crate::sys;
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

/// Returns the address and the bytes of each mapping of a map.
fn regions(map: &Map) -> Vec<(*mut u8, usize)> {
    let mut regions = Vec::new();
    let visit = |at, bytes| regions.push((at, bytes));
    // SAFETY: the map's tables are mapped, and the test does not drop the map meanwhile.
    unsafe { Table::for_each(map.table.load(Relaxed), visit) };
    regions
}

#[test]
fn an_empty_map_has_no_memory() {
    let map = Map::new();
    assert!(map.lookup_all(0).is_none());
    assert_eq!(map.set(0, u64::MAX, None), Ok(()));
    assert_eq!(map.update(|_| unreachable!()), Ok(()));
    assert_eq!((map.len(), map.next_from(0)), (0, None));
    assert!(all(&map).is_empty());
    assert!(regions(&map).is_empty());
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
    // Up to the last page, which is also what unused starts hold.
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
    let mut regions = regions(map);
    assert!(regions.len() > 1);
    regions.push((place.as_ptr().cast(), size));
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
    let mut most = 0;
    for step in 0..120_000 {
        let start = below(PAGES);
        let longest = match below(1000) {
            0 => PAGES,
            1..10 => 2000,
            _ => 4,
        };
        let end = (start + 1 + below(longest)).min(PAGES);
        // More removals in some phases, so that the map also shrinks.
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
            most = most.max(map.len());
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
        }
    }
    // The map has grown several times.
    assert!(most > 1500, "{most}");
    map.set(0, PAGES, None).unwrap();
    assert_eq!(map.len(), 0);
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
    let bytes = || regions(&map).iter().map(|region| region.1).sum::<usize>();
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
        map.set(0, 1400, None).unwrap();
        if round == 3 {
            early = bytes();
        }
    }
    assert_eq!(bytes(), early);
}
