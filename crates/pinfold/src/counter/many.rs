//! Thousands of counters in one allocation.

use super::PercpuCounter;
use super::error::CounterError;
use super::shards::{BATCH_MOST, SIZE};
use super::{fork, stripe, watch};
use crate::{percpu, sys};
use core::ops::Deref;
use core::ptr::NonNull;

/// Counters made together by [`PercpuCounter::init_many`]: a slice of [`PercpuCounter`]s.
///
/// The handles lie side by side, and so do the words of each CPU: n counters cost n times 128 bytes
/// for the handles, n times 32 bytes for the totals, and as much again for each CPU that adds,
/// nothing for the others.
///
/// ```
/// use pinfold::counter::PercpuCounter;
///
/// let by_table = PercpuCounter::init_many(&[0; 1000], 32)?;
/// by_table[7].add(5);
/// assert_eq!(by_table[7].sum(), 5);
/// assert_eq!(by_table.iter().map(|rows| rows.sum()).sum::<i64>(), 5);
/// # Ok::<(), pinfold::counter::CounterError>(())
/// ```
#[derive(Debug)]
pub struct Counters {
    handles: NonNull<PercpuCounter>,
    length: usize,
    /// Where the first counter's block is; the others' follow.
    offset: usize,
}

// SAFETY: counters are shared between threads, and their memory belongs to no thread.
unsafe impl Send for Counters {}
// SAFETY: as above.
unsafe impl Sync for Counters {}

impl PercpuCounter {
    /// Makes one counter for each of `values`, all with the same batch, packed together.
    ///
    /// # Errors
    ///
    /// [`CounterError::Batch`] as for [`with_batch`](Self::with_batch); [`CounterError::OutOfMemory`] when there is no room for so
    /// many.
    pub fn init_many(values: &[i64], batch: u64) -> Result<Counters, CounterError> {
        if batch == 0 || batch > BATCH_MOST {
            return Err(CounterError::Batch { batch });
        }
        if values.is_empty() {
            return Ok(Counters {
                handles: NonNull::dangling(),
                length: 0,
                offset: 0,
            });
        }
        // Another thread may be at it, for a moment.
        let mut looks = 0;
        while !fork::register() && looks < 1000 {
            stripe::pause(&mut looks);
        }
        let handles =
            sys::map_memory(handle_bytes(values.len())).ok_or(CounterError::OutOfMemory)?;
        let handles = handles.cast::<PercpuCounter>();
        let Some(offset) = percpu::alloc_after_fork(values.len() * SIZE) else {
            // SAFETY: mapped above, and nobody knows of it.
            unsafe { sys::unmap(handles.as_ptr().cast(), handle_bytes(values.len())) };
            return Err(CounterError::OutOfMemory);
        };
        for (at, &value) in values.iter().enumerate() {
            let counter = PercpuCounter::make(value, batch, 0);
            counter.settle(offset + at * SIZE);
            // SAFETY: within the mapping, which is aligned to a page.
            unsafe { handles.add(at).write(counter) };
        }
        Ok(Counters {
            handles,
            length: values.len(),
            offset,
        })
    }
}

fn handle_bytes(count: usize) -> usize {
    (count * size_of::<PercpuCounter>()).next_multiple_of(sys::page_size())
}

impl Deref for Counters {
    type Target = [PercpuCounter];
    fn deref(&self) -> &[PercpuCounter] {
        // SAFETY: as many handles were written there, and stay until the drop.
        unsafe { core::slice::from_raw_parts(self.handles.as_ptr(), self.length) }
    }
}

impl Drop for Counters {
    fn drop(&mut self) {
        if self.length == 0 {
            return;
        }
        for block in (self.offset..).step_by(SIZE).take(self.length) {
            let _held = stripe::hold_all(block);
            watch::forget(block, SIZE);
        }
        // SAFETY: allocated and mapped together; the counters are nobody's any more, and no folder looks at them. The handles
        // have nothing else to give back.
        unsafe {
            percpu::free(self.offset, self.length * SIZE);
            sys::unmap(self.handles.as_ptr().cast(), handle_bytes(self.length));
        }
    }
}
