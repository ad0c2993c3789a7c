//! What the stress of the slab layer works on, and what its signal handlers do there.

use super::held::{Held, Kind, Pool, Store, found_again};
use super::items::{Item, can_fence, look, number};
use pinfold::slab::{DebugFlags, KmemCache, MemPool, grace};
use std::alloc::Layout;
use std::cell::Cell;
use std::ptr::{NonNull, null_mut};
use std::sync::Mutex;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize};

pub const KINDS: [Kind; 19] = [
    Kind::plain(8, 8),
    Kind::plain(24, 8),
    Kind::plain(64, 64),
    Kind::plain(200, 8),
    Kind::plain(1000, 8),
    Kind::plain(4096, 4096),
    Kind::plain(20_000, 16),
    Kind::plain(40, 8).constructed(),
    Kind::plain(3000, 8).constructed(),
    Kind::plain(8, 8).hardened(),
    Kind::plain(48, 16).hardened(),
    Kind::plain(5000, 8).hardened(),
    Kind::plain(40, 8).hardened().constructed(),
    Kind::plain(1, 1).debugged(DebugFlags::DEFAULT),
    Kind::plain(24, 8).debugged(DebugFlags::CONSISTENCY),
    Kind::plain(100, 4)
        .debugged(DebugFlags::DEFAULT)
        .constructed(),
    Kind::plain(256, 8).debugged(DebugFlags::RED_ZONE),
    Kind::plain(1000, 64).debugged(DebugFlags::POISON),
    Kind::plain(9000, 8).debugged(DebugFlags::DEFAULT),
];

/// Which of them have pools: a plain, a constructed, a hardened and a debugged one.
pub const POOLED: [usize; 4] = [3, 7, 10, 16];

/// Places for objects that handlers leave to later handlers: a few for each cache.
pub const STASHED: usize = 4;
/// The tag of such objects.
pub const STASH_TAG: u64 = 0x5745;

pub struct World {
    pub stores: &'static [Store],
    pub pools: Vec<Pool>,
    /// Objects that readers look at.
    pub items: KmemCache,
    pub places: [AtomicPtr<Item>; 16],
    pub stash: [[AtomicPtr<u8>; STASHED]; KINDS.len()],
    pub exchange: Mutex<Vec<(usize, Held)>>,
    pub stop: AtomicBool,
    pub fences: bool,
    pub seed: u64,
    pub operations: AtomicU64,
    pub made: AtomicUsize,
    pub forks: AtomicUsize,
}

/// What handlers work on; null while they have nothing to do.
pub static WORLD: AtomicPtr<World> = AtomicPtr::new(null_mut());
pub static HANDLED: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Handlers that this thread runs differ.
    pub static TURN: Cell<u64> = const { Cell::new(0) };
}

impl World {
    pub fn new(seed: u64) -> World {
        let stores: Vec<Store> = KINDS
            .iter()
            .enumerate()
            .map(|(nth, &kind)| Store::new(&format!("stress-{nth}"), kind))
            .collect();
        let stores: &'static [Store] = Box::leak(stores.into_boxed_slice());
        let pool = |of: usize| Pool {
            pool: MemPool::new(&stores[of].cache, 20).unwrap(),
            of,
        };
        World {
            stores,
            pools: POOLED.map(pool).into(),
            items: KmemCache::new("stress-items", Layout::new::<Item>()).unwrap(),
            places: [const { AtomicPtr::new(null_mut()) }; 16],
            stash: [const { [const { AtomicPtr::new(null_mut()) }; STASHED] }; KINDS.len()],
            exchange: Mutex::new(Vec::new()),
            stop: AtomicBool::new(false),
            fences: can_fence(),
            seed,
            operations: AtomicU64::new(0),
            made: AtomicUsize::new(0),
            forks: AtomicUsize::new(0),
        }
    }

    /// Puts a new item into a place and defers the old one's end; a handler may get none.
    pub fn replace(&self, place: usize) {
        let Some(fresh) = self.items.alloc() else {
            return;
        };
        number(fresh);
        let old = self.places[place % 16].swap(fresh.cast().as_ptr(), AcqRel);
        if let Some(old) = NonNull::new(old) {
            // SAFETY: it came from this cache, and is out of sight.
            unsafe { self.items.free_deferred(old.cast()) };
        }
    }

    pub fn read(&self, place: usize, looks: u64) {
        let _reader = grace::enter();
        let item = self.places[place % 16].load(Acquire);
        // SAFETY: whoever takes it out of sight defers its end until this reader has left.
        if let Some(item) = unsafe { item.as_ref() } {
            look(item, looks);
        }
    }

    /// Exchanges a stashed object for a new one, or for none.
    pub fn restash(&self, of: usize, place: usize, deferred: bool) {
        let store = &self.stores[of];
        let fresh = store.cache.alloc();
        let fresh = fresh.map_or(null_mut(), |at| store.hold(at, STASH_TAG).at.as_ptr());
        let old = self.stash[of][place % STASHED].swap(fresh, AcqRel);
        if let Some(old) = NonNull::new(old) {
            let object = store.give_up(&found_again(old, STASH_TAG));
            match deferred {
                // SAFETY: it came from this cache and is given up.
                true => unsafe { store.cache.free_deferred(object) },
                // SAFETY: as above.
                false => unsafe { store.cache.free(object) },
            }
        }
    }
}

/// Handlers at work, and forks that keep them from it: the C library's fork waits for its `malloc`, with the locks of caches held,
/// and a handler that has interrupted `malloc` would wait for these.
pub static AT_WORK: AtomicUsize = AtomicUsize::new(0);
pub static FORKS: AtomicUsize = AtomicUsize::new(0);

pub extern "C" fn on_timer(_: libc::c_int) {
    HANDLED.fetch_add(1, Relaxed);
    AT_WORK.fetch_add(1, SeqCst);
    if FORKS.load(SeqCst) == 0 {
        // SAFETY: the world is there while it is here.
        if let Some(world) = unsafe { WORLD.load(Acquire).as_ref() } {
            handle(world);
        }
    }
    AT_WORK.fetch_sub(1, SeqCst);
}

fn handle(world: &World) {
    let turn = TURN.get().wrapping_mul(0x5851_f42d_4c95_7f2d) + 1;
    TURN.set(turn);
    let (kind, place) = ((turn >> 40) as usize, (turn >> 33) as usize);
    world.restash(kind % KINDS.len(), place, turn >> 60 == 0);
    if turn >> 61 == 1 {
        world.read(place, 1);
        world.replace(kind);
    }
    if turn >> 59 == 31 {
        let pool = &world.pools[kind % POOLED.len()];
        if let Some(object) = pool.pool.alloc() {
            let held = world.stores[pool.of].hold(object, turn);
            // SAFETY: it came from this pool and is given up.
            unsafe { pool.pool.free(world.stores[pool.of].give_up(&held)) };
        }
    }
}

impl World {
    /// Ends a cache all of whose objects came back, but for those that it says are lost.
    pub fn end(&self, cache: KmemCache) {
        let name = cache.name().to_owned();
        let lost = cache.statistics().free_rcu_sheaf_fail as usize;
        match cache.destroy() {
            Ok(()) => assert_eq!(lost, 0),
            Err(leak) if !self.fences || leak.objects == lost => {}
            Err(leak) => panic!(
                "{name}: {leak}: {lost} of them known to be lost; {:?}, {:?}",
                leak.cache.usage(),
                leak.cache.statistics()
            ),
        }
    }
}

/// Frees what nobody holds: what lies in places, in the stash and in the exchange.
pub fn put_back(world: &World) {
    for place in &world.places {
        if let Some(item) = NonNull::new(place.swap(null_mut(), AcqRel)) {
            // SAFETY: it came from this cache, and all readers have left.
            unsafe { world.items.free(item.cast()) };
        }
    }
    for (store, places) in world.stores.iter().zip(&world.stash) {
        for place in places {
            if let Some(object) = NonNull::new(place.swap(null_mut(), AcqRel)) {
                store.free(found_again(object, STASH_TAG));
            }
        }
    }
    for (of, held) in world.exchange.lock().unwrap().drain(..) {
        world.stores[of].free(held);
    }
}
