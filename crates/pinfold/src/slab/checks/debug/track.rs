//! Tracks. A track records the thread, CPU, time and callers of an allocation or a free.

use crate::profile::{ALL, walk};
use crate::sys;
use core::fmt;
use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicBool, AtomicI32};

/// Whether some stack walk has ended. If so, the unwinder's library is loaded.
///
/// All accesses to this word and to `WALKERS` are relaxed, because these words guard no data of
/// this crate, and the loader has its own locks.
static LOADED: AtomicBool = AtomicBool::new(false);

/// The TIDs of the threads that walk their stack before `LOADED` is set. Unused entries are 0.
static WALKERS: [AtomicI32; 16] = [const { AtomicI32::new(0) }; 16];

/// The most callers that a track keeps.
const FRAMES: usize = 16;

/// How many of the innermost frames a track leaves out: those of the walk, of `Track::here`, and of
/// the debugging code that called it.
const OWN: usize = 3;

/// The last allocation or the last free of an object.
///
/// ```
/// # use pinfold::slab::{DebugFlags, KmemCache};
/// # use std::alloc::Layout;
/// let cache = KmemCache::builder("session", Layout::new::<u64>())
///     .debug(DebugFlags::USER)
///     .build()?;
/// let session = cache.alloc().expect("memory");
/// cache.leaks_with(|report| {
///     let [allocated, freed] = &report.tracks;
///     println!("by thread {} from {:x?}", allocated.thread(), allocated.frames().next());
///     assert_eq!(freed.thread(), 0);
/// });
/// # // SAFETY: the object came from this cache and is not used afterwards.
/// # unsafe { cache.free(session) };
/// # Ok::<(), pinfold::slab::CacheError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Track {
    frames: [usize; FRAMES],
    milliseconds: u64,
    thread: i32,
    cpu: u32,
}

impl Track {
    pub(crate) const NOBODY: Track = Track {
        frames: [0; FRAMES],
        milliseconds: 0,
        thread: 0,
        cpu: 0,
    };

    /// Returns a track of the calling thread at this moment. Walks the stack by the program's
    /// unwinding tables, and takes no lock of this crate.
    ///
    /// The process's first walk may load the unwinder's library, and the loader allocates. If that
    /// allocation walked the stack too, its walk would load the library again, without end. So an
    /// allocation inside such a walk records no callers.
    #[cold]
    #[inline(never)]
    pub(crate) fn here() -> Track {
        let mut track = Track {
            milliseconds: sys::coarse_milliseconds(),
            thread: pinfold_rseq::kernel::thread(),
            // SAFETY: `sched_getcpu` has no preconditions.
            cpu: unsafe { libc::sched_getcpu() } as u32,
            ..Track::NOBODY
        };
        let loaded = LOADED.load(Relaxed);
        let walker = if loaded { None } else { enter(track.thread) };
        if loaded || walker.is_some() {
            let mut frames = [0; OWN + FRAMES];
            walk(&mut frames, ALL);
            track.frames.copy_from_slice(&frames[OWN..]);
        }
        if let Some(walker) = walker {
            LOADED.store(true, Relaxed);
            walker.store(0, Relaxed);
        }
        track
    }

    /// Returns the thread's TID, or 0 for a track that records nothing.
    pub fn thread(&self) -> i32 {
        self.thread
    }

    /// Returns the CPU on which the thread ran.
    pub fn cpu(&self) -> u32 {
        self.cpu
    }

    /// Returns the return addresses of the calls, innermost first.
    pub fn frames(&self) -> impl Iterator<Item = usize> + '_ {
        self.frames.iter().copied().take_while(|&frame| frame != 0)
    }

    /// Writes the track, with the callers' names if they are known. `now` is the time of the
    /// report: looking up the names of one track may take so long that the next would seem older.
    /// Writes nothing for a track that records nothing.
    pub(super) fn write(&self, what: &str, now: u64, to: &mut dyn fmt::Write) -> fmt::Result {
        if self.thread == 0 {
            return Ok(());
        }
        let ago = now.saturating_sub(self.milliseconds);
        let (seconds, rest) = (ago / 1000, ago % 1000);
        writeln!(
            to,
            "  {what} by thread {} on CPU {}, {seconds}.{rest:03} s ago:",
            self.thread, self.cpu
        )?;
        super::report::write_frames(self.frames(), to)
    }
}

/// Takes an entry of `WALKERS` for `thread`. Returns `None` if the thread has an entry already, or
/// all entries are taken.
fn enter(thread: i32) -> Option<&'static AtomicI32> {
    if WALKERS.iter().any(|walker| walker.load(Relaxed) == thread) {
        return None;
    }
    WALKERS
        .iter()
        .find(|walker| walker.compare_exchange(0, thread, Relaxed, Relaxed).is_ok())
}
