//! The heap profile of a Rust program, from inside, for a program whose allocator is
//! [`pinfold_malloc::Pinfold`].
//!
//! ```
//! #[global_allocator]
//! static ALLOCATOR: pinfold_malloc::Pinfold = pinfold_malloc::Pinfold;
//!
//! # fn main() -> Result<(), pinfold_pprof::Error> {
//! pinfold_pprof::activate()?; // one sample for each 512 KiB
//! let table = vec![1_u8; 100 << 20];
//! let bytes = pinfold_pprof::dump_pprof()?; // for `go tool pprof`, Pyroscope, Parca
//! assert_eq!(bytes[..2], [0x1f, 0x8b]); // packed by gzip
//! # drop(table);
//! # Ok(())
//! # }
//! ```
//!
//! `docs/pprof.md` has a server's `/debug/pprof/heap`, and what changes for users of
//! `jemalloc_pprof`. `docs/heap-profiles.md` says what the figures mean, and what a profile costs.
#![forbid(unsafe_code)]

#[doc(hidden)]
pub mod internal;
mod own;

use internal::{ParseError, pprof};
#[cfg(feature = "flamegraph")]
use internal::{flame, flame::Picture, profile::What};
use own::Naming;
use pinfold_malloc::heap_profile;
pub use pinfold_malloc::heap_profile::{DEFAULT_INTERVAL, MAX_INTERVAL};
#[cfg(feature = "flamegraph")]
use std::borrow::Cow;
use std::future::{Ready, ready};
use std::io;

/// Why there is no profile.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// No profile was started in this process.
    NotStarted,
    /// The interval is not from 1 to [`MAX_INTERVAL`].
    Interval(u64),
    /// The profile could not be started, or another thread is starting or stopping it.
    Refused,
    /// `/proc/self/maps` cannot be read, which tells where the program's code is.
    Mappings(io::Error),
    /// The records were overwritten.
    Damaged(ParseError),
    /// No sampled memory is in use, so there is nothing to draw.
    Nothing,
    /// The flame graph could not be drawn.
    Picture(io::Error),
}

pinfold_rseq::error_texts! { Error:
    Error::NotStarted => "no heap profile was started; call pinfold_pprof::activate, or set PINFOLD_HEAP=on";
    Error::Interval(bytes) => "{bytes} is no interval; give bytes from 1 to {MAX_INTERVAL}";
    Error::Refused => "the heap profile cannot be started: there is no memory, no libgcc_s.so.1 of GCC 12 or later, or another thread is starting or stopping it";
    Error::Mappings(error) => "cannot read /proc/self/maps: {error}";
    Error::Damaged(error) => "{error}";
    Error::Nothing => "no call stack holds memory to draw";
    Error::Picture(error) => "cannot draw: {error}";
}

/// Starts to sample allocations, one for each [`DEFAULT_INTERVAL`] bytes on average. `PINFOLD_HEAP`
/// does the same at the program's start.
///
/// # Errors
///
/// Fails with [`Error::Refused`].
pub fn activate() -> Result<(), Error> {
    activate_with(DEFAULT_INTERVAL)
}

/// Starts to sample one allocation for each `interval` bytes on average, or changes the interval.
///
/// # Errors
///
/// Fails with [`Error::Interval`] or [`Error::Refused`].
pub fn activate_with(interval: u64) -> Result<(), Error> {
    if !(1..=MAX_INTERVAL).contains(&interval) {
        return Err(Error::Interval(interval));
    }
    match heap_profile::start(interval) {
        true => Ok(()),
        false => Err(Error::Refused),
    }
}

/// Stops sampling. What was sampled stays in the profile, and its frees still count.
///
/// # Errors
///
/// Fails with [`Error::Refused`] if another thread is starting or stopping the profile.
pub fn deactivate() -> Result<(), Error> {
    match heap_profile::stop() {
        true => Ok(()),
        false => Err(Error::Refused),
    }
}

/// Returns whether allocations are sampled. Costs one load.
pub fn is_active() -> bool {
    heap_profile::is_on()
}

/// Returns the profile as a gzip'd `profile.proto`, with the names and lines of functions.
///
/// The first dump reads the symbol tables and the debug information of the program and its
/// libraries. Later dumps read files only for new addresses. Takes milliseconds to seconds, and
/// memory up to the size of the debug information, so call it where a thread may block. A second
/// thread waits until the first has its profile.
///
/// # Errors
///
/// Fails with [`Error::NotStarted`] or [`Error::Mappings`].
pub fn dump_pprof() -> Result<Vec<u8>, Error> {
    Ok(pprof::encode(&own::profile(Naming::Functions)?))
}

/// Returns the profile as [`dump_pprof`] does, but leaves the names of functions to the reader, who
/// finds them by the build ids of the files. Reads no symbols. The call stacks begin with the
/// allocator's own functions.
///
/// # Errors
///
/// Fails with [`Error::NotStarted`] or [`Error::Mappings`].
pub fn dump_pprof_addresses() -> Result<Vec<u8>, Error> {
    Ok(pprof::encode(&own::profile(Naming::BuildIds)?))
}

/// Returns a flame graph of the memory in use, as SVG. Costs as much as [`dump_pprof`].
///
/// # Errors
///
/// Fails with [`Error::NotStarted`], [`Error::Mappings`], [`Error::Nothing`] or [`Error::Picture`].
#[cfg(feature = "flamegraph")]
pub fn dump_flamegraph() -> Result<Vec<u8>, Error> {
    // XML has no place for control characters.
    fn clean(text: &str) -> Cow<'_, str> {
        text.replace(char::is_control, "\u{fffd}").into()
    }
    let picture = Picture {
        what: What::InUse,
        subtitle: None,
        most: usize::MAX,
        clean,
    };
    flame::draw(&own::profile(Naming::Functions)?, picture)
}

/// The functions of this crate under the names of `jemalloc_pprof`. There is always one.
pub static PROF_CTL: Option<ProfCtl> = Some(ProfCtl(()));

/// A handle to the process's profile. All handles are the same profile.
#[derive(Clone, Copy, Debug)]
pub struct ProfCtl(());

impl ProfCtl {
    /// Returns the handle. Waits for nothing: it is there for code that awaits a lock.
    pub fn lock(self) -> Ready<ProfCtl> {
        ready(self)
    }

    /// Calls [`is_active`].
    pub fn activated(self) -> bool {
        is_active()
    }

    /// Calls [`activate`].
    ///
    /// # Errors
    ///
    /// Those of [`activate`].
    pub fn activate(self) -> Result<(), Error> {
        activate()
    }

    /// Calls [`deactivate`].
    ///
    /// # Errors
    ///
    /// Those of [`deactivate`].
    pub fn deactivate(self) -> Result<(), Error> {
        deactivate()
    }

    /// Calls [`dump_pprof`].
    ///
    /// # Errors
    ///
    /// Those of [`dump_pprof`].
    pub fn dump_pprof(self) -> Result<Vec<u8>, Error> {
        dump_pprof()
    }

    /// Calls [`dump_flamegraph`].
    ///
    /// # Errors
    ///
    /// Those of [`dump_flamegraph`].
    #[cfg(feature = "flamegraph")]
    pub fn dump_flamegraph(self) -> Result<Vec<u8>, Error> {
        dump_flamegraph()
    }
}

/// Runs the examples of the users' documentation as tests.
#[cfg(all(doctest, feature = "flamegraph"))]
#[doc = include_str!("../../../docs/pprof.md")]
struct Guide;

/// Runs the README's example as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
