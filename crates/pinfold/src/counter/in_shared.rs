//! Counters that several processes share through a file.
//!
//! A counter of one process keeps its words in memory that no other process has. Processes that
//! count together need words in a file that all of them map. Three things are different there:
//!
//! * A process may be killed at any instruction, and the others go on. So no operation may leave a
//!   lock taken, or an amount in two places or in none.
//! * One process may use restartable sequences and another one atomics. Neither method protects a
//!   word from the other.
//! * Concurrency ids belong to one process. Two processes use the same id on two CPUs.
//!
//! So an add is one locked instruction on a word of the CPU's own, in every process. A killed
//! process has made the add or has not. The CPU number only chooses the word: an add on another
//! CPU's word is slower, and as correct.
//!
//! # The file
//!
//! | place | content | written by |
//! |---|---|---|
//! | header | magic, number of counters, number of lanes | the first process, by compare-exchanges from 0 |
//! | header | a bit for each lane in use | an add, before its first use of the lane |
//! | tops, a line each | whether a counter is frozen | sums |
//! | tops, the next line | the base of a counter | adds that find the counter frozen |
//! | lanes, whole pages | `up` and `down` of each counter, which only grow | adds, normally on the lane's CPU |
//!
//! # The freeze
//!
//! A sum collects all words twice. If the collections agree, no word moved while the base was
//! loaded in between. If adds keep coming, the sum freezes the counter, which sends adds to the
//! base. The freeze only helps a sum to end: adds and sums are correct with and without it. So a
//! sum that is killed during its freeze costs the adds speed, until the next sum ends the freeze.

use super::exact::order_own_adds;
use super::shards::Moved;
use crate::sys;
use crate::topology::{bits, facts};
use core::fmt;
use core::ptr::NonNull;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use pinfold_rseq::MAX_INDEX;
use pinfold_rseq::kernel::{self, Answer};

/// The first word of the file: a name, and the version of the layout in the last byte.
const MAGIC: u64 = u64::from_le_bytes(*b"pinfcnt\x01");
/// Bytes of the header. The lanes begin at multiples of it.
const PAGE: usize = 4096;
const WORD: usize = 8;
/// Words of the header: the number of counters, of lanes, and where the bits begin.
const COUNT: usize = 1;
const LANES: usize = 2;
const BITS: usize = 8;
/// Bytes of a counter's top: a line that says whether it is frozen, and a line with the base.
const TOP: usize = 128;
const BASE: usize = 64;
/// Bytes of a counter in a lane: `up` and `down`.
const PAIR: usize = 16;
/// The largest number of counters in a file.
const MOST: usize = 1 << 20;
/// How often a sum tries before it freezes the counter.
const TRIES: usize = 8;

/// Why a file cannot hold counters.
///
/// ```
/// use pinfold::counter::{SharedCounters, SharedError};
///
/// assert_eq!(SharedCounters::in_shared(-1, 1).unwrap_err(), SharedError::File { errno: 9 });
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SharedError {
    /// The number of counters is 0 or above 2^20.
    Count {
        /// The number that the caller gave.
        count: usize,
    },
    /// The kernel refused to read the file's size, to set it, or to map the file.
    File {
        /// The errno of the system call.
        errno: i32,
    },
    /// The file is neither empty nor large enough.
    TooSmall {
        /// The file's size in bytes.
        bytes: u64,
        /// The size that it needs.
        needed: u64,
    },
    /// The content of the file is another program's, or that of another version of this library.
    Layout {
        /// The first eight bytes of the file.
        found: u64,
    },
    /// The file holds another number of counters.
    OtherCount {
        /// The number in the file.
        found: u64,
    },
}

impl fmt::Display for SharedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SharedError::Count { count } => {
                write!(f, "{count} shared counters: give 1 to {MOST}")
            }
            SharedError::File { errno } => write!(
                f,
                "the file for shared counters cannot be mapped (errno {errno}): give a memfd or a file that is open for reading and writing"
            ),
            SharedError::TooSmall { bytes, needed } => write!(
                f,
                "the file for shared counters has {bytes} bytes and needs {needed}: give an empty or a larger file"
            ),
            SharedError::Layout { found } => write!(
                f,
                "the file begins with {found:#x}, not with this version's shared counters: give an empty file, or run the same version in all processes"
            ),
            SharedError::OtherCount { found } => {
                write!(
                    f,
                    "the file holds {found} shared counters: give that number"
                )
            }
        }
    }
}

impl core::error::Error for SharedError {}

/// Counters in a file that several processes map. Any process adds to them, reads and sums them.
///
/// A process that is killed at any instruction loses nothing that it has added, and blocks no
/// other process. Processes with restartable sequences and without them may share counters. Forked
/// children go on with the same counters.
///
/// A file with `n` counters takes 4 KiB, 128 bytes a counter, and 16 bytes a counter, in whole
/// pages, for each CPU on which a process has added. No process may truncate the file: the others
/// would get `SIGBUS`. A memfd that allows seals is sealed against that.
///
/// ```
/// use pinfold::counter::SharedCounters;
/// use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
///
/// // SAFETY: the name ends with a zero byte, and the descriptor is new.
/// let fd = unsafe { OwnedFd::from_raw_fd(libc::memfd_create(c"hits".as_ptr(), 0)) };
/// let counters = SharedCounters::in_shared(fd.as_raw_fd(), 2)?;
/// counters.add(1, 5);
/// // Another process that has the descriptor maps the same counters.
/// let elsewhere = SharedCounters::in_shared(fd.as_raw_fd(), 2)?;
/// elsewhere.add(1, -2);
/// assert_eq!((counters.sum(0), counters.sum(1)), (Some(0), Some(3)));
/// # Ok::<(), pinfold::counter::SharedError>(())
/// ```
#[derive(Debug)]
pub struct SharedCounters {
    at: NonNull<u8>,
    count: usize,
    lanes: usize,
    /// Where the first lane begins, and the bytes of a lane: an add would take longer if it
    /// computed them.
    first_lane: usize,
    lane_bytes: usize,
}

// SAFETY: the mapping belongs to no thread, and all accesses to it are atomic.
unsafe impl Send for SharedCounters {}
// SAFETY: all accesses to the mapping are atomic.
unsafe impl Sync for SharedCounters {}

/// Returns the bytes that a file with `count` counters and `lanes` lanes needs.
fn needed(count: usize, lanes: usize) -> usize {
    first_lane(count) + lanes * lane_bytes(count)
}

/// Returns where the first lane begins.
fn first_lane(count: usize) -> usize {
    PAGE + (count * TOP).next_multiple_of(PAGE)
}

fn lane_bytes(count: usize) -> usize {
    (count * PAIR).next_multiple_of(PAGE)
}

/// Makes the file at least `wanted` bytes large. Never makes it smaller, because another process
/// may have mapped it meanwhile.
fn grow(fd: i32, wanted: usize) -> Answer<()> {
    // Allocates the last byte alone. That changes no data, and lengthens only a smaller file.
    match kernel::allocate(fd, wanted - 1, 1) {
        // Some file systems do not have the call.
        Err(libc::EOPNOTSUPP | libc::ENOSYS) => kernel::set_size(fd, wanted),
        grown => grown,
    }
}

/// Returns the size of the file. An empty file first gets the size `wanted`.
fn size_of_file(fd: i32, wanted: usize) -> Answer<u64> {
    let size = || kernel::status(fd).map(|status| status.st_size as u64);
    if size()? == 0
        && let Err(error) = grow(fd, wanted)
        // Another process may have sized and sealed the file meanwhile.
        && size()? == 0
    {
        return Err(error);
    }
    size()
}

fn map(fd: i32, bytes: usize) -> Result<NonNull<u8>, SharedError> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: maps the file at an address that the kernel chooses, so no existing memory changes.
    let at = unsafe { kernel::map(0, bytes, protection, libc::MAP_SHARED, fd, 0) };
    let at = at.map_err(|errno| SharedError::File { errno })?;
    NonNull::new(at as *mut u8).ok_or(SharedError::File {
        errno: libc::ENOMEM,
    })
}

impl SharedCounters {
    /// Maps `count` counters in the file `fd`, which is open for reading and writing. The first
    /// process gives an empty file. Its counters begin at 0. The descriptor may be closed after the
    /// call.
    ///
    /// Two processes may make the call for an empty file at once. Makes about six system calls.
    ///
    /// # Errors
    ///
    /// A [`SharedError`], which names the cause and the remedy. The file may have grown.
    pub fn in_shared(fd: i32, count: usize) -> Result<SharedCounters, SharedError> {
        if count == 0 || count > MOST {
            return Err(SharedError::Count { count });
        }
        Self::open(fd, count)
    }

    fn open(fd: i32, count: usize) -> Result<SharedCounters, SharedError> {
        // With restartable sequences, a thread reads its CPU's number without a call.
        facts::choose_backend();
        let lanes = pinfold_rseq::possible();
        let bytes =
            size_of_file(fd, needed(count, lanes)).map_err(|errno| SharedError::File { errno })?;
        let too_small = |lanes| {
            let needed = needed(count, lanes) as u64;
            (bytes < needed).then_some(SharedError::TooSmall { bytes, needed })
        };
        // Never touches a page beyond the end of the file, which would raise SIGBUS.
        if let Some(error) = too_small(1) {
            return Err(error);
        }
        let header = Self::mapped(map(fd, PAGE)?, 0, 0);
        let lanes = header.agree(count, lanes)?;
        if let Some(error) = too_small(lanes) {
            return Err(error);
        }
        // A file that cannot be sealed works too, as long as no process truncates it.
        let _ = kernel::seal(fd, libc::F_SEAL_SHRINK);
        let at = map(fd, needed(count, lanes))?;
        Ok(Self::mapped(at, count, lanes))
    }

    fn mapped(at: NonNull<u8>, count: usize, lanes: usize) -> SharedCounters {
        SharedCounters {
            at,
            count,
            lanes,
            first_lane: first_lane(count),
            lane_bytes: lane_bytes(count),
        }
    }

    /// Writes the header of a new file, or compares it. Returns the number of lanes.
    ///
    /// Each word is written by a compare-exchange from 0. So several processes write one header,
    /// and a process that is killed here leaves a header that the next one completes.
    fn agree(&self, count: usize, lanes: usize) -> Result<usize, SharedError> {
        let settle = |word: usize, wanted: u64| {
            // Relaxed: the words say nothing about other memory, which begins as zeroes.
            match (self.word(word * WORD)).compare_exchange(0, wanted, Relaxed, Relaxed) {
                Ok(_) => wanted,
                Err(found) => found,
            }
        };
        let found = settle(0, MAGIC);
        if found != MAGIC {
            return Err(SharedError::Layout { found });
        }
        let found = settle(COUNT, count as u64);
        if found != count as u64 {
            return Err(SharedError::OtherCount { found });
        }
        match settle(LANES, lanes as u64) as usize {
            lanes @ 1..=MAX_INDEX => Ok(lanes),
            lanes => Err(SharedError::Layout {
                found: lanes as u64,
            }),
        }
    }

    /// Returns the number of counters.
    #[allow(clippy::len_without_is_empty, reason = "there is always a counter")]
    pub fn len(&self) -> usize {
        self.count
    }

    /// Adds `n`, which may be negative, to counter number `nth`. Returns false, and adds nothing,
    /// if there is no such counter.
    ///
    /// Costs one locked add on a line of the CPU's own, and a few loads. Never waits. Any thread
    /// and any signal handler may add.
    #[inline]
    pub fn add(&self, nth: usize, n: i64) -> bool {
        if nth >= self.count {
            return false;
        }
        let [frozen, base] = self.top(nth);
        // Relaxed: the add is correct in either case.
        if frozen.load(Relaxed) != 0 {
            // Release, here and below, pairs with the acquires of the sums: a thread that sees the
            // add sees what this thread did before.
            base.fetch_add(n as u64, Release);
            return true;
        }
        let mut lane = pinfold_rseq::current_cpu();
        // The process that made the file may have known fewer CPUs.
        if lane >= self.lanes {
            lane %= self.lanes;
        }
        let used = self.word((BITS + lane / 64) * WORD);
        if used.load(Relaxed) & 1 << (lane % 64) == 0 {
            used.fetch_or(1 << (lane % 64), Relaxed);
        }
        // The release of the add orders it after the bit: a sum that sees the add through another
        // word also finds the lane.
        let [up, down] = self.pair(lane, nth);
        let word = if n >= 0 { up } else { down };
        word.fetch_add(n.unsigned_abs(), Release);
        true
    }

    /// Returns the approximate value of counter number `nth`, or `None` if there is no such
    /// counter. It is off by at most what was added and subtracted during the call.
    ///
    /// Loads two words for each CPU on which a process has added. Takes no lock and makes no system
    /// call.
    pub fn read(&self, nth: usize) -> Option<i64> {
        (nth < self.count).then(|| {
            let moved = self.collect(nth).net();
            moved.wrapping_add(self.top(nth)[1].load(Acquire) as i64)
        })
    }

    /// Returns the exact value that counter number `nth` had at one moment during the call, or
    /// `None` if there is no such counter.
    ///
    /// Collects as [`read`](Self::read) does, twice or more, while all processes may add. If adds
    /// keep coming in between, freezes the counter, so that they go to one word for some
    /// microseconds.
    pub fn sum(&self, nth: usize) -> Option<i64> {
        if nth >= self.count {
            return None;
        }
        order_own_adds();
        let [frozen, base] = self.top(nth);
        let try_sum = || {
            let first = self.collect(nth);
            let base = base.load(Acquire) as i64;
            (first == self.collect(nth)).then(|| base.wrapping_add(first.net()))
        };
        let tried = || (0..TRIES).find_map(|_| try_sum());
        let sum = tried().unwrap_or_else(|| {
            loop {
                // Another sum may end the freeze, so each iteration freezes the counter again.
                // Meanwhile, a thread moves a lane's word only if it loaded `frozen` before. Each
                // thread does that at most once.
                frozen.store(1, Release);
                if let Some(sum) = tried() {
                    return sum;
                }
            }
        });
        // Also ends the freeze of a sum that was killed.
        if frozen.load(Relaxed) != 0 {
            frozen.store(0, Release);
        }
        Some(sum)
    }

    /// Returns what was added to all lanes, and what was taken away.
    fn collect(&self, nth: usize) -> Moved {
        let mut sum = Moved { up: 0, down: 0 };
        for at in 0..self.lanes.div_ceil(64) {
            // `sum` collects twice, and loads the base in between. Acquire, here and below, keeps
            // these three in order, and pairs with the releases in `add`.
            let used = self.word((BITS + at) * WORD).load(Acquire);
            for lane in bits(used).map(|bit| at * 64 + bit) {
                // A damaged file may have bits of lanes that do not exist.
                if lane < self.lanes {
                    let [up, down] = self.pair(lane, nth);
                    sum.up = sum.up.wrapping_add(up.load(Acquire));
                    sum.down = sum.down.wrapping_add(down.load(Acquire));
                }
            }
        }
        sum
    }

    /// Returns the word that says whether a counter is frozen, and its base.
    fn top(&self, nth: usize) -> [&AtomicU64; 2] {
        let at = PAGE + nth * TOP;
        [self.word(at), self.word(at + BASE)]
    }

    /// Returns `up` and `down` of a counter in a lane.
    fn pair(&self, lane: usize, nth: usize) -> [&AtomicU64; 2] {
        let at = self.first_lane + lane * self.lane_bytes + nth * PAIR;
        [self.word(at), self.word(at + WORD)]
    }

    /// Returns the word at `offset`. The callers check the number of the counter and of the lane.
    fn word(&self, offset: usize) -> &AtomicU64 {
        debug_assert!(offset < needed(self.count, self.lanes));
        // SAFETY: the mapping is a page for the header alone, or `needed` bytes, which stay mapped
        // while `self` lives. Offsets are multiples of 8, and all processes access the words
        // atomically.
        unsafe { &*self.at.as_ptr().add(offset).cast() }
    }
}

impl Drop for SharedCounters {
    fn drop(&mut self) {
        let bytes = needed(self.count, self.lanes);
        // SAFETY: `open` mapped these bytes, and no reference into them outlives `self`.
        unsafe { sys::unmap(self.at.as_ptr(), bytes) };
    }
}
