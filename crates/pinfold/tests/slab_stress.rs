//! Everything at once, every byte checked: caches plain, constructed, hardened and debugged; single and bulk calls, prefilled sheaves,
//! pools, deferred frees under readers, nodes; while all is looked at, shrunk, drained and purged, and caches come and go. Threads
//! are more than CPUs, moved at random, each interrupted by a timer of its own whose handler does the same. Processes fork in the midst.
//!
//! Each test runs in a process of its own, this binary again. `PINFOLD_STRESS_SECONDS` sets how long (3 without it),
//! `PINFOLD_STRESS_SEED` repeats a run as far as the system lets it, `PINFOLD_STRESS_THREADS` (12) and
//! `PINFOLD_STRESS_TIMER_US` (300) how many threads there are and how often each is interrupted.

mod common;

use common::held::{Held, Pool, Store};
use common::timer::Timer;
use common::world::{
    AT_WORK, FORKS, HANDLED, KINDS, POOLED, TURN, WORLD, World, on_timer, put_back,
};
use common::{Random, StopAtEnd, from_environment, pin};
use pinfold::shepherd::Shepherd;
use pinfold::slab::{KmemCache, caches, shrink_all, slabinfo};
use std::alloc::Layout;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::Ordering::{Relaxed, Release, SeqCst};
use std::time::{Duration, Instant};

/// Objects that a thread holds at most.
const HELD: usize = 200;
/// Objects on their way to other threads.
const EXCHANGED: usize = 400;

struct Worker<'w> {
    world: &'w World,
    random: Random,
    held: Vec<(usize, Held)>,
}

impl Worker<'_> {
    fn below(&mut self, n: usize) -> usize {
        self.random.below(n as u64) as usize
    }

    fn tag(&mut self) -> u64 {
        self.random.below(1 << 40) | 1 << 50
    }

    fn run(&mut self) {
        while !self.world.stop.load(Relaxed) {
            for _ in 0..64 {
                self.step();
            }
            self.world.operations.fetch_add(64, Relaxed);
        }
        while let Some((of, held)) = self.held.pop() {
            self.world.stores[of].free(held);
        }
    }

    fn step(&mut self) {
        match self.below(1000) {
            0..350 => self.alloc(),
            350..700 => self.free(),
            700..760 => self.many(),
            760..800 => self.prefilled(),
            800..850 => self.pooled(),
            850..900 => self.hand_on(),
            900..985 => self.readers(),
            985..995 => pin(self.below(64)),
            995..999 => self.look_on(),
            _ => self.disturb(),
        }
    }

    fn alloc(&mut self) {
        if self.held.len() >= HELD {
            return self.free();
        }
        let of = self.below(KINDS.len());
        let cache = &self.world.stores[of].cache;
        let node = self.below(2);
        let object = match self.below(8) {
            0 => cache.alloc_node(node),
            1 => cache.alloc_node_exact(node).or_else(|| cache.alloc()),
            _ => cache.alloc(),
        };
        self.keep(of, object);
    }

    fn keep(&mut self, of: usize, object: Option<NonNull<u8>>) {
        let object = object.expect("memory");
        let tag = self.tag();
        self.held
            .push((of, self.world.stores[of].hold(object, tag)));
    }

    fn free(&mut self) {
        if self.held.is_empty() {
            return;
        }
        let at = self.below(self.held.len());
        let (of, held) = self.held.swap_remove(at);
        let store = &self.world.stores[of];
        match self.below(16) {
            0 => {
                let object = store.give_up(&held);
                // SAFETY: it came from this cache and is given up.
                unsafe { store.cache.free_deferred(object) };
            }
            _ => store.free(held),
        }
    }

    /// Allocates and frees in bulk.
    fn many(&mut self) {
        let (of, count) = (self.below(KINDS.len()), self.below(150));
        let store = &self.world.stores[of];
        let mut objects = vec![null_mut(); count];
        assert_eq!(store.cache.alloc_bulk(&mut objects), count);
        let tag = self.tag();
        let held: Vec<Held> = objects
            .iter()
            .map(|&object| store.hold(NonNull::new(object).unwrap(), tag))
            .collect();
        let objects: Vec<*mut u8> = held
            .iter()
            .map(|held| store.give_up(held).as_ptr())
            .collect();
        // SAFETY: they came from this cache and are given up.
        unsafe { store.cache.free_bulk(&objects) };
    }

    fn prefilled(&mut self) {
        let (of, count) = (self.below(KINDS.len()), self.below(150));
        let mut prefilled = self.world.stores[of].cache.prefill(count).unwrap();
        for _ in 0..self.below(count + 1).min(20) {
            self.keep(of, prefilled.alloc());
        }
        if self.below(4) == 0 {
            prefilled.refill(count).unwrap();
            assert_eq!(prefilled.len(), count);
        }
    }

    fn pooled(&mut self) {
        let Pool { pool, of } = &self.world.pools[self.below(POOLED.len())];
        let store = &self.world.stores[*of];
        let object = match self.below(4) {
            0 => pool.alloc_preallocated(),
            _ => pool.alloc(),
        };
        if let Some(object) = object {
            let held = store.hold(object, self.tag());
            let object = store.give_up(&held);
            // SAFETY: it came from this pool and is given up.
            unsafe { pool.free(object) };
        }
        if self.below(200) == 0 {
            pool.resize(self.below(40)).unwrap();
        }
    }

    /// Hands an object to another thread, and takes one of another's.
    fn hand_on(&mut self) {
        let mut exchange = self.world.exchange.lock().unwrap();
        exchange.extend(self.held.pop());
        if exchange.len() > EXCHANGED {
            let at = self.random.below(exchange.len() as u64) as usize;
            self.held.push(exchange.swap_remove(at));
        }
    }

    fn readers(&mut self) {
        let place = self.below(16);
        match self.below(4) {
            0 => self.world.replace(place),
            1 => self.world.read(place, 500),
            _ => self.world.read(place, 2),
        }
    }

    /// Looks at what there is, which changes nothing.
    fn look_on(&mut self) {
        let at = self.below(self.held.len().max(1));
        if let Some((of, held)) = self.held.get(at) {
            self.world.stores[*of].check(held);
        }
        let of = self.below(KINDS.len());
        let Store { cache, kind, .. } = &self.world.stores[of];
        match self.below(8) {
            0 => assert!(slabinfo().to_string().contains("stress-0")),
            1 => assert!(cache.attributes().to_string().contains("objs_per_slab")),
            2 => assert!(caches().map(|info| info.usage().slabs).sum::<usize>() > 0),
            3 => drop(cache.leaks_with(|_| {})),
            _ => cache
                .validate()
                .unwrap_or_else(|fault| panic!("{kind:?}: {fault}")),
        }
    }

    /// What goes through everything.
    fn disturb(&mut self) {
        let of = self.below(KINDS.len());
        let cache = &self.world.stores[of].cache;
        match self.below(12) {
            // A kernel that cannot fence shrinks nothing.
            0..3 => drop(cache.shrink()),
            3 => drop(cache.flush_deferred()),
            4 => drop(shrink_all()),
            5 => drop(self.world.items.flush_deferred()),
            6 => _ = Shepherd::new().tick(),
            7 => self.fork(),
            _ => self.come_and_go(),
        }
    }

    /// A cache's whole life.
    fn come_and_go(&mut self) {
        let kind = KINDS[self.below(KINDS.len())];
        let store = Store::new("stress-short", kind);
        let mut held = Vec::new();
        for _ in 0..self.below(300) {
            let tag = self.tag();
            held.push(store.hold(store.cache.alloc().expect("memory"), tag));
            if self.below(3) == 0 {
                let held = held.swap_remove(self.below(held.len()));
                let object = store.give_up(&held);
                match self.below(4) {
                    // SAFETY: it came from this cache and is given up.
                    0 => unsafe { store.cache.free_deferred(object) },
                    // SAFETY: as above.
                    _ => unsafe { store.cache.free(object) },
                }
            }
            if self.below(100) == 0 {
                pin(self.below(64));
            }
        }
        held.into_iter().for_each(|held| store.free(held));
        store.cache.validate().unwrap();
        self.world.end(store.cache);
        self.world.made.fetch_add(1, Relaxed);
    }

    /// A child that has what this thread has, uses all caches, and exits.
    fn fork(&mut self) {
        FORKS.fetch_add(1, SeqCst);
        while AT_WORK.load(SeqCst) != 0 {
            std::thread::yield_now();
        }
        // SAFETY: the child uses caches, and exits.
        let child = unsafe { libc::fork() };
        FORKS.fetch_sub(1, SeqCst);
        assert!(child >= 0, "no child");
        if child == 0 {
            // SAFETY: no preconditions. A child that hangs ends.
            unsafe { libc::alarm(60) };
            let fine = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                for _ in 0..20 {
                    (0..100).for_each(|_| self.alloc());
                    self.many();
                    self.prefilled();
                    self.come_and_go();
                }
                self.world.replace(0);
                for store in self.world.stores {
                    store.cache.validate().unwrap();
                }
                while let Some((of, held)) = self.held.pop() {
                    self.world.stores[of].free(held);
                }
            }));
            // SAFETY: no preconditions.
            unsafe { libc::_exit(if fine.is_ok() { 0 } else { 7 }) };
        }
        let mut status = 0;
        // SAFETY: `status` is writable.
        let mut wait = || unsafe { libc::waitpid(child, &raw mut status, 0) };
        while wait() < 0 {}
        assert_eq!(status, 0, "a child failed");
        self.world.forks.fetch_add(1, Relaxed);
    }
}

/// Has a panic say what and where, and no more: what the standard library does takes locks, which another thread may have held when
/// a child was forked.
fn say_faults_without_locks() {
    std::panic::set_hook(Box::new(|fault| {
        let thread = std::thread::current();
        let name = thread.name().unwrap_or("?");
        // SAFETY: no preconditions.
        let process = unsafe { libc::getpid() };
        let text = format!("{name}, process {process}: {fault}\n");
        // SAFETY: the text is readable. What cannot be written is lost.
        unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
    }));
}

/// Ends the process when it takes too long: something waits for ever.
fn watch(seconds: u64) {
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(seconds));
        eprintln!("still there after {seconds} seconds: something hangs");
        std::process::abort();
    });
}

#[test]
#[ignore = "needs a process of its own; run by the others"]
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
        while begin.elapsed() < Duration::from_secs(time) && !world.stop.load(Relaxed) {
            // At this rate sheaves are idle, pages purged.
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
    // SAFETY: leaked by `World::new`; pools and threads, which had references, have ended.
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

/// Runs the stress in a process with so many nodes.
fn with_nodes(nodes: &str) {
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "stress", "--nocapture", "--include-ignored"])
        .env("PINFOLD_FAKE_NODES", nodes)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{nodes} nodes, {}: {text}",
        output.status
    );
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("1 passed"), "it did not run: {said}");
    said.lines()
        .filter(|line| line.contains("operations"))
        .for_each(|line| println!("{line}"));
}

#[test]
fn nothing_is_lost_on_one_node() {
    with_nodes("1");
}

#[test]
fn nothing_is_lost_on_two_nodes() {
    with_nodes("2");
}
