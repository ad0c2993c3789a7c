//! Readers look at objects that writers replace and free. Signal handlers in all these threads read
//! and write too. No reader sees a freed object.

mod common;

use common::items::{Item, can_fence, look, number};
use common::timer::Timer;
use common::{Random, from_environment, pin};
use pinfold::slab::{KmemCache, grace};
use std::alloc::Layout;
use std::ptr::NonNull;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicPtr, AtomicUsize};
use std::time::{Duration, Instant};

static PLACES: [AtomicPtr<Item>; 16] = [const { AtomicPtr::new(std::ptr::null_mut()) }; 16];
static CACHE: AtomicPtr<KmemCache> = AtomicPtr::new(std::ptr::null_mut());
static HANDLED: AtomicUsize = AtomicUsize::new(0);

/// Puts a new item into a place, and defers the old one.
fn replace(cache: &KmemCache, place: usize) {
    // A handler that interrupted the cache's slow path may get no object.
    let Some(fresh) = cache.alloc() else {
        return;
    };
    number(fresh);
    let old = PLACES[place % 16].swap(fresh.cast().as_ptr(), AcqRel);
    if let Some(old) = NonNull::new(old) {
        // SAFETY: the item came from this cache, and `swap` took it out of sight.
        unsafe { cache.free_deferred(old.cast()) };
    }
}

fn read(place: usize, looks: u64) {
    let _reader = grace::enter();
    let item = PLACES[place % 16].load(Acquire);
    // SAFETY: a thread that takes the item out of sight frees it deferred, so it stays until this
    // reader has left.
    if let Some(item) = unsafe { item.as_ref() } {
        look(item, looks);
    }
}

extern "C" fn on_timer(_: libc::c_int) {
    let turn = HANDLED.fetch_add(1, Relaxed);
    read(turn, 1);
    // SAFETY: `CACHE` is null, or points to a cache that outlives the timers.
    if let Some(cache) = unsafe { CACHE.load(Acquire).as_ref() } {
        replace(cache, turn);
    }
}

#[test]
fn no_reader_sees_a_freed_object() {
    if !can_fence() {
        return;
    }
    let cache = KmemCache::new("canaries", Layout::new::<Item>()).unwrap();
    let time = Duration::from_secs(from_environment("PINFOLD_STRESS_SECONDS", 3));
    (0..16).for_each(|place| replace(&cache, place));
    CACHE.store((&raw const cache).cast_mut(), Release);
    let begin = Instant::now();
    let (mut reads, mut writes) = (0, 0);
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..3)
            .map(|seed| {
                scope.spawn(move || {
                    let _timer = Timer::start(libc::SIGUSR1, on_timer, 200);
                    let (mut random, mut reads) = (Random::new(seed), 0u64);
                    while begin.elapsed() < time {
                        for _ in 0..100 {
                            let looks = if random.below(1000) == 0 { 20_000 } else { 2 };
                            read(random.below(16) as usize, looks);
                            reads += 1;
                        }
                        if random.below(50) == 0 {
                            pin(random.below(64) as usize);
                        }
                    }
                    reads
                })
            })
            .collect();
        let _timer = Timer::start(libc::SIGUSR1, on_timer, 200);
        let mut random = Random::new(7);
        while begin.elapsed() < time {
            for _ in 0..100 {
                replace(&cache, random.below(16) as usize);
                writes += 1;
            }
            if random.below(200) == 0 {
                cache.flush_deferred().unwrap();
            }
        }
        reads += readers
            .into_iter()
            .map(|reader| reader.join().unwrap())
            .sum::<u64>();
    });
    CACHE.store(std::ptr::null_mut(), Release);
    let handled = HANDLED.load(Relaxed);
    println!(
        "{reads} reads, {writes} writes, {handled} handlers, {:?}",
        cache.statistics()
    );
    assert!(reads > 1000 && writes > 1000 && handled > 100);
    for place in &PLACES {
        let last = NonNull::new(place.swap(std::ptr::null_mut(), AcqRel)).unwrap();
        // SAFETY: the item came from this cache, and all readers have left.
        unsafe { cache.free(last.cast()) };
    }
    let lost = cache.statistics().free_rcu_sheaf_fail;
    cache.flush_deferred().unwrap();
    cache.validate().unwrap();
    match cache.destroy() {
        Ok(()) => assert_eq!(lost, 0),
        Err(leak) => assert_eq!(leak.objects as u64, lost),
    }
}
