//! The shepherd of a program that runs on this allocator.
//!
//! Slow paths tick in passing. A thread of its own it gets once the program has made one itself, or at the start where
//! [`VARIABLE`] asks for it: a program with one thread may fork, or change namespaces, and would mind a stranger's.

use core::sync::atomic::AtomicI32;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use core::time::Duration;
use pinfold::shepherd::Shepherd;

/// The environment variable that says when there is a thread: `auto` (or nothing) once the program has threads, `on` from the
/// start, `off` never; a number is `on` with that many milliseconds between looks.
pub const VARIABLE: &str = "PINFOLD_SHEPHERD";

/// The process in which a thread was started; 0 in none.
static STARTED_IN: AtomicI32 = AtomicI32::new(0);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wish {
    Auto,
    On(Option<Duration>),
    Off,
}

/// What the variable's value asks for; what makes no sense is `auto`.
fn parse(value: &[u8]) -> Wish {
    match value {
        b"on" => Wish::On(None),
        b"off" => Wish::Off,
        _ => {
            let number = core::str::from_utf8(value)
                .ok()
                .and_then(|text| text.parse().ok());
            match number {
                Some(milliseconds @ 1..=86_400_000) => {
                    Wish::On(Some(Duration::from_millis(milliseconds)))
                }
                _ => Wish::Auto,
            }
        }
    }
}

fn wish() -> Wish {
    let mut value = [0u8; 16];
    pinfold_rseq::env::read(VARIABLE, &mut value).map_or(Wish::Auto, parse)
}

/// To be called when the library is loaded.
pub fn library_loaded() {
    if let Wish::On(interval) = wish() {
        start(interval);
    }
}

/// To be called when the program has made a thread.
pub fn program_made_thread() {
    if STARTED_IN.load(Relaxed) == 0 {
        match wish() {
            Wish::Auto => start(None),
            Wish::On(interval) => start(interval),
            Wish::Off => {}
        }
    }
}

/// In the child after a fork, which has no thread.
pub(crate) fn fork_child() {
    STARTED_IN.store(0, Relaxed);
}

fn start(interval: Option<Duration>) {
    // SAFETY: no preconditions.
    let here = unsafe { libc::getpid() };
    // One thread at most, and the making of it, which may come by here again, makes none.
    if STARTED_IN
        .compare_exchange(0, here, AcqRel, Acquire)
        .is_err()
    {
        return;
    }
    let mut shepherd = Shepherd::new();
    if let Some(interval) = interval {
        shepherd = shepherd.interval(interval);
    }
    // It runs as long as the process. Without a thread the slow paths go on ticking.
    // SAFETY: errno is the calling thread's own; who makes a thread need not find it changed.
    unsafe {
        let errno = *libc::__errno_location();
        let _ = shepherd.start().map(core::mem::forget);
        *libc::__errno_location() = errno;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_the_variable() {
        let milliseconds = |n| Wish::On(Some(Duration::from_millis(n)));
        for (value, wish) in [
            (&b""[..], Wish::Auto),
            (b"auto", Wish::Auto),
            (b"on", Wish::On(None)),
            (b"off", Wish::Off),
            (b"250", milliseconds(250)),
            (b"0", Wish::Auto),
            (b"-1", Wish::Auto),
            (b"99999999999999999999", Wish::Auto),
            (b"\xff", Wish::Auto),
        ] {
            assert_eq!(parse(value), wish, "{value:?}");
        }
    }
}
