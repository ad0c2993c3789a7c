//! Where a word has its copies, and how an operation finds that of its CPU.

use super::list::register_fork;
use super::ring::READERS;
use super::{MOVES, WORD};
use crate::counter_units::{self, COUNTER_UNITS, LazyBlock, shared, units, word_at};
use crate::fork;
use core::marker::PhantomData;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{AcqRel, Acquire};
use pinfold_rseq::{Backend, FenceError, Units, backend, fence_index};

/// Where a word has its copies. A value is small, because it is an argument of the slow path, and
/// the fast path must keep it until then.
pub trait Place: Copy {
    /// Returns the offset of the word in every unit, or `None` before its block is allocated.
    fn known(self) -> Option<usize>;

    /// Returns the offset of the word in every unit. Allocates the block if need be.
    fn offset(self) -> Option<usize>;

    /// Returns the copy that CPUs without memory share.
    fn spilled(&self) -> &AtomicU64;

    /// Runs `section` on this CPU's copy. If this CPU has no copy and cannot get one, runs
    /// `spilled` on the shared copy.
    ///
    /// Callers pass closures that own what they use. A closure with references to local variables
    /// would keep these variables in memory instead of registers.
    #[inline(always)]
    fn run<R>(
        self,
        section: impl Fn(&Units, usize) -> Option<R>,
        spilled: impl FnOnce(&AtomicU64) -> R,
    ) -> R {
        let done = self.known().and_then(|offset| section(units(), offset));
        done.unwrap_or_else(move || self.run_slow(section, spilled))
    }

    /// Runs `section` on this CPU's copy. Returns false if this CPU has no copy.
    #[inline(always)]
    fn run_known(self, section: impl FnOnce(&Units, usize) -> bool) -> bool {
        let known = self.known();
        known.is_some_and(move |offset| section(units(), offset))
    }

    /// Runs `section` on this CPU's copy, which it makes if need be, or else `spilled` on the
    /// shared copy.
    #[cold]
    #[inline(never)]
    fn run_slow<R>(
        self,
        section: impl Fn(&Units, usize) -> Option<R>,
        spilled: impl FnOnce(&AtomicU64) -> R,
    ) -> R {
        let mut moves = 0;
        while moves < MOVES {
            let Some(offset) = self.offset() else { break };
            let Some(cpu) = counter_units::install_here() else {
                break;
            };
            if let Some(done) = section(units(), offset) {
                return done;
            }
            // The thread may have moved to a CPU without a unit between the two steps.
            moves += usize::from(!await_writer(cpu));
        }
        spilled(self.spilled())
    }

    /// Returns the word of `cpu`, if that CPU has a copy.
    fn word_on(self, cpu: usize) -> Option<&'static AtomicU64> {
        let offset = self.known()?;
        let has_unit = !COUNTER_UNITS.unit(cpu).is_null();
        has_unit.then(|| word_at(cpu, offset))
    }

    /// Stores `bits` in the word of `cpu`, and returns the bits that were there. Returns `Ok(None)`
    /// if that CPU has no copy.
    ///
    /// With restartable sequences, the steps are those of the module [`list`](super::list): hold
    /// [`READERS`], stop the CPU's unit, fence, store, resume. A section of that CPU comes before
    /// the stop, or it fails until the unit is resumed ([`await_writer`]). On atomics, each
    /// operation on a word is one atomic instruction, and so is this one.
    #[cold]
    fn swap_on(self, cpu: usize, bits: u64) -> Result<Option<u64>, FenceError> {
        let Some(word) = self.word_on(cpu) else {
            return Ok(None);
        };
        // AcqRel: as in the operations on this CPU's copy.
        if backend() == Backend::Atomic {
            return Ok(Some(word.swap(bits, AcqRel)));
        }
        let busy = |errno| FenceError { errno };
        fork::retry(|| register_fork().then_some(())).ok_or(busy(libc::EBUSY))?;
        let _reading = READERS.lock().ok_or(busy(libc::EDEADLK))?;
        COUNTER_UNITS.stop(cpu);
        let stored = fence_index(cpu).map(|()| word.swap(bits, AcqRel));
        COUNTER_UNITS.resume_untouched(cpu);
        stored.map(Some)
    }

    /// Calls `f(so_far, cpu, word)` for each CPU that has a copy, and last with `None` for the
    /// shared copy. `so_far` is `first`, and then what `f` returned.
    fn fold<A>(self, first: A, mut f: impl FnMut(A, Option<usize>, u64) -> A) -> A {
        let mut all = first;
        if let Some(offset) = self.known() {
            for cpu in counter_units::used() {
                // Acquire pairs with the releases of the operations: if the word is a reference,
                // this thread sees what it refers to.
                all = f(all, Some(cpu), word_at(cpu, offset).load(Acquire));
            }
        }
        f(all, None, self.spilled().load(Acquire))
    }
}

/// Waits while another thread has stopped the unit of `cpu` to write a word there. Returns whether
/// the unit was stopped, or is.
///
/// Does not wait in a signal handler that interrupted the holder of a lock of the library: the
/// holder may be the writing thread.
pub(super) fn await_writer(cpu: usize) -> bool {
    if COUNTER_UNITS.is_stopped(cpu) {
        // The writing thread holds the lock until it has resumed the unit. If a fork holds the
        // lock, no unit is stopped.
        return READERS.lock_or_divert().is_some() || !COUNTER_UNITS.is_stopped(cpu);
    }
    false
}

/// Blocks of `N` words in the units, and the copy that CPUs without memory share.
#[repr(C)]
pub struct Words<const N: usize> {
    block: LazyBlock,
    spilled: [AtomicU64; N],
}

impl<const N: usize> Words<N> {
    /// Returns words that have no block yet.
    pub(super) const fn new() -> Self {
        Words {
            block: LazyBlock::new(),
            spilled: [const { AtomicU64::new(0) }; N],
        }
    }

    /// Returns the place of the word number `at`, which is less than `N`.
    #[inline(always)]
    pub(super) fn place(&self, at: usize) -> OfWords<'_, N> {
        OfWords { words: self, at }
    }
}

impl<const N: usize> Drop for Words<N> {
    fn drop(&mut self) {
        // SAFETY: `offset` allocated the block with this size. `drop` has the only reference, so no
        // thread works on the block any more.
        unsafe { self.block.free(N * WORD) };
    }
}

/// The place of a word of [`Words`].
#[derive(Clone, Copy)]
pub struct OfWords<'a, const N: usize> {
    words: &'a Words<N>,
    at: usize,
}

impl<const N: usize> Place for OfWords<'_, N> {
    #[inline(always)]
    fn known(self) -> Option<usize> {
        let block = self.words.block.get();
        block.map(|offset| offset + self.at * WORD)
    }

    fn offset(self) -> Option<usize> {
        let (block, register) = (&self.words.block, counter_units::register_fork);
        let offset = block.get_or_alloc(N * WORD, register, |offset| offset)?;
        Some(offset + self.at * WORD)
    }

    fn spilled(&self) -> &AtomicU64 {
        &self.words.spilled[self.at]
    }
}

/// The place of a word of a block that stays for `'a`. Its shared copy is in the shared unit.
#[derive(Clone, Copy)]
pub struct InBlock<'a> {
    offset: usize,
    block: PhantomData<&'a LazyBlock>,
}

impl<'a> InBlock<'a> {
    /// Returns the place of the word number `at` of `block`, or `None` before the block is
    /// allocated. The block has more than `at` words.
    #[inline(always)]
    pub(super) fn of(block: &'a LazyBlock, at: usize) -> Option<Self> {
        Some(InBlock {
            offset: block.get()? + at * WORD,
            block: PhantomData,
        })
    }
}

impl Place for InBlock<'_> {
    #[inline(always)]
    fn known(self) -> Option<usize> {
        Some(self.offset)
    }

    fn offset(self) -> Option<usize> {
        Some(self.offset)
    }

    fn spilled(&self) -> &AtomicU64 {
        shared(self.offset)
    }
}
