//! Typed caches as a user sees them, on the backend that `PINFOLD_RSEQ` selects.

use pinfold::slab::{
    Cache, CacheError, Handle, Kept, ObjectCache, Reusable, Shared, SharedCache, TryAllocError,
    UninitHandle,
};
use std::cell::Cell;
use std::collections::HashSet;
use std::panic::catch_unwind;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Barrier, LazyLock};
use std::thread;

#[cfg(feature = "allocator-api2")]
mod typed_collections;

/// A value that counts its drops.
#[derive(Debug)]
struct Counts<'a>(&'a AtomicUsize);

impl Drop for Counts<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

fn is_send<T: Send>() {}
fn is_sync<T: Sync>() {}

/// The documentation of the types has examples for the opposite: handles that must not be sent or
/// shared, which do not compile.
#[test]
fn handles_are_send_and_sync_as_their_values_are() {
    type Local = Cell<*const u8>;
    is_send::<Cache<Local>>();
    is_sync::<Cache<Local>>();
    is_send::<SharedCache<Local>>();
    is_sync::<SharedCache<Local>>();
    is_send::<Handle<'_, Cell<u8>>>();
    is_send::<UninitHandle<'_, Cell<u8>>>();
    is_sync::<Handle<'_, std::sync::MutexGuard<'_, u8>>>();
    is_send::<Shared<'_, String>>();
    is_sync::<Shared<'_, String>>();
    is_send::<ObjectCache<Tally>>();
    is_sync::<ObjectCache<Tally>>();
    is_send::<Kept<'_, Tally>>();
}

#[test]
fn values_drop_exactly_once() {
    let drops = AtomicUsize::new(0);
    let cache = Cache::new("drops").unwrap();
    drop(cache.alloc(Counts(&drops)).unwrap());
    assert_eq!(drops.load(Ordering::Relaxed), 1);
    let value = Handle::into_inner(cache.alloc_with(|| Counts(&drops)).unwrap());
    assert_eq!(drops.load(Ordering::Relaxed), 1);
    drop(value);
    assert_eq!(drops.load(Ordering::Relaxed), 2);
    let raw = Handle::into_raw(cache.alloc(Counts(&drops)).unwrap());
    // SAFETY: `into_raw` returned `raw` from a handle of this cache, and it is passed once.
    drop(unsafe { Handle::from_raw(raw, &cache) });
    assert_eq!(drops.load(Ordering::Relaxed), 3);
    drop(Handle::into_pin(cache.alloc(Counts(&drops)).unwrap()));
    assert_eq!(drops.load(Ordering::Relaxed), 4);
    drop(cache.alloc_uninit().unwrap());
    let written = cache.alloc_uninit().unwrap().write(Counts(&drops));
    drop(written);
    assert_eq!(drops.load(Ordering::Relaxed), 5);
    cache.destroy().unwrap();
}

#[test]
fn constructors_that_fail_or_panic_give_the_object_back() {
    let cache = Cache::<String>::new("fails").unwrap();
    let error = cache.try_alloc_with(|| Err("no name")).unwrap_err();
    assert_eq!(error, TryAllocError::Constructor("no name"));
    assert_eq!(error.to_string(), "the constructor failed: no name");
    for _ in 0..100 {
        assert!(catch_unwind(|| cache.alloc_with(|| panic!("in a constructor"))).is_err());
        let tried = catch_unwind(|| cache.try_alloc_with(|| -> Result<_, ()> { panic!("too") }));
        assert!(tried.is_err());
    }
    let name = cache.try_alloc_with(|| "7".parse()).unwrap();
    assert_eq!(*name, "7");
    drop(name);
    cache.destroy().unwrap();

    let shared = SharedCache::<String>::new("fails").unwrap();
    assert!(catch_unwind(|| shared.alloc_with(|| panic!("in a constructor"))).is_err());
    assert!(shared.try_alloc_with(|| Err(())).is_err());
    shared.destroy().unwrap();
}

#[test]
fn destructors_may_panic_and_use_the_cache() {
    struct Panics;
    impl Drop for Panics {
        fn drop(&mut self) {
            panic!("in a destructor");
        }
    }
    let cache = Cache::new("panics").unwrap();
    let shared = SharedCache::new("panics").unwrap();
    for _ in 0..10 {
        let handle = cache.alloc_with(|| Panics).unwrap();
        assert!(catch_unwind(|| drop(handle)).is_err());
        let handle = shared.alloc_with(|| Panics).unwrap();
        let other = handle.clone();
        drop(handle);
        assert!(catch_unwind(|| drop(other)).is_err());
    }
    cache.destroy().unwrap();
    shared.destroy().unwrap();

    struct Node {
        _next: Option<Handle<'static, Node>>,
    }
    static NODES: LazyLock<Cache<Node>> = LazyLock::new(|| Cache::new("nodes").unwrap());
    let mut list = NODES.alloc_with(|| Node { _next: None }).unwrap();
    for _ in 0..1000 {
        list = NODES.alloc(Node { _next: Some(list) }).ok().unwrap();
    }
    assert!(NODES.raw().in_use() > 1000);
    drop(list);
    NODES.raw().shrink().ok();
    if pinfold_rseq::fence().is_ok() {
        assert_eq!(NODES.raw().in_use(), 0);
    }
}

#[test]
fn leaked_values_stay_and_are_reported() {
    let cache = Cache::new("leaks").unwrap();
    let leaked = Handle::leak(cache.alloc(String::from("still")).unwrap());
    leaked.push_str(" here");
    assert_eq!(leaked, "still here");
    assert_eq!(cache.destroy().unwrap_err().objects, 1);

    static TABLES: LazyLock<Cache<[u8; 3]>> = LazyLock::new(|| Cache::new("tables").unwrap());
    let table: &'static mut [u8; 3] = Handle::leak(TABLES.alloc([1, 2, 3]).unwrap());
    table[0] = 9;
    assert_eq!(table, &[9, 2, 3]);
}

#[test]
fn pinned_values_do_not_move() {
    let cache = Cache::new("pinned").unwrap();
    let pinned = Handle::into_pin(cache.alloc(std::marker::PhantomPinned).unwrap());
    let at: *const _ = &raw const *pinned;
    let stored: Vec<Pin<Handle<'_, _>>> = vec![pinned];
    assert_eq!(&raw const *stored[0], at);
}

#[test]
#[expect(
    clippy::mutable_key_type,
    reason = "a handle's hash and order are its value's; what is mutable is the cache behind it"
)]
fn handles_stand_for_their_values() {
    let cache = Cache::new("words").unwrap();
    let shared = SharedCache::new("words").unwrap();
    let word = |text: &str| cache.alloc(String::from(text)).unwrap();
    assert_eq!(word("a"), word("a"));
    assert!(word("a") < word("b"));
    assert_eq!(format!("{} {:?}", word("a"), word("b")), "a \"b\"");
    assert_eq!(
        format!("{:p}", shared.alloc(1).unwrap()).get(..2),
        Some("0x")
    );
    let mut words: HashSet<Handle<'_, String>> = ["x", "y", "x"].into_iter().map(word).collect();
    assert_eq!(words.len(), 2);
    // `Borrow` finds the handle by the value's hash.
    assert!(words.remove(&String::from("y")));
    assert_eq!(AsRef::<String>::as_ref(&word("as ref")), "as ref");
    let mut changed = word("chang");
    changed.as_mut().push_str("ed");
    assert_eq!(*changed, "changed");
}

#[test]
fn odd_layouts_are_served() {
    #[repr(align(4096))]
    struct Page(u8);
    let pages = Cache::new("pages").unwrap();
    let held: Vec<_> = (0..50)
        .map(|n| pages.alloc(Page(n)).ok().unwrap())
        .collect();
    for (n, page) in held.iter().enumerate() {
        assert_eq!(
            (usize::from(page.0), &raw const **page as usize % 4096),
            (n, 0)
        );
    }
    drop(held);
    pages.destroy().unwrap();

    let shared = SharedCache::new("shared pages").unwrap();
    let page = shared.alloc(Page(1)).ok().unwrap();
    assert_eq!(&raw const *page as usize % 4096, 0);
    drop(page);
    shared.destroy().unwrap();

    let units = Cache::new("units").unwrap();
    let held: Vec<_> = (0..1000).map(|_| units.alloc(()).unwrap()).collect();
    drop(held);
    units.destroy().unwrap();
    let shared = SharedCache::new("units").unwrap();
    let unit = shared.alloc(()).unwrap();
    assert_eq!(Shared::strong_count(&unit.clone()), 2);
    drop(unit);
    shared.destroy().unwrap();
    assert!(matches!(
        Cache::<[u8; 100_000]>::new("large"),
        Err(CacheError::TooLarge)
    ));
}

#[test]
fn handles_cross_threads() {
    let drops = AtomicUsize::new(0);
    let cache = Cache::new("crossing").unwrap();
    thread::scope(|scope| {
        let (send, receive) = std::sync::mpsc::sync_channel(100);
        let cache = &cache;
        let drops = &drops;
        scope.spawn(move || {
            for _ in 0..20_000 {
                send.send(cache.alloc(Counts(drops)).unwrap()).unwrap();
            }
        });
        scope.spawn(move || receive.into_iter().for_each(drop));
    });
    assert_eq!(drops.load(Ordering::Relaxed), 20_000);
    cache.raw().validate().unwrap();
    cache.destroy().unwrap();
}

#[test]
fn a_shared_value_drops_with_its_last_handle() {
    const ROUNDS: usize = 20;
    let drops = AtomicUsize::new(0);
    let cache = SharedCache::new("shared").unwrap();
    for _ in 0..ROUNDS {
        let first = cache.alloc(Counts(&drops)).unwrap();
        let begin = Barrier::new(3);
        thread::scope(|scope| {
            for _ in 0..3 {
                let (mine, begin) = (first.clone(), &begin);
                scope.spawn(move || {
                    begin.wait();
                    for _ in 0..5000 {
                        assert!(Shared::strong_count(&mine.clone()) >= 2);
                    }
                });
            }
            drop(first);
        });
    }
    assert_eq!(drops.load(Ordering::Relaxed), ROUNDS);
    cache.destroy().unwrap();
}

#[test]
fn exactly_one_thread_gets_the_value() {
    let cache = SharedCache::new("one").unwrap();
    for round in 0..500 {
        let first = cache.alloc(round.to_string()).unwrap();
        let second = first.clone();
        let (mine, theirs) = thread::scope(|scope| {
            let other = scope.spawn(|| Shared::into_inner(second));
            (Shared::into_inner(first), other.join().unwrap())
        });
        assert_eq!(mine.xor(theirs), Some(round.to_string()));
    }
    cache.destroy().unwrap();
}

#[test]
fn the_only_handle_gives_access_to_the_value() {
    let cache = SharedCache::new("alone").unwrap();
    let mut number = cache.alloc(1).unwrap();
    *Shared::get_mut(&mut number).unwrap() += 1;
    let other = number.clone();
    assert!(Shared::ptr_eq(&number, &other));
    assert!(Shared::get_mut(&mut number).is_none());
    let number = Shared::try_unwrap(number).unwrap_err();
    drop(other);
    assert_eq!(Shared::try_unwrap(number), Ok(2));
    cache.destroy().unwrap();
}

/// A value that counts its uses.
#[derive(Debug)]
struct Tally {
    uses: u64,
    open: bool,
    _large: [u64; 50],
}

impl Reusable for Tally {
    const NEW: Tally = Tally {
        uses: 0,
        open: false,
        _large: [7; 50],
    };

    fn reset(&mut self) {
        assert!(self.uses < 1_000_000, "reset panics");
        self.open = false;
    }
}

#[test]
fn kept_values_stay_as_they_are_left() {
    let cache = ObjectCache::<Tally>::new("tallies").unwrap();
    for n in 0..3 {
        let mut held: Vec<_> = (0..1000).map(|_| cache.alloc().unwrap()).collect();
        for tally in &mut held {
            assert!(!tally.open && tally._large == [7; 50]);
            // A reused value has counted its uses; a new one has none.
            assert!(tally.uses <= n);
            tally.uses += 1;
            tally.open = true;
        }
        if n == 2 {
            assert!(held.iter().any(|tally| tally.uses > 1));
        }
    }
    cache.raw().validate().unwrap();
    cache.destroy().unwrap();
}

#[test]
fn a_reset_that_panics_loses_no_object() {
    let cache = ObjectCache::<Tally>::new("tallies").unwrap();
    let mut tally = cache.alloc().unwrap();
    tally.uses = 1_000_000;
    let dropped = catch_unwind(std::panic::AssertUnwindSafe(|| drop(tally)));
    assert!(dropped.is_err());
    cache.destroy().unwrap();
}

#[test]
fn a_kept_value_has_one_thread_at_a_time() {
    let cache = ObjectCache::<Tally>::new("tallies").unwrap();
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..10_000 {
                    let mut tally = cache.alloc().unwrap();
                    assert!(!std::mem::replace(&mut tally.open, true));
                    tally.uses = 0;
                }
            });
        }
    });
    cache.destroy().unwrap();
}
