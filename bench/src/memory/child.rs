//! The process that measures one subject: its threads, their blocks, and the resident memory.

use super::{Sizes, Variant, fragmented};
use crate::args::MemoryChildArgs;
use crate::child::ensure_environment;
use crate::subjects::{Glibc, Jemalloc, Mimalloc, Rpmalloc, Snmalloc, SubjectName, Tcmalloc};
use anyhow::{Context, Result, bail};
use core::ptr::null_mut;
use pinfold_lab::{MallocApi, PinfoldMalloc};
use std::fs;
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::thread::{self, Thread};
use std::time::Duration;

const PER_THREAD: usize = 1 << 20;

/// Bytes of stack that each thread touches before the baseline, so that an allocator's use of the
/// stack does not count as its memory.
const STACK_TOUCHED: usize = 32 << 10;

/// Measures, and prints the sizes as a line of JSON.
pub fn measure(args: &MemoryChildArgs) -> Result<()> {
    // A thousand spinning threads must not survive an interrupted measurement.
    // SAFETY: this prctl takes integers only and changes no memory.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    // tcmalloc knows its mode only after an allocation. The other subjects must not allocate before
    // the baseline.
    if args.subject == SubjectName::TcmallocPercpu {
        ensure_environment(args.subject)?;
    }
    let sizes = match args.subject {
        SubjectName::PinfoldMalloc => of::<PinfoldMalloc>(args)?,
        SubjectName::Mimalloc => of::<Mimalloc>(args)?,
        SubjectName::Jemalloc => of::<Jemalloc>(args)?,
        SubjectName::Snmalloc => of::<Snmalloc>(args)?,
        SubjectName::Rpmalloc => of::<Rpmalloc>(args)?,
        SubjectName::Glibc => of::<Glibc>(args)?,
        SubjectName::Tcmalloc | SubjectName::TcmallocPercpu => of::<Tcmalloc>(args)?,
        _ => bail!("a cache or a pool has objects of one size only"),
    };
    println!("{}", serde_json::to_string(&sizes)?);
    Ok(())
}

/// The shared state of the main thread and the sleeping threads.
struct Meeting {
    main: Thread,
    /// Number of times that a thread reached a point where the main thread waits for it.
    arrived: AtomicUsize,
    /// Separates allocating from freeing if all threads work at the same time.
    allocated: Option<Barrier>,
}

impl Meeting {
    fn arrive(&self) {
        self.arrived.fetch_add(1, Ordering::Release);
        self.main.unpark();
    }

    fn wait_for(&self, threads: usize) {
        while self.arrived.load(Ordering::Acquire) < threads {
            thread::park();
        }
    }
}

fn of<A: MallocApi>(args: &MemoryChildArgs) -> Result<Sizes> {
    if args.variant == Variant::Fragmented {
        return fragmented::measure::<A>(Duration::from_secs(u64::from(args.setup.settle)));
    }
    let count = args.setup.threads as usize;
    let meeting = Arc::new(Meeting {
        main: thread::current(),
        arrived: AtomicUsize::new(0),
        allocated: (args.variant == Variant::AtOnce).then(|| Barrier::new(count)),
    });
    let mut threads = Vec::new();
    for number in 0..count {
        let go = Arc::new(AtomicBool::new(false));
        let (meeting, told) = (Arc::clone(&meeting), Arc::clone(&go));
        let handle = thread::Builder::new()
            .stack_size(256 << 10)
            .spawn(move || sleeper::<A>(number, &meeting, &told))
            .context("cannot start all threads; give fewer --threads")?;
        threads.push((handle.thread().clone(), go));
    }
    meeting.wait_for(count);
    let baseline = resident()?;
    for (number, (thread, go)) in threads.iter().enumerate() {
        go.store(true, Ordering::Release);
        thread.unpark();
        if args.variant == Variant::OneByOne {
            meeting.wait_for(count + number + 1);
        }
    }
    meeting.wait_for(2 * count);
    let after = resident()?;
    thread::sleep(Duration::from_secs(u64::from(args.setup.settle)));
    let settled = resident()?;
    Ok(Sizes {
        rss_bytes: after.saturating_sub(baseline),
        baseline_bytes: baseline,
        settled_rss_bytes: settled.saturating_sub(baseline),
    })
}

/// Runs a thread: it sleeps, works once when it is told to, and sleeps until the process ends.
fn sleeper<A: MallocApi>(number: usize, meeting: &Meeting, go: &AtomicBool) {
    touch_stack();
    meeting.arrive();
    while !go.load(Ordering::Acquire) {
        thread::park();
    }
    A::enter_thread();
    let blocks = allocate::<A>(number);
    if let Some(barrier) = &meeting.allocated {
        barrier.wait();
    }
    blocks.free::<A>();
    meeting.arrive();
    loop {
        thread::park();
    }
}

#[inline(never)]
fn touch_stack() {
    black_box([1_u8; STACK_TOUCHED]);
}

/// Blocks linked through their first bytes, in the order of allocation, so that the test needs no
/// memory of its own.
struct Blocks {
    first: *mut Block,
}

#[repr(C)]
struct Block {
    next: *mut Block,
}

/// Allocates [`PER_THREAD`] bytes in blocks of 16 to 4096 bytes and writes every byte.
///
/// There are as many blocks between 16 and 32 bytes as between 2048 and 4096. The sizes depend only
/// on the thread's number.
fn allocate<A: MallocApi>(number: usize) -> Blocks {
    // Spreads the number over all bits, because xorshift starts slowly from small numbers.
    let mut random = (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let (mut first, mut last) = (null_mut::<Block>(), null_mut::<Block>());
    let mut total = 0;
    while total < PER_THREAD {
        let size = next_size(&mut random);
        total += size;
        let block = A::malloc(size).cast::<Block>();
        assert!(!block.is_null(), "the subject has no memory");
        // SAFETY: `malloc` returned the block just now, with at least `size` bytes and malloc's
        // alignment. Every size holds a `Block`.
        unsafe {
            block.cast::<u8>().write_bytes(0xa5, size);
            block.write(Block { next: null_mut() });
        }
        if last.is_null() {
            first = block;
        } else {
            // SAFETY: `last` is the previous block of this list, written in the previous turn.
            unsafe { (*last).next = block };
        }
        last = block;
    }
    Blocks { first }
}

/// Steps xorshift64 (Marsaglia 2003), which goes through all numbers but 0.
fn step(random: &mut u64) {
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
}

/// Returns a random number below `most`.
pub(super) fn random_below(random: &mut u64, most: usize) -> usize {
    step(random);
    (*random >> 32) as usize % most
}

/// Returns a size from 16 to 4096. Each power of two is equally likely.
fn next_size(random: &mut u64) -> usize {
    step(random);
    let low = 16 << (*random % 8);
    low + (*random >> 32) as usize % (low + 1)
}

impl Blocks {
    fn free<A: MallocApi>(self) {
        let mut block = self.first;
        while !block.is_null() {
            // SAFETY: the block is on the list, so it is initialised and not yet freed.
            let next = unsafe { (*block).next };
            // SAFETY: `allocate` got the block from `A`, and the list goes on without it.
            unsafe { A::free(block.cast()) };
            block = next;
        }
    }
}

/// Returns the resident memory of this process without files: anonymous and shared, in bytes.
pub(super) fn resident() -> Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let kib = |key: &str| -> Option<u64> {
        let line = status.lines().find(|line| line.starts_with(key))?;
        line.split_whitespace().nth(1)?.parse().ok()
    };
    let (anonymous, shared) = (kib("RssAnon:"), kib("RssShmem:"));
    Ok(1024 * (anonymous.context("no RssAnon in /proc/self/status")? + shared.unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_sizes_stay_within_their_bounds() {
        let mut random = 7;
        let sizes: Vec<_> = (0..10_000).map(|_| next_size(&mut random)).collect();
        assert!(sizes.iter().all(|size| (16..=4096).contains(size)));
        assert!(sizes.iter().any(|&size| size < 24));
        assert!(sizes.iter().any(|&size| size > 4000));
    }

    #[test]
    fn all_blocks_are_freed() {
        let blocks = allocate::<Glibc>(3);
        blocks.free::<Glibc>();
    }
}
