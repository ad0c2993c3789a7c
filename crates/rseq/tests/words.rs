//! Tests the operations on words, pairs, lists and rings, undisturbed and in a storm of signals and
//! moves between CPUs.
//!
//! The backend is the one that `PINFOLD_RSEQ` selects.

mod storm;

use pinfold_rseq::{Append, Index, RING_SLOTS, RING_TAIL, UNIT_HEADER, Units, init, possible};
use std::ptr::null_mut;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize};
use storm::{choose, cpus, pin};

const WORD: usize = UNIT_HEADER;
const PAIR: usize = UNIT_HEADER + 16;
const LIST: usize = UNIT_HEADER + 32;
const GUARDED: usize = UNIT_HEADER + 40;
const OTHER: usize = UNIT_HEADER + 48;
const SUM: usize = UNIT_HEADER + 56;
const GATED: usize = UNIT_HEADER + 64;
const RING: usize = UNIT_HEADER + 128;
const SIZE: usize = 256;
const SLOT: usize = 32;
const UNIT: usize = RING + RING_SLOTS + SIZE;

#[repr(align(64))]
struct Unit([u64; UNIT / 8]);

/// Returns a table with a zeroed unit for every index.
fn table() -> &'static Units {
    choose();
    let units: &'static Units = Box::leak(Box::new(Units::new()));
    for index in 0..possible() {
        let unit = Box::leak(Box::new(Unit([0; UNIT / 8])));
        units.install(index, unit.0.as_mut_ptr().cast()).unwrap();
    }
    units
}

fn word(units: &Units, index: usize, offset: usize) -> &AtomicU64 {
    // SAFETY: every index has a unit of `UNIT` bytes.
    unsafe { &*units.unit(index).add(offset).cast() }
}

#[test]
fn without_a_unit_every_operation_fails() {
    init(Index::Cid);
    let units = Box::leak(Box::new(Units::new()));
    // SAFETY: there is no unit in which an offset could be wrong.
    unsafe {
        assert!(!units.store(WORD, 1) && !units.and(WORD, 1) && !units.or(WORD, 1));
        assert_eq!(units.fetch_add(WORD, 1), None);
        assert_eq!(units.swap(WORD, 1), None);
        assert_eq!(units.compare_exchange(WORD, 0, 1), None);
        assert!(!units.try_compare_exchange(WORD, 0, 1));
        assert!(!units.compare_exchange_pair(PAIR, [0; 2], [1; 2]));
        assert!(!units.add_pair(PAIR, [1; 2]));
        assert!(!units.store_two_if_equal(GUARDED, (0, 1), OTHER, 1));
        assert!(!units.store_if_both_equal(GUARDED, (0, 1), OTHER, 0));
        assert!(!units.list_push(LIST, (&raw mut *Box::new(0u64)).cast()));
        assert!(!units.add_gated(GATED, 1, &AtomicUsize::new(GATED)));
        assert!(units.list_pop(LIST).is_null() && units.list_take(LIST).is_null());
        assert_eq!(units.append(RING, SIZE, &[1], SLOT), Append::NoUnit);
    }
}

#[test]
fn words_change_as_the_operation_says() {
    pin(0);
    let units = table();
    // SAFETY: every index has a unit of `UNIT` bytes, aligned to 64.
    unsafe {
        assert!(units.store(WORD, 0b1100));
        assert!(units.and(WORD, 0b0110));
        assert!(units.or(WORD, 0b0001));
        assert_eq!(units.load(WORD), Some(0b0101));
        assert_eq!(units.fetch_add(WORD, u64::MAX), Some(5));
        assert_eq!(units.swap(WORD, u64::MAX), Some(4));
        assert_eq!(units.compare_exchange(WORD, 3, 9), Some(u64::MAX));
        assert_eq!(units.load(WORD), Some(u64::MAX));
        assert_eq!(units.compare_exchange(WORD, u64::MAX, 9), Some(u64::MAX));
        assert_eq!(units.load(WORD), Some(9));
        assert!(!units.try_compare_exchange(WORD, 8, 10));
        assert_eq!(units.load(WORD), Some(9));
        assert!(units.try_compare_exchange(WORD, 9, 10));
        assert_eq!(units.load(WORD), Some(10));
        assert!(units.compare_exchange_pair(PAIR, [0, 0], [1, 2]));
        assert!(!units.compare_exchange_pair(PAIR, [1, 1], [7, 7]));
        assert!(!units.compare_exchange_pair(PAIR, [2, 2], [7, 7]));
        assert_eq!([units.load(PAIR), units.load(PAIR + 8)], [Some(1), Some(2)]);
        assert!(units.compare_exchange_pair(PAIR, [1, 2], [u64::MAX, 3]));
        assert_eq!(
            [units.load(PAIR), units.load(PAIR + 8)],
            [Some(u64::MAX), Some(3)]
        );
        assert!(units.add_pair(PAIR, [2, 1 << 40]));
        assert_eq!(
            [units.load(PAIR), units.load(PAIR + 8)],
            [Some(1), Some(3 + (1 << 40))]
        );
        assert!(units.store_two_if_equal(GUARDED, (0, 1), OTHER, 5));
        assert!(!units.store_two_if_equal(GUARDED, (0, 2), OTHER, 6));
        assert_eq!([units.load(GUARDED), units.load(OTHER)], [Some(1), Some(5)]);
        assert!(!units.store_if_both_equal(GUARDED, (5, 8), OTHER, 5));
        assert!(!units.store_if_both_equal(GUARDED, (1, 8), OTHER, 1));
        assert_eq!([units.load(GUARDED), units.load(OTHER)], [Some(1), Some(5)]);
        assert!(units.store_if_both_equal(GUARDED, (1, 8), OTHER, 5));
        assert_eq!([units.load(GUARDED), units.load(OTHER)], [Some(8), Some(5)]);
        let gate = AtomicUsize::new(GATED);
        assert!(units.add_gated(GATED, 7, &gate) && units.add_gated(GATED, 3, &gate));
        gate.store(GATED | 1, Relaxed);
        assert!(!units.add_gated(GATED, 1, &gate));
        assert_eq!(units.load(GATED), Some(10));
    }
}

/// After a gate was closed, and the thread that closed it has waited, no word moves.
#[test]
fn behind_a_closed_gate_no_word_moves() {
    let units = table();
    let gate = AtomicUsize::new(GATED);
    let stop = AtomicBool::new(false);
    let sum = || -> u64 {
        let word = |index| word(units, index, GATED).load(Acquire);
        (0..possible()).map(word).sum()
    };
    let add = |cpu: usize| {
        pin(cpu % cpus());
        let mut added = 0;
        while !stop.load(Relaxed) {
            // SAFETY: every index has a unit with the word.
            added += u64::from(unsafe { units.add_gated(GATED, 1, &gate) });
        }
        added
    };
    let added: u64 = std::thread::scope(|scope| {
        let adders = [0, 1, 2].map(|cpu| {
            let add = &add;
            scope.spawn(move || add(cpu))
        });
        let (mut moved, mut is_at_rest) = (0, true);
        while moved < 20 && is_at_rest {
            let before = sum();
            gate.store(GATED + 1, SeqCst);
            units.quiesce(possible()).expect("a fence");
            let closed = sum();
            is_at_rest = (0..100).all(|_| sum() == closed);
            gate.store(GATED, SeqCst);
            moved += u64::from(closed != before);
        }
        stop.store(true, Relaxed);
        assert!(is_at_rest, "a word moved behind the closed gate");
        adders.map(|adder| adder.join().unwrap()).iter().sum()
    });
    assert_eq!(sum(), added);
}

#[test]
fn a_list_is_last_in_first_out() {
    pin(0);
    let units = table();
    let items: Vec<*mut u8> = (0..3)
        .map(|_| Box::leak(Box::new(7u64)) as *mut u64 as *mut u8)
        .collect();
    // SAFETY: every index has an empty list at `LIST`. The items are leaked.
    unsafe {
        assert!(items.iter().all(|&item| units.list_push(LIST, item)));
        assert_eq!(units.list_pop(LIST), items[2]);
        assert_eq!(units.list_take(LIST), items[1]);
        assert_eq!(*items[1].cast::<*mut u8>(), items[0]);
        assert_eq!(*items[0].cast::<u64>(), 0);
        assert!(units.list_pop(LIST).is_null());
    }
}

#[test]
fn a_ring_is_first_in_first_out_and_bounded() {
    pin(0);
    let units = table();
    // SAFETY: every index has an empty ring of `SIZE` bytes at `RING`, and records fit in slots.
    let append = |n: u64| unsafe { units.append(RING, SIZE, &[n, n + 1, n + 2], SLOT) };
    let index = pinfold_rseq::current();
    let slots = (SIZE / SLOT) as u64;
    for turn in 0..3 {
        for n in 0..slots {
            assert_eq!(append(turn * 100 + n), Append::Done);
        }
        assert_eq!(append(0), Append::Full);
        let tail = word(units, index, RING + RING_TAIL);
        for n in 0..slots {
            let at = RING + RING_SLOTS + n as usize * SLOT;
            let record = [0, 8, 16].map(|byte| word(units, index, at + byte).load(Relaxed));
            assert_eq!(record, [0, 1, 2].map(|plus| turn * 100 + n + plus));
            tail.fetch_add(SLOT as u64, Release);
        }
    }
}

/// Threads run every operation on all CPUs, and change CPU at random. Signals interrupt them, and
/// the handler runs the same operations. No add, item or record is lost or doubled, and no pair is
/// torn.
#[test]
fn a_storm_neither_loses_nor_doubles() {
    const ITEMS: usize = 32;
    let units = table();
    UNITS.store(std::ptr::from_ref(units).cast_mut(), SeqCst);
    for n in 0..ITEMS {
        pin(n % cpus());
        let item: *mut u64 = Box::leak(Box::new([0u64, n as u64])).as_mut_ptr();
        // SAFETY: every index has a list at `LIST`, and the item is leaked.
        assert!((0..1000).any(|_| unsafe { units.list_push(LIST, item.cast()) }));
    }
    let stop = AtomicBool::new(false);
    let (mut total, mut read, mut held) = (Total::default(), 0, vec![]);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (1..=6u64)
            .map(|seed| {
                scope.spawn({
                    let stop = &stop;
                    move || work(units, seed, stop)
                })
            })
            .collect();
        let reader = scope.spawn(|| read_rings(units, &stop));
        let storm = scope.spawn(|| storm::storm(on_signal, &stop));
        storm::wait(&HANDLED);
        stop.store(true, Relaxed);
        storm.join().unwrap();
        for worker in workers {
            let (done, mut kept) = worker.join().unwrap();
            total.added += done.added;
            total.appended += done.appended;
            total.paired += done.paired;
            total.guarded += done.guarded;
            held.append(&mut kept);
        }
        read += reader.join().unwrap();
    });
    read += read_once(units);
    assert!(HANDLED.load(SeqCst) > 100, "too few signals arrived");
    let sum = |offset| {
        (0..possible())
            .map(|index| word(units, index, offset).load(SeqCst))
            .sum::<u64>()
    };
    assert_eq!(sum(SUM), total.added + HANDLED.load(SeqCst));
    assert_eq!(read, total.appended);
    assert_eq!(sum(PAIR), total.paired);
    assert_eq!(sum(GUARDED), total.guarded);
    for index in 0..possible() {
        assert_eq!(
            word(units, index, PAIR).load(SeqCst),
            word(units, index, PAIR + 8).load(SeqCst)
        );
        let mut item = word(units, index, LIST).load(SeqCst) as *const u64;
        while !item.is_null() {
            // SAFETY: items are leaked, and no operation is under way.
            unsafe {
                held.push(*item.add(1));
                item = *item as *const u64;
            }
        }
    }
    held.extend(
        SET_ASIDE
            .iter()
            .map(|place| place.load(SeqCst))
            .filter(|item| !item.is_null())
            .map(
                // SAFETY: items are leaked.
                |item| unsafe { *item.cast::<u64>().add(1) },
            ),
    );
    held.sort_unstable();
    assert_eq!(held, (0..ITEMS as u64).collect::<Vec<_>>());
}

#[derive(Default)]
struct Total {
    added: u64,
    appended: u64,
    paired: u64,
    guarded: u64,
}

/// Runs operations until `stop`. Returns what it did, and the items that it still holds.
fn work(units: &Units, seed: u64, stop: &AtomicBool) -> (Total, Vec<u64>) {
    let (mut total, mut kept, mut random) = (
        Total::default(),
        vec![],
        seed.wrapping_mul(0x9e37_79b9_7f4a_7c15),
    );
    while !stop.load(Relaxed) {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        if random.is_multiple_of(256) {
            pin(random as usize / 256 % cpus());
        }
        // SAFETY: every index has a unit with a word, a pair, a list and a ring.
        unsafe {
            total.added += u64::from(units.fetch_add(SUM, 1).is_some());
            if let (Some(a), Some(b)) = (units.load(PAIR), units.load(PAIR + 8)) {
                let paired = units.compare_exchange_pair(PAIR, [a, b], [a + 1, b + 1]);
                assert!(!paired || a == b, "a pair was torn: {a}, {b}");
                total.paired += u64::from(paired);
            }
            // The other word never changes here, so the section fails only if this word differs.
            if let Some(now) = units.load(GUARDED) {
                let stored = units.store_if_both_equal(GUARDED, (now, now + 1), OTHER, 0);
                total.guarded += u64::from(stored);
            }
            let record = [random, !random, random ^ seed, seed];
            let words = if random & 1024 == 0 { 4 } else { 3 };
            if units.append(RING, SIZE, &record[..words], SLOT) == Append::Done {
                total.appended += 1;
            }
            let item = if random & 4096 == 0 {
                let item = units.list_pop(LIST);
                if !item.is_null() {
                    // Ends the chain, because the next item is still in the list.
                    item.cast::<*mut u8>().write(null_mut());
                }
                item
            } else {
                units.list_take(LIST)
            };
            kept.extend(put_back(units, item));
        }
    }
    (total, kept)
}

/// Puts the chain of items that begins with `item` on the current list. Returns those for which
/// that fails.
///
/// # Safety
///
/// The chain belongs to the caller, and every index has a list at `LIST`.
unsafe fn put_back(units: &Units, mut item: *mut u8) -> Vec<u64> {
    let mut kept = vec![];
    while !item.is_null() {
        // SAFETY: the item was taken off the list, so it belongs to this thread.
        unsafe {
            let next = *item.cast::<*mut u8>();
            if !(0..1000).any(|_| units.list_push(LIST, item)) {
                kept.push(*item.cast::<u64>().add(1));
            }
            item = next;
        }
    }
    kept
}

/// Reads all rings until `stop`. Returns the number of records.
fn read_rings(units: &Units, stop: &AtomicBool) -> u64 {
    let mut read = 0;
    while !stop.load(Relaxed) {
        read += read_once(units);
        std::thread::yield_now();
    }
    read
}

fn read_once(units: &Units) -> u64 {
    let mut read = 0;
    for index in 0..possible() {
        let tail = word(units, index, RING + RING_TAIL);
        let end = word(units, index, RING).load(Acquire);
        let mut at = tail.load(Relaxed);
        while at != end {
            let slot = RING + RING_SLOTS + at as usize % SIZE;
            let [a, b, c] = [0, 8, 16].map(|byte| word(units, index, slot + byte).load(Relaxed));
            assert!(
                a == !b && (1..=6).contains(&(a ^ c)),
                "a record was torn: {a} {b} {c}"
            );
            at += SLOT as u64;
            tail.store(at, Release);
            read += 1;
        }
    }
    read
}

static UNITS: AtomicPtr<Units> = AtomicPtr::new(null_mut());
static HANDLED: AtomicU64 = AtomicU64::new(0);
/// Items that a handler could not put back.
static SET_ASIDE: [AtomicPtr<u8>; 64] = [const { AtomicPtr::new(null_mut()) }; 64];

extern "C" fn on_signal(_: libc::c_int) {
    // The handler may be the first in its thread that needs the index.
    pinfold_rseq::current();
    // SAFETY: the test stored the address of a leaked table before the first signal, and every
    // index has a unit with a word and a list.
    unsafe {
        let units = &*UNITS.load(Relaxed);
        if units.fetch_add(SUM, 1).is_some() {
            HANDLED.fetch_add(1, Relaxed);
        }
        let item = units.list_pop(LIST);
        if !item.is_null() && !(0..9).any(|_| units.list_push(LIST, item)) {
            let empty = |place: &&AtomicPtr<u8>| {
                place
                    .compare_exchange(null_mut(), item, SeqCst, SeqCst)
                    .is_ok()
            };
            SET_ASIDE
                .iter()
                .find(empty)
                .expect("more places than items");
        }
    }
}
