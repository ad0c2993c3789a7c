//! Objects that show when they were freed under a reader.

use pinfold::slab::KmemCache;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// Whether what waits can be flushed: else the tests' caches keep their objects.
pub fn can_fence() -> bool {
    pinfold_rseq::init(pinfold_rseq::Index::Cid) == pinfold_rseq::Backend::Atomic
        || pinfold_rseq::fence().is_ok()
}

/// What readers look at: a number that no other object ever had, twice, and who frees it destroys both.
pub struct Item {
    canary: AtomicU64,
    again: [AtomicU64; 7],
}

pub const DEAD: u64 = 0xdead_dead_dead_dead;

pub fn make(cache: &KmemCache) -> NonNull<u8> {
    let object = cache.alloc().unwrap();
    number(object);
    object
}

/// Gives an object its number; whoever still looks at what was there before sees that it is gone.
pub fn number(object: NonNull<u8>) {
    static NUMBER: AtomicU64 = AtomicU64::new(1);
    // SAFETY: an object is large enough for an item, and any bits are one.
    let item = unsafe { object.cast::<Item>().as_ref() };
    item.canary.store(DEAD, Relaxed);
    let number = NUMBER.fetch_add(1, Relaxed);
    item.again
        .iter()
        .for_each(|word| word.store(number, Relaxed));
    item.canary.store(number, Relaxed);
}

/// Looks at an item several times over: it is the same all the time.
pub fn look(item: &Item, looks: u64) {
    let number = item.canary.load(Relaxed);
    assert_ne!(number, DEAD, "a reader sees a freed object");
    for _ in 0..looks {
        for word in &item.again {
            assert_eq!(
                word.load(Relaxed),
                number,
                "an object changed under a reader"
            );
        }
        std::hint::spin_loop();
    }
    assert_eq!(item.canary.load(Relaxed), number);
}
