//! Per-CPU variables, lists and rings for a program's own data.
//!
//! A per-CPU variable has one copy for each CPU. An operation works on the copy of the CPU on which
//! the thread runs. With restartable sequences, an operation is one critical section: it takes no
//! lock, executes no atomic instruction, and makes no system call. These are the kernel's
//! `this_cpu` operations, under the kernel's names.
//!
//! | type | what each CPU has | what the kernel or librseq has |
//! |---|---|---|
//! | [`PerCpu`] | a word | `this_cpu_read` … `this_cpu_try_cmpxchg` |
//! | [`PerCpuArray`] | an array of words | the same, on an element |
//! | [`PerCpuPair`] | two words that change together | `this_cpu_cmpxchg_double` |
//! | [`PerCpuList`] | a list of items | librseq's per-CPU list |
//! | [`PerCpuRing`] | a ring of records, read from afar | `perf`'s and `ftrace`'s buffers |
//! | [`PerCpuRef`] | a part of a reference count | `percpu_ref` |
//!
//! # The copy of "this CPU"
//!
//! A thread may move to another CPU between two operations. An operation that the kernel interrupts
//! starts again, and works on one copy only. So a `read` followed by a `write` may work on two
//! copies. An operation that reads and writes, such as [`cmpxchg`](PerCpu::cmpxchg), works on one
//! copy, and no other thread comes between.
//!
//! "CPU" here means the index of the process's backend: the CPU's number, or the concurrency id
//! that the kernel gives each thread that is running ([`pinfold_rseq`]).
//!
//! # Memory
//!
//! Copies are packed side by side, at the same offset for each CPU and on the CPU's node. A word
//! takes 8 bytes on each CPU that uses it. All blocks of a process share 32 MiB for each CPU. If
//! the kernel commits memory strictly, they share 256 KiB. A limit on the address space reduces the
//! size further, down to 64 KiB. The first operation on a variable reserves its offset on all CPUs,
//! and the first operation on a CPU may allocate that CPU's memory. If there is none, all CPUs
//! share one copy inside the variable, which is changed by atomic instructions. The results are
//! right then too, but the operations are slower.
//!
//! # Signals and fork
//!
//! Signal handlers may use every operation on this CPU's copy. After a fork, the child has its own
//! copies. [`PerCpuPair`] names the one exception.

mod array;
mod list;
mod pair;
mod place;
mod ref_count;
mod reference;
mod ring;
#[doc(hidden)]
pub mod sized;
mod word;

pub use array::PerCpuArray;
pub use list::{Items, Node, PerCpuList};
pub use pair::PerCpuPair;
#[doc(hidden)]
pub use ref_count::{Killed, RefCount};
pub use reference::PerCpuRef;
#[doc(hidden)]
pub use reference::{kill, revive};
pub use ring::{PerCpuRing, PushError};
pub use word::{Integer, Word};

use core::fmt;
use core::marker::PhantomData;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use pinfold_rseq::{FenceError, Units};
use place::{OfWords, Place, Words};

/// What `ref_count` uses. Its model in loom replaces this module.
mod primitive {
    pub(super) use super::MOVES;
    use super::list::register_fork;
    use crate::topology::facts;
    pub(super) use core::sync::atomic::{AtomicU64, fence};
    use pinfold_rseq::fence_is_refused;
    pub(super) use pinfold_rseq::possible;

    /// Returns whether a count may have words on the CPUs: a fork waits for the threads that work
    /// on them from afar, and the kernel can fence.
    pub(super) fn register() -> bool {
        facts::choose_backend() && !fence_is_refused() && register_fork()
    }
}

/// Bytes of a word.
const WORD: usize = 8;
/// The number of times that an operation tries to get a unit for its CPU, before it uses the shared
/// copy.
const MOVES: usize = 8;

/// A variable with a copy of type `T` for each CPU, which is all zero bits at first.
///
/// Each operation costs one critical section, whatever other CPUs do. `pinfold-bench percpu` prints
/// its cycles.
///
/// ```
/// use pinfold::percpu::PerCpu;
///
/// static REQUESTS: PerCpu<u64> = PerCpu::new();
///
/// std::thread::scope(|scope| {
///     for _ in 0..4 {
///         scope.spawn(|| (0..1000).for_each(|_| REQUESTS.inc()));
///     }
/// });
/// assert_eq!(REQUESTS.sum(), 4000);
/// ```
///
/// A reference to a variable cannot become one to a variable of another lifetime:
///
/// ```compile_fail
/// use pinfold::percpu::PerCpu;
///
/// static ANY: PerCpu<Option<&'static for<'a> fn(&'a u8)>> = PerCpu::new();
/// let longer: &PerCpu<Option<&'static fn(&'static u8)>> = &ANY;
/// ```
// The C header declares this layout, for `T` of a word.
#[repr(C)]
pub struct PerCpu<T: Word> {
    words: Words<1>,
    // `T` may not become a supertype or a subtype: what one reference writes, another reads.
    types: PhantomData<fn(T) -> T>,
}

/// The operations of [`PerCpu`] and of an element of an array. `place` says where the copies are.
macro_rules! operations {
    () => {
        /// Returns the copy of this CPU. Costs three loads.
        #[inline]
        pub fn read(&self) -> T {
            // SAFETY: `run` passes the offset of a word of this variable's block, which is freed
            // only when the variable is dropped.
            let word = |units: &Units, at| unsafe { units.load(at) };
            T::from_bits(self.place().run(word, |word| word.load(Acquire)))
        }

        /// Stores `value` in the copy of this CPU.
        #[inline]
        pub fn write(&self, value: T) {
            let bits = value.to_bits();
            // SAFETY: `run` passes the offset of a word of this variable's block.
            let section = move |units: &Units, at| unsafe { units.store(at, bits) }.then_some(());
            self.place()
                .run(section, move |word| word.store(bits, Release));
        }

        /// Stores `value` in the copy of this CPU, and returns the value that was there.
        #[inline]
        pub fn xchg(&self, value: T) -> T {
            let bits = value.to_bits();
            // SAFETY: `run` passes the offset of a word of this variable's block.
            let section = move |units: &Units, at| unsafe { units.swap(at, bits) };
            T::from_bits(
                self.place()
                    .run(section, move |word| word.swap(bits, AcqRel)),
            )
        }

        /// Stores `new` in the copy of this CPU if the copy is `expected`. Returns the value that
        /// was there: it equals `expected` if `new` was stored.
        ///
        /// Values are compared by their bits: a reference by its address.
        #[inline]
        pub fn cmpxchg(&self, expected: T, new: T) -> T {
            let (old, new) = (expected.to_bits(), new.to_bits());
            // SAFETY: `run` passes the offset of a word of this variable's block.
            let section = move |units: &Units, at| unsafe { units.compare_exchange(at, old, new) };
            T::from_bits(self.place().run(section, move |word| {
                let done = word.compare_exchange(old, new, AcqRel, Acquire);
                done.unwrap_or_else(|now| now)
            }))
        }

        /// Stores `new` in the copy of this CPU if the copy is `expected`, and returns true.
        /// Otherwise stores the copy in `expected`, and returns false. Faster than
        /// [`cmpxchg`](Self::cmpxchg) if it stores, and slower if it does not.
        #[inline]
        pub fn try_cmpxchg(&self, expected: &mut T, new: T) -> bool {
            let (old, bits) = (expected.to_bits(), new.to_bits());
            let section = move |units: &Units, at| {
                // SAFETY: `run_known` passes the offset of a word of this variable's block.
                unsafe { units.try_compare_exchange(at, old, bits) }
            };
            if self.place().run_known(section) {
                return true;
            }
            *expected = self.cmpxchg_slow(*expected, new);
            expected.to_bits() == old
        }

        #[cold]
        #[inline(never)]
        fn cmpxchg_slow(&self, expected: T, new: T) -> T {
            self.cmpxchg(expected, new)
        }

        /// Replaces the value of this CPU's copy by what `f` makes of it, and returns the value
        /// that was there.
        ///
        /// Calls `f` again if the copy of the CPU on which the thread now runs differs from the
        /// value that `f` received. A copy that changed and changed back is not noticed.
        #[inline]
        pub fn update(&self, mut f: impl FnMut(T) -> T) -> T {
            let mut now = self.read();
            loop {
                let new = f(now);
                if self.try_cmpxchg(&mut now, new) {
                    return now;
                }
            }
        }

        /// Calls `f` with each CPU that has a copy and the value of the copy. Last, calls `f` with
        /// `None` and the value of the copy that CPUs without memory share.
        ///
        /// Each value is whole, but other CPUs may change their copies meanwhile. Costs one cache
        /// miss for each copy that has changed.
        pub fn for_each_cpu(&self, mut f: impl FnMut(Option<usize>, T)) {
            self.place()
                .fold((), |(), cpu, bits| f(cpu, T::from_bits(bits)));
        }

        /// Returns the copy of `cpu`, or `None` if that CPU has no copy yet. One cache miss if the
        /// copy has changed. The kernel's `*per_cpu_ptr(x, cpu)`.
        ///
        /// The value is whole. The CPU may change its copy meanwhile.
        #[doc(alias = "per_cpu_ptr")]
        pub fn read_on(&self, cpu: usize) -> Option<T> {
            self.place().word_on(cpu).map(|word| {
                // Acquire pairs with the releases of the operations.
                T::from_bits(word.load(Acquire))
            })
        }

        /// Stores `value` in the copy of `cpu`, and returns the value that was there. Returns
        /// `Ok(None)`, and stores nothing, if that CPU has no copy yet. The kernel's
        /// `*per_cpu_ptr(x, cpu) = value`, but no operation of that CPU is lost or undone.
        ///
        /// An operation of that CPU comes before the store or after it. To be sure of that, this
        /// function stops the operations on words there, fences, and stores. An operation that
        /// begins meanwhile waits some microseconds. One in a signal handler that may not wait
        /// works on the copy that CPUs without memory share. Counters, which share the memory,
        /// count in their common part, and [`PerCpuRing::push`] may return
        /// [`PushError::Unavailable`].
        ///
        /// Interrupts each CPU that runs a thread of this process, once, or only `cpu` if copies
        /// belong to CPU numbers (see [`fence_index`](pinfold_rseq::fence_index)). Waits while
        /// another thread does this, or reads a list or a ring. Not for signal handlers.
        ///
        /// # Errors
        ///
        /// Returns an error if the kernel or a sandbox does not allow the fence. Returns it with
        /// `EDEADLK` if a signal handler calls this function and has interrupted a holder of a lock
        /// of the library, and with `EBUSY` if another thread's fork does not end within about a
        /// second. Nothing is stored then.
        #[doc(alias = "per_cpu_ptr")]
        pub fn write_on(&self, cpu: usize, value: T) -> Result<Option<T>, FenceError> {
            let stored = self.place().swap_on(cpu, value.to_bits())?;
            Ok(stored.map(T::from_bits))
        }

        /// Combines the values of all copies, beginning with `first`. The costs and the meaning are
        /// those of [`for_each_cpu`](Self::for_each_cpu).
        pub fn fold<A>(&self, first: A, mut f: impl FnMut(A, T) -> A) -> A {
            self.place()
                .fold(first, |so_far, _, bits| f(so_far, T::from_bits(bits)))
        }
    };
}

macro_rules! integer_operations {
    () => {
        /// Adds `n` to the copy of this CPU.
        #[inline]
        pub fn add(&self, n: T) {
            let n = n.to_bits();
            // SAFETY: `run` passes the offset of a word of this variable's block, which is freed
            // only when the variable is dropped.
            let section = move |units: &Units, at| unsafe { units.add(at, n) }.then_some(());
            self.place().run(section, move |word| {
                word.fetch_add(n, AcqRel);
            });
        }

        /// Adds `n` to the copy of this CPU, and returns the sum.
        #[inline]
        pub fn add_return(&self, n: T) -> T {
            let n = n.to_bits();
            // SAFETY: `run` passes the offset of a word of this variable's block.
            let section = move |units: &Units, at| unsafe { units.fetch_add(at, n) };
            let old = self
                .place()
                .run(section, move |word| word.fetch_add(n, AcqRel));
            T::from_bits(old.wrapping_add(n))
        }

        /// Subtracts `n` from the copy of this CPU, and returns the difference.
        #[inline]
        pub fn sub_return(&self, n: T) -> T {
            self.add_return(T::from_bits(n.to_bits().wrapping_neg()))
        }

        /// Adds 1 to the copy of this CPU, and returns the sum.
        #[inline]
        pub fn inc_return(&self) -> T {
            self.add_return(T::from_bits(1))
        }

        /// Subtracts 1 from the copy of this CPU, and returns the difference.
        #[inline]
        pub fn dec_return(&self) -> T {
            self.add_return(T::from_bits(u64::MAX))
        }

        /// Adds 1 to the copy of this CPU.
        #[inline]
        pub fn inc(&self) {
            self.add(T::from_bits(1));
        }

        /// Subtracts 1 from the copy of this CPU.
        #[inline]
        pub fn dec(&self) {
            self.add(T::from_bits(u64::MAX));
        }

        /// Clears the bits of this CPU's copy that are clear in `mask`.
        #[inline]
        pub fn and(&self, mask: T) {
            let mask = mask.to_bits();
            // SAFETY: `run` passes the offset of a word of this variable's block.
            let section = move |units: &Units, at| unsafe { units.and(at, mask) }.then_some(());
            self.place().run(section, move |word| {
                word.fetch_and(mask, AcqRel);
            });
        }

        /// Sets the bits of this CPU's copy that are set in `mask`.
        #[inline]
        pub fn or(&self, mask: T) {
            let mask = mask.to_bits();
            // SAFETY: `run` passes the offset of a word of this variable's block.
            let section = move |units: &Units, at| unsafe { units.or(at, mask) }.then_some(());
            self.place().run(section, move |word| {
                word.fetch_or(mask, AcqRel);
            });
        }

        /// Returns the sum of all copies, wrapping.
        ///
        /// Costs as much as [`for_each_cpu`](Self::for_each_cpu). While CPUs add, the sum is
        /// between those at the start and at the end only if all adds have the same sign. For a sum
        /// that is exact meanwhile, use [`PerCpuCounter`](crate::counter::PerCpuCounter).
        pub fn sum(&self) -> T {
            T::from_bits(self.fold(0, |sum: u64, value| sum.wrapping_add(value.to_bits())))
        }
    };
}
use {integer_operations, operations};

impl<T: Word> PerCpu<T> {
    /// Returns a variable whose copies are all zero bits. A static can hold it. Allocates nothing.
    pub const fn new() -> Self {
        PerCpu {
            words: Words::new(),
            types: PhantomData,
        }
    }

    #[inline(always)]
    fn place(&self) -> OfWords<'_, 1> {
        self.words.place(0)
    }

    operations!();
}

impl<T: Integer> PerCpu<T> {
    integer_operations!();
}

impl<T: Word> Default for PerCpu<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T: Word + fmt::Debug> fmt::Debug for PerCpu<T> {
    /// Shows the value of each copy.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut map = f.debug_map();
        self.for_each_cpu(|cpu, value| {
            map.entry(&cpu, &value);
        });
        map.finish()
    }
}
