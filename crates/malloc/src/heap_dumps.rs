//! Writes the heap profile at moments: above a limit, at a peak, at an interval, on a signal.
//!
//! A shepherd's tick looks for the moments ([`look`]), because it holds no lock and may open files.
//! Only the thread of a shepherd that the program or its user asked for does so. So [`VARIABLE`]
//! also asks for a shepherd in a program that is started on `libpinfold.so`.
//!
//! # The state
//!
//! One thread at a time looks: the one that has written the process's number to `LOOKING`. A child
//! of a fork may find its parent's number there, which excludes no thread of the child. The thread
//! that looks owns the other words. If they belong to the parent, it begins anew. The signal's
//! handler sets `SIGNALLED` too.

use crate::heap_profile::{self, FILE_VARIABLE, PATH};
use core::cell::UnsafeCell;
use core::ffi::{CStr, c_int};
use core::fmt::Write;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64};
use pinfold::internal::arena::{Limit, held, tightest_limit};
use pinfold::internal::{Text, coarse_milliseconds, keep_errno};
use pinfold::shepherd::{self, Reach};
use pinfold_rseq::{env, kernel};

/// The environment variable that says when the profile is written. [`FILE_VARIABLE`] says where.
pub const VARIABLE: &str = "PINFOLD_HEAP_DUMP";

/// The longest value of the variable.
const LONGEST: usize = 128;
/// How many numbered files stay, unless the user says otherwise.
const KEPT: u32 = 8;
/// The held memory must fall by 1/`FALL` below the limit before passing the limit counts again. So
/// memory that swings around the limit does not write a profile each time.
const FALL: u64 = 8;

/// When the profile is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Moments {
    /// When the held memory passes this much.
    above: Option<Limit>,
    /// When the profile's bytes in use are this many percent above the last written peak.
    peak: Option<u32>,
    /// Milliseconds from one profile to the next.
    every: Option<u64>,
    /// A signal that asks for a profile.
    signal: Option<c_int>,
    /// How many numbered files stay.
    keep: u32,
}

/// Parses the variable's value, as `above:512M,peak:10%,every:5m,signal:USR2,keep:4`. Returns
/// `None` for an invalid value, and for one that names no moment.
pub(crate) fn parse(value: &[u8]) -> Option<Moments> {
    let value = str::from_utf8(value)
        .ok()
        .filter(|value| value.len() <= LONGEST)?;
    let mut moments = Moments {
        above: None,
        peak: None,
        every: None,
        signal: None,
        keep: KEPT,
    };
    for word in value.split(',') {
        let (name, amount) = word.split_once(':')?;
        match name {
            "above" => moments.above = Some(amount.parse().ok()?),
            "peak" => moments.peak = Some(number(amount.strip_suffix('%')?, 1000)?),
            "every" => moments.every = Some(milliseconds(amount)?),
            "signal" => moments.signal = Some(signal(amount)?),
            "keep" => moments.keep = number(amount, 1000)?,
            _ => return None,
        }
    }
    let is_any = moments.above.is_some()
        || moments.peak.is_some()
        || moments.every.is_some()
        || moments.signal.is_some();
    is_any.then_some(moments)
}

/// Returns the number of a signal that programs may use as they like.
fn signal(name: &str) -> Option<c_int> {
    match name {
        "USR1" | "SIGUSR1" => Some(libc::SIGUSR1),
        "USR2" | "SIGUSR2" => Some(libc::SIGUSR2),
        _ => None,
    }
}

/// Returns a number from 1 to `most`.
fn number(text: &str, most: u32) -> Option<u32> {
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
    let number = text.parse().ok().filter(|_| is_number)?;
    (1..=most).contains(&number).then_some(number)
}

/// Returns the milliseconds of a time, as `30s`, `5m` or `2h`.
fn milliseconds(text: &str) -> Option<u64> {
    let units = [('s', 1000), ('m', 60_000), ('h', 3_600_000)];
    units.into_iter().find_map(|(unit, length)| {
        let count = number(text.strip_suffix(unit)?, 100_000)?;
        Some(u64::from(count) * length)
    })
}

/// What the environment asks for, copied at the start: the program may change its environment while
/// a shepherd looks.
struct Asked {
    moments: Moments,
    /// The path of the file, without the process's number.
    file: [u8; PATH],
    length: usize,
}

struct Place(UnsafeCell<Option<Asked>>);
// SAFETY: `start_as_asked` writes the place once, before it stores `IS_ASKED`. Other threads read
// it only after they have seen `IS_ASKED`.
unsafe impl Sync for Place {}
static ASKED: Place = Place(UnsafeCell::new(None));
static IS_ASKED: AtomicBool = AtomicBool::new(false);

/// The PID of the process whose thread looks, or 0.
static LOOKING: AtomicI32 = AtomicI32::new(0);
/// The process that the words below belong to.
static PROCESS: AtomicI32 = AtomicI32::new(0);
/// The number of the last file.
static NUMBER: AtomicU32 = AtomicU32::new(0);
/// When the last interval began, in milliseconds of the coarse clock.
static BEGIN: AtomicU64 = AtomicU64::new(0);
/// Whether the signal came since the last look.
static SIGNALLED: AtomicBool = AtomicBool::new(false);
/// Whether a profile was written since the held memory passed the limit.
static WAS_ABOVE: AtomicBool = AtomicBool::new(false);
/// The bytes in use of the last peak that was written.
static PEAK: AtomicU64 = AtomicU64::new(0);

/// Returns the moments that the environment asks for, if it also names a file.
fn asked() -> Option<Moments> {
    let moments = parse(env::read(VARIABLE, &mut [0; LONGEST])?)?;
    env::is_set(FILE_VARIABLE).then_some(moments)
}

/// Returns whether the environment asks for profiles at moments, and so for a shepherd.
pub(crate) fn is_asked() -> bool {
    asked().is_some()
}

/// Has the shepherds look for the moments that the environment names. The loader calls this in one
/// thread.
pub(crate) fn start_as_asked() {
    let Some(moments) = asked() else {
        return;
    };
    let mut file = [0; PATH];
    let length = env::read(FILE_VARIABLE, &mut file).map_or(0, <[u8]>::len);
    if length == 0 {
        return;
    }
    // SAFETY: no other thread reads the place before `IS_ASKED` is stored.
    unsafe {
        *ASKED.0.get() = Some(Asked {
            moments,
            file,
            length,
        });
    }
    BEGIN.store(coarse_milliseconds(), Relaxed);
    PROCESS.store(kernel::process(), Relaxed);
    // Release pairs with the acquire in `look`.
    IS_ASKED.store(true, Release);
    shepherd::register(look);
    moments.signal.into_iter().for_each(handle);
}

/// Has the signal ask for a profile, unless the program's parent has it ignored. The program has
/// not begun yet, so no handler of its own is there. One that it sets later takes this one's place.
fn handle(signal: c_int) {
    extern "C" fn ask(_: c_int) {
        SIGNALLED.store(true, Relaxed);
    }
    // SAFETY: the handler only stores a word, which any thread may do at any time. All fields of
    // `sigaction` may be zero.
    unsafe {
        let mut action: libc::sigaction = core::mem::zeroed();
        if libc::sigaction(signal, core::ptr::null(), &raw mut action) != 0
            || action.sa_sigaction != libc::SIG_DFL
        {
            return;
        }
        action.sa_sigaction = ask as extern "C" fn(c_int) as usize;
        // Most of the program's system calls go on. Those that wait for events or time end with
        // EINTR all the same.
        action.sa_flags = libc::SA_RESTART | libc::SA_ONSTACK;
        libc::sigaction(signal, &raw const action, core::ptr::null_mut());
    }
}

/// Writes the profile if one of the moments has come.
fn look(reach: Reach) {
    // Acquire pairs with the release in `start_as_asked`: this thread sees the place.
    if reach == Reach::ThisCpu || !IS_ASKED.load(Acquire) || !heap_profile::exists() {
        return;
    }
    // SAFETY: `IS_ASKED` is set, so the place is written, and no thread writes it again.
    let Some(asked) = (unsafe { &*ASKED.0.get() }) else {
        return;
    };
    let (own, other) = (kernel::process(), LOOKING.load(Relaxed));
    // Acquire pairs with the release below: this thread sees the words of the last look.
    if other == own
        || LOOKING
            .compare_exchange(other, own, Acquire, Relaxed)
            .is_err()
    {
        return;
    }
    keep_errno(|| {
        if PROCESS.swap(own, Relaxed) != own {
            NUMBER.store(0, Relaxed);
            BEGIN.store(coarse_milliseconds(), Relaxed);
            WAS_ABOVE.store(false, Relaxed);
            PEAK.store(0, Relaxed);
            SIGNALLED.store(false, Relaxed);
        }
        look_alone(asked, own);
    });
    LOOKING.store(0, Release);
}

fn look_alone(asked: &Asked, process: libc::pid_t) {
    let Moments {
        above,
        peak,
        every,
        signal: _,
        keep,
    } = asked.moments;
    let (held, now) = (held(), coarse_milliseconds());
    let limit = above.map(bytes);
    let is_above = limit.is_some_and(|limit| held >= limit);
    let has_passed = is_above && !WAS_ABOVE.load(Relaxed);
    let is_due = every.is_some_and(|every| now.saturating_sub(BEGIN.load(Relaxed)) >= every);
    if is_due {
        BEGIN.store(now, Relaxed);
    }
    let is_signalled = SIGNALLED.swap(false, Relaxed);
    if has_passed || is_due || is_signalled {
        let number = NUMBER.load(Relaxed).wrapping_add(1);
        if write(asked, process, format_args!("{number}"), true) {
            NUMBER.store(number, Relaxed);
            WAS_ABOVE.fetch_or(is_above, Relaxed);
            if let Some(old) = number.checked_sub(keep).filter(|&old| old > 0) {
                let removed = |path: &CStr| kernel::unlink(path).is_ok();
                with_path(asked, process, format_args!("{old}"), removed);
            }
        } else if is_signalled {
            // The next look tries again.
            SIGNALLED.store(true, Relaxed);
        }
    }
    if limit.is_some_and(|limit| held < limit - limit / FALL) {
        WAS_ABOVE.store(false, Relaxed);
    }
    if let Some(percent) = peak {
        // Held memory also counts what was freed and is kept, so it peaks when less is in use.
        let totals = heap_profile::totals();
        let in_use = totals.bytes.saturating_sub(totals.freed_bytes);
        let last = PEAK.load(Relaxed);
        let least = last.saturating_add(last / 100 * u64::from(percent));
        if in_use > least && write(asked, process, format_args!("peak"), last == 0) {
            PEAK.store(in_use, Relaxed);
        }
    }
}

/// Returns the bytes of a limit. A share is one of the tightest limit.
fn bytes(limit: Limit) -> u64 {
    match limit {
        Limit::Bytes(bytes) => bytes as u64,
        Limit::Percent(percent) => tightest_limit() as u64 / 100 * percent as u64,
    }
}

/// Writes the profile to `FILE.PID.last`. Returns false if the system refuses that. If this process
/// has not written the file, one that is there is a former process's, and gets the name
/// `FILE.PID.last.old`: after the restart of a container, its process has the same number.
fn write(
    asked: &Asked,
    process: libc::pid_t,
    last: core::fmt::Arguments<'_>,
    is_first: bool,
) -> bool {
    if is_first {
        with_path(asked, process, format_args!("{last}.old"), |old| {
            with_path(asked, process, last, |path| {
                kernel::rename(path, old).is_ok()
            })
        });
    }
    with_path(asked, process, last, heap_profile::write)
}

/// Calls `act` with the path `FILE.PID.last`. Returns false if it is too long.
fn with_path(
    asked: &Asked,
    process: libc::pid_t,
    last: core::fmt::Arguments<'_>,
    act: impl FnOnce(&CStr) -> bool,
) -> bool {
    let mut end = Text::<48>::new();
    if write!(end, ".{process}.{last}").is_err() {
        return false;
    }
    let end = end.get();
    let mut path = [0; PATH + 1];
    let length = asked.length + end.len();
    if length > PATH {
        return false;
    }
    path[..asked.length].copy_from_slice(&asked.file[..asked.length]);
    path[asked.length..length].copy_from_slice(end);
    CStr::from_bytes_until_nul(&path).is_ok_and(act)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_the_variable() {
        let all = parse(b"above:512M,peak:10%,every:5m,signal:SIGUSR2,keep:4").unwrap();
        let expected = Moments {
            above: Some(Limit::Bytes(512 << 20)),
            peak: Some(10),
            every: Some(300_000),
            signal: Some(libc::SIGUSR2),
            keep: 4,
        };
        assert_eq!(all, expected);
        let share = parse(b"above:90%").unwrap();
        assert_eq!((share.above, share.keep), (Some(Limit::Percent(90)), KEPT));
        for wrong in [
            "",
            "above",
            "above:",
            "above:0",
            "above:lots",
            "peak:10",
            "peak:0%",
            "peak:+5%",
            "every:60",
            "every:0s",
            "every:1d",
            "keep:4",
            "keep:0,every:1s",
            "every:1s,",
            "signal:KILL",
            "signal:12",
            "above:1G;peak:5%",
            "sometimes:1",
        ] {
            assert_eq!(parse(wrong.as_bytes()), None, "{wrong}");
        }
        assert_eq!(parse(b"every:1s,every:\xff"), None);
    }
}
