//! An array of words for each CPU.

use super::place::{OfWords, Place, Words};
use super::{Integer, Word, integer_operations, operations};
use core::fmt;
use core::marker::PhantomData;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use pinfold_rseq::{FenceError, Units};

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
    pub fn at(&self, at: usize) -> Option<Element<OfWords<'_, N>, T>> {
        (at < N).then(|| Element::at(self.words.place(at)))
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

/// An element of an array, with the operations of a [`PerCpu`](super::PerCpu).
pub struct Element<P, T> {
    place: P,
    types: PhantomData<fn(T) -> T>,
}

impl<P: Place, T: Word> Element<P, T> {
    #[inline(always)]
    pub(super) fn at(place: P) -> Self {
        Element {
            place,
            types: PhantomData,
        }
    }

    #[inline(always)]
    fn place(&self) -> P {
        self.place
    }

    operations!();
}

impl<P: Place, T: Integer> Element<P, T> {
    integer_operations!();
}

impl<P: Place, T: Word + fmt::Debug> fmt::Debug for Element<P, T> {
    /// Shows the value of each copy.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut map = f.debug_map();
        self.for_each_cpu(|cpu, value| {
            map.entry(&cpu, &value);
        });
        map.finish()
    }
}
