//! Hardened caches in forked children: the children have new keys, and still find every fault.

mod common;

use common::reports::free;
use common::timer::Timer;
use common::{stay_on_one_cpu, take};
use pinfold::slab::KmemCache;
use pinfold::slab::debug::{Kind, Report, Verdict, on_report};
use std::alloc::Layout;
use std::cell::RefCell;
use std::collections::HashSet;
use std::ptr::{NonNull, null_mut};
use std::sync::OnceLock;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

const SIZE: usize = 64;

type Object = NonNull<u8>;

thread_local! {
    static REPORTS: RefCell<Vec<(Kind, Object)>> = const { RefCell::new(Vec::new()) };
}

fn keep(report: &Report<'_>) -> Verdict {
    let object = NonNull::new(report.object.cast_mut()).unwrap();
    REPORTS.with(|reports| reports.borrow_mut().push((report.kind, object)));
    Verdict::Continue
}

fn reports() -> Vec<(Kind, Object)> {
    REPORTS.with(|reports| reports.borrow_mut().split_off(0))
}

fn hardened(name: &str) -> KmemCache {
    stay_on_one_cpu();
    on_report(keep);
    KmemCache::builder(name, Layout::from_size_align(SIZE, 8).unwrap())
        .hardened(true)
        .build()
        .unwrap()
}

fn words(object: Object) -> &'static mut [u64] {
    // SAFETY: the object is of one of the test's caches, aligned, and has `SIZE` bytes, which stay
    // mapped after a free.
    unsafe { std::slice::from_raw_parts_mut(object.as_ptr().cast(), SIZE / 8) }
}

/// Runs `f` in a forked child, and fails if `f` fails there.
#[track_caller]
fn in_child(f: impl FnOnce()) {
    common::in_child(60, || {
        f();
        true
    });
}

/// Returns a page that forked children share with the test.
fn shared_words() -> &'static mut [u64] {
    // SAFETY: `mmap` returned a new page, which is never unmapped, and zeroes are valid numbers.
    unsafe {
        let (rights, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_ANONYMOUS,
        );
        let at = libc::mmap(null_mut(), 4096, rights, flags, -1, 0);
        assert_ne!(at, libc::MAP_FAILED);
        std::slice::from_raw_parts_mut(at.cast(), 512)
    }
}

/// Frees every second object. Returns the freed ones and the others.
fn free_half(cache: &KmemCache, objects: Vec<Object>) -> (Vec<Object>, Vec<Object>) {
    let freed: Vec<_> = objects.iter().copied().step_by(2).collect();
    let kept = objects.into_iter().skip(1).step_by(2).collect();
    freed.iter().for_each(|&object| free(cache, object));
    (freed, kept)
}

#[test]
fn keys_reveal_neither_other_keys_nor_the_secret() {
    let cache = hardened("keys");
    let (freed, _kept) = free_half(&cache, take(&cache, 400));
    let pairs = || {
        freed
            .iter()
            .map(|&object| (object.as_ptr() as u64, words(object)[0]))
    };
    // Relations between an address and its key, by the operations that an attacker would try first.
    let relations: [fn((u64, u64)) -> u64; 4] = [
        |(at, key)| key ^ at,
        |(at, key)| key ^ at.swap_bytes(),
        |(at, key)| key.wrapping_sub(at),
        |(at, key)| key.wrapping_sub(at.swap_bytes()),
    ];
    for relation in relations {
        let distinct: HashSet<_> = pairs().map(relation).collect();
        assert_eq!(distinct.len(), freed.len());
    }
    // No bit of the address may go straight into the key: keys of neighbours must differ in about
    // half of the bits that are not the same in all keys.
    let fixed = pairs().fold((u64::MAX, u64::MAX), |(ones, zeroes), (_, key)| {
        (ones & key, zeroes & !key)
    });
    let varying = (!(fixed.0 | fixed.1)).count_ones();
    assert!(varying >= 48, "{varying} bits of the keys vary");
    let keys: Vec<_> = pairs().map(|(_, key)| key).collect();
    let differing: u32 = keys
        .windows(2)
        .map(|pair| (pair[0] ^ pair[1]).count_ones())
        .sum();
    let share = f64::from(differing) / f64::from(varying) / (keys.len() - 1) as f64;
    assert!((0.45..0.55).contains(&share), "{share} of the bits differ");
}

#[test]
fn children_have_keys_of_their_own() {
    let cache = hardened("own");
    let objects = take(&cache, 8);
    let told = shared_words();
    for child in 0..2 {
        in_child(|| {
            free(&cache, objects[0]);
            told[child] = words(objects[0])[0];
            in_child(|| {
                free(&cache, objects[1]);
                told[2 + child] = words(objects[1])[0];
            });
            free(&cache, objects[1]);
            told[4 + child] = words(objects[1])[0];
        });
    }
    free(&cache, objects[0]);
    free(&cache, objects[1]);
    let first: HashSet<_> = [told[0], told[1], words(objects[0])[0]].into();
    assert_eq!(first.len(), 3, "{first:x?}");
    let second = [told[2], told[3], told[4], told[5], words(objects[1])[0]];
    assert_eq!(HashSet::from(second).len(), 5, "{second:x?}");
    assert_eq!(reports(), []);
}

#[test]
fn objects_freed_before_the_fork_are_given_out_after_it() {
    let cache = hardened("before");
    let (freed, kept) = free_half(&cache, take(&cache, 8000));
    in_child(|| {
        let more: Vec<_> = kept.iter().copied().take(2000).collect();
        more.iter().for_each(|&object| free(&cache, object));
        in_child(|| {
            let all: HashSet<_> = take(&cache, 20_000).into_iter().collect();
            assert_eq!(reports(), []);
            for part in [&freed, &more] {
                let again = part.iter().filter(|object| all.contains(object)).count();
                assert!(
                    again >= 1000,
                    "{again} of {} were given out again",
                    part.len()
                );
            }
            assert!(all.iter().all(|&object| words(object) == [0; SIZE / 8]));
            all.iter().for_each(|&object| free(&cache, object));
            assert_eq!(reports(), []);
        });
        let all: HashSet<_> = take(&cache, 20_000).into_iter().collect();
        assert_eq!(reports(), []);
        assert!(freed.iter().filter(|object| all.contains(object)).count() >= 1000);
    });
}

#[test]
fn a_second_free_is_found_across_forks() {
    let cache = hardened("twice");
    let objects = take(&cache, 100);
    free(&cache, objects[0]);
    in_child(|| {
        free(&cache, objects[0]);
        free(&cache, objects[1]);
        free(&cache, objects[1]);
        let twice = |nth: usize| (Kind::DoubleFree, objects[nth]);
        assert_eq!(reports(), [twice(0), twice(1)]);
        in_child(|| {
            (0..3).for_each(|nth| free(&cache, objects[nth]));
            free(&cache, objects[2]);
            assert_eq!(reports(), [twice(0), twice(1), twice(2)]);
            objects[3..].iter().for_each(|&object| free(&cache, object));
            assert_eq!(reports(), []);
        });
    });
}

#[test]
fn a_write_after_the_free_is_found_across_forks() {
    let cache = hardened("after");
    let objects = take(&cache, 100);
    free(&cache, objects[0]);
    let look = |expected: &[Object]| {
        if cache.shrink().is_err() {
            return;
        }
        let all: HashSet<_> = take(&cache, 20_000).into_iter().collect();
        let found = reports();
        assert!(
            found
                .iter()
                .all(|(kind, _)| *kind == Kind::WrittenAfterFree)
        );
        let found: HashSet<_> = found.into_iter().map(|(_, object)| object).collect();
        assert_eq!(found, expected.iter().copied().collect());
        assert!(found.is_disjoint(&all));
    };
    in_child(|| {
        free(&cache, objects[1]);
        in_child(|| {
            free(&cache, objects[2]);
            (0..3).for_each(|nth| words(objects[nth])[0] ^= 0x100);
            look(&objects[..3]);
        });
        // Another object's key is not accepted.
        words(objects[1])[0] = words(objects[0])[0];
        words(objects[0])[0] ^= 1 << 63;
        look(&objects[..2]);
    });
}

/// A chain of more forks than a process keeps secrets.
#[test]
fn forks_may_be_deep() {
    fn descend(cache: &KmemCache, objects: &mut Vec<Object>, freed: &mut Vec<Object>, left: u32) {
        let object = objects.pop().unwrap();
        free(cache, object);
        freed.push(object);
        if left > 0 {
            return in_child(|| descend(cache, objects, freed, left - 1));
        }
        let expected: Vec<_> = freed
            .iter()
            .map(|&object| (Kind::DoubleFree, object))
            .collect();
        freed.iter().for_each(|&object| free(cache, object));
        assert_eq!(reports(), expected);
        if cache.shrink().is_err() {
            return;
        }
        let all: HashSet<_> = take(cache, 20_000).into_iter().collect();
        assert_eq!(reports(), []);
        assert!(freed.iter().any(|object| all.contains(object)));
    }
    let cache = hardened("deep");
    let mut objects = take(&cache, 100);
    descend(&cache, &mut objects, &mut Vec::new(), 12);
}

/// Objects that a handler has set aside hold links to each other. The child decodes the links with
/// the parent's secret.
#[test]
fn objects_set_aside_before_the_fork_come_home_after_it() {
    const ROUND: usize = 400;
    static CACHE: OnceLock<KmemCache> = OnceLock::new();
    /// The objects that the handler frees. `NEXT` and `END` bound those of the current round that
    /// are left.
    static OBJECTS: OnceLock<Vec<usize>> = OnceLock::new();
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    static END: AtomicUsize = AtomicUsize::new(0);

    /// Frees more objects than the sheaves take. So it needs the node's lock, which the interrupted
    /// frame holds most of the time.
    extern "C" fn free_some(_: libc::c_int) {
        let (next, end) = (NEXT.load(Relaxed), END.load(Relaxed));
        if let (Some(cache), Some(objects)) = (CACHE.get(), OBJECTS.get())
            && next < end
        {
            for &object in &objects[next..end] {
                free(cache, NonNull::new(object as *mut u8).unwrap());
            }
            NEXT.store(end, Relaxed);
        }
    }

    let cache = CACHE.get_or_init(|| hardened("aside"));
    let kept = take(cache, 50_000).len();
    let objects = OBJECTS.get_or_init(|| {
        let objects = take(cache, 20 * ROUND).into_iter();
        objects.map(|object| object.as_ptr() as usize).collect()
    });
    let timer = Timer::start(libc::SIGUSR1, free_some, 200);
    for round in 1..=objects.len() / ROUND {
        END.store(round * ROUND, Relaxed);
        while NEXT.load(Relaxed) < round * ROUND {
            // Holds the node's lock for a long time.
            cache.validate().unwrap();
        }
        in_child(|| {
            if cache.shrink().is_ok() {
                assert_eq!(cache.in_use(), kept + objects.len() - round * ROUND);
            }
            assert_eq!(reports(), []);
            cache.validate().unwrap();
        });
    }
    drop(timer);
    assert_eq!(reports(), []);
}
