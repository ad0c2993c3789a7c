//! The texts of errors.

/// Makes a type an error. Its text is that of the first pattern that fits, with the arguments of
/// [`write!`](core::write).
#[doc(hidden)]
#[macro_export]
macro_rules! error_texts {
    ($error:ty: $($kind:pat => $text:literal $(, $argument:expr)*;)+) => {
        impl core::fmt::Display for $error {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                match self {
                    $($kind => write!(f, $text $(, $argument)*),)+
                }
            }
        }

        impl core::error::Error for $error {}
    };
}
