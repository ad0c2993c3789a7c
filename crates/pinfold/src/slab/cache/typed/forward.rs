//! Implements traits of the value for `Handle` and `Shared`, as `Box` and `Arc` do.

/// Implements traits that only read the value for `$handle<'_, T>`, which dereferences to `T`.
macro_rules! forward_to_value {
    ($handle:ident) => {
        impl<T> AsRef<T> for $handle<'_, T> {
            fn as_ref(&self) -> &T {
                self
            }
        }

        // `Borrow` requires that the handle's `Hash`, `Eq` and `Ord` agree with the value's. They
        // do, because the implementations below forward to the value.
        impl<T> core::borrow::Borrow<T> for $handle<'_, T> {
            fn borrow(&self) -> &T {
                self
            }
        }

        impl<T: core::fmt::Debug> core::fmt::Debug for $handle<'_, T> {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                (**self).fmt(f)
            }
        }

        impl<T: core::fmt::Display> core::fmt::Display for $handle<'_, T> {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                (**self).fmt(f)
            }
        }

        impl<T> core::fmt::Pointer for $handle<'_, T> {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                let value: *const T = &**self;
                value.fmt(f)
            }
        }

        impl<T: PartialEq> PartialEq for $handle<'_, T> {
            fn eq(&self, other: &Self) -> bool {
                **self == **other
            }
        }

        impl<T: Eq> Eq for $handle<'_, T> {}

        impl<T: PartialOrd> PartialOrd for $handle<'_, T> {
            fn partial_cmp(&self, other: &Self) -> Option<core::cmp::Ordering> {
                (**self).partial_cmp(&**other)
            }
        }

        impl<T: Ord> Ord for $handle<'_, T> {
            fn cmp(&self, other: &Self) -> core::cmp::Ordering {
                (**self).cmp(&**other)
            }
        }

        impl<T: core::hash::Hash> core::hash::Hash for $handle<'_, T> {
            fn hash<H: core::hash::Hasher>(&self, state: &mut H) {
                (**self).hash(state);
            }
        }
    };
}

pub(super) use forward_to_value;
