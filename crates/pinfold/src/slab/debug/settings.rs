//! `PINFOLD_SLAB_DEBUG` of this process, read once.

use super::{DebugFlags, parse};
use crate::sys::die;
use core::cell::UnsafeCell;
use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// The environment variable.
const NAME: &str = "PINFOLD_SLAB_DEBUG";
const LONGEST: usize = 64 << 10;

struct Text(UnsafeCell<[u8; LONGEST]>);
// SAFETY: written by the one thread that has `LENGTH` at `BUSY`, read by others after that.
unsafe impl Sync for Text {}
static TEXT: Text = Text(UnsafeCell::new([0; LONGEST]));

/// The text's length, or one of these.
static LENGTH: AtomicUsize = AtomicUsize::new(UNREAD);
const UNREAD: usize = usize::MAX;
const BUSY: usize = usize::MAX - 1;

/// The settings; empty where there are none, and for who is in here at the same time.
fn text() -> &'static str {
    if LENGTH
        .compare_exchange(UNREAD, BUSY, Acquire, Relaxed)
        .is_ok()
    {
        // SAFETY: only this thread gets here, once.
        let buffer = unsafe { &mut *TEXT.0.get() };
        let length = pinfold_rseq::env::read(NAME, buffer).map_or(0, |value| value.len());
        LENGTH.store(length, Release);
    }
    match LENGTH.load(Acquire) {
        UNREAD | BUSY => "",
        length => {
            // SAFETY: written before the length was, and never again.
            let bytes = unsafe { &(&(*TEXT.0.get()))[..length] };
            match core::str::from_utf8(bytes) {
                Ok(text) => text,
                Err(_) => die(format_args!("{NAME} is no text")),
            }
        }
    }
}

/// What the environment says of the cache `name`. A text that cannot be read ends the process: debugging that was asked for
/// and silently is not there would mislead.
pub(in crate::slab) fn for_cache(name: &str) -> DebugFlags {
    match parse::flags_for(text(), name) {
        Ok(flags) => flags,
        Err(error) => die(format_args!("{NAME}: {error}")),
    }
}
