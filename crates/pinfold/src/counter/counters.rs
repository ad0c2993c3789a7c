//! Thousands of counters in one allocation.

use super::PerCpuCounter;
use super::error::CounterError;
use super::fork;
use super::shards::{MAX_BATCH, SIZE, Shards};
use crate::{counter_units, sys};
use core::ops::Deref;
use core::ptr::NonNull;

/// Many counters with one batch, made together: a slice of [`PerCpuCounter`]s.
///
/// The handles lie side by side, and so do the words of each CPU. `n` counters take `n` times 152
/// bytes for the handles and `n` times 32 bytes for the totals. Each CPU that adds takes `n` times
/// 32 bytes more.
///
/// ```
/// use pinfold::counter::Counters;
///
/// let by_table = Counters::new(&[0; 1000], 32)?;
/// by_table[7].add(5);
/// assert_eq!(by_table[7].sum(), 5);
/// assert_eq!(by_table.iter().map(|rows| rows.sum()).sum::<i64>(), 5);
/// # Ok::<(), pinfold::counter::CounterError>(())
/// ```
#[derive(Debug)]
pub struct Counters {
    handles: NonNull<PerCpuCounter>,
    length: usize,
}

// SAFETY: `PerCpuCounter` is `Send`, and the mapping that holds the handles belongs to no thread.
unsafe impl Send for Counters {}
// SAFETY: `&Counters` gives out nothing but `&[PerCpuCounter]`, and `PerCpuCounter` is `Sync`.
unsafe impl Sync for Counters {}

impl Counters {
    /// Makes one counter for each of `values`, all with the same batch, packed together. Not for
    /// signal handlers: waits while the process forks.
    ///
    /// # Errors
    ///
    /// * [`CounterError::Batch`] if `batch` is 0 or above 2^40.
    /// * [`CounterError::OutOfMemory`] if there is no room for this many counters.
    #[doc(alias = "percpu_counter_init_many")]
    pub fn new(values: &[i64], batch: u64) -> Result<Counters, CounterError> {
        if batch == 0 || batch > MAX_BATCH {
            return Err(CounterError::Batch { batch });
        }
        if values.is_empty() {
            return Ok(Counters {
                handles: NonNull::dangling(),
                length: 0,
            });
        }
        fork::outlast(|| fork::register().then_some(())).ok_or(CounterError::OutOfMemory)?;
        let handles =
            sys::map_memory(handle_bytes(values.len())).ok_or(CounterError::OutOfMemory)?;
        let handles = handles.cast::<PerCpuCounter>();
        let Some(offset) = counter_units::alloc_after_fork(values.len() * SIZE) else {
            // SAFETY: mapped above with this size, and only this thread knows the mapping.
            unsafe { sys::unmap(handles.as_ptr().cast(), handle_bytes(values.len())) };
            return Err(CounterError::OutOfMemory);
        };
        for (at, &value) in values.iter().enumerate() {
            let counter = PerCpuCounter::new().with_value(value).with_batch(batch);
            let block = offset + at * SIZE;
            // SAFETY: the blocks were allocated above, and no other thread knows them.
            unsafe { Shards::at(block) }.open(batch);
            counter.adopt(block);
            // SAFETY: the mapping has room for `values.len()` handles, and begins at a page.
            unsafe { handles.add(at).write(counter) };
        }
        Ok(Counters {
            handles,
            length: values.len(),
        })
    }
}

/// Returns the size of the mapping for `count` handles.
fn handle_bytes(count: usize) -> usize {
    (count * size_of::<PerCpuCounter>()).next_multiple_of(sys::page_size())
}

impl Deref for Counters {
    type Target = [PerCpuCounter];
    fn deref(&self) -> &[PerCpuCounter] {
        // SAFETY: `new` wrote `length` handles there. They stay until `drop`, and the borrow
        // of `self` ends before that. Without handles, the length is 0, and a dangling pointer is
        // allowed.
        unsafe { core::slice::from_raw_parts(self.handles.as_ptr(), self.length) }
    }
}

impl Drop for Counters {
    fn drop(&mut self) {
        if self.length == 0 {
            return;
        }
        // SAFETY: `new` mapped the handles with this size and wrote this many. `drop` has the only
        // reference, so no thread uses them any more. Each handle frees its own block.
        unsafe {
            NonNull::slice_from_raw_parts(self.handles, self.length).drop_in_place();
            sys::unmap(self.handles.as_ptr().cast(), handle_bytes(self.length));
        }
    }
}
