//! Objects that show whether they were freed under a reader.

use pinfold::slab::KmemCache;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// Returns whether deferred objects can be flushed. If not, the tests' caches keep their objects.
pub fn can_fence() -> bool {
    pinfold_rseq::init(pinfold_rseq::Index::Cid) == pinfold_rseq::Backend::Atomic
        || pinfold_rseq::fence().is_ok()
}

/// An object that readers look at. It holds a number that no other object ever had, several times.
/// `number` replaces all of them.
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

/// Gives an object a new number. A reader that still looks at the object's old content notices.
pub fn number(object: NonNull<u8>) {
    static NUMBER: AtomicU64 = AtomicU64::new(1);
    // SAFETY: an object is as large as an `Item`, whose words are valid for any bits.
    let item = unsafe { object.cast::<Item>().as_ref() };
    item.canary.store(DEAD, Relaxed);
    let number = NUMBER.fetch_add(1, Relaxed);
    item.again
        .iter()
        .for_each(|word| word.store(number, Relaxed));
    item.canary.store(number, Relaxed);
}

/// Reads an item several times, and checks that it does not change.
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
