//! `PINFOLD_SLAB_DEBUG` of this process, read once.

use super::{DebugFlags, parse};
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
            core::str::from_utf8(bytes).unwrap_or("")
        }
    }
}

/// What the environment says of the cache `name`. Settings that cannot be read are ignored, all of
/// them: a program must not end by them when it makes its hundredth cache. [`check`](parse::check)
/// says what is wrong, before a program starts.
pub(in crate::slab) fn for_cache(name: &str) -> DebugFlags {
    parse::flags_for(text(), name).unwrap_or_default()
}
