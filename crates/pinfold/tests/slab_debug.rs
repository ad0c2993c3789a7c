//! Faults planted as the kernel's slub_kunit plants them, and the report of each.

mod common;

use common::assert_has;
use common::reports::{free, keep, reports};
use common::timer::Timer;
use pinfold::slab::debug::{Kind, Part, on_report, symbolize_with};
use pinfold::slab::{DebugFlags, KmemCache};
use std::alloc::Layout;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::thread::sleep;
use std::time::Duration;

fn cache(name: &str, flags: DebugFlags) -> KmemCache {
    on_report(keep);
    KmemCache::builder(name, Layout::from_size_align(64, 8).unwrap())
        .debug(flags)
        .build()
        .unwrap()
}

/// Writes to a byte of the cache's memory that no program may write to.
fn poke(object: NonNull<u8>, offset: isize, byte: u8) {
    // SAFETY: red zones and freed objects are the cache's memory, which is mapped.
    unsafe { object.as_ptr().offset(offset).write_volatile(byte) };
}

/// Returns how many faults `validate` finds, and the kind and text of the first.
fn validate(cache: &KmemCache) -> (usize, Option<(Kind, String)>) {
    let mut first = None;
    let errors = cache
        .validate_with(|report| {
            first.get_or_insert_with(|| (report.kind, report.to_string()));
        })
        .map_or_else(|wrong| wrong.errors, |()| 0);
    (errors, first)
}

fn part(kind: Kind) -> Part {
    match kind {
        Kind::Overwritten(found) => found.part,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_clobbered_red_zone() {
    for (offset, at) in [(64, Part::RightRedZone), (-1, Part::LeftRedZone)] {
        let cache = cache("rz_alloc", DebugFlags::RED_ZONE);
        let object = cache.alloc().unwrap();
        poke(object, offset, 0x12);
        let (errors, first) = validate(&cache);
        let (kind, text) = first.unwrap();
        assert_eq!((errors, part(kind)), (1, at));
        let side = if offset < 0 { "left" } else { "right" };
        assert_has(
            &text,
            &[&format!("cache rz_alloc: {side} red zone overwritten")],
        );
        assert_has(&text, &[&format!("object {object:p} of 64 bytes, in use")]);
        let found = format!("at offset {offset}: 0x12 instead of 0xcc, 1 wrong in all");
        assert!(text.contains(&found), "{text}");
        // The check repaired the bytes, so it finds the fault once.
        assert_eq!(validate(&cache).0, 0);
        free(&cache, object);
        assert_eq!(reports().len(), 0);
        cache.destroy().unwrap();
    }
}

#[test]
fn a_red_zone_clobbered_before_the_free() {
    let cache = cache("rz_at_free", DebugFlags::RED_ZONE | DebugFlags::USER);
    let object = cache.alloc().unwrap();
    poke(object, 65, 0x12);
    free(&cache, object);
    let found = reports();
    assert_eq!(found.len(), 1);
    assert_eq!(part(found[0].0), Part::RightRedZone);
    assert!(found[0].1.contains("allocated by thread"), "{}", found[0].1);
    // The object cannot be trusted, so it is never given out again.
    let leak = cache.destroy().unwrap_err();
    assert_eq!(leak.objects, 1);
}

/// Free objects hold no links, so writing over a free object loses no object and damages no list.
#[test]
fn writes_over_a_free_objects_first_word() {
    let cache = cache("next_ptr_free", DebugFlags::POISON);
    let object = cache.alloc().unwrap();
    free(&cache, object);
    for offset in 0..8 {
        poke(object, offset, 0xff);
    }
    let (errors, first) = validate(&cache);
    assert_eq!((errors, part(first.unwrap().0)), (1, Part::Poison));
    assert_eq!(validate(&cache).0, 0);
    cache.destroy().unwrap();
}

#[test]
fn writes_after_the_free() {
    for (offset, byte, wrong) in [(0, 0x78, 1), (50, 0x9a, 1), (63, 0x00, 1)] {
        let cache = cache("after_free", DebugFlags::POISON);
        let object = cache.alloc().unwrap();
        free(&cache, object);
        poke(object, offset, byte);
        let (errors, first) = validate(&cache);
        let (kind, text) = first.unwrap();
        assert_eq!((errors, part(kind)), (1, Part::Poison));
        assert!(text.contains("written to after it was freed"), "{text}");
        let found = format!("at offset {offset}: {byte:#04x} instead of");
        assert_has(&text, &[&found, &format!("{wrong} wrong")]);
        cache.destroy().unwrap();
    }
}

#[test]
fn a_write_after_the_free_is_found_by_the_next_allocation() {
    let cache = cache("found_at_alloc", DebugFlags::POISON | DebugFlags::USER);
    let object = cache.alloc().unwrap();
    free(&cache, object);
    poke(object, 8, 1);
    let other = cache.alloc().unwrap();
    assert_ne!(other, object, "given out although it was written to");
    let found = reports();
    assert_eq!(found.len(), 1);
    assert!(found[0].1.contains("freed by thread"), "{}", found[0].1);
    assert!(
        found[0].1.contains("slab_debug"),
        "no names of callers: {}",
        found[0].1
    );
    free(&cache, other);
}

/// The last object of a slab may leave its slab empty. The slab must not go back to the arena with
/// the fault.
#[test]
fn writes_after_the_free_of_a_slabs_only_object() {
    on_report(keep);
    for size in [64, 40 << 10, 64 << 10] {
        let layout = Layout::from_size_align(size, 64).unwrap();
        let cache = KmemCache::builder("only_one", layout).debug(DebugFlags::DEFAULT);
        // Found by the next allocation.
        let cache = cache.build().unwrap();
        let object = cache.alloc().unwrap();
        free(&cache, object);
        poke(object, size as isize - 1, 1);
        let other = cache.alloc().unwrap();
        assert_ne!(other, object, "given out although it was written to");
        let found = reports();
        assert_eq!(found.len(), 1, "{size}");
        assert_eq!(part(found[0].0), Part::Poison);
        assert!(found[0].1.contains("freed by thread"), "{}", found[0].1);
        // Found although other slabs became empty later, also by the end of the cache.
        let others: Vec<_> = (0..6).map(|_| cache.alloc().unwrap()).collect();
        free(&cache, other);
        poke(other, 0, 2);
        others.into_iter().for_each(|object| free(&cache, object));
        assert_eq!(reports().len(), 0);
        let leak = cache.destroy().unwrap_err();
        assert_eq!(leak.objects, 1, "the first one");
        let found = reports();
        assert_eq!(found.len(), 1, "{size}: {found:?}");
        assert_has(&found[0].1, &[&format!("object {other:p}")]);
    }
}

#[test]
fn a_red_zone_clobbered_after_the_free() {
    let cache = cache("rz_free", DebugFlags::RED_ZONE);
    let object = cache.alloc().unwrap();
    free(&cache, object);
    poke(object, 64, 0xab);
    let (errors, first) = validate(&cache);
    let (kind, text) = first.unwrap();
    assert_eq!((errors, part(kind)), (1, Part::RightRedZone));
    assert_has(&text, &["0xab instead of 0xbb", ", free;"]);
    cache.destroy().unwrap();
}

#[test]
fn leaks_are_named_with_their_owners() {
    let cache = cache("leak_destroy", DebugFlags::USER);
    let kept = cache.alloc().unwrap();
    let freed = cache.alloc().unwrap();
    free(&cache, freed);
    let leak = cache.destroy().unwrap_err();
    assert_eq!(leak.objects, 1);
    let text = leak.to_string();
    assert_has(
        &text,
        &["cache leak_destroy cannot be destroyed: 1 objects"],
    );
    let process = format!("object not freed\n  process {} (", std::process::id());
    assert!(text.contains(&process), "{text}");
    assert!(text.contains(&format!(")\n  object {kept:p}")), "{text}");
    assert_has(&text, &["allocated by thread", "slab_debug"]);
    assert!(!text.contains(&format!("object {freed:p}")), "{text}");
    free(&leak.cache, kept);
    leak.cache.destroy().unwrap();
}

#[test]
fn wrong_frees_are_reported() {
    let cache = cache("frees", DebugFlags::CONSISTENCY | DebugFlags::USER);
    let other = KmemCache::new("other", Layout::new::<[u64; 8]>()).unwrap();
    let (object, foreign) = (cache.alloc().unwrap(), other.alloc().unwrap());
    free(&cache, object);
    free(&cache, object);
    let found = reports();
    assert_eq!(found[0].0, Kind::DoubleFree);
    assert_has(&found[0].1, &["cache frees: object freed twice"]);
    assert!(found[0].1.contains("freed by thread"), "{}", found[0].1);
    let object = cache.alloc().unwrap();
    // SAFETY: offset 8 is within the object's 64 bytes.
    free(&cache, unsafe { object.add(8) });
    assert_eq!(reports()[0].0, Kind::NotAnObject);
    free(&cache, foreign);
    let found = reports();
    assert_eq!(found[0].0, Kind::WrongCache);
    assert!(found[0].1.contains("of cache other"), "{}", found[0].1);
    let mut on_the_stack = 0u64;
    free(&cache, NonNull::from(&mut on_the_stack).cast());
    let found = reports();
    assert_eq!(found[0].0, Kind::WrongCache);
    let text = &found[0].1;
    assert_has(text, &["cache frees: not an object of any cache"]);
    assert!(text.contains("the address is not Pinfold's"), "{text}");
    free(&cache, object);
    free(&other, foreign);
    assert_eq!(reports().len(), 0);
    cache.destroy().unwrap();
    other.destroy().unwrap();
}

/// Looking up the names of the callers takes long, and makes no track older.
#[test]
fn ages_are_those_at_the_time_of_the_report() {
    if !common::again::alone("ages_are_those_at_the_time_of_the_report", |_| {}) {
        return;
    }
    symbolize_with(|_, to| {
        sleep(Duration::from_millis(50));
        to.write_str("a name")
    });
    let cache = cache("ages", DebugFlags::USER);
    let object = cache.alloc().unwrap();
    free(&cache, object);
    free(&cache, object);
    let text = &reports()[0].1;
    let ages: Vec<f64> = text
        .lines()
        .filter_map(|line| {
            line.strip_suffix(" s ago:")?
                .rsplit(' ')
                .next()?
                .parse()
                .ok()
        })
        .collect();
    let [allocated, freed] = ages[..] else {
        panic!("{text}");
    };
    assert!(allocated >= freed, "{text}");
    assert!(text.contains("a name"), "{text}");
    cache.destroy().unwrap();
}

/// All checks at once, with all ways of allocating, report nothing about a correct program.
#[test]
fn correct_programs_cause_no_reports() {
    for (size, align) in [
        (1, 1),
        (24, 8),
        (64, 64),
        (100, 4),
        (4096, 4096),
        (65536, 8),
    ] {
        on_report(keep);
        let layout = Layout::from_size_align(size, align).unwrap();
        let cache = KmemCache::builder("sound", layout)
            .debug(DebugFlags::DEFAULT)
            .build()
            .unwrap();
        let mut objects = vec![null_mut(); 300];
        assert_eq!(cache.alloc_bulk(&mut objects), 300);
        for &object in &objects {
            assert_eq!(object as usize % align, 0);
            // SAFETY: the test owns the object, which has `size` bytes.
            unsafe { object.write_bytes(7, size) };
        }
        assert_eq!(validate(&cache).0, 0);
        // SAFETY: the objects came from this cache and are not used afterwards.
        unsafe { cache.free_bulk(&objects) };
        assert_eq!(validate(&cache).0, 0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let mut mine = Vec::new();
                    for turn in 0..2000usize {
                        let object = cache.alloc().unwrap();
                        // SAFETY: this thread owns the object, which has `size` bytes.
                        unsafe { object.as_ptr().write_bytes(turn as u8, size) };
                        mine.push(object);
                        if turn % 3 > 0 {
                            free(&cache, mine.swap_remove(turn * 7 % mine.len()));
                        }
                    }
                    mine.into_iter().for_each(|object| free(&cache, object));
                    assert_eq!(reports().len(), 0);
                });
            }
        });
        assert_eq!(validate(&cache).0, 0);
        cache.shrink().unwrap();
        assert_eq!(cache.statistics().slabs, 0);
        cache.destroy().unwrap();
    }
}

/// The smallest and the largest layouts, with and without checks.
#[test]
fn layouts_at_the_bounds() {
    for (size, align) in [
        (0, 1),
        (0, 65536),
        (1, 65536),
        (65536, 1),
        (65536, 65536),
        (40_000, 32768),
    ] {
        for (hardened, flags) in [
            (false, DebugFlags::NONE),
            (true, DebugFlags::NONE),
            (false, DebugFlags::DEFAULT),
            (false, DebugFlags::RED_ZONE),
            (false, DebugFlags::POISON),
        ] {
            let layout = Layout::from_size_align(size, align).unwrap();
            let builder = KmemCache::builder("bounds", layout);
            let cache = builder.hardened(hardened).debug(flags).build().unwrap();
            let objects: Vec<_> = (0..40).map(|_| cache.alloc().unwrap()).collect();
            for (nth, object) in objects.iter().enumerate() {
                assert_eq!(object.as_ptr() as usize % align, 0);
                // SAFETY: the test owns the object, which has `size` bytes.
                unsafe { object.as_ptr().write_bytes(nth as u8, size) };
            }
            for (nth, object) in objects.iter().enumerate() {
                // SAFETY: the test owns the object, and wrote its `size` bytes above.
                let bytes = unsafe { std::slice::from_raw_parts(object.as_ptr(), size) };
                assert!(bytes.iter().all(|&byte| byte == nth as u8));
            }
            cache.validate().unwrap();
            objects.into_iter().for_each(|object| free(&cache, object));
            cache.validate().unwrap();
            assert!(cache.destroy().is_ok_and(|()| reports().is_empty()));
        }
    }
}

/// Free objects with a constructor keep their bytes.
#[test]
fn constructed_objects_are_not_poisoned() {
    unsafe fn construct(object: *mut u8) {
        // SAFETY: the cache's objects have 64 bytes.
        unsafe { object.write_bytes(0x11, 64) };
    }
    let layout = Layout::from_size_align(64, 8).unwrap();
    let builder = KmemCache::builder("constructed", layout).debug(DebugFlags::DEFAULT);
    // SAFETY: `construct` initialises all 64 bytes of an object, and cannot unwind.
    let cache = unsafe { builder.constructor(construct) }.build().unwrap();
    assert!(!cache.debug_flags().contains(DebugFlags::POISON));
    for _ in 0..3 {
        let object = cache.alloc().unwrap();
        // SAFETY: the test owns the object, and the constructor wrote its 64 bytes.
        let bytes = unsafe { std::slice::from_raw_parts(object.as_ptr(), 64) };
        assert!(bytes.iter().all(|&byte| byte == 0x11));
        free(&cache, object);
    }
    cache.destroy().unwrap();
}

static STASH: [AtomicPtr<u8>; 64] = [const { AtomicPtr::new(null_mut()) }; 64];
static WATCHED: AtomicPtr<KmemCache> = AtomicPtr::new(null_mut());

extern "C" fn free_one(_: libc::c_int) {
    // SAFETY: `WATCHED` is null, or points to a cache that lives longer than the timer.
    let cache = unsafe { WATCHED.load(Acquire).as_ref() };
    let object = STASH
        .iter()
        .find_map(|place| NonNull::new(place.swap(null_mut(), AcqRel)));
    if let (Some(cache), Some(object)) = (cache, object) {
        free(cache, object);
    }
}

/// A signal handler frees objects while its thread checks all objects.
#[test]
fn frees_by_signal_handlers_are_not_reported() {
    for (size, flags) in [
        (1, DebugFlags::DEFAULT),
        (100, DebugFlags::DEFAULT),
        (24, DebugFlags::RED_ZONE),
        (24, DebugFlags::POISON | DebugFlags::CONSISTENCY),
    ] {
        on_report(keep);
        let layout = Layout::from_size_align(size, 1).unwrap();
        let cache = KmemCache::builder("interrupted", layout)
            .debug(flags)
            .build()
            .unwrap();
        // Enough objects that most signals arrive during a check.
        let others: Vec<_> = (0..2000).map(|_| cache.alloc().unwrap()).collect();
        WATCHED.store((&raw const cache).cast_mut(), Release);
        let timer = Timer::start(libc::SIGUSR1, free_one, 100);
        for turn in 0..300 {
            for place in &STASH {
                if place.load(Acquire).is_null()
                    && let Some(object) = cache.alloc()
                {
                    // SAFETY: the test owns the object, which has `size` bytes.
                    unsafe { object.as_ptr().write_bytes(turn as u8, size) };
                    place.store(object.as_ptr(), Release);
                }
            }
            cache.validate().unwrap();
        }
        drop(timer);
        WATCHED.store(null_mut(), Release);
        for place in &STASH {
            if let Some(object) = NonNull::new(place.swap(null_mut(), AcqRel)) {
                free(&cache, object);
            }
        }
        others.into_iter().for_each(|object| free(&cache, object));
        assert_eq!(validate(&cache).0, 0);
        assert_eq!(reports().len(), 0);
        cache.destroy().unwrap();
    }
}
