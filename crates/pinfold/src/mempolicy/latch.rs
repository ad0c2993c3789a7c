//! How readers find what a writer publishes, without writing anything themselves: the kernel's `seqcount_latch`, with whole buffers.
//!
//! There are two buffers, and a version that says which one is active: the one whose number is the version's last bit.
//!
//! | who | may touch |
//! |---|---|
//! | the writer (one at a time: whoever holds the lock) | reads all; writes the spare buffer, its pointer, and the version |
//! | readers, any number | read all, write nothing |
//!
//! The writer fills the spare buffer while readers go on with the active one, then adds 1 to the version: now the spare one is active. A
//! reader loads the version, looks at the buffer that it names, and loads the version again. While that was the same, nobody wrote that
//! buffer: it is rewritten, or another put in its place, only when the version has moved on. Else the reader throws away what it
//! saw, which may be torn, and looks again. So
//!
//! * what a reader returns was all there at once, at the moment when it loaded the version the first time; nothing is stale: a change
//!   that was published before the read began is seen;
//! * a reader looks again only when a writer has published meanwhile: lookups are lock-free. A writer that sleeps in the middle, or
//!   is interrupted by a handler that reads, or died in a fork, disturbs nobody;
//! * readers meet no line that another reader writes.
//!
//! Buffers are never given back while a reader may come: one that a larger one has replaced stays what it was, with each word an atomic. A
//! reader that slept in it reads old words, which the second load of the version then refuses.
//!
//! # Orderings
//!
//! 1. The version is stored with release and loaded with acquire: who sees a version sees the buffer as it was published.
//! 2. The writer's release fence stands between its last publication and its first write to the spare buffer, the reader's acquire fence
//!    between its last look and its second load of the version. A reader that saw any word of the rewriting therefore sees that
//!    publication too: another version than its own.
//! 3. A pointer is stored with release and loaded with acquire: a reader may load the pointer of a later version, and then sees a buffer
//!    that is laid out, if not the one it wanted; that it sees in step 2's way.
//!
//! `tests/model_ranges.rs` explores this file in loom, and that it fails without any one of these.

use super::primitive::{AtomicPtr, AtomicU64, fence};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// Two buffers and which of them is active.
pub(super) struct Latch<B> {
    version: AtomicU64,
    buffers: [AtomicPtr<B>; 2],
}

impl<B> Latch<B> {
    /// Version 0 of nothing: zero, and two null pointers.
    pub(super) const fn new(version: AtomicU64, buffers: [AtomicPtr<B>; 2]) -> Self {
        Latch { version, buffers }
    }

    fn buffer(&self, version: u64) -> &AtomicPtr<B> {
        let [even, odd] = &self.buffers;
        if version & 1 == 0 { even } else { odd }
    }

    /// What `look` makes of the active buffer, which is null before the first change. `look` may be called several times and find
    /// words that do not belong together; what it makes of those is dropped.
    #[inline(always)]
    pub(super) fn read<T>(&self, mut look: impl FnMut(*const B) -> T) -> T {
        loop {
            // Acquire pairs with the release in `publish`.
            let version = self.version.load(Acquire);
            // Acquire pairs with the release in `replace_spare`.
            let seen = look(self.buffer(version).load(Acquire));
            // Pairs with the fence in `open_spare`.
            fence(Acquire);
            if self.version.load(Relaxed) == version {
                return seen;
            }
        }
    }

    /// The active buffer, for the writer, who alone would change that.
    pub(super) fn active(&self) -> *mut B {
        self.buffer(self.version.load(Relaxed)).load(Relaxed)
    }

    /// The other one, to look at.
    pub(super) fn spare(&self) -> *mut B {
        self.buffer(self.version.load(Relaxed) ^ 1).load(Relaxed)
    }

    /// The other one, to write: only after this may the writer change a word of it.
    pub(super) fn open_spare(&self) -> *mut B {
        // Pairs with the fence in `read`.
        fence(Release);
        self.spare()
    }

    /// Puts another buffer in the spare one's place. The old one must stay readable.
    pub(super) fn replace_spare(&self, new: *mut B) {
        // Release pairs with the acquire of the pointer in `read`, also for what was published before.
        self.buffer(self.version.load(Relaxed) ^ 1)
            .store(new, Release);
    }

    /// Makes the spare buffer the active one.
    pub(super) fn publish(&self) {
        // Release pairs with the first load in `read`.
        self.version.store(self.version.load(Relaxed) + 1, Release);
    }
}
