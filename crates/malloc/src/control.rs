//! Does what other processes ask this process for, through the mailbox (`segment`).
//!
//! A new kind of request needs a number beside [`TRIM`], and one arm in [`serve`], which calls a
//! function that takes the argument and returns an [`Answer`]. Such a function:
//!
//! * runs in a tick: in a slow path of an allocation or free, possibly in a signal handler, or in
//!   the shepherd's thread;
//! * checks its argument, which may be any word;
//! * makes only the system calls that malloc makes, unless [`makes_new_calls`] names its request.

use crate::changeable::{Changeable, SETTINGS, publish};
use crate::heap_profile::MAX_INTERVAL;
use pinfold::internal::heap::{fragments, sampling};
use pinfold::internal::loader_is_idle;
use pinfold::internal::profile;
use pinfold::internal::segment::{
    Answer, Code, GET, HEAP_FRAGMENTS, HEAP_START, HEAP_STOP, SET, TRIM,
};
use pinfold::internal::show::Server;
use pinfold::shepherd::{self, Reach};
use pinfold::slab;

/// What serves this process's requests.
pub(crate) static SERVER: Server = Server {
    publish,
    makes_new_calls,
    serve,
};

/// Does what a request asks for.
fn serve(what: u32, argument: u64, reach: Reach) -> Answer {
    match what {
        TRIM => trim(reach),
        GET => get(argument),
        HEAP_START => heap_start(argument, reach),
        HEAP_STOP => heap_stop(),
        HEAP_FRAGMENTS => heap_fragments(),
        SET.. => set(what, argument),
        _ => Answer::new(Code::Unknown, 0),
    }
}

/// Returns whether [`serve`] may make system calls for this request that malloc does not make. They
/// need the asking process's consent.
fn makes_new_calls(what: u32, argument: u64) -> bool {
    match what {
        // Makes a file, and may load a library.
        HEAP_START => true,
        SET.. => setting(what).is_some_and(|setting| setting.needs_the_machine(argument)),
        _ => false,
    }
}

/// Returns the setting that a request of kind `what` changes.
fn setting(what: u32) -> Option<&'static Changeable> {
    SETTINGS.get(what.checked_sub(SET)? as usize)
}

/// Gives free memory back. If `reach` allows it, also empties the sheaves of other CPUs.
fn trim(reach: Reach) -> Answer {
    if reach != Reach::ThisCpu
        && let Some(bytes) = slab::trim_everywhere()
    {
        return Answer::new(Code::Done, bytes as u64);
    }
    Answer::new(Code::DoneHere, slab::trim_here() as u64)
}

/// Starts a heap profile.
fn heap_start(interval: u64, reach: Reach) -> Answer {
    if !(1..=MAX_INTERVAL).contains(&interval) {
        return Answer::new(Code::Value, 0);
    }
    let is_shepherd = reach != Reach::ThisCpu || shepherd::is_automatic();
    let started = match is_shepherd {
        true => sampling::start_apart(interval),
        // A slow path may be inside the loader, which must not be called again there.
        false => loader_is_idle() && sampling::start(interval),
    };
    if started {
        return Answer::new(Code::Done, interval);
    }
    Answer::new(
        Code::Refused,
        profile::no_walks().map_or(0, |why| why as u64),
    )
}

fn heap_stop() -> Answer {
    if sampling::is_profiling() && sampling::stop() {
        return Answer::new(Code::Done, 0);
    }
    Answer::new(Code::Refused, 0)
}

fn heap_fragments() -> Answer {
    let code = match fragments::look() {
        true => Code::Done,
        false => Code::Refused,
    };
    Answer::new(code, 0)
}

fn get(number: u64) -> Answer {
    let setting = usize::try_from(number)
        .ok()
        .and_then(|nth| SETTINGS.get(nth));
    match setting {
        Some(setting) => Answer::new(Code::Done, setting.get()),
        None => Answer::new(Code::Unknown, 0),
    }
}

fn set(what: u32, value: u64) -> Answer {
    match setting(what) {
        Some(setting) if setting.set(value) => Answer::new(Code::Done, setting.get()),
        Some(setting) => Answer::new(Code::Value, setting.get()),
        None => Answer::new(Code::Unknown, 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_request_is_answered() {
        let settings = SETTINGS.len() as u32;
        for what in 0..256 {
            for argument in [0, 1, 4, 5, 1 << 52, 1 << 63, u64::MAX] {
                if [TRIM, HEAP_START].contains(&what)
                    || (SET..SET + settings).contains(&what) && argument <= 1 << 52
                {
                    continue;
                }
                let answer = serve(what, argument, Reach::ThisCpu);
                let code = match what {
                    GET if argument < u64::from(settings) => Code::Done,
                    // There is no profile.
                    HEAP_STOP | HEAP_FRAGMENTS => Code::Refused,
                    what if (SET..SET + settings).contains(&what) => Code::Value,
                    _ => Code::Unknown,
                };
                assert_eq!(answer.code(), Some(code), "{what} {argument}");
            }
        }
    }
}
