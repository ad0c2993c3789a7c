//! Made-up segments, and what a reader finds in them.

use super::*;
use pinfold::internal::segment::Call;

const NODES: usize = 2;
const CACHES: usize = 6;
const MEMORY_AT: usize = 256;
const CACHES_AT: usize = MEMORY_AT + NODES * size_of::<NodeMemory>();
const EVENTS_AT: usize = CACHES_AT + CACHES * size_of::<CacheRow>();
const FIRST: usize = EVENTS_AT + CACHES * NODES * size_of::<NodeEvents>();
const SIZE: usize = 4096;
const CALLS: usize = 128;

fn set(bytes: &mut [u8], at: usize, value: usize) {
    bytes[at..at + 4].copy_from_slice(&(value as u32).to_le_bytes());
}

/// Returns a segment with caches of 16, 32, … bytes and `units` units.
pub fn segment(units: usize) -> Vec<u8> {
    let mut bytes = vec![0; FIRST + units * SIZE];
    bytes[..8].copy_from_slice(&MAGIC.to_le_bytes());
    for (at, value) in [
        (offset_of!(Segment, version), VERSION as usize),
        (offset_of!(Segment, pid), 77),
        (offset_of!(Segment, units), units),
        (offset_of!(Segment, units_at), FIRST),
        (offset_of!(Segment, unit_bytes), SIZE),
        (offset_of!(Segment, calls), CALLS),
        (offset_of!(Segment, memory_at), MEMORY_AT),
        (offset_of!(Segment, caches_at), CACHES_AT),
        (offset_of!(Segment, caches), CACHES),
        (offset_of!(Segment, caches_used), CACHES),
        (offset_of!(Segment, events_at), EVENTS_AT),
        (offset_of!(Segment, nodes), NODES),
    ] {
        set(&mut bytes, at, value);
    }
    for nth in 0..CACHES {
        let row = CACHES_AT + nth * size_of::<CacheRow>();
        let name = format!("kmalloc-{}", 16 * (nth + 1));
        bytes[row..row + name.len()].copy_from_slice(name.as_bytes());
        set(&mut bytes, row + offset_of!(CacheRow, state), 6);
        set(&mut bytes, row + offset_of!(CacheRow, size), 16 * (nth + 1));
        set(&mut bytes, row + offset_of!(CacheRow, per_slab), 100);
    }
    bytes
}

/// Sets the count of a call in the unit `unit`.
pub fn set_call(bytes: &mut [u8], unit: usize, call: Call, count: usize) {
    let at = FIRST + unit * SIZE + CALLS + 8 * call.index();
    bytes[at..at + 8].copy_from_slice(&(count as u64).to_le_bytes());
}

/// Sets the count of an event of cache `nth` on `node`.
pub fn set_event(bytes: &mut [u8], nth: usize, node: usize, event: SlabEvent, count: usize) {
    let at = EVENTS_AT + (nth * NODES + node) * size_of::<NodeEvents>();
    set(bytes, at + 8 * event.index(), count);
}

#[test]
fn counts_of_all_units_are_added_up() {
    let mut bytes = segment(3);
    for unit in 0..3 {
        set_call(&mut bytes, unit, Call::alloc(1), 7);
    }
    let calls = Snapshot::parse(&bytes).unwrap().calls.unwrap();
    assert_eq!(calls.of_class(1), (21, 0));
    assert!(Snapshot::parse(&segment(0)).unwrap().calls.is_none());
}

#[test]
fn events_of_all_nodes_are_added_up() {
    let mut bytes = segment(0);
    for node in 0..NODES {
        set_event(&mut bytes, 3, node, SlabEvent::Refilled, 50);
        set_event(&mut bytes, 3, node, SlabEvent::Flushed, 20);
        set_event(&mut bytes, 3, node, SlabEvent::SlabAlloc, 1);
    }
    let snapshot = Snapshot::parse(&bytes).unwrap();
    let cache = &snapshot.caches[3];
    assert_eq!((cache.name.as_str(), cache.size), ("kmalloc-64", 64));
    assert_eq!((cache.out(), cache.slabs(), cache.total()), (60, 2, 200));
    assert_eq!(snapshot.caches[2].out(), 0);
}

#[test]
fn events_of_a_split_cache_s_parts_are_added() {
    let mut bytes = segment(0);
    set_event(&mut bytes, 3, 1, SlabEvent::Refilled, 50);
    let rows = bytes.len().next_multiple_of(64);
    // The row of a part on node 1, a free row, one of a cache without a row, and one of no node.
    let parts = [(4, 1), (0, 1), (CACHES + 9, 0), (4, NODES)];
    bytes.resize(rows + parts.len() * size_of::<SplitRow>(), 0);
    for (nth, (cache, node)) in parts.into_iter().enumerate() {
        let row = rows + nth * size_of::<SplitRow>();
        set(&mut bytes, row + offset_of!(SplitRow, cache), cache);
        set(&mut bytes, row + offset_of!(SplitRow, node), node);
        let events = row + offset_of!(SplitRow, events);
        set(&mut bytes, events + 8 * SlabEvent::Refilled.index(), 7);
    }
    for (at, value) in [
        (offset_of!(Segment, splits_at), rows),
        (offset_of!(Segment, splits), parts.len()),
        (offset_of!(Segment, splits_used), parts.len()),
    ] {
        set(&mut bytes, at, value);
    }
    let caches = Snapshot::parse(&bytes).unwrap().caches;
    let refilled: Vec<_> = caches.iter().map(Cache::refilled).collect();
    assert_eq!(refilled, [0, 0, 0, 57, 0, 0]);
    bytes.truncate(rows + 60);
    assert!(Snapshot::parse(&bytes).is_err());
}

#[test]
fn rows_without_a_cache_and_rows_being_written_are_left_out() {
    let mut bytes = segment(0);
    for (nth, state) in [(1, 0), (2, 3), (4, 4)] {
        let at = CACHES_AT + nth * size_of::<CacheRow>() + offset_of!(CacheRow, state);
        set(&mut bytes, at, state);
    }
    let caches = Snapshot::parse(&bytes).unwrap().caches;
    assert_eq!(
        caches.iter().map(|cache| cache.nth).collect::<Vec<_>>(),
        [0, 3, 5]
    );
}

#[test]
fn other_files_and_versions_are_refused() {
    let mut bytes = segment(0);
    set(&mut bytes, offset_of!(Segment, version), 4);
    assert_eq!(Snapshot::parse(&bytes).unwrap_err(), Refused::Version(4));
    bytes[0] ^= 1;
    assert_eq!(Snapshot::parse(&bytes).unwrap_err(), Refused::NotASegment);
    assert_eq!(Snapshot::parse(b"").unwrap_err(), Refused::NotASegment);
}

#[test]
fn broken_segments_are_refused() {
    let whole = segment(2);
    assert!(Snapshot::parse(&whole).is_ok());
    // The rest of the last unit holds other words.
    let end = FIRST + SIZE + CALLS + Calls::BYTES;
    assert!(
        (0..end)
            .step_by(61)
            .all(|cut| Snapshot::parse(&whole[..cut]).is_err())
    );
    // The high half of each field.
    for at in [
        offset_of!(Segment, units),
        offset_of!(Segment, units_at),
        offset_of!(Segment, unit_bytes),
        offset_of!(Segment, calls),
        offset_of!(Segment, memory_at),
        offset_of!(Segment, caches_at),
        offset_of!(Segment, events_at),
        offset_of!(Segment, nodes),
    ] {
        let mut broken = whole.clone();
        broken[at + 2] ^= 0x40;
        assert_eq!(
            Snapshot::parse(&broken).unwrap_err(),
            Refused::Broken,
            "byte {at}"
        );
    }
}

/// A small file can claim more rows than a reader could ever show.
#[test]
fn more_rows_than_a_process_can_make_are_refused() {
    use pinfold::internal::segment::{CACHES, COUNTERS, NODES};
    let mut whole = segment(0);
    whole.resize(32 << 20, 0);
    for (field, most) in [
        (offset_of!(Segment, caches), CACHES),
        (offset_of!(Segment, counters), COUNTERS),
        (offset_of!(Segment, nodes), NODES),
    ] {
        for (number, is_read) in [(most, true), (most + 1, false), (270_583, false)] {
            let mut bytes = whole.clone();
            set(&mut bytes, field, number);
            assert_eq!(
                Snapshot::parse(&bytes).is_ok(),
                is_read,
                "{number} at {field}"
            );
        }
    }
}

/// Of a file of any size, little is read until it is known to be a segment, and then its rows only.
#[test]
fn few_bytes_are_read() {
    let mut most = 0;
    let refused = Snapshot::read(|at, size| {
        most = most.max(at + size);
        Ok(vec![0; size])
    });
    assert_eq!(refused.unwrap().unwrap_err(), Refused::NotASegment);
    assert!(most <= 64 << 10);
    let whole = segment(0);
    let read = Snapshot::read(|at, size| {
        most = most.max(at + size);
        Ok((at..at + size)
            .map(|at| *whole.get(at).unwrap_or(&0))
            .collect())
    });
    assert_eq!(read.unwrap().unwrap().caches.len(), CACHES);
    assert!(most <= whole.len().max(4096));
    let mut far = whole.clone();
    set(&mut far, offset_of!(Segment, events_at), 60 << 20);
    far.resize(64 << 20, 0);
    assert_eq!(Snapshot::parse(&far).unwrap_err(), Refused::Broken);
}

#[test]
fn random_bytes_are_never_a_panic() {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for _ in 0..20_000 {
        let mut bytes = segment(2);
        for _ in 0..random() % 6 + 1 {
            let at = random() as usize % 768;
            bytes[at] = random() as u8;
        }
        bytes.truncate(bytes.len() - random() as usize % 2 * (random() as usize % 4096));
        let _ = Snapshot::parse(&bytes);
    }
}

#[test]
fn calls_count_for_the_twin_where_the_class_has_no_cache() {
    use kmalloc::{ALL_CLASSES, data, sampled};
    for (nths, found) in [
        ([0, sampled(0), sampled(1)], [Some(0), None, Some(1)]),
        ([0, data(0), data(1)], [Some(0), None, Some(1)]),
        (
            [data(2), sampled(2), sampled(data(2))],
            [Some(2), None, None],
        ),
        (
            [2, ALL_CLASSES - 1, ALL_CLASSES],
            [Some(2), Some(kmalloc::CLASSES - 1), None],
        ),
    ] {
        let mut snapshot = Snapshot::parse(&segment(1)).unwrap();
        for (cache, nth) in snapshot.caches.iter_mut().zip(nths) {
            cache.nth = nth;
        }
        snapshot.caches.truncate(3);
        let classes = snapshot.caches.iter().map(|cache| snapshot.class_of(cache));
        assert_eq!(classes.collect::<Vec<_>>(), found, "{nths:?}");
    }
}
