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
fn an_empty_map_has_no_buffers() {
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
fn buffers_double_for_thousands_of_ranges() {
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
    // SAFETY: after 100 sets both buffers of the map exist, and they stay mapped while the map
    // lives.
    let bytes_of = |buffer: *mut Buffer<4>| (buffer.cast(), unsafe { (*buffer).bytes });
    let protect = |how: libc::c_int| {
        let regions: [(*mut u8, usize); 3] = [
            (place.as_ptr().cast(), size),
            bytes_of(map.latch.active()),
            bytes_of(map.latch.spare()),
        ];
        for (at, size) in regions {
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
