//! Reads the process's `PINFOLD_SLAB_DEBUG`, once.

use super::{DebugFlags, parse};
use core::cell::UnsafeCell;
use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use pinfold_rseq::env::{self, MAX_TEXT};

/// The environment variable that says which caches are checked, in the form that
/// [`check_settings`](super::check_settings) reads.
pub const VARIABLE: &str = "PINFOLD_SLAB_DEBUG";

struct Text(UnsafeCell<[u8; MAX_TEXT]>);
// SAFETY: only the thread that changed `LENGTH` from `UNREAD` to `BUSY` writes the text. Other
// threads read the text only after that thread has stored the length.
unsafe impl Sync for Text {}
static TEXT: Text = Text(UnsafeCell::new([0; MAX_TEXT]));

/// The length of the text in bytes. Before that is known: `UNREAD`, and then `BUSY` while a thread
/// reads the text from the environment.
static LENGTH: AtomicUsize = AtomicUsize::new(UNREAD);
const UNREAD: usize = usize::MAX;
const BUSY: usize = usize::MAX - 1;

/// Returns the settings. Returns an empty text if there are no settings, and while another thread
/// is reading them from the environment.
fn text() -> &'static str {
    if LENGTH
        .compare_exchange(UNREAD, BUSY, Acquire, Relaxed)
        .is_ok()
    {
        // SAFETY: only one thread ever succeeds in the `compare_exchange` above, and no thread
        // reads the text before `LENGTH` is stored.
        let buffer = unsafe { &mut *TEXT.0.get() };
        let length = env::read(VARIABLE, buffer).map_or(0, |value| value.len());
        LENGTH.store(length, Release);
    }
    match LENGTH.load(Acquire) {
        UNREAD | BUSY => "",
        length => {
            // SAFETY: this thread loaded with acquire a length that was stored, with release, after
            // the text was written. The text is never written again.
            let bytes = unsafe { &(&(*TEXT.0.get()))[..length] };
            core::str::from_utf8(bytes).unwrap_or("")
        }
    }
}

/// Returns the checks that the environment asks of the cache `name`. If the settings have an error,
/// ignores all of them: a program must not end because it makes a cache. [`check`](parse::check)
/// reports the error before a program starts.
pub(crate) fn for_cache(name: &str) -> DebugFlags {
    parse::flags_for(text(), name).unwrap_or_default()
}
