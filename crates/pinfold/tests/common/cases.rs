//! A table of the tests of a loom model: the sound protocol, and each planted fault that the model
//! must find.

/// Makes a test of each entry `name: call;`. With `, panics "words"` behind the call, the test
/// passes only if the call panics with these words.
macro_rules! cases {
    ($($name:ident: $call:expr $(, panics $words:literal)?;)*) => {$(
        #[test]
        $(#[should_panic(expected = $words)])?
        fn $name() {
            $call;
        }
    )*};
}
