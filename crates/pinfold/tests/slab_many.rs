//! Caches that are made and destroyed again and again: memory does not grow, and no thread that
//! looks at caches meanwhile takes one cache for another.
//!
//! `PINFOLD_MANY` sets how many caches each test makes.

mod common;

use common::{StopAtEnd, cpus, from_environment, in_child, stay_on_one_cpu};
use pinfold::internal::arena;
use pinfold::slab::{Builder, DebugFlags, Info, KmemCache, Statistics, caches, slabinfo};
use std::alloc::Layout;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Rounds before the memory is measured: everything that is made once has been made by then.
const WARM: u64 = 300;

/// Bytes that may be mapped after that, however many caches there are: the shepherd's records of a
/// CPU are made at a tick, half a second after the start.
const ONCE: u64 = 512 << 10;

/// Runs one test at a time, because all of them measure the memory of the process.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn many() -> u64 {
    from_environment("PINFOLD_MANY", 20_000)
}

/// The sizes of the objects differ from cache to cache, and the name tells the size.
fn size_of(nth: u64) -> usize {
    8 + (nth as usize * 24) % 1500
}

/// Makes the `nth` cache, uses it, and destroys it.
fn use_one(nth: u64, settings: impl Fn(Builder<'_>) -> Builder<'_>, deferred: bool) {
    let size = size_of(nth);
    let name = format!("many-{size}");
    let layout = Layout::from_size_align(size, 8).unwrap();
    let cache = settings(KmemCache::builder(&name, layout)).build().unwrap();
    assert_eq!(cache.name(), name);
    // Nothing of the last cache with this descriptor is left.
    assert_eq!(cache.usage(), Default::default());
    let mut counted = cache.statistics();
    counted.sheaf_capacity = 0;
    assert_eq!(counted, Statistics::default());
    let objects: Vec<_> = (0..1 + nth % 5).map(|_| cache.alloc().unwrap()).collect();
    for object in objects {
        // SAFETY: the object came from this cache, which frees it once. No reader knows it.
        unsafe {
            object.write_bytes(nth as u8, size);
            match deferred {
                true => cache.free_deferred(object),
                false => cache.free(object),
            }
        }
    }
    cache.destroy().unwrap();
}

/// Asserts that the memory for the allocator's own structures stays level during `rounds` calls of
/// `f`.
fn assert_level(rounds: u64, mut f: impl FnMut(u64)) {
    // Each further CPU has records of its own.
    stay_on_one_cpu();
    (0..WARM).for_each(&mut f);
    let before = arena::metadata_mapped();
    (WARM..WARM + rounds).for_each(&mut f);
    let grown = arena::metadata_mapped() - before;
    assert!(grown <= ONCE, "{grown} bytes more after {rounds} caches");
}

// A program that makes a cache for each connection must not grow.
#[test]
fn caches_made_and_destroyed_take_no_memory() {
    let _turn = turn();
    assert_level(many(), |nth| use_one(nth, |builder| builder, false));
}

#[test]
fn caches_with_deferred_frees_take_no_memory() {
    let _turn = turn();
    assert_level(many() / 10, |nth| use_one(nth, |builder| builder, true));
}

#[test]
fn caches_that_check_take_no_memory() {
    let _turn = turn();
    let checks = DebugFlags::POISON | DebugFlags::RED_ZONE | DebugFlags::USER;
    assert_level(many() / 10, |nth| {
        use_one(nth, |builder| builder.hardened(true), nth % 2 == 0);
        use_one(nth, |builder| builder.debug(checks), nth % 2 == 0);
    });
}

// Several caches live at once, and each gets another's descriptor later.
#[test]
fn caches_that_overlap_take_no_memory() {
    let _turn = turn();
    let mut alive = Vec::new();
    assert_level(many() / 4, |nth| {
        let size = size_of(nth);
        let layout = Layout::from_size_align(size, 8).unwrap();
        alive.push(KmemCache::new(&format!("many-{size}"), layout).unwrap());
        if alive.len() == 40 {
            alive.drain(..30).for_each(|cache| cache.destroy().unwrap());
        }
    });
}

#[test]
fn caches_in_a_forked_child_take_no_memory() {
    let _turn = turn();
    use_one(0, |builder| builder, false);
    in_child(600, || {
        assert_level(many() / 10, |nth| use_one(nth, |builder| builder, false));
        true
    });
}

/// Checks that a view shows one cache, or a destroyed one, and never parts of two.
fn check(info: Info) {
    let size_in_name = info.name().strip_prefix("many-");
    let Some(size) = size_in_name.and_then(|size| size.parse::<u64>().ok()) else {
        return;
    };
    let (name, usage) = (info.name().to_owned(), info.usage());
    assert_eq!(info.attribute("object_size"), Some(size), "{name}");
    assert!(
        usage.allocated <= 1000 && usage.slabs <= 8,
        "{name}: {usage:?}"
    );
    assert_eq!(info.name(), name);
}

// Threads that read all caches, one that keeps views of destroyed caches, one that gives everything
// back, and a shepherd's ticks, while two threads make and destroy caches.
#[test]
fn threads_that_look_meanwhile_see_whole_caches() {
    let _turn = turn();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        let running = || !stop.load(Ordering::Relaxed);
        scope.spawn(move || {
            while running() {
                caches().for_each(check);
            }
        });
        scope.spawn(move || {
            let mut kept: Vec<Info> = Vec::new();
            while running() {
                kept.extend(caches().filter(|info| info.name().starts_with("many-")));
                kept.iter().copied().for_each(check);
                for gone in kept.iter().filter(|info| info.is_destroyed()) {
                    assert_eq!(gone.usage(), Default::default());
                    assert_eq!(gone.statistics(), Statistics::default());
                    assert!(gone.slabinfo().to_string().lines().count() == 2);
                }
                let excess = kept.len().saturating_sub(200);
                kept.drain(..excess);
            }
        });
        let shepherd = pinfold::shepherd::Shepherd::new();
        scope.spawn(move || {
            while running() {
                for line in slabinfo().to_string().lines().skip(2) {
                    let mut words = line.split_whitespace();
                    let (name, slot) = (words.next().unwrap(), words.nth(2).unwrap());
                    if let Some(size) = name.strip_prefix("many-") {
                        let (size, slot): (u64, u64) =
                            (size.parse().unwrap(), slot.parse().unwrap());
                        assert_eq!(slot, size.next_multiple_of(8), "{line}");
                    }
                }
                pinfold::slab::shrink_all().unwrap();
                shepherd.tick();
            }
        });
        let maker = |first: u64| {
            move || {
                for nth in 0..many() / 20 {
                    use_one(2 * nth + first, |builder| builder, nth % 3 == 0);
                }
            }
        };
        let other = scope.spawn(maker(1));
        // At most one more descriptor for each thread that looks.
        let before = arena::metadata_mapped();
        maker(0)();
        other.join().unwrap();
        let grown = arena::metadata_mapped() - before;
        let records = ONCE * cpus() as u64;
        assert!(grown <= (1 << 20) + records, "{grown} bytes more");
    });
}
