//! A latch: readers see a writer's complete changes, without a lock and without writing anything.
//!
//! The problem: a policy is many words long. A reader that copies the words while a writer changes
//! them would get a mixture of two policies. A lock would make readers wait, and would deadlock a
//! signal handler that looks up a policy while it interrupts the writer.
//!
//! The latch is the kernel's `seqcount_latch`. It has two copies of the data, each in a buffer of
//! its own, and a version. The version's lowest bit is the number of the *active* buffer; the other
//! buffer is the *spare*.
//!
//! | thread | may |
//! |---|---|
//! | the writer: the lock's holder | read everything; write the spare, its pointer, the version |
//! | readers, any number | read everything, write nothing |
//!
//! The writer:
//!
//! 1. makes the spare buffer, or replaces it, if it cannot hold the change;
//! 2. fills the spare buffer, while readers read the active one;
//! 3. adds 1 to the version, which makes the spare buffer the active one.
//!
//! A reader:
//!
//! 1. loads the version;
//! 2. reads the buffer that the version names;
//! 3. loads the version again. If the version is the same, the buffer has stayed the active one,
//!    and the writer writes only the spare one. If the version has changed, the words may be a
//!    mixture: the reader drops them and starts over.
//!
//! So:
//!
//! * The result of a read is complete, and was in effect when the reader first loaded the version.
//!   The reader sees each change that was published before the read began.
//! * A reader starts over only if a writer has published a change during the read. So lookups are
//!   lock-free. No reader has to wait for a writer that sleeps in the middle of a change, that a
//!   reading signal handler interrupted, or that does not exist in a forked child.
//! * Readers write no cache line, so they do not slow each other down.
//!
//! Buffers are not unmapped while the latch exists. A buffer that a larger one has replaced stays
//! readable, and each of its words is atomic. A reader that slept in a replaced buffer reads old
//! words, and its second load of the version refuses them.
//!
//! # Orderings
//!
//! 1. The version is stored with release and loaded with acquire. A reader that sees a version sees
//!    the content of its buffer.
//! 2. The writer's release fence stands between its last publication and its first write to the
//!    spare buffer. The reader's acquire fence stands between its last read of the buffer and its
//!    second load of the version. So a reader that saw any word of the new content also sees that
//!    the version has changed.
//! 3. A pointer is stored with release and loaded with acquire. A reader may load the pointer of a
//!    later version. Then it sees an initialized buffer, and its second load of the version refuses
//!    what it read there.
//!
//! `tests/model_ranges.rs` explores this file in loom, and shows that the latch fails if any one of
//! these orderings is missing.

use super::primitive::{AtomicPtr, AtomicU64, fence};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// Two buffers, and which of them is active.
pub(super) struct Latch<B> {
    version: AtomicU64,
    buffers: [AtomicPtr<B>; 2],
}

impl<B> Latch<B> {
    /// Makes a latch. The version must be 0 and both pointers null.
    pub(super) const fn new(version: AtomicU64, buffers: [AtomicPtr<B>; 2]) -> Self {
        Latch { version, buffers }
    }

    fn buffer(&self, version: u64) -> &AtomicPtr<B> {
        let [even, odd] = &self.buffers;
        if version & 1 == 0 { even } else { odd }
    }

    /// Calls `look` with the active buffer, and returns its result. The buffer is null before the
    /// first change.
    ///
    /// `look` may be called several times. If it found words that do not belong together, its
    /// result is dropped.
    #[inline(always)]
    pub(super) fn read<T>(&self, mut look: impl FnMut(*const B) -> T) -> T {
        loop {
            // The reader's step 1. Acquire pairs with the release in `publish`: the reader sees the
            // content of the version's buffer.
            let version = self.version.load(Acquire);
            // The reader's step 2. Acquire pairs with the release in `replace_spare`: the reader
            // sees the initialized head of the buffer.
            let seen = look(self.buffer(version).load(Acquire));
            // The reader's step 3. Acquire pairs with the release fence in `open_spare`: a reader
            // that saw a word of a newer content also sees that the version has changed.
            fence(Acquire);
            if self.version.load(Relaxed) == version {
                return seen;
            }
        }
    }

    /// Returns the active buffer. For the writer, which is the only thread that changes the
    /// version.
    pub(super) fn active(&self) -> *mut B {
        self.buffer(self.version.load(Relaxed)).load(Relaxed)
    }

    /// Returns the spare buffer, for reading. For the writer.
    pub(super) fn spare(&self) -> *mut B {
        self.buffer(self.version.load(Relaxed) ^ 1).load(Relaxed)
    }

    /// Returns the spare buffer, for writing. The writer may change its words only after this call.
    pub(super) fn open_spare(&self) -> *mut B {
        // Release pairs with the acquire fence in `read`: a reader that sees a word that the writer
        // writes from now on also sees that the version has changed.
        fence(Release);
        self.spare()
    }

    /// Replaces the spare buffer. The old buffer must stay readable.
    pub(super) fn replace_spare(&self, new: *mut B) {
        // Release pairs with the acquire load of the pointer in `read`: a reader that sees the
        // pointer also sees the initialized head.
        self.buffer(self.version.load(Relaxed) ^ 1)
            .store(new, Release);
    }

    /// Makes the spare buffer the active one.
    pub(super) fn publish(&self) {
        // Release pairs with the first load of the version in `read`: a reader that sees the
        // version also sees the content of its buffer.
        self.version.store(self.version.load(Relaxed) + 1, Release);
    }
}
