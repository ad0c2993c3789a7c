//! The types that a per-CPU variable can have.

use sealed::Bits;

/// A type that fits in a word and has no value that needs dropping.
///
/// A per-CPU variable begins as the value whose bits are all zero.
///
/// ```
/// use pinfold::percpu::{PerCpu, Word};
///
/// /// Stores `value` in this CPU's copy, and returns whether that changed the copy.
/// fn replace<T: Word + PartialEq>(variable: &PerCpu<T>, value: T) -> bool {
///     variable.xchg(value) != value
/// }
/// static LAST: PerCpu<Option<&'static &'static str>> = PerCpu::new();
/// assert!(replace(&LAST, Some(&"request")));
/// ```
pub trait Word: Copy + Send + 'static + Bits {}

/// An integer that fills a word, for the operations that calculate. They wrap around.
///
/// ```
/// use pinfold::percpu::{Integer, PerCpu};
///
/// fn count<T: Integer>(variable: &PerCpu<T>, n: T) {
///     variable.add(n);
/// }
/// static BYTES: PerCpu<usize> = PerCpu::new();
/// count(&BYTES, 10);
/// assert_eq!(BYTES.sum(), 10);
/// ```
pub trait Integer: Word {}

pub(super) mod sealed {
    /// Converts a value to a word and back.
    pub trait Bits: Sized {
        fn to_bits(self) -> u64;
        /// Returns the value with these bits. They come from `to_bits`, or are all zero.
        fn from_bits(bits: u64) -> Self;
    }
}

macro_rules! integers {
    ($($type:ty),*) => {$(
        #[allow(clippy::cast_lossless, reason = "the same code serves wide and narrow types")]
        impl Bits for $type {
            #[inline(always)]
            fn to_bits(self) -> u64 {
                self as u64
            }
            #[inline(always)]
            fn from_bits(bits: u64) -> Self {
                bits as $type
            }
        }
        impl Word for $type {}
    )*};
}

integers!(u64, i64, usize, isize, u32, i32, u16, i16, u8, i8);

impl Integer for u64 {}
impl Integer for i64 {}
#[cfg(target_pointer_width = "64")]
impl Integer for usize {}
#[cfg(target_pointer_width = "64")]
impl Integer for isize {}

impl Bits for bool {
    #[inline(always)]
    fn to_bits(self) -> u64 {
        u64::from(self)
    }
    #[inline(always)]
    fn from_bits(bits: u64) -> Self {
        bits != 0
    }
}
impl Word for bool {}

impl Bits for [u32; 2] {
    #[inline(always)]
    fn to_bits(self) -> u64 {
        u64::from(self[0]) | u64::from(self[1]) << 32
    }
    #[inline(always)]
    fn from_bits(bits: u64) -> Self {
        [bits as u32, (bits >> 32) as u32]
    }
}
impl Word for [u32; 2] {}

impl<T: Sync> Bits for Option<&'static T> {
    #[inline(always)]
    fn to_bits(self) -> u64 {
        self.map_or(0, |value| {
            core::ptr::from_ref(value).expose_provenance() as u64
        })
    }
    #[inline(always)]
    fn from_bits(bits: u64) -> Self {
        let value = core::ptr::with_exposed_provenance::<T>(bits as usize);
        // SAFETY: the bits are zero, or come from a reference of this type, which lives as long as
        // the process.
        unsafe { value.as_ref() }
    }
}
impl<T: Sync> Word for Option<&'static T> {}
