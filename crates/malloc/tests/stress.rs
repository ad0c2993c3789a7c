//! Many threads on few CPUs allocate, resize and free blocks of all sizes, hand blocks to other
//! threads, and check every byte. The threads move between CPUs at random. A fast timer interrupts
//! them, and its handler allocates and frees too.
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `PINFOLD_STRESS_SECONDS` | how long the test runs | 2 |
//! | `PINFOLD_STRESS_THREADS` | number of threads | 64 |
//! | `PINFOLD_STRESS_TIMER_US` | microseconds between two signals | 100 |
//! | `PINFOLD_RSEQ` | the backend | the machine's best |

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
/// The most blocks that a thread holds.
const HELD: usize = 64;

/// A block filled with a byte that follows from its address and tag.
struct Block {
    at: NonNull<u8>,
    size: usize,
    tag: u8,
    /// The index of the block's cache; `None` for malloc.
    cache: Option<usize>,
}

// SAFETY: a `Block` owns its memory, and no other thread uses that memory.
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

    /// Returns a size: mostly small, sometimes up to 200 KiB, rarely up to 3 MiB.
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
                    // SAFETY: the block was just allocated with this size.
                    let bytes = unsafe { std::slice::from_raw_parts(at, size) };
                    assert!(bytes.iter().all(|&byte| byte == 0));
                    at
                }
                _ => pinfold_malloc(size).cast(),
            };
            (at, size, None)
        };
        let block = Block {
            at: NonNull::new(at).expect("the allocator returned null"),
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
        // SAFETY: this value owns the block, which has `size` bytes.
        unsafe { self.at.as_ptr().write_bytes(self.byte(), self.size) };
    }

    fn check(&self) {
        // SAFETY: this value owns the block, whose `size` bytes `fill` has written.
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
        // SAFETY: this value owns the block, which came from malloc.
        let at = unsafe { pinfold_realloc(self.at.as_ptr().cast(), size.max(1)) };
        self.at = NonNull::new(at.cast()).expect("the allocator returned null");
        // SAFETY: `realloc` keeps the content up to the smaller size, which `fill` had written.
        let bytes = unsafe { std::slice::from_raw_parts(self.at.as_ptr(), kept) };
        assert!(bytes.iter().all(|&found| found == byte));
        self.size = size;
        self.fill();
    }

    fn free(self, world: &World) {
        self.check();
        match self.cache {
            // SAFETY: the block came from that cache, and this value gives it up.
            Some(cache) => unsafe { world.caches[cache].free(self.at) },
            // SAFETY: the block came from malloc, and this value gives it up.
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
                // Fails on a kernel that cannot fence, which this test allows.
                let _ = world.caches[random.next() % world.caches.len()].shrink();
            }
            _ => {}
        }
    }
    held.into_iter().for_each(|block| block.free(world));
}

static HANDLED: AtomicUsize = AtomicUsize::new(0);

/// Allocates and frees above a thread that may be allocating or freeing.
extern "C" fn on_timer(_: libc::c_int) {
    let nth = HANDLED.fetch_add(1, Ordering::Relaxed);
    let size = [24, 100, 700, 5000, 100_000][nth % 5];
    let block: *mut u8 = pinfold_malloc(size).cast();
    assert!(!block.is_null());
    // SAFETY: the block was just allocated with this size.
    unsafe { block.write_bytes(0xa5, size) };
    // SAFETY: the block came from malloc, and is not used any more.
    unsafe { pinfold_free(block.cast()) };
}

/// Signals the process every `microseconds`; stops that with 0.
fn start_timer(microseconds: i64) {
    // SAFETY: the handler calls only Pinfold, which is safe in signal handlers.
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
    // SAFETY: `sysconf` has no preconditions.
    let cpus = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) as usize };
    pinfold::topology::set_affinity(&[to % cpus].into_iter().collect());
}

#[test]
fn no_block_is_lost_handed_out_twice_or_overwritten() {
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
