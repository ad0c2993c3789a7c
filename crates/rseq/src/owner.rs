//! Debug builds check that no two threads work on a unit at once.
//!
//! The kernel gives each index to one running thread, and aborts the section of a thread that loses
//! its index. If it did not, two threads would change words of one unit together, and an object
//! could be lost or handed out twice long before anything fails.
//!
//! So before each operation except the fast paths of malloc and free, a debug build runs a section
//! that writes the thread's token into the unit's header and reads it for a while. Any other value
//! there was written by a second thread in the middle of this section. The process then ends at
//! once.
//!
//! A thread that the kernel preempts or moves, and a thread that a signal handler interrupts, never
//! continues its section, so it does not see the other's token.
#![allow(unsafe_code, reason = "runs a section")]

use crate::arch::Area;

/// Bytes from the start of a unit to the word with the token. The word before is the lock of the
/// atomic backend.
pub(crate) const OWNER: usize = 8;

/// How often a thread reads the word: for about as long as another CPU's store takes to arrive.
const ROUNDS: u64 = 64;

/// Ends the process if another thread works on the current unit meanwhile.
#[inline(always)]
pub(crate) fn check(area: &Area) {
    if is_shared(area, ROUNDS) {
        abort();
    }
}

/// Returns whether another thread wrote its token while this one held the unit.
fn is_shared(area: &Area, rounds: u64) -> bool {
    let token = crate::thread_pointer() as u64;
    // SAFETY: the area is registered, and every unit begins with a header. Only this function uses
    // the header's word at `OWNER`.
    unsafe { area.hold(OWNER, token, rounds) != 0 }
}

#[cold]
fn abort() -> ! {
    let line = "pinfold: two threads work on one unit: the kernel gave both the same index\n";
    let arguments = [2, line.as_ptr() as usize, line.len()];
    // SAFETY: the line is readable for its length.
    unsafe {
        let _ = crate::syscall(libc::SYS_write, arguments);
        libc::abort()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backend, Index, UNIT_HEADER, Units, backend, init};
    use core::sync::atomic::AtomicBool;
    use core::sync::atomic::Ordering::Relaxed;
    use std::boxed::Box;
    use std::thread;
    use std::time::{Duration, Instant};

    fn table() -> Option<&'static Units> {
        init(Index::Cpu);
        if !matches!(backend(), Backend::Rseq(_)) {
            return None;
        }
        let units: &'static Units = Box::leak(Box::new(Units::new()));
        for index in 0..crate::possible() {
            let unit = Box::leak(Box::new([0u64; UNIT_HEADER / 8]));
            units.install(index, unit.as_mut_ptr().cast()).ok()?;
        }
        Some(units)
    }

    /// Runs `threads` threads that hold their units until one finds another owner, for at most
    /// `milliseconds`. With `same`, each thread takes an index of its own choice: 0.
    fn finds(units: &'static Units, threads: usize, same: bool, milliseconds: u64) -> bool {
        static FOUND: AtomicBool = AtomicBool::new(false);
        FOUND.store(false, Relaxed);
        let end = Instant::now() + Duration::from_millis(milliseconds);
        let hold = || {
            let zero = 0u32;
            let mut area = units.area().unwrap();
            if same {
                let at = (&raw const zero) as usize;
                area.index = at.wrapping_sub(crate::thread_pointer()) as isize;
            }
            while !FOUND.load(Relaxed) && Instant::now() < end {
                if (0..1000).any(|_| is_shared(&area, ROUNDS)) {
                    FOUND.store(true, Relaxed);
                }
            }
        };
        thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(hold))));
        FOUND.load(Relaxed)
    }

    #[test]
    fn only_two_threads_with_one_index_are_found() {
        let Some(units) = table() else { return };
        assert!(!finds(units, 8, false, 500), "each thread had its index");
        let cpus = thread::available_parallelism().map_or(1, usize::from);
        assert!(
            cpus < 2 || finds(units, 8, true, 20_000),
            "two threads with one index"
        );
    }
}
