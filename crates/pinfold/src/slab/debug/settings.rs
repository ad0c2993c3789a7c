//! The process's `PINFOLD_SLAB_DEBUG`, read once.

use super::{DebugFlags, parse};
use core::cell::UnsafeCell;
use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// The environment variable.
const NAME: &str = "PINFOLD_SLAB_DEBUG";
const LONGEST: usize = 64 << 10;

struct Text(UnsafeCell<[u8; LONGEST]>);
// SAFETY: only the thread that moved `LENGTH` from `UNREAD` to `BUSY` writes the text. Other
// threads read it after that thread has stored the length.
unsafe impl Sync for Text {}
static TEXT: Text = Text(UnsafeCell::new([0; LONGEST]));

/// The text's length, or `UNREAD`, or `BUSY`.
static LENGTH: AtomicUsize = AtomicUsize::new(UNREAD);
const UNREAD: usize = usize::MAX;
const BUSY: usize = usize::MAX - 1;

/// Returns the settings. Returns an empty text if there are none, and while another thread is
/// reading them from the environment.
fn text() -> &'static str {
    if LENGTH
        .compare_exchange(UNREAD, BUSY, Acquire, Relaxed)
        .is_ok()
    {
        // SAFETY: only one thread ever succeeds in the `compare_exchange` above, and no thread
        // reads the text before `LENGTH` is stored.
        let buffer = unsafe { &mut *TEXT.0.get() };
        let length = pinfold_rseq::env::read(NAME, buffer).map_or(0, |value| value.len());
        LENGTH.store(length, Release);
    }
    match LENGTH.load(Acquire) {
        UNREAD | BUSY => "",
        length => {
            // SAFETY: this thread acquired a length that was stored after the text was written. The
            // text is never written again.
            let bytes = unsafe { &(&(*TEXT.0.get()))[..length] };
            core::str::from_utf8(bytes).unwrap_or("")
        }
    }
}

/// Returns the checks that the environment asks of the cache `name`. If the settings cannot be
/// read, all of them are ignored, because a program must not end when it makes its hundredth cache.
/// [`check`](parse::check) reports the error before a program starts.
pub(in crate::slab) fn for_cache(name: &str) -> DebugFlags {
    parse::flags_for(text(), name).unwrap_or_default()
}
