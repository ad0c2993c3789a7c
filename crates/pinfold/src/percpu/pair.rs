//! Two words for each CPU that change together.

use super::place::await_writer;
use super::{MOVES, Word};
use crate::counter_units::{self, LazyBlock, units};
use core::fmt;
use core::marker::PhantomData;
use core::sync::atomic::Ordering::Acquire;

/// Bytes of a pair. The block's size, a power of two, also aligns it.
const SIZE: usize = 16;

/// Two words with a copy for each CPU, which one operation compares and replaces together.
///
/// All bits are zero at first. Without restartable sequences, the child of a fork may find one word
/// of a copy old and the other new, if another thread was changing them. This is the kernel's
/// `this_cpu_cmpxchg_double`.
///
/// ```
/// use pinfold::percpu::PerCpuPair;
///
/// /// The bytes of the largest request on this CPU, and its number.
/// static LARGEST: PerCpuPair<u64, u64> = PerCpuPair::new();
///
/// let note = |bytes, number| {
///     while let Some(now) = LARGEST.read().filter(|now| now.0 < bytes) {
///         if LARGEST.cmpxchg(now, (bytes, number)) {
///             break;
///         }
///     }
/// };
/// note(100, 1);
/// note(700, 2);
/// note(300, 3);
/// let mut largest = (0, 0);
/// LARGEST.for_each_cpu(|_, pair| largest = largest.max(pair));
/// assert_eq!(largest, (700, 2));
/// ```
// The C header declares this layout.
#[repr(C)]
pub struct PerCpuPair<A: Word, B: Word> {
    block: LazyBlock,
    // Neither type may become a supertype or a subtype: what one reference writes, another reads.
    first: PhantomData<fn(A) -> A>,
    second: PhantomData<fn(B) -> B>,
}

impl<A: Word, B: Word> PerCpuPair<A, B> {
    /// Returns a pair whose copies are all zero bits. A static can hold it. Allocates nothing.
    pub const fn new() -> Self {
        PerCpuPair {
            block: LazyBlock::new(),
            first: PhantomData,
            second: PhantomData,
        }
    }

    /// Returns this CPU's copy, or `None` if there is no memory for one.
    ///
    /// Reads the two words one after the other. The pair may mix two moments or two CPUs.
    /// [`cmpxchg`](Self::cmpxchg) compares both words again, so it never stores over a different
    /// pair. Costs six loads.
    #[inline]
    pub fn read(&self) -> Option<(A, B)> {
        let load = |offset| {
            // SAFETY: `offset` is that of this pair's block of two words, which is freed only when
            // the pair is dropped.
            let words = unsafe { (units().load(offset)?, units().load(offset + 8)?) };
            Some((A::from_bits(words.0), B::from_bits(words.1)))
        };
        let known = self.block.get().and_then(load);
        known.or_else(|| self.read_slow(load))
    }

    #[cold]
    #[inline(never)]
    fn read_slow(&self, load: impl Fn(usize) -> Option<(A, B)>) -> Option<(A, B)> {
        let mut moves = 0;
        while moves < MOVES {
            let (offset, cpu) = self.prepare()?;
            if let Some(pair) = load(offset) {
                return Some(pair);
            }
            // The thread may have moved to a CPU without a unit between the two steps. A unit that
            // another thread has stopped comes back, however often that happens.
            moves += usize::from(!await_writer(cpu));
        }
        None
    }

    /// Stores `new` in this CPU's copy if the copy is `expected`, and returns true.
    ///
    /// Returns false and stores nothing if a word differs, if there is no memory for the copy, or
    /// (without restartable sequences) if another thread is changing the copy. A signal handler may
    /// have interrupted that thread, so a handler must not repeat the call without end. Costs one
    /// critical section.
    #[inline]
    pub fn cmpxchg(&self, expected: (A, B), new: (A, B)) -> bool {
        let expected = (expected.0.to_bits(), expected.1.to_bits());
        let new = (new.0.to_bits(), new.1.to_bits());
        let known = self.block.get();
        known.is_some_and(|offset| Self::exchange(offset, expected, new))
            || self.cmpxchg_slow(expected, new)
    }

    #[inline(always)]
    fn exchange(offset: usize, expected: (u64, u64), new: (u64, u64)) -> bool {
        // SAFETY: callers pass the offset of a pair's block, which is freed only when the pair is
        // dropped. Blocks of 16 bytes are aligned to 16 bytes, and units to pages.
        unsafe { units().compare_exchange_pair(offset, expected.into(), new.into()) }
    }

    /// Exchanges again if the first attempt failed because this CPU had no copy.
    ///
    /// Takes pairs of words, which the caller passes in registers.
    #[cold]
    #[inline(never)]
    fn cmpxchg_slow(&self, expected: (u64, u64), new: (u64, u64)) -> bool {
        // SAFETY: `at` is the offset of this pair's block.
        let has_copy = |at| unsafe { units().load(at) }.is_some();
        if self.block.get().is_some_and(has_copy) {
            return false;
        }
        let exchange = |offset| Self::exchange(offset, expected, new);
        (0..MOVES).any(|_| {
            self.prepare().is_some_and(|(offset, cpu)| {
                await_writer(cpu);
                exchange(offset)
            })
        })
    }

    /// Calls `f` with each CPU that has a copy, and with the copy.
    ///
    /// Another CPU may change its copy between the reads of the two words.
    pub fn for_each_cpu(&self, mut f: impl FnMut(usize, (A, B))) {
        let Some(offset) = self.block.get() else {
            return;
        };
        for cpu in counter_units::used() {
            // Acquire pairs with the release of `cmpxchg`: if a word is a reference, this thread
            // sees what it refers to.
            let words = [0, 8].map(|at| counter_units::word_at(cpu, offset + at).load(Acquire));
            f(cpu, (A::from_bits(words[0]), B::from_bits(words[1])));
        }
    }

    /// Returns the block's offset and this CPU, which has a unit now.
    #[cold]
    #[inline(never)]
    fn prepare(&self) -> Option<(usize, usize)> {
        let offset = self
            .block
            .get_or_alloc(SIZE, counter_units::register_fork, |offset| offset)?;
        Some((offset, counter_units::install_here()?))
    }
}

impl<A: Word, B: Word> Drop for PerCpuPair<A, B> {
    fn drop(&mut self) {
        // SAFETY: `prepare` allocated the block with this size. `drop` has the only reference, so
        // no thread works on the block any more.
        unsafe { self.block.free(SIZE) };
    }
}

impl<A: Word, B: Word> Default for PerCpuPair<A, B> {
    fn default() -> Self {
        Self::new()
    }
}

impl<A: Word + fmt::Debug, B: Word + fmt::Debug> fmt::Debug for PerCpuPair<A, B> {
    /// Shows each copy.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut map = f.debug_map();
        self.for_each_cpu(|cpu, pair| {
            map.entry(&cpu, &pair);
        });
        map.finish()
    }
}
