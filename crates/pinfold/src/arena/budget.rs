//! How much memory may be held: the limits of the process, and the free memory that it keeps.
//!
//! # What is kept
//!
//! Free memory that stays with the process makes the next allocation cheap, but no other process
//! can use it. [`kept_most`] bounds this memory by a share of the memory in use, and by the
//! tightest limit.
//!
//! # Limits
//!
//! | limit | from | read |
//! |---|---|---|
//! | hard | the cgroup's memory limits, `RLIMIT_DATA`, `RLIMIT_AS` | at start, by some shepherds |
//! | soft | [`VARIABLE`], [`set_memory_limit`] | at start, and when it is set |
//!
//! A shepherd (`crate::shepherd`) that the program or its user asked for reads the hard limits
//! again.
//!
//! A process that passes a hard limit is killed, or its allocation fails, even if the process has
//! free memory of another size. So near the tightest limit, free memory has to serve first:
//!
//! 1. A thread that would make the held memory grow asks [`near`]. The memory may grow up to the
//!    *mark*, an eighth below the limit. Beyond the mark, `near` refuses the growth.
//! 2. The slow path whose allocation was refused gives all free memory back (`slab::or_reclaim`),
//!    and moves the mark ([`reclaimed`]). The new mark is a step above the memory that is held
//!    then, if that is higher than an eighth below the limit. A step is a thirty-second part of the
//!    limit, and at least 2 MiB.
//! 3. The slow path tries once more. This time its growth may pass the mark ([`lift`]). So no
//!    allocation fails because of a mark.
//!
//! Without a limit the mark is `usize::MAX`. Any thread may write the words below. They guard no
//! other memory.

use super::held;
use crate::sys;
use crate::topology::cgroup;
use core::fmt;
use core::str::FromStr;
use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::Relaxed;
use pinfold_rseq::env;

/// The environment variable with the soft limit, in the form that [`Limit`] parses.
pub const VARIABLE: &str = "PINFOLD_MEMORY_LIMIT";

/// Bytes that may always be kept if there is no limit.
const MIN_KEPT: usize = 4 << 20;
/// Bytes that may be kept even if a limit leaves nothing: a few runs that are used over and over.
const KEPT_AT_LIMIT: usize = 1 << 20;
/// The smallest growth between two reclaims near a limit, in bytes.
const MIN_STEP: usize = 2 << 20;

/// Means "no limit" in the words below that are amounts of memory.
const NONE: usize = usize::MAX;

/// The tightest hard limit.
static HARD: AtomicUsize = AtomicUsize::new(NONE);
/// The soft limit in bytes.
static SOFT: AtomicUsize = AtomicUsize::new(NONE);
/// The soft limit as a share of the hard one, in percent; 0 if it was given in bytes.
static PERCENT: AtomicUsize = AtomicUsize::new(0);
/// The smaller one of [`HARD`] and [`SOFT`].
static TIGHTEST: AtomicUsize = AtomicUsize::new(NONE);
/// The mark: held memory may grow up to here without a reclaim.
static MARK: AtomicUsize = AtomicUsize::new(NONE);
/// The number of threads that have just reclaimed and now try again. While it is above 0, `near`
/// refuses no growth.
static LIFTED: AtomicUsize = AtomicUsize::new(0);
/// The most bytes of free memory to keep, as the program or its user chose.
static MOST_KEPT: AtomicUsize = AtomicUsize::new(NONE);
/// How often growth was refused, by a mark or by the system.
static REFUSALS: AtomicUsize = AtomicUsize::new(0);

/// A soft limit as a user gives it.
///
/// ```
/// use pinfold::memory::Limit;
///
/// assert_eq!("512M".parse(), Ok(Limit::Bytes(512 << 20)));
/// assert_eq!("80%".parse(), Ok(Limit::Percent(80)));
/// assert_eq!(Limit::Bytes(512 << 20).to_string(), "512M");
/// assert!("1.5G".parse::<Limit>().is_err());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Bytes.
    Bytes(usize),
    /// Percent, from 1 to 100, of the tightest hard limit, or of the machine's memory if there is
    /// none.
    Percent(usize),
}

impl Limit {
    /// Parses a limit, as `from_str` does.
    fn parse(value: &[u8]) -> Option<Limit> {
        let (&last, rest) = value
            .split_last()
            .filter(|_| value.len() <= env::MAX_WORD)?;
        let shift = match last.to_ascii_uppercase() {
            b'0'..=b'9' => return number(value).map(Limit::Bytes),
            b'%' => return number(rest).filter(|&n| n <= 100).map(Limit::Percent),
            b'K' => 10,
            b'M' => 20,
            b'G' => 30,
            b'T' => 40,
            _ => return None,
        };
        number(rest)?.checked_mul(1 << shift).map(Limit::Bytes)
    }
}

impl FromStr for Limit {
    type Err = LimitError;

    /// Reads a number of bytes, which `K`, `M`, `G` or `T` (powers of 1024) may follow, or a number
    /// from 1 to 100 with `%`.
    ///
    /// # Errors
    ///
    /// [`LimitError`] for anything else, and for 0.
    fn from_str(value: &str) -> Result<Limit, LimitError> {
        Limit::parse(value.as_bytes()).ok_or(LimitError)
    }
}

impl fmt::Display for Limit {
    /// Writes bytes with the largest suffix that leaves a whole number.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = match *self {
            Limit::Percent(percent) => return write!(f, "{percent}%"),
            Limit::Bytes(bytes) => bytes,
        };
        let suffixes = [(40, "T"), (30, "G"), (20, "M"), (10, "K")];
        let fits = |&&(shift, _): &&(u32, &str)| bytes > 0 && bytes.trailing_zeros() >= shift;
        match suffixes.iter().find(fits) {
            Some((shift, suffix)) => write!(f, "{}{suffix}", bytes >> shift),
            None => write!(f, "{bytes}"),
        }
    }
}

/// A text that is not a [`Limit`].
///
/// ```
/// use pinfold::memory::{Limit, LimitError};
///
/// assert_eq!("0".parse::<Limit>(), Err(LimitError));
/// assert!(LimitError.to_string().contains("512M"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitError;

impl fmt::Display for LimitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not a memory limit: give bytes, as 512M, or a percentage from 1% to 100%")
    }
}

impl core::error::Error for LimitError {}

/// Returns the value of a decimal number above 0.
fn number(text: &[u8]) -> Option<usize> {
    let digit = |&byte: &u8| byte.is_ascii_digit().then(|| usize::from(byte - b'0'));
    let add = |sum: usize, byte| sum.checked_mul(10)?.checked_add(digit(byte)?);
    text.iter().try_fold(0, add).filter(|&number| number > 0)
}

/// Reads the hard limits and the user's soft limit. Called at the start.
#[cold]
#[inline(never)]
pub(super) fn read() {
    set(env::parsed(VARIABLE, Limit::parse));
    refresh();
}

/// Reads the hard limits. Opens files and makes system calls, so it is called only at the start,
/// and by a shepherd that was asked for.
#[cold]
#[inline(never)]
pub(crate) fn refresh() {
    if let Some(cgroup) = cgroup::memory_limit(b"") {
        HARD.store(cgroup.min(resources()), Relaxed);
    }
    settle();
}

/// Returns how many bytes the resource limits leave to the arenas.
fn resources() -> usize {
    let (all, data) = (
        sys::resource_limit(libc::RLIMIT_AS),
        sys::resource_limit(libc::RLIMIT_DATA),
    );
    if all.min(data) == NONE {
        return NONE;
    }
    // These limits also count the program, its libraries and its stacks. Their memory is
    // subtracted.
    let held = held() as usize;
    let left = |limit: usize, mapped: usize| match limit {
        NONE => NONE,
        limit => limit.saturating_sub(mapped.saturating_sub(held)),
    };
    let mapped = sys::mapped();
    left(all, mapped.0).min(left(data, mapped.1))
}

fn set(limit: Option<Limit>) {
    let (bytes, percent) = match limit {
        None => (NONE, 0),
        Some(Limit::Bytes(bytes)) => (bytes, 0),
        Some(Limit::Percent(percent)) => (NONE, percent),
    };
    SOFT.store(bytes, Relaxed);
    PERCENT.store(percent, Relaxed);
}

/// Computes the tightest limit and the mark again.
fn settle() {
    let hard = HARD.load(Relaxed);
    let percent = PERCENT.load(Relaxed);
    if percent > 0 {
        let whole = hard.min(sys::physical_memory());
        let share = whole as u128 * percent as u128 / 100;
        SOFT.store(share as usize, Relaxed);
    }
    TIGHTEST.store(hard.min(SOFT.load(Relaxed)), Relaxed);
    reclaimed();
}

/// Sets the soft limit on the memory that Pinfold holds, in bytes. `None` removes the limit.
///
/// Replaces the value of `PINFOLD_MEMORY_LIMIT`. Near the limit, Pinfold uses free memory of all
/// sizes, or gives it back to the system, before the held memory grows. The limit is soft: an
/// allocation passes the limit if it cannot be served otherwise. The limit bounds what [`held`]
/// counts. It does not bound the program's own mappings, stacks and code.
///
/// Takes effect when memory is next allocated or freed in a slow path. Costs a few stores. Close to
/// the limit, slow paths that need memory first give free memory back. They do so at most once each
/// time the held memory grows by a thirty-second part of the limit, or by 2 MiB if that is more.
///
/// ```
/// use pinfold::memory;
///
/// memory::set_memory_limit(Some(512 << 20));
/// assert_eq!(memory::memory_limit(), Some(512 << 20));
/// memory::set_memory_limit(None);
/// assert_eq!(memory::memory_limit(), None);
/// ```
pub fn set_memory_limit(bytes: Option<usize>) {
    super::init();
    set(bytes.map(Limit::Bytes));
    settle();
}

/// Returns the soft limit on the memory that Pinfold holds, in bytes. A few loads.
pub fn memory_limit() -> Option<usize> {
    super::init();
    Some(SOFT.load(Relaxed)).filter(|&bytes| bytes != NONE)
}

/// Replaces the value of `PINFOLD_MEMORY_LIMIT`, as [`set_memory_limit`] does, by bytes or a share.
#[doc(hidden)]
pub fn set_limit(limit: Option<Limit>) {
    super::init();
    set(limit);
    settle();
}

/// Returns the soft limit as it was given.
#[doc(hidden)]
pub fn limit() -> Option<Limit> {
    match PERCENT.load(Relaxed) {
        0 => memory_limit().map(Limit::Bytes),
        percent => Some(Limit::Percent(percent)),
    }
}

/// Sets the largest number of bytes that the process keeps in free runs. `None`, the default, sets
/// no number.
///
/// A share of the memory in use, and the limits, bound the kept memory in any case. Takes effect at
/// the next `free` of a run. Costs one store.
///
/// ```
/// use pinfold::memory;
///
/// memory::set_dirty_limit(Some(1 << 20));
/// assert_eq!(memory::dirty_limit(), Some(1 << 20));
/// memory::set_dirty_limit(None);
/// ```
pub fn set_dirty_limit(bytes: Option<usize>) {
    MOST_KEPT.store(bytes.unwrap_or(NONE), Relaxed);
}

/// Returns what [`set_dirty_limit`] has set. Costs one load.
pub fn dirty_limit() -> Option<usize> {
    Some(MOST_KEPT.load(Relaxed)).filter(|&bytes| bytes != NONE)
}

/// Returns the tightest hard limit, in bytes: of the cgroup, `RLIMIT_DATA` or `RLIMIT_AS`. What the
/// program, its libraries and its stacks take is subtracted from the resource limits. One load.
pub fn hard_limit() -> Option<usize> {
    super::init();
    Some(HARD.load(Relaxed)).filter(|&bytes| bytes != NONE)
}

/// Returns the tightest of the soft limit, the hard limits and the machine's memory, in bytes.
#[doc(hidden)]
pub fn tightest_limit() -> usize {
    super::init();
    TIGHTEST.load(Relaxed).min(sys::physical_memory())
}

/// Returns whether the tightest limit is at least `times` the `held` memory. One load.
pub(super) fn is_far(held: usize, times: usize) -> bool {
    TIGHTEST.load(Relaxed) / times >= held
}

/// Returns how many bytes may be kept if `in_use` bytes are in use, and at most `lately` bytes were
/// in use at once a short while ago. This is nine eighths of `lately` less `in_use`, plus the
/// larger of 4 MiB and an eighth of `in_use`. But the result is at most a sixteenth of the tightest
/// limit, and at most the memory that this limit leaves. A limit that leaves nothing still allows 1
/// MiB, because the held memory includes pages that were never touched. [`set_dirty_limit`] may
/// allow less. Two loads.
pub(crate) fn kept_most(in_use: usize, lately: usize) -> usize {
    let kept = kept_below(TIGHTEST.load(Relaxed), in_use, lately);
    kept.min(MOST_KEPT.load(Relaxed))
}

fn kept_below(limit: usize, in_use: usize, lately: usize) -> usize {
    let most = (limit / 16).min(limit.saturating_sub(in_use));
    let kept = (lately + lately / 8).saturating_sub(in_use) + (in_use / 8).max(MIN_KEPT);
    kept.min(most).max(KEPT_AT_LIMIT)
}

/// Returns whether the held memory, `held` bytes, must not grow by `more` bytes, so that free
/// memory has to serve first. Counts a refusal if so. Costs two loads at most.
pub(crate) fn near(held: usize, more: usize) -> bool {
    let near = is_beyond_mark(held.saturating_add(more)) && LIFTED.load(Relaxed) == 0;
    if near {
        refused();
    }
    near
}

/// Returns whether `held` bytes are beyond the mark. One load.
pub(super) fn is_beyond_mark(held: usize) -> bool {
    held > MARK.load(Relaxed)
}

/// Counts a refusal, by a mark or by the system.
pub(crate) fn refused() {
    REFUSALS.fetch_add(1, Relaxed);
}

/// Returns how many refusals there were.
pub(crate) fn refusals() -> usize {
    REFUSALS.load(Relaxed)
}

/// Returns whether there is a limit.
pub(crate) fn is_limited() -> bool {
    TIGHTEST.load(Relaxed) != NONE
}

/// Returns whether a block of `size` bytes fits the machine's memory and the hard limit.
pub(crate) fn is_possible(size: usize) -> bool {
    size <= HARD.load(Relaxed).min(sys::physical_memory())
}

/// Sets the mark. Called after all free memory was given back, and when the held memory may have
/// shrunk.
pub(crate) fn reclaimed() {
    MARK.store(mark(TIGHTEST.load(Relaxed), held() as usize), Relaxed);
}

/// Returns the mark: an eighth below the limit, or a step above the held memory, if that is higher.
fn mark(limit: usize, held: usize) -> usize {
    if limit == NONE {
        return NONE;
    }
    let step = (limit / 32).max(MIN_STEP);
    (limit - limit / 8).max(held.saturating_add(step))
}

/// Lets the growth of all threads pass the mark until this value is dropped. A forked child forgets
/// the values of its parent's threads ([`fork_child`]).
pub(crate) struct Lifted(());

/// Lets the growth of all threads pass the mark until the result is dropped.
pub(crate) fn lift() -> Lifted {
    // Relaxed is enough: only this thread has to see the word, when it tries again.
    LIFTED.fetch_add(1, Relaxed);
    Lifted(())
}

impl Drop for Lifted {
    fn drop(&mut self) {
        // In a child that a signal handler of this thread forked, `fork_child` has already set the
        // word to 0, so it is not lowered again.
        let one_less = |lifted: usize| lifted.checked_sub(1);
        let _ = LIFTED.fetch_update(Relaxed, Relaxed, one_less);
    }
}

/// Forgets, in the child after a fork, that threads of the parent lifted the mark.
pub(crate) fn fork_child() {
    LIFTED.store(0, Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::ToString;

    const MIB: usize = 1 << 20;

    #[test]
    fn limits_are_read() {
        for (text, limit) in [
            ("1", Limit::Bytes(1)),
            ("4096", Limit::Bytes(4096)),
            ("64k", Limit::Bytes(64 << 10)),
            ("512M", Limit::Bytes(512 << 20)),
            ("3G", Limit::Bytes(3 << 30)),
            ("1T", Limit::Bytes(1 << 40)),
            ("100%", Limit::Percent(100)),
            ("1%", Limit::Percent(1)),
        ] {
            assert_eq!(text.parse(), Ok(limit), "{text}");
            assert_eq!(limit.to_string().parse(), Ok(limit), "{text}");
        }
        for text in [
            "",
            "0",
            "0M",
            "M",
            "%",
            "0%",
            "101%",
            "-1",
            "+1",
            "1.5G",
            "1 G",
            "1GB",
            "1MiB",
            "x",
            "18446744073709551616",
            "99999999999T",
            "\u{ff}",
            "000000000000000000000000000000000000001",
        ] {
            assert_eq!(text.parse::<Limit>(), Err(LimitError), "{text}");
        }
    }

    #[test]
    fn what_is_kept_is_a_share_of_the_use_within_the_limit() {
        let steady = |limit, in_use| kept_below(limit, in_use, in_use);
        assert_eq!(steady(NONE, 0), 4 * MIB);
        assert_eq!(steady(NONE, 128 * MIB), 32 * MIB);
        assert_eq!(steady(NONE, 800 * MIB), 200 * MIB);
        // The use was larger a short while ago.
        assert_eq!(kept_below(NONE, 400 * MIB, 800 * MIB), 550 * MIB);
        assert_eq!(kept_below(NONE, 0, 800 * MIB), 904 * MIB);
        // A sixteenth of 256 MiB is 16 MiB, and of 128 MiB 8 MiB.
        assert_eq!(steady(256 * MIB, 0), 4 * MIB);
        assert_eq!(steady(256 * MIB, 200 * MIB), 16 * MIB);
        assert_eq!(kept_below(256 * MIB, 100 * MIB, 190 * MIB), 16 * MIB);
        assert_eq!(steady(128 * MIB, 100 * MIB), 8 * MIB);
        // The limit leaves less than a sixteenth of itself.
        assert_eq!(steady(256 * MIB, 250 * MIB), 6 * MIB);
        assert_eq!(steady(256 * MIB, 256 * MIB), MIB);
        assert_eq!(steady(256 * MIB, 10_000 * MIB), MIB);
    }

    #[test]
    fn the_mark_is_below_the_limit_and_moves_with_what_is_held() {
        assert_eq!(mark(NONE, 10_000 * MIB), NONE);
        assert_eq!(mark(256 * MIB, 0), 224 * MIB);
        assert_eq!(mark(256 * MIB, 216 * MIB), 224 * MIB);
        assert_eq!(mark(256 * MIB, 240 * MIB), 248 * MIB);
        assert_eq!(mark(16 * MIB, 16 * MIB), 18 * MIB);
    }
}
