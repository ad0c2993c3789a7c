//! What the command `pinfold` uses of this crate, for profiles of other processes and in files. Not
//! part of the API: changes at any time.

pub mod elf;
#[cfg(feature = "flamegraph")]
pub mod flame;
pub mod maps;
pub mod names;
pub mod pprof;
pub mod profile;
pub mod raw;

use pinfold::internal::profile::HEAP_VERSION;

/// Why bytes are no heap profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParseError {
    /// They do not begin as a process's profile does.
    NotRaw,
    /// They have another version.
    Version(u32),
    /// Their records have too few bytes.
    Damaged(usize),
    /// They are not packed by gzip.
    NotGzip,
    /// They are no message of pprof.
    NotPprof,
    /// They are another profile of pprof.
    NotHeap,
}

pinfold_rseq::error_texts! { ParseError:
    ParseError::NotRaw => "this is not a heap profile";
    ParseError::Version(version) =>
        "this heap profile has version {version}, and version {HEAP_VERSION} is read here; use \
         the command of the library's release";
    ParseError::Damaged(size) => "this heap profile is damaged: its records have {size} bytes";
    ParseError::NotGzip => "this is neither a heap profile nor a gzip'd pprof file";
    ParseError::NotPprof => "this is not a pprof file";
    ParseError::NotHeap => "this pprof file is not a heap profile of `pinfold heap`";
}
