//! A ring of records for each CPU.

use super::MOVES;
use super::list::register_fork;
use crate::counter_units::{self, LazyBlock, units, word_at};
use crate::lock::{Lock, Rank};
use core::fmt;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use pinfold_rseq::{Append, RING_SLOTS, RING_TAIL};

/// Serialises the threads that take or read other CPUs' items, or kill a reference count.
pub(super) static READERS: Lock<()> = Lock::new(Rank::Readers, ());

/// The number of records that a reader copies while it holds [`READERS`].
const AT_ONCE: usize = 8;

/// Why a record was not appended.
///
/// ```
/// use pinfold::percpu::PushError;
///
/// assert_eq!(PushError::Full.to_string(), "this CPU's ring is full");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum PushError {
    /// This CPU's ring is full until a reader has read from it.
    Full,
    /// There is no memory for this CPU's ring, another thread forks while the ring gets its memory,
    /// the thread moved between CPUs again and again, or another thread writes a word of this CPU
    /// from afar ([`PerCpu::write_on`](super::PerCpu::write_on)). Without restartable sequences
    /// also: another thread is using the memory of counters, lists and rings on this CPU.
    Unavailable,
}

pinfold_rseq::error_texts! { PushError:
    PushError::Full => "this CPU's ring is full";
    PushError::Unavailable => "this CPU's ring has no memory, or another thread is using it: try \
        again, or drop the record";
}

/// A ring of records with a part for each CPU. A record is `WORDS` words, and each CPU has room for
/// `SLOTS` records.
///
/// Each CPU appends to its own ring by one critical section, and any thread reads all rings from
/// afar. Reading interrupts no CPU: the writer stores only the head, the reader stores only the
/// tail, and neither waits for the other. No record is lost, torn or seen twice; a record for which
/// there is no room is refused.
///
/// Both numbers are powers of two, or [`new`](Self::new) does not compile. The ring takes
/// `8 * WORDS * SLOTS` bytes on each CPU that appends, and 128 bytes more. The [module](super) says
/// how much room there is.
///
/// ```
/// use pinfold::percpu::PerCpuRing;
///
/// /// Time, kind of event, and two arguments.
/// static TRACE: PerCpuRing<4, 256> = PerCpuRing::new();
///
/// TRACE.push([17, 1, 80, 443])?;
/// TRACE.push([19, 2, 80, 0])?;
/// let mut seen = vec![];
/// TRACE.drain(|_cpu, record| seen.push(record));
/// # seen.sort();
/// assert_eq!(seen, [[17, 1, 80, 443], [19, 2, 80, 0]]);
/// # Ok::<(), pinfold::percpu::PushError>(())
/// ```
pub struct PerCpuRing<const WORDS: usize, const SLOTS: usize> {
    block: LazyBlock,
}

/// The sizes of a ring, which are powers of two.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    /// Bytes of a record.
    pub(super) slot: usize,
    /// Bytes of all records.
    pub(super) size: usize,
}

impl Shape {
    /// Returns the bytes of a ring's block.
    pub(super) const fn block(self) -> usize {
        RING_SLOTS + self.size
    }

    /// Appends `record` to this CPU's ring.
    ///
    /// # Safety
    ///
    /// `block` holds the offset of a block of this shape if it holds one, and stays until this
    /// function returns. The record fills a slot.
    #[inline(always)]
    pub(super) unsafe fn push(self, block: &LazyBlock, record: &[u64]) -> Result<(), PushError> {
        // SAFETY: the caller promises the block and the record.
        let append = |offset| unsafe { self.append(offset, record) };
        match block.get().map_or(Append::NoUnit, append) {
            Append::Done => Ok(()),
            Append::Full => Err(PushError::Full),
            // SAFETY: the caller promises the block and the record.
            Append::NoUnit => unsafe { self.push_slow(block, record) },
        }
    }

    /// # Safety
    ///
    /// `offset` is that of a block of this shape, which stays until this function returns. The
    /// record fills a slot.
    #[inline(always)]
    unsafe fn append(self, offset: usize, record: &[u64]) -> Append {
        // SAFETY: the caller promises that the block has this shape. Blocks are zeroed at first.
        // Sizes are powers of two, and the record is as large as a slot.
        unsafe { units().append(offset, self.size, record, self.slot) }
    }

    /// Gives this CPU its ring, and appends `record`.
    ///
    /// # Safety
    ///
    /// The same as for [`push`](Self::push).
    #[cold]
    #[inline(never)]
    unsafe fn push_slow(self, block: &LazyBlock, record: &[u64]) -> Result<(), PushError> {
        // SAFETY: `prepare` returns the offset of the block. The caller promises the record.
        let append = |offset| unsafe { self.append(offset, record) };
        // The thread may move to a CPU without a unit between the two steps.
        for _ in 0..MOVES {
            match self.prepare(block).map_or(Append::NoUnit, append) {
                Append::Done => return Ok(()),
                Append::Full => return Err(PushError::Full),
                Append::NoUnit => {}
            }
        }
        Err(PushError::Unavailable)
    }

    /// Reads the records of all CPUs into `records`, which have room for a record each, and calls
    /// `f` with the CPU and the record. Returns the number of records.
    ///
    /// `block` holds the offset of a block of this shape if it holds one.
    #[inline(always)]
    pub(super) fn drain<R: AsMut<[u64]>>(
        self,
        block: &LazyBlock,
        records: &mut [R],
        mut f: impl FnMut(usize, &R),
    ) -> usize {
        let Some(offset) = block.get() else {
            return 0;
        };
        let mut count = 0;
        for cpu in counter_units::used() {
            // Acquire pairs with the release of `append`: this thread sees the records.
            let end = word_at(cpu, offset).load(Acquire);
            loop {
                let read = self.read(cpu, offset, end, records);
                records[..read].iter().for_each(|record| f(cpu, record));
                count += read;
                if read < records.len() {
                    break;
                }
            }
        }
        count
    }

    /// Copies the first records of `cpu` that begin before `end`, and gives their slots back.
    /// Returns their number.
    ///
    /// `offset` is that of a block of this shape. Each of `records` has room for a record.
    #[inline(always)]
    fn read(self, cpu: usize, offset: usize, end: u64, records: &mut [impl AsMut<[u64]>]) -> usize {
        let Some(_reading) = READERS.lock() else {
            return 0;
        };
        let tail = word_at(cpu, offset + RING_TAIL);
        let mut at = tail.load(Relaxed);
        let mut read = 0;
        // Another reader may have read past `end`, so the distance is signed.
        while read < records.len() && (end.wrapping_sub(at) as i64) > 0 {
            let slot = offset + RING_SLOTS + at as usize % self.size;
            for (n, word) in records[read].as_mut().iter_mut().enumerate() {
                // Relaxed: the load of the head has made the record visible.
                *word = word_at(cpu, slot + n * 8).load(Relaxed);
            }
            at = at.wrapping_add(self.slot as u64);
            read += 1;
        }
        if read > 0 {
            // Release pairs with the acquire in `append`: the writer writes to the slots only after
            // this thread has read them.
            tail.store(at, Release);
        }
        read
    }

    /// Allocates the block and gives this CPU its unit, unless that was done before.
    fn prepare(self, block: &LazyBlock) -> Option<usize> {
        let offset = block.get_or_alloc(self.block(), register_fork, |offset| offset)?;
        counter_units::install_here().map(|_| offset)
    }
}

impl<const WORDS: usize, const SLOTS: usize> PerCpuRing<WORDS, SLOTS> {
    const SHAPE: Shape = Shape {
        slot: WORDS * 8,
        size: WORDS * 8 * SLOTS,
    };

    /// Returns empty rings. A static can hold them. Allocates nothing.
    pub const fn new() -> Self {
        const {
            assert!(WORDS.is_power_of_two(), "WORDS must be a power of two");
            assert!(SLOTS.is_power_of_two(), "SLOTS must be a power of two");
        }
        PerCpuRing {
            block: LazyBlock::new(),
        }
    }

    /// Appends `record` to this CPU's ring. Costs one critical section.
    ///
    /// # Errors
    ///
    /// Returns [`PushError::Full`] if the ring has no free slot. Returns [`PushError::Unavailable`]
    /// in the cases that it names. Nothing is appended then.
    #[inline]
    pub fn push(&self, record: [u64; WORDS]) -> Result<(), PushError> {
        // SAFETY: only this ring's operations give the block an offset, and all of them pass this
        // shape. The record has `WORDS` words.
        unsafe { Self::SHAPE.push(&self.block, &record) }
    }

    /// Reads the records of all CPUs, and calls `f` with the CPU and the record. Returns the number
    /// of records.
    ///
    /// The records of one CPU come in the order in which they were appended. Reads each ring up to
    /// the head that it had when `drain` reached that ring.
    ///
    /// Takes a lock at least once for each CPU, and copies up to eight records under the lock. Does
    /// not hold the lock while `f` runs. So several threads may drain at once, and each record goes
    /// to one of them. A CPU with nothing to read costs two cache misses. `f` may append. Not for
    /// signal handlers. Uses stack space for eight records.
    pub fn drain(&self, mut f: impl FnMut(usize, [u64; WORDS])) -> usize {
        let mut records = [[0; WORDS]; AT_ONCE];
        Self::SHAPE.drain(&self.block, &mut records, |cpu, &record| f(cpu, record))
    }
}

impl<const WORDS: usize, const SLOTS: usize> Drop for PerCpuRing<WORDS, SLOTS> {
    fn drop(&mut self) {
        // SAFETY: `prepare` allocated the block with this size. `drop` has the only reference, so
        // no thread works on the block any more.
        unsafe { self.block.free(Self::SHAPE.block()) };
    }
}

impl<const WORDS: usize, const SLOTS: usize> Default for PerCpuRing<WORDS, SLOTS> {
    fn default() -> Self {
        Self::new()
    }
}

impl<const WORDS: usize, const SLOTS: usize> fmt::Debug for PerCpuRing<WORDS, SLOTS> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PerCpuRing").finish_non_exhaustive()
    }
}
