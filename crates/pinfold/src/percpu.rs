//! Memory per CPU: a block stands at the same offset of every CPU's unit.
//!
//! All units lie in one mapping, a fixed stride apart; pages of it become memory where they are touched. Small blocks
//! are packed side by side, so that many counters share the lines and pages of each CPU, and a CPU that never comes by
//! costs nothing. Behind the last CPU's unit lies one more, the *shared unit*: what all CPUs have in common stands
//! there, at the same offset.
//!
//! ```text
//! unit 0                 unit 1                       unit `possible`
//! | header | closed | blocks…   | header | closed | blocks…   …   | shared unit: | blocks…
//! ```
//!
//! A unit is installed by the first slow path that runs on its CPU, and stays. On a machine with
//! several nodes its pages lie on the CPU's node, whatever the process's memory policy is.

use crate::fork::{self, Hooks, Rank};
use crate::lock::{Guard, Lock};
use crate::sys;
use crate::topology::facts;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU64, AtomicUsize};
use pinfold_rseq::{
    Backend, Index, MAX_INDEX, UNIT_HEADER, Units, backend, current, near, possible,
};

/// The units of all per-CPU memory of the library but the slab layer's.
pub(crate) static UNITS: Units = Units::new();

/// The units, for fast paths.
#[inline(always)]
pub(crate) fn units() -> &'static Units {
    near!(UNITS, Units)
}

/// The offset of a block of [`CLOSED_SIZE`] bytes that stay zero: a bounded add there always fails. Where a handle points
/// that has no block yet.
pub(crate) const CLOSED: usize = UNIT_HEADER;
const CLOSED_SIZE: usize = 64;

/// The unit of allocation, in bytes.
const WORD: usize = 8;
/// A block of at least a line begins at a line; a smaller one never crosses one if its size is a power of two.
const LINE_WORDS: usize = 8;
/// Bytes of a unit's address space: room for a million counters.
pub(crate) const STRIDE_MOST: usize = 32 << 20;
/// The same where every page is charged, touched or not.
const STRIDE_STRICT: usize = 256 << 10;
const STRIDE_LEAST: usize = 64 << 10;

/// Where the units lie; 0 until there is memory.
static BASE: AtomicUsize = AtomicUsize::new(0);
static STRIDE: AtomicUsize = AtomicUsize::new(0);
/// Where the shared unit lies.
static SHARED: AtomicUsize = AtomicUsize::new(0);
/// One bit for each index with a unit.
static IN_USE: [AtomicU64; MAX_INDEX / 64] = [const { AtomicU64::new(0) }; MAX_INDEX / 64];
/// How many words of `IN_USE` may not be 0.
static IN_USE_WORDS: AtomicUsize = AtomicUsize::new(0);

static SPACE: Lock<Space> = Lock::new(Space {
    map: 0,
    words: 0,
    hints: [0; CLASSES],
});

/// Alignments that are told apart in the search: 1, 2, 4 and 8 words.
const CLASSES: usize = 4;

/// Which words of the units are taken.
struct Space {
    /// The address of a bitmap with a bit for each word of a unit.
    map: usize,
    /// How many words a unit has.
    words: usize,
    /// For each alignment, the first word from which a run may be free.
    hints: [usize; CLASSES],
}

impl Space {
    fn bits(&self) -> &'static [AtomicU64] {
        // SAFETY: `open` mapped that many bits, for ever.
        unsafe { core::slice::from_raw_parts(self.map as *const AtomicU64, self.words / 64) }
    }

    /// Maps the units, in the largest size that the limits allow.
    fn open(&mut self) -> bool {
        if self.map != 0 {
            return true;
        }
        // The backend is chosen before there is any unit: no word is ever worked on in both ways.
        // NUMA work needs the CPU's number.
        pinfold_rseq::init(if facts::has_several_nodes() {
            Index::Cpu
        } else {
            Index::Cid
        });
        if !pinfold_rseq::decided() {
            return false;
        }
        let units = possible() + 1;
        let mut stride = if sys::commits_strictly() {
            STRIDE_STRICT
        } else {
            STRIDE_MOST
        };
        let most = sys::address_space_left() / 16;
        let base = loop {
            if stride < STRIDE_LEAST {
                return false;
            }
            let size = stride * units;
            match (size <= most).then(|| sys::map_sparse(size)).flatten() {
                Some(base) => break base,
                None => stride /= 2,
            }
        };
        let words = stride / WORD;
        let Some(map) = sys::map_sparse((words / 8).next_multiple_of(sys::page_size())) else {
            // SAFETY: just mapped, and nobody knows of it.
            unsafe { sys::unmap(base.as_ptr(), stride * units) };
            return false;
        };
        (self.map, self.words) = (map.as_ptr() as usize, words);
        let first = (CLOSED + CLOSED_SIZE) / WORD;
        self.set(0, first, true);
        self.hints = [first; CLASSES];
        STRIDE.store(stride, Relaxed);
        SHARED.store(base.as_ptr() as usize + possible() * stride, Relaxed);
        // Release pairs with the acquire in `unit_at`: it sees the stride.
        BASE.store(base.as_ptr() as usize, Release);
        true
    }

    fn is_taken(&self, word: usize) -> bool {
        self.bits()[word / 64].load(Relaxed) & 1 << (word % 64) != 0
    }

    fn set(&self, from: usize, count: usize, taken: bool) {
        for word in from..from + count {
            let bits = &self.bits()[word / 64];
            let bit = 1 << (word % 64);
            let old = bits.load(Relaxed);
            bits.store(if taken { old | bit } else { old & !bit }, Relaxed);
        }
    }

    /// The first free run of `count` words that begins at a multiple of `align`.
    fn find(&self, count: usize, align: usize, hint: usize) -> Option<usize> {
        let mut from = hint.next_multiple_of(align);
        while from + count <= self.words {
            // A full group of 64 is passed over at once.
            if from.is_multiple_of(64) && self.bits()[from / 64].load(Relaxed) == u64::MAX {
                from += 64;
                continue;
            }
            match (from..from + count).rfind(|&word| self.is_taken(word)) {
                None => return Some(from),
                Some(taken) => from = (taken + 1).next_multiple_of(align),
            }
        }
        None
    }
}

/// The alignment of a block of `words` words, and its class.
fn alignment(words: usize) -> (usize, usize) {
    let align = words.next_power_of_two().min(LINE_WORDS);
    (align, align.ilog2() as usize)
}

/// Finds room for `size` bytes in every unit. Returns the offset of a block that is zero
/// everywhere; `None` if there is no room or no memory, in a signal handler that interrupted this
/// function, and while another thread forks.
///
/// Touches one bit a word; takes the lock of this module.
pub(crate) fn alloc(size: usize) -> Option<usize> {
    place(SPACE.lock_or_divert(|_| false)?, size)
}

/// Finds room as [`alloc`] does, but waits until a fork is over. Not for signal handlers.
pub(crate) fn alloc_after_fork(size: usize) -> Option<usize> {
    place(SPACE.lock()?, size)
}

fn place(mut space: Guard<'_, Space>, size: usize) -> Option<usize> {
    let words = size.div_ceil(WORD);
    let (align, class) = alignment(words);
    if !space.open() {
        return None;
    }
    let found = space.find(words, align, space.hints[class])?;
    space.set(found, words, true);
    if words <= LINE_WORDS {
        space.hints[class] = found + words;
    }
    Some(found * WORD)
}

/// Gives a block back: zeroes it in every unit.
///
/// # Safety
///
/// `alloc(size)` gave `offset`, and no operation on the block is under way or will begin; reads may be, and mean nothing then.
pub(crate) unsafe fn free(offset: usize, size: usize) {
    let words = size.div_ceil(WORD);
    for unit in used().chain(core::iter::once(possible())) {
        for word in 0..words {
            let word = word_at(unit, offset + word * WORD);
            // A page that nobody has written to stays without memory.
            if word.load(Relaxed) != 0 {
                word.store(0, Relaxed);
            }
        }
    }
    // A frame of this thread that is in `alloc` loses the block: a handler that frees while it interrupts one is rare.
    if let Some(mut space) = SPACE.lock() {
        let from = offset / WORD;
        space.set(from, words, false);
        for hint in &mut space.hints {
            *hint = (*hint).min(from);
        }
    }
}

/// The word at `offset` of unit `unit`; `possible()` is the shared unit.
///
/// `offset` comes from [`alloc`], `unit` is at most `possible()`: both are checked by nothing but the callers' use.
#[inline]
pub(crate) fn word_at(unit: usize, offset: usize) -> &'static AtomicU64 {
    // Acquire pairs with the release in `open`.
    let base = BASE.load(Acquire);
    debug_assert!(base != 0 && unit <= possible() && offset < STRIDE.load(Relaxed));
    let at = base + unit * STRIDE.load(Relaxed) + offset;
    // SAFETY: offsets exist only once the units are mapped, for ever; words are aligned and always accessed atomically,
    // or by critical sections, whose accesses are single instructions.
    unsafe { &*(at as *const AtomicU64) }
}

/// The word at `offset` that all CPUs share.
#[inline]
pub(crate) fn shared(offset: usize) -> &'static AtomicU64 {
    // Acquire pairs with the release in `open`.
    debug_assert!(BASE.load(Acquire) != 0 && offset < STRIDE.load(Relaxed));
    // SAFETY: as in `word_at`; who has an offset came by `open`.
    unsafe { &*((SHARED.load(Relaxed) + offset) as *const AtomicU64) }
}

/// The indexes whose CPUs have a unit.
pub(crate) fn used() -> impl Iterator<Item = usize> {
    let words = IN_USE_WORDS.load(Acquire);
    IN_USE[..words].iter().enumerate().flat_map(|(at, bits)| {
        // Acquire pairs with the release in `install_here`.
        let mut left = bits.load(Acquire);
        core::iter::from_fn(move || {
            let bit = (left != 0).then(|| left.trailing_zeros() as usize)?;
            left &= left - 1;
            Some(at * 64 + bit)
        })
    })
}

/// Calls `f` with the `N` words at `offset` of each unit that is in use: what sums are made of.
#[inline]
pub(crate) fn for_each_used<const N: usize>(offset: usize, mut f: impl FnMut(&[AtomicU64; N])) {
    let words = IN_USE_WORDS.load(Acquire);
    // Acquire pairs with the release in `open`.
    let (base, stride) = (BASE.load(Acquire), STRIDE.load(Relaxed));
    for (at, bits) in IN_USE[..words].iter().enumerate() {
        // Acquire pairs with the release in `install_here`.
        let mut left = bits.load(Acquire);
        while left != 0 {
            let unit = at * 64 + left.trailing_zeros() as usize;
            left &= left - 1;
            // SAFETY: as in `word_at`; the caller's block has `N` words.
            f(unsafe { &*((base + unit * stride + offset) as *const [AtomicU64; N]) });
        }
    }
}

/// The index of the CPU (or concurrency id) the thread runs on, with its unit installed. `None` when there is no memory yet, or
/// for an index that the system did not announce at the start.
pub(crate) fn install_here() -> Option<usize> {
    let index = current();
    if index >= possible() || BASE.load(Acquire) == 0 {
        return None;
    }
    if UNITS.unit(index).is_null() {
        let unit = word_at(index, 0).as_ptr().cast();
        // SAFETY: the unit is a stride of whole pages in the units' mapping.
        unsafe { place_near(index, unit, STRIDE.load(Relaxed)) };
        // In use before installed: whoever walks the units meanwhile finds zeroes. Release pairs with the acquire in `used`.
        IN_USE_WORDS.fetch_max(index / 64 + 1, Release);
        IN_USE[index / 64].fetch_or(1 << (index % 64), Release);
        // Another thread may have been faster, with the same unit.
        let _ = UNITS.install(index, unit);
    }
    Some(index)
}

/// Has the kernel place the pages of a unit, which are not touched yet, on the node of CPU `index`:
/// the process's memory policy could place them anywhere. Does nothing on a machine with one node,
/// and where units are of concurrency ids, which move between nodes. Goes on where the kernel
/// refuses.
///
/// Two system calls, once for a unit; one more on a CPU whose node has no memory.
///
/// # Safety
///
/// `[unit, unit + size)` are whole pages of a mapping of ours.
#[cold]
pub(crate) unsafe fn place_near(index: usize, unit: *mut u8, size: usize) {
    if !facts::has_several_nodes() || backend() == Backend::Rseq(Index::Cid) {
        return;
    }
    let here = sys::cpu_and_node().filter(|&(cpu, _)| cpu == index);
    // SAFETY: the caller's promise.
    unsafe {
        let node = here.map(|(_, node)| node);
        // A thread that has left the CPU, and a CPU without memory of its own: the threads that
        // touch the unit run on the CPU.
        if node.is_none() || !sys::prefer_node(unit, size, node) {
            sys::prefer_node(unit, size, None);
        }
    }
}

/// The bytes from a unit's start that hold all blocks allocated so far, in whole pages, if these are `blocks` bytes and nobody
/// else's. No further block is put there: what lies there now can be [shared](share).
pub(crate) fn seal(blocks: usize) -> Option<usize> {
    let space = SPACE.lock()?;
    let taken = (0..space.words).filter(|&word| space.is_taken(word));
    let (count, last) = taken.fold((0, 0), |(count, _), word| (count + 1, word));
    if count * WORD != CLOSED + CLOSED_SIZE + blocks {
        return None;
    }
    let end = ((last + 1) * WORD).next_multiple_of(sys::page_size());
    space.set(0, end / WORD, true);
    Some(end)
}

/// Maps the file `fd`, from `offset` on, over the first `bytes` of every unit, one after the other and the shared unit last: what
/// is counted there shows to whoever maps the file too. The counts begin at zero. False when the system refuses, of some
/// units or of all.
///
/// # Safety
///
/// `bytes` comes from [`seal`]; the file is zeroed, of that size and nobody cuts it; no operation on blocks in those bytes is under
/// way, and what they hold is not needed.
pub(crate) unsafe fn share(fd: i32, offset: usize, bytes: usize) -> bool {
    let (base, stride) = (BASE.load(Acquire), STRIDE.load(Relaxed));
    (0..=possible()).all(|unit| {
        let at = (base + unit * stride) as *mut u8;
        // SAFETY: the beginning of a unit, in whole pages; the rest is the caller's promise.
        unsafe { sys::map_file_over(at, bytes, fd, offset + unit * bytes) }
    })
}

/// Has a fork wait until no place is being found or given back. False as for [`fork::register`].
pub(crate) fn register_fork() -> bool {
    static HOOKS: Hooks = Hooks {
        rank: Rank::Units,
        holds: |thread| SPACE.is_held_by(thread),
        before: || SPACE.lock_for_fork(),
        child: || UNITS.unlock_all_in_child(possible()),
        after: || SPACE.unlock_after_fork(),
    };
    fork::register(&HOOKS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    #[test]
    fn blocks_are_apart_aligned_and_zero_again() {
        let sizes = [8, 32, 8, 24, 64, 15_368, 32, 8, 320_000];
        let blocks: Vec<_> = sizes
            .iter()
            .map(|&size| (alloc(size).unwrap(), size))
            .collect();
        let mut sorted = blocks.clone();
        sorted.sort_unstable();
        assert!(sorted[0].0 >= CLOSED + CLOSED_SIZE);
        for pair in sorted.windows(2) {
            assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:?} overlap");
        }
        for &(offset, size) in &blocks {
            assert!(offset.is_multiple_of(size.next_power_of_two().min(64)));
            shared(offset).store(7, Relaxed);
            shared(offset + size - 8).store(7, Relaxed);
            // SAFETY: allocated above, and nothing operates on it.
            unsafe { free(offset, size) };
        }
        for size in sizes {
            let offset = alloc(size).unwrap();
            for word in (offset..offset + size).step_by(8) {
                assert_eq!(shared(word).load(Relaxed), 0);
            }
        }
    }

    #[test]
    fn a_unit_is_there_after_its_first_use() {
        let offset = alloc(8).unwrap();
        let index = install_here().unwrap();
        assert!(used().any(|used| used == index));
        // SAFETY: the block is 8 bytes long.
        while !unsafe { UNITS.add(offset, 1) } {
            install_here();
        }
        let sum: u64 = used().map(|unit| word_at(unit, offset).load(Relaxed)).sum();
        assert_eq!(sum, 1);
    }

    #[test]
    fn exhaustion_is_an_answer() {
        assert_eq!(alloc(STRIDE_MOST * 2), None);
    }
}
