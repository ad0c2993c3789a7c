//! An array of words for each CPU.

use super::{Integer, Word, Words, integer_operations, operations};
use core::fmt;
use core::marker::PhantomData;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use pinfold_rseq::Units;

/// An array of `N` words with a copy for each CPU, all zero bits at first.
///
/// The elements of a copy lie side by side, eight to a cache line.
///
/// ```
/// use pinfold::percpu::PerCpuArray;
///
/// static BY_STATUS: PerCpuArray<u64, 6> = PerCpuArray::new();
///
/// let count = |status: usize| {
///     if let Some(element) = BY_STATUS.at(status / 100) {
///         element.inc();
///     }
/// };
/// [200, 204, 404, 999].map(count);
/// assert_eq!(BY_STATUS.at(2).unwrap().sum(), 2);
/// assert!(BY_STATUS.at(6).is_none());
/// ```
pub struct PerCpuArray<T: Word, const N: usize> {
    words: Words<N>,
    types: PhantomData<fn(T) -> T>,
}

impl<T: Word, const N: usize> PerCpuArray<T, N> {
    /// Returns an array whose copies are all zero bits. A static can hold it. Allocates nothing.
    pub const fn new() -> Self {
        PerCpuArray {
            words: Words::new(),
            types: PhantomData,
        }
    }

    /// Returns the element number `at`, for operations on it. Returns `None` if `at` is `N` or
    /// more. Costs one comparison.
    #[inline(always)]
    pub fn at(&self, at: usize) -> Option<Element<'_, T, N>> {
        (at < N).then_some(Element {
            words: &self.words,
            at,
            types: PhantomData,
        })
    }
}

impl<T: Word, const N: usize> Default for PerCpuArray<T, N> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T: Word + fmt::Debug, const N: usize> fmt::Debug for PerCpuArray<T, N> {
    /// Shows the value of each element's copies.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list()
            .entries((0..N).filter_map(|at| self.at(at)))
            .finish()
    }
}

/// An element of a [`PerCpuArray`], with the operations of a [`PerCpu`](super::PerCpu).
pub struct Element<'a, T: Word, const N: usize> {
    words: &'a Words<N>,
    at: usize,
    types: PhantomData<fn(T) -> T>,
}

impl<T: Word, const N: usize> Element<'_, T, N> {
    #[inline(always)]
    fn run<R>(
        &self,
        section: impl Fn(&Units, usize) -> Option<R>,
        spilled: impl FnOnce(&AtomicU64) -> R,
    ) -> R {
        self.words.run(self.at, section, spilled)
    }

    #[inline(always)]
    fn run_known(&self, section: impl FnOnce(&Units, usize) -> bool) -> bool {
        self.words.run_known(self.at, section)
    }

    fn for_each(&self, f: impl FnMut(Option<usize>, u64)) {
        self.words.for_each(self.at, f);
    }

    operations!();
}

impl<T: Integer, const N: usize> Element<'_, T, N> {
    integer_operations!();
}

impl<T: Word + fmt::Debug, const N: usize> fmt::Debug for Element<'_, T, N> {
    /// Shows the value of each copy.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut map = f.debug_map();
        self.for_each_cpu(|cpu, value| {
            map.entry(&cpu, &value);
        });
        map.finish()
    }
}
