//! The capacity of sheaves: by the objects' size or chosen, within a budget.

use pinfold::shepherd::Shepherd;
use pinfold::slab::{KmemCache, set_sheaf_budget, sheaf_bytes};
use std::alloc::Layout;
use std::sync::Mutex;

/// Lets one test run at a time, because the budget belongs to the process.
static TURN: Mutex<()> = Mutex::new(());

fn cache(name: &str, size: usize) -> KmemCache {
    KmemCache::builder(name, Layout::from_size_align(size, 8).unwrap())
        .hardened(false)
        .build()
        .unwrap()
}

fn capacity(cache: &KmemCache) -> usize {
    cache.statistics().sheaf_capacity
}

/// In each pass, allocates and frees far more objects than a sheaf holds.
fn burst(cache: &KmemCache, passes: usize) {
    for _ in 0..passes {
        let objects: Vec<_> = (0..500).map(|_| cache.alloc().unwrap()).collect();
        for object in objects {
            // SAFETY: the object came from this cache and is not used afterwards.
            unsafe { cache.free(object) };
        }
    }
}

#[test]
fn caches_beyond_the_budget_have_small_sheaves() {
    let _turn = TURN.lock().unwrap();
    let before = sheaf_bytes();
    let cache = cache("bounded", 4096);
    let first = capacity(&cache);
    assert_eq!(sheaf_bytes() - before, 2 * first * 4096);
    set_sheaf_budget(sheaf_bytes());
    burst(&cache, 200);
    assert_eq!(capacity(&cache), first);
    // A cache that is made now gets the smallest sheaves.
    let late = self::cache("late", 4096);
    assert_eq!(capacity(&late), 4);
    burst(&late, 3);
    late.destroy().unwrap();
    set_sheaf_budget(16 << 20);
    cache.destroy().unwrap();
    assert_eq!(sheaf_bytes(), before);
}

#[test]
fn a_new_budget_changes_the_caches_that_exist() {
    let _turn = TURN.lock().unwrap();
    let before = sheaf_bytes();
    let cache = cache("changed", 4096);
    let chosen = KmemCache::builder("kept", Layout::new::<[u64; 512]>())
        .hardened(false)
        .sheaf_capacity(10)
        .build()
        .unwrap();
    let (first, claimed) = (capacity(&cache), sheaf_bytes());
    set_sheaf_budget(0);
    assert_eq!((capacity(&cache), capacity(&chosen)), (4, 10));
    assert!(sheaf_bytes() < claimed);
    // Sheaves of four objects need more exchanges with the barn than sheaves of 32.
    burst(&cache, 20);
    let slow = cache.statistics().alloc_slowpath;
    burst(&cache, 100);
    let slow = cache.statistics().alloc_slowpath - slow;
    assert!(slow > 100 * 500 / 8, "{slow} slow allocations");
    set_sheaf_budget(claimed);
    assert_eq!((capacity(&cache), capacity(&chosen)), (first, 10));
    assert_eq!(sheaf_bytes(), claimed);
    set_sheaf_budget(16 << 20);
    cache.destroy().unwrap();
    chosen.destroy().unwrap();
    assert_eq!(sheaf_bytes(), before);
}

#[test]
fn a_chosen_capacity_stays_and_can_be_changed() {
    let _turn = TURN.lock().unwrap();
    let cache = KmemCache::builder("chosen", Layout::new::<[u64; 8]>())
        .hardened(false)
        .sheaf_capacity(10)
        .build()
        .unwrap();
    burst(&cache, 200);
    assert_eq!(capacity(&cache), 10);
    for capacity in [125, 4, 60, 1, 1000] {
        cache.set_sheaf_capacity(capacity);
        assert_eq!(self::capacity(&cache), capacity.clamp(4, 125));
        burst(&cache, 3);
        cache.validate().unwrap();
    }
    // The capacity can also be chosen later for a cache that was made without a choice.
    let plain = self::cache("plain", 4096);
    plain.set_sheaf_capacity(4);
    burst(&plain, 200);
    assert_eq!(capacity(&plain), 4);
    plain.destroy().unwrap();
    let usage = cache.usage();
    assert_eq!(usage.active, 0, "{usage:?}");
    cache.destroy().unwrap();
}

/// Caches come and go while the shepherd visits them. Each gives back exactly the bytes that it
/// claimed.
#[test]
fn destroyed_caches_give_their_budget_back() {
    let _turn = TURN.lock().unwrap();
    let before = sheaf_bytes();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let shepherd = Shepherd::new();
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                shepherd.tick();
            }
        });
        for _ in 0..40 {
            let cache = cache("short", 8192);
            burst(&cache, 20);
            drop(cache);
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    assert_eq!(sheaf_bytes(), before);
}
