//! A table that readers use without a lock: `cargo run --release -p pinfold --example grace`.
//!
//! A reader enters, and may then use the table that it finds. A writer puts a new table in place
//! and frees the old one deferred: after all readers that may still use it have left.

use pinfold::slab::{CacheError, KmemCache, grace};
use std::alloc::Layout;
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::thread;

/// The sum of all entries is 0 in every table.
type Table = [i64; 64];

/// Makes a table with `value` in its first entry and `-value` in its last one.
fn table(cache: &KmemCache, value: i64) -> *mut Table {
    let object = cache.alloc().expect("there is memory").cast::<Table>();
    let mut table = [0; 64];
    (table[0], table[63]) = (value, -value);
    // SAFETY: the object is fresh, and has the size and alignment of a table.
    unsafe { object.write(table) };
    object.as_ptr()
}

fn main() -> Result<(), CacheError> {
    let cache = KmemCache::new("table", Layout::new::<Table>())?;
    let current = AtomicPtr::new(table(&cache, 0));
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..100_000 {
                    let _reader = grace::enter();
                    // SAFETY: the writer frees this table only after `_reader` is dropped. Acquire
                    // pairs with the release in the writer's swap, so the table is complete.
                    let table = unsafe { &*current.load(Acquire) };
                    assert_eq!(table.iter().sum::<i64>(), 0);
                }
            });
        }
        for value in 1..10_000 {
            let old = current.swap(table(&cache, value), AcqRel);
            let old = std::ptr::NonNull::new(old).expect("there is always a table");
            // SAFETY: `old` came from this cache, new readers cannot find it, and it is freed once.
            unsafe { cache.free_deferred(old.cast()) };
        }
    });
    println!("{:?}", cache.usage());
    Ok(())
}
