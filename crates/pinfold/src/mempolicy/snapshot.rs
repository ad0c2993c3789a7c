//! A copy of all ranges of a map at one moment.

use super::tree::{Record, Tree};
use crate::sys;
use core::mem::size_of;
use core::ptr::NonNull;

/// A copy of all ranges, in ascending order, in a mapping of its own.
pub(crate) struct Snapshot<const WORDS: usize> {
    records: NonNull<Record<WORDS>>,
    len: usize,
    /// Bytes of the mapping; 0 if there is none.
    bytes: usize,
}

// SAFETY: the snapshot owns its records, which no thread writes after `of` has returned.
unsafe impl<const WORDS: usize> Send for Snapshot<WORDS> {}
// SAFETY: shared references only read the records, which no thread writes after `of` has returned.
unsafe impl<const WORDS: usize> Sync for Snapshot<WORDS> {}

impl<const WORDS: usize> Snapshot<WORDS> {
    /// Copies a tree that no thread changes during the copy. Returns `None` if there is no memory.
    pub(super) fn of(tree: Tree<'_, WORDS>) -> Option<Self> {
        let mut snapshot = Snapshot {
            records: NonNull::dangling(),
            len: 0,
            bytes: 0,
        };
        let most = tree.len();
        if most == 0 {
            return Some(snapshot);
        }
        let bytes = most.checked_mul(size_of::<Record<WORDS>>())?;
        let bytes = bytes.checked_next_multiple_of(sys::page_size())?;
        snapshot.records = sys::map_memory(bytes)?.cast();
        snapshot.bytes = bytes;
        let mut from = 0;
        while let Some(record) = tree.next_from(from).filter(|_| snapshot.len < most) {
            from = record.end;
            // SAFETY: the mapping has room for `most` records, and `len` is below that. It is
            // aligned to a page.
            unsafe { snapshot.records.add(snapshot.len).write(record) };
            snapshot.len += 1;
        }
        Some(snapshot)
    }

    /// Returns range `at`, in ascending order of pages, or `None` past the last range.
    pub(crate) fn record(&self, at: usize) -> Option<Record<WORDS>> {
        // SAFETY: `of` wrote `len` records. Without records, a slice of length 0 may have a
        // dangling address.
        let records = unsafe { core::slice::from_raw_parts(self.records.as_ptr(), self.len) };
        records.get(at).cloned()
    }
}

impl<const WORDS: usize> Drop for Snapshot<WORDS> {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: `of` mapped exactly these bytes for this snapshot alone. Records need no
            // drop.
            unsafe { sys::unmap(self.records.as_ptr().cast(), self.bytes) };
        }
    }
}
