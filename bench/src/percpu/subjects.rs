//! The subjects: Pinfold's operations from Rust and from C, and sections written in C.

use pinfold::percpu::{Node, PerCpu, PerCpuList, PerCpuPair, PerCpuRing};
use std::cell::UnsafeCell;
use std::hint::black_box;

/// The operations, in the order of the loops.
pub const OPERATIONS: [&str; 7] = [
    "add",
    "add_return",
    "try_cmpxchg",
    "cmpxchg_pair",
    "list_push",
    "list_pop",
    "ring_push",
];

/// The turns of a loop: the items of the list, and the records that the ring holds.
pub const TURNS: u32 = 1024;

/// The loops of a subject. The C headers of `bench/percpu` declare this layout.
#[repr(C)]
pub struct Subject {
    /// Runs an operation some times, at most [`TURNS`]. Returns how often its result was wrong.
    loops: [extern "C" fn(u32) -> u64; OPERATIONS.len()],
    /// Makes the word and the pair of this CPU 0, and its ring empty.
    reset: extern "C" fn(),
}

impl Subject {
    /// Prepares the data for a loop.
    pub fn reset(&self) {
        (self.reset)();
    }

    /// Runs the operation number `operation`, [`TURNS`] times. Returns how often its result was
    /// wrong.
    pub fn run(&self, operation: usize) -> u64 {
        self.loops[operation](TURNS)
    }
}

/// Pinfold's operations, inlined into the loops.
pub static PINFOLD: Subject = Subject {
    loops: [
        add,
        add_return,
        try_cmpxchg,
        cmpxchg_pair,
        list_push,
        list_pop,
        ring_push,
    ],
    reset,
};

static WORD: PerCpu<u64> = PerCpu::new();
static PAIR: PerCpuPair<u64, u64> = PerCpuPair::new();
static LIST: PerCpuList<u64> = PerCpuList::new();
static RING: PerCpuRing<4, { TURNS as usize }> = PerCpuRing::new();

struct Items(UnsafeCell<[Node<u64>; TURNS as usize]>);

// SAFETY: only `list_push` uses the items, from one thread at a time.
unsafe impl Sync for Items {}

static ITEMS: Items = Items(UnsafeCell::new([const { Node::new(0) }; TURNS as usize]));

extern "C" fn reset() {
    WORD.write(0);
    if let Some(pair) = PAIR.read() {
        PAIR.cmpxchg(pair, (0, 0));
    }
    RING.drain(|_, _| ());
}

extern "C" fn add(times: u32) -> u64 {
    for _ in 0..times {
        WORD.add(1);
        black_box(());
    }
    u64::from(WORD.read() != u64::from(times))
}

/// Calls `right` with 0 to `times - 1`. Returns how often it returned false.
#[inline(always)]
fn repeat(times: u32, mut right: impl FnMut(u64) -> bool) -> u64 {
    let mut wrong = 0;
    for n in 0..u64::from(times) {
        wrong += u64::from(!right(n));
        black_box(());
    }
    wrong
}

extern "C" fn add_return(times: u32) -> u64 {
    repeat(times, |n| WORD.add_return(1) == n + 1)
}

extern "C" fn try_cmpxchg(times: u32) -> u64 {
    repeat(times, |n| WORD.try_cmpxchg(&mut { n }, n + 1))
}

extern "C" fn cmpxchg_pair(times: u32) -> u64 {
    repeat(times, |n| PAIR.cmpxchg((n, n), (n + 1, n + 1)))
}

extern "C" fn list_push(times: u32) -> u64 {
    let items = ITEMS.0.get().cast::<Node<u64>>();
    repeat(times, |n| {
        // SAFETY: `list_pop` has taken every item off the list since the last push, and dropped the
        // reference. `n` is less than the number of items.
        LIST.push(unsafe { &mut *items.add(n as usize) });
        true
    })
}

extern "C" fn list_pop(times: u32) -> u64 {
    repeat(times, |_| LIST.pop().is_some())
}

extern "C" fn ring_push(times: u32) -> u64 {
    repeat(times, |n| RING.push([n, n + 1, n + 2, n + 3]).is_ok())
}

/// The subjects in C: the sections inlined, the sections called as functions, and Pinfold's C API.
#[cfg(sections)]
mod in_c {
    use super::Subject;
    use pinfold_rseq::{Backend, Index, backend, possible};

    // Links the C API, which only C calls here.
    use pinfold_malloc as _;

    unsafe extern "C" {
        static sections_inlined: Subject;
        static sections_called: Subject;
        static pinfold_called: Subject;
        fn sections_init(cpus: usize, cid: bool) -> bool;
    }

    /// Returns the subjects, or why they are left out. The sections use the same index as Pinfold.
    pub fn subjects() -> Result<[&'static Subject; 3], &'static str> {
        let Backend::Rseq(index) = backend() else {
            return Err("Pinfold runs without restartable sequences here");
        };
        // SAFETY: the function only maps memory, and no other thread runs sections yet.
        if !unsafe { sections_init(possible(), index == Index::Cid) } {
            return Err("the C library has not registered the rseq area, or there is no memory");
        }
        // SAFETY: the subjects are constants, and the C headers declare their layout.
        Ok(unsafe { [&sections_inlined, &pinfold_called, &sections_called] })
    }
}

#[cfg(not(sections))]
mod in_c {
    use super::Subject;

    pub fn subjects() -> Result<[&'static Subject; 3], &'static str> {
        Err("they are written for x86-64 and glibc")
    }
}

pub use in_c::subjects as in_c;
