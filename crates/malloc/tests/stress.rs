//! Everything at once, checking every byte: many threads on few CPUs, moved at random, interrupted by a fast timer whose
//! handler allocates and frees too, with objects of all sizes handed from thread to thread.
//!
//! `PINFOLD_STRESS_SECONDS` sets how long (2 without it), `PINFOLD_RSEQ` the backend.

use pinfold::slab::KmemCache;
use pinfold_malloc::c::{
    pinfold_calloc, pinfold_free, pinfold_malloc, pinfold_memalign, pinfold_realloc,
};
use std::alloc::Layout;
use std::ptr::{NonNull, null_mut};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const THREADS: usize = 64;
/// Blocks that a thread holds at most.
const HELD: usize = 64;

/// A block with a pattern that its address and tag determine.
struct Block {
    at: NonNull<u8>,
    size: usize,
    tag: u8,
    /// Which of the caches, or malloc.
    cache: Option<usize>,
}

// SAFETY: a block is owned memory.
unsafe impl Send for Block {}

struct World {
    caches: Vec<KmemCache>,
    /// Blocks on their way to another thread.
    exchange: Mutex<Vec<Block>>,
    stop: AtomicBool,
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize
    }

    /// Mostly small, sometimes large, now and then huge.
    fn size(&mut self) -> usize {
        match self.next() % 1000 {
            0 => self.next() % (3 << 20),
            1..20 => self.next() % (200 << 10),
            20..300 => self.next() % 4096,
            _ => self.next() % 256,
        }
    }
}

impl Block {
    fn new(world: &World, random: &mut Random) -> Block {
        let tag = random.next() as u8;
        let (at, size, cache) = if random.next().is_multiple_of(3) {
            let cache = random.next() % world.caches.len();
            let cache_of = &world.caches[cache];
            (
                cache_of.alloc().unwrap().as_ptr(),
                cache_of.object_size(),
                Some(cache),
            )
        } else {
            let size = random.size();
            let at: *mut u8 = match random.next() % 8 {
                0 => pinfold_memalign(16 << (random.next() % 8), size).cast(),
                1 => {
                    let at: *mut u8 = pinfold_calloc(1, size).cast();
                    // SAFETY: the block is ours and that large.
                    let bytes = unsafe { std::slice::from_raw_parts(at, size) };
                    assert!(bytes.iter().all(|&byte| byte == 0));
                    at
                }
                _ => pinfold_malloc(size).cast(),
            };
            (at, size, None)
        };
        let block = Block {
            at: NonNull::new(at).expect("memory"),
            size,
            tag,
            cache,
        };
        block.fill();
        block
    }

    fn byte(&self) -> u8 {
        self.tag ^ (self.at.as_ptr() as usize >> 4) as u8
    }

    fn fill(&self) {
        // SAFETY: the block is ours and that large.
        unsafe { self.at.as_ptr().write_bytes(self.byte(), self.size) };
    }

    fn check(&self) {
        // SAFETY: the block is ours and filled.
        let bytes = unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.size) };
        let byte = self.byte();
        if let Some(at) = bytes.iter().position(|&found| found != byte) {
            panic!(
                "byte {at} of {} at {:p} is {:#x}, not {byte:#x}",
                self.size, self.at, bytes[at]
            );
        }
    }

    fn resize(&mut self, size: usize) {
        let (kept, byte) = (self.size.min(size), self.byte());
        // SAFETY: a block of malloc's, ours.
        let at = unsafe { pinfold_realloc(self.at.as_ptr().cast(), size.max(1)) };
        self.at = NonNull::new(at.cast()).expect("memory");
        // SAFETY: realloc keeps what was there.
        let bytes = unsafe { std::slice::from_raw_parts(self.at.as_ptr(), kept) };
        assert!(bytes.iter().all(|&found| found == byte));
        self.size = size;
        self.fill();
    }

    fn free(self, world: &World) {
        self.check();
        match self.cache {
            // SAFETY: it came from that cache and is given up.
            Some(cache) => unsafe { world.caches[cache].free(self.at) },
            // SAFETY: it came from malloc and is given up.
            None => unsafe { pinfold_free(self.at.as_ptr().cast()) },
        }
    }
}

fn work(world: &World, seed: usize) {
    let mut random = Random((seed as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let mut held: Vec<Block> = Vec::new();
    while !world.stop.load(Ordering::Relaxed) {
        match random.next() % 16 {
            0..6 if held.len() < HELD => held.push(Block::new(world, &mut random)),
            0..12 if !held.is_empty() => held.swap_remove(random.next() % held.len()).free(world),
            12 if !held.is_empty() => {
                let at = random.next() % held.len();
                if held[at].cache.is_none() {
                    let size = random.size();
                    held[at].resize(size);
                }
            }
            13 => {
                let mut exchange = world.exchange.lock().unwrap();
                if let Some(block) = held.pop() {
                    exchange.push(block);
                }
                if exchange.len() > THREADS {
                    let at = random.next() % exchange.len();
                    held.push(exchange.swap_remove(at));
                }
            }
            14 if random.next().is_multiple_of(64) => pin(random.next()),
            15 if random.next().is_multiple_of(20_000) => {
                // On a kernel that cannot fence nothing is shrunk.
                let _ = world.caches[random.next() % world.caches.len()].shrink();
            }
            _ => {}
        }
    }
    held.into_iter().for_each(|block| block.free(world));
}

static HANDLED: AtomicUsize = AtomicUsize::new(0);

/// Allocates and frees while whatever it interrupts may be in the middle of just that.
extern "C" fn on_timer(_: libc::c_int) {
    let nth = HANDLED.fetch_add(1, Ordering::Relaxed);
    let size = [24, 100, 700, 5000, 100_000][nth % 5];
    let block: *mut u8 = pinfold_malloc(size).cast();
    assert!(!block.is_null());
    // SAFETY: the block is ours and that large.
    unsafe { block.write_bytes(0xa5, size) };
    // SAFETY: as above.
    unsafe { pinfold_free(block.cast()) };
}

/// A 10 kHz timer that signals the process.
fn start_timer(microseconds: i64) {
    // SAFETY: the handler only uses what may be used in a handler here: that is what is tested.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_timer as *const () as usize;
        action.sa_flags = libc::SA_RESTART;
        libc::sigaction(libc::SIGALRM, &raw const action, null_mut());
        let every = libc::timeval {
            tv_sec: 0,
            tv_usec: microseconds,
        };
        let timer = libc::itimerval {
            it_interval: every,
            it_value: every,
        };
        libc::setitimer(libc::ITIMER_REAL, &raw const timer, null_mut());
    }
}

fn pin(to: usize) {
    // SAFETY: cpu_set_t is plain integers.
    unsafe {
        let cpus = libc::sysconf(libc::_SC_NPROCESSORS_ONLN) as usize;
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(to % cpus, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set);
    }
}

#[test]
fn nothing_is_lost_doubled_or_overlapping() {
    let seconds = std::env::var("PINFOLD_STRESS_SECONDS").map_or(2.0, |text| text.parse().unwrap());
    let threads =
        std::env::var("PINFOLD_STRESS_THREADS").map_or(THREADS, |text| text.parse().unwrap());
    let layouts = [
        (8, 8),
        (24, 8),
        (64, 64),
        (200, 8),
        (1000, 8),
        (4096, 8),
        (20_000, 16),
    ];
    let world = World {
        caches: layouts
            .iter()
            .map(|&(size, align)| {
                KmemCache::new("stress", Layout::from_size_align(size, align).unwrap()).unwrap()
            })
            .collect(),
        exchange: Mutex::new(Vec::new()),
        stop: AtomicBool::new(false),
    };
    let timer = std::env::var("PINFOLD_STRESS_TIMER_US").map_or(100, |text| text.parse().unwrap());
    start_timer(timer);
    let end = Instant::now() + Duration::from_secs_f64(seconds);
    std::thread::scope(|scope| {
        for seed in 0..threads {
            let world = &world;
            scope.spawn(move || work(world, seed));
        }
        while Instant::now() < end {
            std::thread::sleep(Duration::from_millis(50));
            world
                .caches
                .iter()
                .for_each(|cache| cache.validate().unwrap());
        }
        world.stop.store(true, Ordering::Relaxed);
    });
    start_timer(0);
    world
        .exchange
        .lock()
        .unwrap()
        .drain(..)
        .for_each(|block| block.free(&world));
    assert!(
        HANDLED.load(Ordering::Relaxed) > 10,
        "the timer did not run"
    );
    for cache in world.caches {
        cache.validate().unwrap();
        cache.destroy().unwrap();
    }
}
