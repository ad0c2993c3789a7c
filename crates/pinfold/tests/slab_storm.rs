//! Threads are born and die around the number of CPUs, while their affinity is narrowed and widened
//! and, on the test machine, CPUs go offline and come back. Concurrency ids change hands most often
//! then: since Linux 6.19, they belong to threads or to CPUs, and the kernel changes between the
//! two when the number of threads passes that of the CPUs, or when CPUs or affinities change.
//!
//! `PINFOLD_STORM_SECONDS` is how long the storm lasts.

mod common;

use common::machine::{Off, affinity, to_switch, try_move};
use common::{Random, StopAtEnd};
use pinfold::slab::KmemCache;
use std::alloc::Layout;
use std::collections::HashSet;
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::thread;
use std::time::{Duration, Instant};

/// Words of an object. All of them hold the object's token, which no other object has.
const WORDS: usize = 8;
/// The most objects that a thread holds.
const HELD: usize = 300;
/// The most operations of a thread's life.
const LIFE: u64 = 20_000;

struct Storm {
    cache: KmemCache,
    /// Objects that any thread may take, as addresses; 0 in an empty place.
    offered: [AtomicUsize; 64],
    tokens: AtomicU64,
    /// The threads that run, by the kernel's numbers.
    threads: Mutex<HashSet<i32>>,
    is_over: AtomicBool,
}

impl Storm {
    fn new() -> Storm {
        Storm {
            cache: KmemCache::new("storm", Layout::new::<[u64; WORDS]>()).unwrap(),
            offered: [const { AtomicUsize::new(0) }; 64],
            tokens: AtomicU64::new(1),
            threads: Mutex::new(HashSet::new()),
            is_over: AtomicBool::new(false),
        }
    }

    /// Takes an object, and marks it.
    fn take(&self) -> NonNull<u8> {
        let object = self.cache.alloc().unwrap();
        let token = self.tokens.fetch_add(1, Relaxed);
        // SAFETY: the cache gave this object of `WORDS` words to this thread alone.
        unsafe { object.cast::<[u64; WORDS]>().write([token; WORDS]) };
        object
    }

    /// Checks that nobody else wrote to an object of this thread's, and frees it.
    fn give(&self, object: NonNull<u8>) {
        let words = object.cast::<[u64; WORDS]>();
        // SAFETY: the object is this thread's, and has `WORDS` words.
        unsafe {
            let found = words.read_volatile();
            assert!(
                found[0] != 0 && found.iter().all(|&word| word == found[0]),
                "an object has two owners: {found:x?}"
            );
            words.write_volatile([0; WORDS]);
            self.cache.free(object);
        }
    }

    /// The life of a thread: takes, gives and exchanges objects.
    fn live(&self, seed: u64) {
        let mut random = Random::new(seed);
        let mut held = Vec::new();
        for _ in 0..random.below(LIFE) {
            match random.below(8) {
                0..4 if held.len() < HELD => held.push(self.take()),
                // A burst empties a sheaf, and fills one.
                4 => held.drain(..).for_each(|object| self.give(object)),
                5 => {
                    let place = &self.offered[random.below(64) as usize];
                    let mine = held.pop().map_or(0, |object| object.as_ptr() as usize);
                    // Acquire and release hand the object's words over.
                    let theirs = place.swap(mine, AcqRel) as *mut u8;
                    held.extend(NonNull::new(theirs));
                }
                _ => {
                    if let Some(object) = held.pop() {
                        self.give(object);
                    }
                }
            }
        }
        held.into_iter().for_each(|object| self.give(object));
    }

    /// A thread from its birth to its death.
    fn thread(&self, seed: u64) {
        // SAFETY: the call has no preconditions.
        let me = unsafe { libc::gettid() };
        self.threads.lock().unwrap().insert(me);
        self.live(seed);
        self.threads.lock().unwrap().remove(&me);
    }

    /// Has as many threads alive as each of the numbers says, for a while.
    fn bear(&self, seconds: u64) {
        let cpus = common::cpus();
        let numbers = [
            cpus.max(2) - 1,
            cpus,
            cpus + 1,
            cpus + cpus.div_ceil(4),
            2 * cpus,
        ];
        let begin = Instant::now();
        thread::scope(|scope| {
            let mut born = 0;
            let mut alive = Vec::new();
            while begin.elapsed() < Duration::from_secs(seconds) {
                let number = numbers[born as usize / 20 % numbers.len()];
                alive.retain(|thread: &thread::ScopedJoinHandle<()>| !thread.is_finished());
                while alive.len() < number {
                    born += 1;
                    alive.push(scope.spawn(move || self.thread(born)));
                }
                thread::yield_now();
            }
        });
    }

    /// Narrows and widens the affinity of all threads.
    fn move_threads(&self) {
        let all = affinity(0);
        let few = &all[..all.len().div_ceil(8)];
        let mut cpus = [few, &all].into_iter().cycle();
        while !self.is_over.load(Relaxed) {
            let cpus = cpus.next().unwrap();
            for &thread in self.threads.lock().unwrap().iter() {
                // The thread may have ended, or all of these CPUs may be off.
                try_move(thread, cpus);
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Switches two CPUs off and on.
    fn switch_cpus(&self) {
        let cpus = to_switch();
        let mut random = Random::new(3);
        while !self.is_over.load(Relaxed) {
            let first = random.below(cpus.len() as u64) as usize;
            let off = [0, 1].map(|next| Off::new(cpus[(first + next) % cpus.len()]));
            thread::sleep(Duration::from_millis(20));
            drop(off);
        }
    }
}

#[test]
fn no_object_is_lost_or_doubled() {
    let seconds = std::env::var("PINFOLD_STORM_SECONDS").map_or(3, |text| text.parse().unwrap());
    let is_machine = std::env::var("PINFOLD_MACHINE").is_ok();
    let storm = Storm::new();
    thread::scope(|scope| {
        let _over = StopAtEnd(&storm.is_over);
        scope.spawn(|| storm.move_threads());
        if is_machine && to_switch().len() > 2 {
            scope.spawn(|| storm.switch_cpus());
        }
        storm.bear(seconds);
    });
    for place in &storm.offered {
        let object = NonNull::new(place.swap(0, Relaxed) as *mut u8);
        object.into_iter().for_each(|object| storm.give(object));
    }
    println!("{} objects", storm.tokens.load(Relaxed) - 1);
    storm.cache.validate().unwrap();
    storm.cache.destroy().unwrap();
}
