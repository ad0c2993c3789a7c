//! The word that holds the offset of a counter's block, which the first use allocates.
//!
//! Several threads and signal handlers may use a counter for the first time at once. None of them
//! may wait for another one, and no block may be lost or freed twice. So all of them follow these
//! steps:
//!
//! 1. The word is `UNSET` at first. A fast path loads the word once, and leaves the fast path if it
//!    finds `UNSET`.
//! 2. A slow path that finds `UNSET` allocates a block and prepares it. No other thread knows this
//!    block yet.
//! 3. The slow path replaces `UNSET` by the block's offset, in one compare-exchange. Only the first
//!    exchange succeeds. From then on the offset never changes, and every thread finds this block.
//!    Only flags in the low bits may be set later ([`set_flags`](LazyBlock::set_flags)).
//! 4. A slow path whose exchange fails frees its own block, and uses the published one.
//! 5. Dropping the counter frees the published block. The drop has the only reference to the word.
//!
//! There are two other writers. The only thread of a forked child may set the word to `UNSET`
//! again. A reference count (`percpu/ref_count.rs`) sets and clears a flag in its word.

use super::{alloc, free};
use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};

/// The offset of a block of the units, or `UNSET` until the first use has allocated the block.
///
/// The C header initialises words of this layout.
#[derive(Debug)]
#[repr(transparent)]
pub(crate) struct LazyBlock<const UNSET: usize = 0>(AtomicUsize);

impl<const UNSET: usize> LazyBlock<UNSET> {
    /// Returns the word of a counter that has no block yet.
    pub(crate) const fn new() -> Self {
        LazyBlock(AtomicUsize::new(UNSET))
    }

    /// Returns the published word, or `UNSET`.
    #[inline(always)]
    pub(crate) fn load(&self) -> usize {
        // Acquire pairs with the release in `publish`: a thread that sees the offset also sees the
        // block zeroed and prepared.
        self.0.load(Acquire)
    }

    /// Returns the word itself, for an owner that sets and clears flags in it.
    ///
    /// Such a flag makes a word that is `UNSET` another one, so that no block is published while
    /// the flag is set.
    #[inline(always)]
    pub(crate) fn word(&self) -> &AtomicUsize {
        &self.0
    }

    /// Returns the published word, or `None` if no word was published.
    #[inline(always)]
    pub(crate) fn get(&self) -> Option<usize> {
        Some(self.load()).filter(|&word| word != UNSET)
    }

    /// Returns the published word. If no word was published, allocates a block of `size` bytes, and
    /// publishes the word that `prepare` returns for the block's offset: the offset, perhaps with
    /// flags in its low bits.
    ///
    /// `register` makes forks wait for the threads that use the block. Returns `None` if `register`
    /// returns false, or if [`alloc`] does not allocate the block.
    pub(crate) fn get_or_alloc(
        &self,
        size: usize,
        register: impl FnOnce() -> bool,
        prepare: impl FnOnce(usize) -> usize,
    ) -> Option<usize> {
        if let Some(word) = self.get() {
            return Some(word);
        }
        let offset = register().then(|| alloc(size)).flatten()?;
        let mine = prepare(offset);
        let word = self.publish(mine);
        if word != mine {
            // SAFETY: another word was published, so no other thread knows the block, which was
            // allocated above with this size.
            unsafe { free(offset, size) };
        }
        Some(word)
    }

    /// Publishes `word` if no word was published before. Returns the word that is published now.
    pub(crate) fn publish(&self, word: usize) -> usize {
        // Release: a thread that sees the offset sees the block prepared. Acquire: this thread sees
        // the same if another thread was faster.
        match self.0.compare_exchange(UNSET, word, AcqRel, Acquire) {
            Ok(_) => word,
            Err(theirs) => theirs,
        }
    }

    /// Sets flags in the low bits of the published word. Does nothing if no word was published.
    pub(crate) fn set_flags(&self, flags: usize) {
        let with = |word: usize| (word != UNSET).then_some(word | flags);
        // Release: a thread that sees the flags also sees what the caller did before.
        let _ = self.0.fetch_update(AcqRel, Acquire, with);
    }

    /// Makes the next use allocate another block, in the child of a fork. The old block is never
    /// freed, because guards from before the fork may still use it.
    pub(crate) fn forget(&self) {
        self.0.store(UNSET, Relaxed);
    }

    /// Frees the block, if there is one.
    ///
    /// # Safety
    ///
    /// The published word is the offset of a whole block of `size` bytes. No operation on the block
    /// is under way, and none will begin.
    pub(crate) unsafe fn free(&mut self, size: usize) {
        let offset = core::mem::replace(self.0.get_mut(), UNSET);
        if offset != UNSET {
            // SAFETY: the caller promises a whole block that is not used any more. The word is
            // `UNSET` now, so the block is freed only once.
            unsafe { free(offset, size) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::MAX_STRIDE;
    use super::*;

    #[test]
    fn the_block_that_is_published_first_is_the_only_one() {
        // If each iteration left a block behind, the later ones would find no room in the units.
        // Other tests take some room meanwhile.
        const SIZE: usize = MAX_STRIDE / 8;
        let mut block: LazyBlock = LazyBlock::new();
        assert_eq!(block.get_or_alloc(SIZE, || false, |offset| offset), None);
        for _ in 0..16 {
            assert_eq!(block.get(), None);
            let mut first = None;
            // A signal handler may allocate between the allocation and the publication.
            let interrupted = |late| {
                first = block.get_or_alloc(SIZE, || true, |offset| offset);
                assert_ne!(first, Some(late));
                late
            };
            let seen = block.get_or_alloc(SIZE, || true, interrupted);
            assert!(first.is_some() && seen == first && block.get() == first);
            assert_eq!(block.get_or_alloc(SIZE, || true, |_| unreachable!()), first);
            // SAFETY: the block has this size, and no other code knows it.
            unsafe { block.free(SIZE) };
        }
        // SAFETY: there is no block any more.
        unsafe { block.free(SIZE) };
    }
}
