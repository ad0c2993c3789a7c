//! Per-CPU memory: a block lies at the same offset in every CPU's unit.
//!
//! All units lie in one mapping, a fixed stride apart. Pages of the mapping take memory only when
//! they are touched, so a CPU on which the process never counts takes none. While a CPU is
//! isolated, the pages of all blocks are made resident instead ([`make_resident`]). Small blocks
//! are packed side by side, so many counters share the cache lines and pages of each CPU. Behind
//! the last CPU's unit lies one more, the *shared unit*. All CPUs together use the part of each
//! block that lies there.
//!
//! ```text
//! unit 0                        unit 1                          unit `possible`
//! | header | closed | blocks…   | header | closed | blocks…  …  | shared unit: | blocks…
//! ```
//!
//! The first slow path that runs on a CPU installs the CPU's unit, for the life of the process. On
//! a machine with several nodes, [`place_near`] puts a unit's pages on the CPU's node, whatever the
//! process's memory policy is.

mod lazy;

pub(crate) use lazy::LazyBlock;

use crate::fork;
use crate::lock::{Guard, Hooks, Lock, Rank};
use crate::sys;
use crate::topology::{bits, facts};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use core::sync::atomic::{AtomicU64, AtomicUsize, fence};
use pinfold_rseq::{
    Backend, Index, MAX_INDEX, UNIT_HEADER, Units, backend, current, near, possible,
};

/// The units of all per-CPU memory except that of `cache_units`.
// `near!` requires `#[used]`.
#[used]
pub(crate) static COUNTER_UNITS: Units = Units::new();

/// Returns the units, for fast paths.
#[inline(always)]
pub(crate) fn units() -> &'static Units {
    near!(COUNTER_UNITS, Units)
}

/// The offset of a block of [`CLOSED_SIZE`] bytes that stay zero, where a bounded add always fails.
/// A counter without a block of its own uses this offset.
pub(crate) const CLOSED: usize = UNIT_HEADER;
const CLOSED_SIZE: usize = 64;

/// The unit of allocation, in bytes.
const WORD: usize = 8;
/// Blocks of this many words or more begin at a cache line. A smaller block never crosses a line if
/// its size is a power of two.
const LINE_WORDS: usize = 8;
/// The address space of a unit in bytes: room for a million counters.
pub(crate) const MAX_STRIDE: usize = 32 << 20;
/// The largest unit if the kernel commits strictly. Every page then counts against the overcommit
/// limit, touched or not.
const STRIDE_STRICT: usize = 256 << 10;
const MIN_STRIDE: usize = 64 << 10;

/// The address of the first unit, or 0 until the units are mapped.
static BASE: AtomicUsize = AtomicUsize::new(0);
static STRIDE: AtomicUsize = AtomicUsize::new(0);
/// The largest offset at which a block has ever ended. Never falls. 0 before the first block.
static END: AtomicUsize = AtomicUsize::new(0);
/// How many bytes at the start of each unit were made resident, in whole pages.
static RESIDENT: AtomicUsize = AtomicUsize::new(0);
/// The address of the shared unit.
static SHARED: AtomicUsize = AtomicUsize::new(0);
/// One bit for each index with a unit.
static IN_USE: [AtomicU64; MAX_INDEX / 64] = [const { AtomicU64::new(0) }; MAX_INDEX / 64];
/// How many words of `IN_USE`, from the first on, may have a bit set.
static IN_USE_WORDS: AtomicUsize = AtomicUsize::new(0);

static SPACE: Lock<Space> = Lock::new(
    Rank::Units,
    Space {
        map: 0,
        words: 0,
        hints: [0; CLASSES],
    },
);

/// The number of alignments that the search distinguishes: 1, 2, 4 and 8 words.
const CLASSES: usize = 4;

/// The taken words of the units.
struct Space {
    /// The address of a bitmap with one bit for each word of a unit.
    map: usize,
    /// The number of words in a unit.
    words: usize,
    /// For each alignment, the first word from which a run may be free.
    hints: [usize; CLASSES],
}

impl Space {
    fn bits(&self) -> &'static [AtomicU64] {
        // SAFETY: callers have run `open`, which mapped a bitmap of `words` bits and never unmaps
        // it.
        unsafe { core::slice::from_raw_parts(self.map as *const AtomicU64, self.words / 64) }
    }

    /// Maps the units, as large as the limits allow. Returns false if there is no memory.
    fn open(&mut self) -> bool {
        if self.map != 0 {
            return true;
        }
        // Chooses the backend before there is any unit, so that atomics and critical sections never
        // work on the same word.
        if !facts::choose_backend() {
            return false;
        }
        let units = possible() + 1;
        let mut stride = if sys::commits_strictly() {
            STRIDE_STRICT
        } else {
            MAX_STRIDE
        };
        let most = sys::address_space_left() / 16;
        let base = loop {
            if stride < MIN_STRIDE {
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
            // SAFETY: this function has just mapped the pages, and no other code knows of them.
            unsafe { sys::unmap(base.as_ptr(), stride * units) };
            return false;
        };
        (self.map, self.words) = (map.as_ptr() as usize, words);
        let first = (CLOSED + CLOSED_SIZE) / WORD;
        self.set(0, first, true);
        self.hints = [first; CLASSES];
        STRIDE.store(stride, Relaxed);
        SHARED.store(base.as_ptr() as usize + possible() * stride, Relaxed);
        // Release pairs with the acquire in `word_at`: a thread that sees the address sees the
        // stride.
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

    /// Returns the first free run of `count` words at or after `hint` that begins at a multiple of
    /// `align`.
    fn find(&self, count: usize, align: usize, hint: usize) -> Option<usize> {
        let mut from = hint.next_multiple_of(align);
        while from + count <= self.words {
            // Skips a full group of 64 words at once.
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

/// Returns the alignment of a block of `words` words, and its class.
fn alignment(words: usize) -> (usize, usize) {
    let align = words.next_power_of_two().min(LINE_WORDS);
    (align, align.ilog2() as usize)
}

/// Allocates a block of `size` bytes at the same offset in every unit, and returns the offset. The
/// block is zero in every unit.
///
/// Returns `None` if there is no room or no memory, while another thread forks, and in a signal
/// handler that may not wait for this module's lock.
///
/// Takes this module's lock, and writes one bit for each word. Reads the bits from a hint up to the
/// first free run. The first call maps the units. While a CPU is isolated, a block on a page
/// without blocks so far costs a system call for each unit.
pub(crate) fn alloc(size: usize) -> Option<usize> {
    alloc_in(SPACE.lock_or_divert()?, size)
}

/// Allocates as [`alloc`] does, but waits until another thread's fork is over. Not for signal
/// handlers.
pub(crate) fn alloc_after_fork(size: usize) -> Option<usize> {
    alloc_in(SPACE.lock()?, size)
}

fn alloc_in(mut space: Guard<'_, Space>, size: usize) -> Option<usize> {
    let words = size.div_ceil(WORD);
    let (align, class) = alignment(words);
    if !space.open() {
        return None;
    }
    let found = space.find(words, align, space.hints[class])?;
    space.set(found, words, true);
    let end = (found + words) * WORD;
    END.fetch_max(end, Relaxed);
    if words <= LINE_WORDS {
        space.hints[class] = found + words;
    }
    // Pairs with the fence in `make_resident`.
    fence(SeqCst);
    if end > RESIDENT.load(Relaxed) && facts::any_quiet() {
        make_resident();
    }
    Some(found * WORD)
}

/// Makes the pages of all blocks resident in the units in use and in the shared unit, so that no
/// later use interrupts an isolated CPU ([`sys::make_resident`]). Makes a system call for each
/// unit.
pub(crate) fn make_resident() {
    // The caller has isolated a CPU, or has moved `END`. Pairs with the fences in `install_here`
    // and `alloc_in`: either this thread sees their unit or block, or they see the isolated CPU.
    fence(SeqCst);
    let end = END.load(Relaxed);
    if end != 0 {
        let units = used().chain(core::iter::once(possible()));
        units.for_each(|unit| make_start_resident(unit, end));
        RESIDENT.fetch_max(end.next_multiple_of(sys::page_size()), Relaxed);
    }
}

/// Makes the pages of a unit that hold its first `size` bytes resident.
fn make_start_resident(unit: usize, size: usize) {
    let size = size.next_multiple_of(sys::page_size());
    // SAFETY: `size` is at most what a unit has, and units are whole pages of a mapping of this
    // library.
    unsafe { sys::make_resident(word_at(unit, 0).as_ptr().cast(), size) };
}

/// Zeroes a block in every unit and gives it back.
///
/// # Safety
///
/// `offset` comes from `alloc(size)`. No operation on the block is under way, and none will begin.
/// Other threads may still read the block, but must not rely on what they read.
pub(crate) unsafe fn free(offset: usize, size: usize) {
    let words = size.div_ceil(WORD);
    for unit in used().chain(core::iter::once(possible())) {
        for word in 0..words {
            let word = word_at(unit, offset + word * WORD);
            // Writes only if needed, so that an untouched page takes no memory.
            if word.load(Relaxed) != 0 {
                word.store(0, Relaxed);
            }
        }
    }
    // The lock refuses a signal handler that may not wait for it. In this rare case the block
    // leaks.
    if let Some(mut space) = SPACE.lock() {
        let from = offset / WORD;
        space.set(from, words, false);
        for hint in &mut space.hints {
            *hint = (*hint).min(from);
        }
    }
}

/// Returns the word at `offset` of unit `unit`. The unit numbered `possible()` is the shared unit.
///
/// The caller passes an offset within a block of [`alloc`], and at most `possible()` as the unit.
/// Only debug builds check these bounds.
#[inline]
pub(crate) fn word_at(unit: usize, offset: usize) -> &'static AtomicU64 {
    // Acquire pairs with the release in `open`: this thread sees the stride.
    let base = BASE.load(Acquire);
    debug_assert!(base != 0 && unit <= possible() && offset < STRIDE.load(Relaxed));
    let at = base + unit * STRIDE.load(Relaxed) + offset;
    // SAFETY: an offset exists only after `open` has mapped the units, which are never unmapped.
    // Words are aligned. Every access is atomic, or a single instruction of a critical section.
    unsafe { &*(at as *const AtomicU64) }
}

/// Returns a function that returns the `N` words at an offset of unit `unit`. The unit's address is
/// computed once.
///
/// The caller passes offsets of blocks of [`alloc`] that have `N` words, and at most `possible()`
/// as the unit. At least one block was allocated before.
#[inline]
pub(crate) fn blocks_of<const N: usize>(
    unit: usize,
) -> impl Fn(usize) -> &'static [AtomicU64; N] + Copy {
    // Acquire pairs with the release in `open`: this thread sees the stride.
    let base = BASE.load(Acquire);
    let stride = STRIDE.load(Relaxed);
    debug_assert!(base != 0 && unit <= possible());
    move |offset| {
        debug_assert!(offset < stride);
        // SAFETY: an offset exists only after `open` has mapped the units, which are never
        // unmapped. The caller's block has `N` aligned words there, which are accessed atomically
        // or by critical sections.
        unsafe { &*((base + unit * stride + offset) as *const [AtomicU64; N]) }
    }
}

/// Returns the unit in which `address` is. The caller passes an address in the units.
pub(crate) fn unit_of(address: usize) -> usize {
    // Acquire pairs with the release in `open`: this thread sees the stride.
    (address - BASE.load(Acquire)) / STRIDE.load(Relaxed)
}

/// Returns the word at `offset` that all CPUs share.
#[inline]
pub(crate) fn shared(offset: usize) -> &'static AtomicU64 {
    // Acquire pairs with the release in `open`: this thread sees the stride.
    debug_assert!(BASE.load(Acquire) != 0 && offset < STRIDE.load(Relaxed));
    // SAFETY: an offset exists only after `open` has mapped the units and stored `SHARED`. The
    // units are never unmapped, and words are aligned and accessed atomically.
    unsafe { &*((SHARED.load(Relaxed) + offset) as *const AtomicU64) }
}

/// Returns the indexes that have a unit.
pub(crate) fn used() -> impl Iterator<Item = usize> {
    // Acquire, here and below, pairs with the releases in `install_here`: a thread that sees a
    // unit's bit also sees the unit's pages placed.
    let words = IN_USE_WORDS.load(Acquire);
    let words = IN_USE[..words].iter().enumerate();
    words.flat_map(|(at, word)| bits(word.load(Acquire)).map(move |bit| at * 64 + bit))
}

/// Calls `f` with the `N` words at `offset` of each unit in use. The counters' sums use this
/// function.
#[inline]
pub(crate) fn for_each_used<const N: usize>(offset: usize, mut f: impl FnMut(&[AtomicU64; N])) {
    // Acquire, here and below, pairs with the releases in `install_here`: a thread that sees a
    // unit's bit also sees the unit's pages placed.
    let words = IN_USE_WORDS.load(Acquire);
    // Acquire pairs with the release in `open`: this thread sees the stride.
    let (base, stride) = (BASE.load(Acquire), STRIDE.load(Relaxed));
    for (at, word) in IN_USE[..words].iter().enumerate() {
        for bit in bits(word.load(Acquire)) {
            let unit = at * 64 + bit;
            // SAFETY: the unit is in use, so it is mapped until the process ends. The caller's
            // block has `N` aligned words at `offset`, which are accessed atomically or by critical
            // sections.
            f(unsafe { &*((base + unit * stride + offset) as *const [AtomicU64; N]) });
        }
    }
}

/// Installs the unit of the index on which the thread runs, and returns the index.
///
/// Returns `None` if the units are not mapped yet, or if the index is [`possible`] or
/// more.
pub(crate) fn install_here() -> Option<usize> {
    let index = current();
    if index >= possible() || BASE.load(Acquire) == 0 {
        return None;
    }
    if COUNTER_UNITS.unit(index).is_null() {
        let unit = word_at(index, 0).as_ptr().cast();
        // SAFETY: the unit is `STRIDE` bytes of whole pages in the mapping of the units.
        unsafe { place_near(index, unit, STRIDE.load(Relaxed)) };
        // Marks the unit as in use before it is installed. A thread that walks the units between
        // the two steps finds zeroes. Release pairs with the acquires in `used` and
        // `for_each_used`: a thread that sees the unit's bit also sees its pages placed.
        IN_USE_WORDS.fetch_max(index / 64 + 1, Release);
        IN_USE[index / 64].fetch_or(1 << (index % 64), Release);
        // Pairs with the fence in `make_resident`.
        fence(SeqCst);
        if facts::any_quiet() {
            make_start_resident(index, END.load(Relaxed));
            sys::make_statics_resident();
        }
        // If another thread was faster, it has installed the same unit.
        let _ = COUNTER_UNITS.install(index, unit);
    }
    Some(index)
}

/// Adds `n` to this CPU's word at `offset`. Installs the CPU's unit first. On a CPU that cannot
/// have a unit, adds to the shared unit's word.
///
/// # Safety
///
/// `offset` is that of a word in a block of [`alloc`], which is not freed meanwhile.
pub(crate) unsafe fn add_slow(offset: usize, n: u64) {
    install_here();
    // SAFETY: the caller promises a word in a block.
    if !unsafe { units().add(offset, n) } {
        shared(offset).fetch_add(n, Relaxed);
    }
}

/// Makes the kernel place the pages of a unit on the node of CPU `index`. The pages are not touched
/// yet.
///
/// Without this call, the process's memory policy could place the pages on any node. Does nothing
/// on a machine with one node. Does nothing if units belong to concurrency ids, because these move
/// between nodes. Ignores a refusal of the kernel.
///
/// Makes two system calls, and one more on a CPU whose node has no memory. Runs about once for each
/// unit.
///
/// # Safety
///
/// `[unit, unit + size)` are whole pages of a mapping of this library.
#[cold]
pub(crate) unsafe fn place_near(index: usize, unit: *mut u8, size: usize) {
    if !facts::has_several_nodes() || backend() == Backend::Rseq(Index::Cid) {
        return;
    }
    let here = sys::cpu_and_node().filter(|&(cpu, _)| cpu == index);
    // SAFETY: the caller promises whole pages of this library.
    unsafe {
        let node = here.map(|(_, node)| node);
        // If the thread has left the CPU, or the CPU's node has no memory, the kernel places each
        // page where it is first touched. The threads that touch the unit run on that CPU, so the
        // pages still come from near it. Pages that `make_resident` touches do not.
        if node.is_none() || !sys::prefer_node(unit, size, node) {
            sys::prefer_node(unit, size, None);
        }
    }
}

/// Returns how many bytes at the start of each unit hold all blocks so far, in whole pages. Places
/// no further blocks there, so that these bytes can be [shared](share).
///
/// Returns `None` if there are more blocks than the `blocks` bytes that the caller has allocated.
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

/// Maps the file `fd` over the first `bytes` of every unit. The units follow each other in the file
/// from `offset` on, and the shared unit is last. Other processes that map the file then see the
/// counts, which begin at 0.
///
/// Returns false if the system refuses, for some units or for all.
///
/// # Safety
///
/// * `bytes` comes from [`seal`].
/// * The file is zeroed and large enough, and no process truncates it.
/// * No operation on blocks in those bytes is under way, and their content is not needed.
pub(crate) unsafe fn share(fd: i32, offset: usize, bytes: usize) -> bool {
    let (base, stride) = (BASE.load(Acquire), STRIDE.load(Relaxed));
    (0..=possible()).all(|unit| {
        let at = (base + unit * stride) as *mut u8;
        // SAFETY: `at` is the start of a unit, and `seal` returned `bytes` as whole pages. The
        // caller promises that their content is not needed, and that no operation on them is under
        // way.
        unsafe { sys::map_file_over(at, bytes, fd, offset + unit * bytes) }
    })
}

/// Makes a fork wait while a thread allocates or frees a block. Returns what [`fork::register`]
/// returns.
pub(crate) fn register_fork() -> bool {
    static HOOKS: [Hooks; 1] = [Hooks {
        child: || COUNTER_UNITS.unlock_all_in_child(possible()),
        ..Hooks::locks(Rank::Units, |visit| visit(SPACE.word()))
    }];
    fork::register(&HOOKS)
}

/// Returns the word of this module's lock, for tests.
#[cfg(test)]
pub(crate) fn lock_word() -> &'static crate::lock::Word {
    SPACE.word()
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
            // SAFETY: the block was allocated above, and no operation on it is under way.
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
    fn a_unit_is_in_use_after_install_here() {
        let offset = alloc(8).unwrap();
        let index = install_here().unwrap();
        assert!(used().any(|used| used == index));
        // SAFETY: the block is 8 bytes long.
        while !unsafe { COUNTER_UNITS.add(offset, 1) } {
            install_here();
        }
        let sum: u64 = used().map(|unit| word_at(unit, offset).load(Relaxed)).sum();
        assert_eq!(sum, 1);
    }

    /// Returns the calling thread's page faults.
    fn faults() -> i64 {
        // SAFETY: `rusage` consists of integers, and the call writes to one.
        unsafe {
            let mut usage: libc::rusage = core::mem::zeroed();
            libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage);
            usage.ru_minflt
        }
    }

    #[test]
    fn blocks_are_resident_while_a_cpu_is_isolated() {
        const SIZE: usize = 1 << 20;
        let write = |offset: usize| {
            let units = used().chain(core::iter::once(possible()));
            let before = faults();
            for unit in units {
                for at in (offset..offset + SIZE).step_by(sys::page_size()) {
                    word_at(unit, at).store(0, Relaxed);
                }
            }
            faults() - before
        };
        // Without an isolated CPU, each page is a fault. Other blocks may share the first page.
        let lazy = alloc(SIZE).unwrap();
        let pages = (SIZE / sys::page_size()) as i64;
        assert!(facts::any_quiet() || write(lazy) >= pages - 1);
        // No CPU has this number.
        let place = crate::spared::claim(9999, 9999).unwrap();
        let resident = alloc(SIZE).unwrap();
        let found = write(resident);
        crate::spared::release(place);
        // SAFETY: the blocks were allocated above, and no operation on them is under way.
        unsafe {
            free(lazy, SIZE);
            free(resident, SIZE);
        }
        assert!(found < 4, "{found} faults");
    }

    #[test]
    fn alloc_returns_none_without_room() {
        assert_eq!(alloc(MAX_STRIDE * 2), None);
    }
}
