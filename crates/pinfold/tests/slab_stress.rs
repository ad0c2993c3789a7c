//! Stresses the whole slab layer at once and checks every byte:
//!
//! * caches plain, constructed, hardened and debugged;
//! * single and bulk calls, prefilled sheaves, pools, deferred frees under readers, several nodes;
//! * listing, validating, shrinking, draining and purging, while caches come and go;
//! * more threads than CPUs, moved at random, each interrupted by its own timer whose handler
//!   allocates and frees too;
//! * forks at any moment.
//!
//! Each test runs this binary again, in a process of its own. The environment sets:
//!
//! * `PINFOLD_STRESS_SECONDS`: how long it runs (default: 3);
//! * `PINFOLD_STRESS_SEED`: a seed, to repeat a run as far as the system allows;
//! * `PINFOLD_STRESS_THREADS`: the number of threads (default: 12);
//! * `PINFOLD_STRESS_TIMER_US`: the time between two signals at a thread, in microseconds (default:
//!   300).

mod common;
#[path = "slab_stress/watchdog.rs"]
mod watchdog;
#[path = "slab_stress/worker.rs"]
mod worker;

use common::held::{Held, Kind, Pool, Store, found_again};
use common::items::{Item, can_fence, look, number};
use common::timer::Timer;
use common::{Random, StopAtEnd, from_environment, pin};
use pinfold::shepherd::Shepherd;
use pinfold::slab::{DebugFlags, KmemCache, MemPool, caches, grace, shrink_all, slabinfo};
use std::alloc::Layout;
use std::cell::Cell;
use std::ptr::{NonNull, null_mut};
use std::sync::Mutex;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize};
use std::time::{Duration, Instant};
use watchdog::{doing, enlist, in_handler, watch};
use worker::Worker;

/// Largest number of objects that a thread holds.
const HELD: usize = 200;
/// Number of objects on their way to other threads.
const EXCHANGED: usize = 400;

const KINDS: [Kind; 19] = [
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

/// The kinds that have pools: a plain, a constructed, a hardened and a debugged one.
const POOLED: [usize; 4] = [3, 7, 10, 16];

/// Number of places, for each cache, in which handlers leave objects to later handlers.
const STASHED: usize = 4;
/// The tag of these objects.
const STASH_TAG: u64 = 0x5745;

struct World {
    stores: &'static [Store],
    pools: Vec<Pool>,
    /// The cache of the objects that readers look at.
    items: KmemCache,
    places: [AtomicPtr<Item>; 16],
    stash: [[AtomicPtr<u8>; STASHED]; KINDS.len()],
    exchange: Mutex<Vec<(usize, Held)>>,
    stop: AtomicBool,
    fences: bool,
    seed: u64,
    operations: AtomicU64,
    made: AtomicUsize,
    forks: AtomicUsize,
}

/// The world of the handlers; null while they have nothing to do.
static WORLD: AtomicPtr<World> = AtomicPtr::new(null_mut());
static HANDLED: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// The state that makes this thread's handlers differ from each other.
    static TURN: Cell<u64> = const { Cell::new(0) };
}

impl World {
    fn new(seed: u64) -> World {
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

    /// Puts a new item into a place, and defers the old one. Does nothing in a handler that gets no
    /// object.
    fn replace(&self, place: usize) {
        let Some(fresh) = self.items.alloc() else {
            return;
        };
        number(fresh);
        let old = self.places[place % 16].swap(fresh.cast().as_ptr(), AcqRel);
        if let Some(old) = NonNull::new(old) {
            // SAFETY: the item came from this cache, and `swap` took it out of sight.
            unsafe { self.items.free_deferred(old.cast()) };
        }
    }

    fn read(&self, place: usize, looks: u64) {
        let _reader = grace::enter();
        let item = self.places[place % 16].load(Acquire);
        // SAFETY: a thread that takes the item out of sight defers it, so it stays until this
        // reader has left.
        if let Some(item) = unsafe { item.as_ref() } {
            look(item, looks);
        }
    }

    /// Replaces a stashed object by a new one, or by null if there is no memory.
    fn restash(&self, of: usize, place: usize, deferred: bool) {
        let store = &self.stores[of];
        let fresh = store.cache.alloc();
        let fresh = fresh.map_or(null_mut(), |at| store.hold(at, STASH_TAG).at.as_ptr());
        let old = self.stash[of][place % STASHED].swap(fresh, AcqRel);
        if let Some(old) = NonNull::new(old) {
            let object = store.give_up(&found_again(old, STASH_TAG));
            match deferred {
                // SAFETY: the object came from this cache, and `swap` took it out of the stash.
                true => unsafe { store.cache.free_deferred(object) },
                // SAFETY: the object came from this cache, and `swap` took it out of the stash.
                false => unsafe { store.cache.free(object) },
            }
        }
    }
}

/// `AT_WORK` counts the handlers at work, and `FORKS` the forks that keep handlers from starting.
/// The C library's fork holds the caches' locks and waits for its own `malloc`. A handler that
/// interrupted that `malloc` would wait for the caches' locks.
static AT_WORK: AtomicUsize = AtomicUsize::new(0);
static FORKS: AtomicUsize = AtomicUsize::new(0);

extern "C" fn on_timer(_: libc::c_int) {
    HANDLED.fetch_add(1, Relaxed);
    AT_WORK.fetch_add(1, SeqCst);
    if FORKS.load(SeqCst) == 0 {
        // SAFETY: `WORLD` is null, or points to a world that lives until all threads with timers
        // have ended.
        if let Some(world) = unsafe { WORLD.load(Acquire).as_ref() } {
            in_handler(|| handle(world));
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
            // SAFETY: the object came from this pool and is given up.
            unsafe { pool.pool.free(world.stores[pool.of].give_up(&held)) };
        }
    }
}

impl World {
    /// Destroys a cache whose objects were all freed, except for those that it counts as lost.
    fn end(&self, cache: KmemCache) {
        let name = cache.name().to_owned();
        let lost = cache.statistics().free_rcu_sheaf_fail as usize;
        match cache.destroy() {
            Ok(()) => assert_eq!(lost, 0),
            Err(leak) if !self.fences || leak.objects == lost => {}
            Err(leak) => panic!(
                "{name}: {leak}: {lost} of them are counted as lost; {:?}, {:?}",
                leak.cache.usage(),
                leak.cache.statistics()
            ),
        }
    }
}

/// Makes a panic print only its message and its place. The standard library's own report takes
/// locks, which another thread may have held when a child was forked.
fn say_faults_without_locks() {
    std::panic::set_hook(Box::new(|fault| {
        let thread = std::thread::current();
        let name = thread.name().unwrap_or("?");
        // SAFETY: `getpid` has no preconditions.
        let process = unsafe { libc::getpid() };
        let text = format!("{name}, process {process}: {fault}\n");
        // SAFETY: `text` is readable for its length. An error is ignored: there is nowhere to
        // report it.
        unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
    }));
}

#[test]
#[ignore = "needs a process of its own; run by the other tests"]
fn stress() {
    let time = from_environment("PINFOLD_STRESS_SECONDS", 3);
    let now = std::time::SystemTime::now();
    let now = now.duration_since(std::time::UNIX_EPOCH).unwrap();
    let seed = from_environment("PINFOLD_STRESS_SEED", now.as_nanos() as u64);
    let threads = from_environment("PINFOLD_STRESS_THREADS", 12);
    let timer = from_environment("PINFOLD_STRESS_TIMER_US", 300);
    eprintln!("PINFOLD_STRESS_SEED={seed}");
    watch(2 * time + from_environment("PINFOLD_STRESS_PATIENCE", 120));
    say_faults_without_locks();
    enlist();
    let mut world = Box::new(World::new(seed));
    WORLD.store(&raw mut *world, Release);
    let begin = Instant::now();
    std::thread::scope(|scope| {
        let world = &*world;
        let _stop = StopAtEnd(&world.stop);
        for nth in 0..threads {
            let work = move || {
                let _stop = StopAtEnd(&world.stop);
                let seed = world.seed ^ nth << 32;
                TURN.set(seed);
                enlist();
                let _timer = Timer::start(libc::SIGUSR1, on_timer, timer);
                let random = Random::new(seed);
                let held = Vec::new();
                Worker {
                    world,
                    random,
                    held,
                }
                .run();
            };
            let thread = std::thread::Builder::new().name(format!("worker {nth} of seed {seed}"));
            thread.spawn_scoped(scope, work).unwrap();
        }
        doing(&"tick");
        while begin.elapsed() < Duration::from_secs(time) && !world.stop.load(Relaxed) {
            // At this rate, sheaves become idle and pages are purged.
            std::thread::sleep(Duration::from_millis(100));
            Shepherd::new().tick();
        }
    });
    WORLD.store(null_mut(), Release);
    put_back(&world);
    println!(
        "{} operations, {} handlers, {} forks, {} caches came and went",
        world.operations.load(Relaxed),
        HANDLED.load(Relaxed),
        world.forks.load(Relaxed),
        world.made.load(Relaxed)
    );
    assert!(timer == 0 || HANDLED.load(Relaxed) > 100);
    world.pools.clear();
    let stores = world.stores;
    // SAFETY: `World::new` leaked the box. The pools and the threads, which referred to it, have
    // ended.
    let stores = unsafe { Box::from_raw(std::ptr::from_ref(stores).cast_mut()) };
    for store in stores {
        store.cache.validate().unwrap();
        world.end(store.cache);
    }
    let items = std::mem::replace(
        &mut world.items,
        KmemCache::new("none", Layout::new::<u64>()).unwrap(),
    );
    items.validate().unwrap();
    world.end(items);
}

/// Frees the objects that no thread holds: those in the places, in the stash and in the exchange.
fn put_back(world: &World) {
    for place in &world.places {
        if let Some(item) = NonNull::new(place.swap(null_mut(), AcqRel)) {
            // SAFETY: the item came from this cache, and all readers have left.
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

/// Runs the stress in a process with this many nodes.
fn with_nodes(nodes: usize) {
    let said = common::again::passes("stress", |command| {
        command.env("PINFOLD_FAKE_NODES", nodes.to_string());
    });
    let lines = said.lines().filter(|line| line.contains("operations"));
    lines.for_each(|line| println!("{line}"));
}

#[test]
fn nothing_is_lost_on_one_node() {
    with_nodes(1);
}

#[test]
fn nothing_is_lost_on_two_nodes() {
    with_nodes(2);
}
