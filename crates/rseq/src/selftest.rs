//! Tests whether the kernel keeps its promise to abort critical sections.
#![allow(unsafe_code, reason = "runs critical sections on memory of its own")]

use crate::abi::{CPU_ID, RSEQ_CS};
use crate::registration::Registration;
use crate::stack::STACK_ALIGN;
use crate::units::{FIRST, UNIT_HEADER};
use crate::{Area, arch, possible};
use core::ptr::null_mut;

/// The result of [`selftest`].
///
/// ```
/// let result = pinfold_rseq::selftest();
/// assert_eq!(result.passed(), result.registered && result.operations && result.aborts);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SelfTest {
    /// The thread's area is registered, by the C library or by this crate.
    pub registered: bool,
    /// The current index is in range, and every operation gave the right result while undisturbed.
    pub operations: bool,
    /// The kernel aborted a section when it preempted or signalled the thread inside it.
    pub aborts: bool,
}

impl SelfTest {
    /// Returns whether all parts passed.
    pub fn passed(&self) -> bool {
        self.registered && self.operations && self.aborts
    }
}

/// Runs the whole self-test on the calling thread.
///
/// Registers the thread first if the C library has not. Takes up to about 100 ms, most of it
/// waiting for an abort. Pins the thread to its CPU and forks
/// a child for that time. On Arm, Linux 6.19 to 7.0.13 does not abort on preemption. This test
/// finds such a kernel.
pub fn selftest() -> SelfTest {
    let Some(registered) = Registration::here() else {
        return SelfTest {
            registered: false,
            operations: false,
            aborts: false,
        };
    };
    let (cs, index) = (registered.offset + RSEQ_CS, registered.offset + CPU_ID);
    let operations = sections_work(cs, index, &mut Block::new());
    SelfTest {
        registered: true,
        operations,
        aborts: operations && preemption_test(),
    }
}

/// Spins in a critical section until the kernel aborts it, and returns whether it did.
///
/// As long as no other thread wants the CPU, nothing aborts the section. So the test pins the
/// calling thread to its CPU and forks a child that competes for the same CPU. The test gives up
/// after about 100 ms, long enough for the scheduler's tick to switch to the child.
pub fn preemption_test() -> bool {
    let Some(registered) = Registration::here() else {
        return false;
    };
    with_competitor(|| {
        (0..64).any(|_| {
            // SAFETY: `registered` describes a registered area, so the sum is the offset of its
            // `rseq_cs`. 2^22 rounds take a few milliseconds.
            unsafe { arch::spin_until_aborted(registered.offset + RSEQ_CS, 1 << 22) }
        })
    })
}

/// Runs `test` while a forked child spins on the same CPU.
fn with_competitor(test: impl FnOnce() -> bool) -> bool {
    // SAFETY: `cpu_set_t` consists of integers, so zeroes are valid. The calls get its address and
    // its size. The child only arms an alarm and spins, which is allowed after a fork in a program
    // with threads.
    unsafe {
        let mut before: libc::cpu_set_t = core::mem::zeroed();
        let size = size_of::<libc::cpu_set_t>();
        if libc::sched_getaffinity(0, size, &raw mut before) != 0 {
            return test();
        }
        let cpu = libc::sched_getcpu();
        let mut here: libc::cpu_set_t = core::mem::zeroed();
        if (0..libc::CPU_SETSIZE).contains(&cpu) {
            libc::CPU_SET(cpu as usize, &mut here);
            libc::sched_setaffinity(0, size, &raw const here);
        }
        let child = libc::fork();
        if child == 0 {
            libc::alarm(2);
            loop {
                core::hint::spin_loop();
            }
        }
        let aborted = test();
        if child > 0 {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, null_mut(), 0);
        }
        libc::sched_setaffinity(0, size, &raw const before);
        aborted
    }
}

/// The memory of the self-test's stack.
#[repr(C, align(1024))]
pub(crate) struct Block([*mut u8; STACK_ALIGN / 8]);

impl Block {
    pub(crate) const fn new() -> Block {
        Block([null_mut(); STACK_ALIGN / 8])
    }
}

/// Returns whether the current index is in range and each operation gives the right result.
///
/// `cs` and `index` are the offsets of `rseq_cs` and of an id field from the thread pointer. Runs
/// when a process chooses its backend, and takes about a microsecond.
pub(crate) fn sections_work(cs: isize, index: isize, block: &mut Block) -> bool {
    // SAFETY: the caller passes the offset of an id field in a registered area.
    let in_range = (unsafe { arch::read_index(index) } as usize) < possible();
    in_range && operations_work(cs, block)
}

/// Returns whether each operation gives the right result on a unit that this function makes.
///
/// The sections take their index from a variable that is always 0. So the thread may move to
/// another CPU during the test, and a table of one entry is enough.
fn operations_work(cs: isize, block: &mut Block) -> bool {
    const WORD: usize = UNIT_HEADER;
    let zero = 0u32;
    let index = (&raw const zero as usize).wrapping_sub(arch::thread_pointer()) as isize;
    let mut unit = [0u64; UNIT_HEADER / 8 + 2];
    let table = [unit.as_mut_ptr().cast::<u8>()];
    let end = block.0.as_mut_ptr_range().end;
    // Room for two items above the guard.
    let bottom = end.wrapping_sub(2) as u64;
    let (one, two, three) = (8 as *mut u8, 16 as *mut u8, 24 as *mut u8);
    // The sections expect the entries `FIRST` bytes behind the start of the table.
    let (table, unit) = (table.as_ptr().wrapping_byte_sub(FIRST), unit.as_mut_ptr());
    let area = Area { cs, index, table };
    let mut taken = [null_mut(); 3];
    // SAFETY: `index` leads to a readable word that is 0, so the sections use the table's first
    // entry. That entry is a unit that holds both words, and the stack lies in `block`.
    unsafe {
        let added = area.add(WORD, 5) && unit.add(WORD / 8).read_volatile() == 5;
        unit.add(WORD / 8 + 1).write_volatile(6);
        let fetched =
            area.fetch_add(WORD + 8, 2) == Some(6) && unit.add(WORD / 8 + 1).read_volatile() == 8;
        let no_match = !area.store_if_equal(WORD, 4, 9);
        let stored = area.store_if_equal(WORD, 5, bottom);
        let empty = area.pop(WORD).is_null();
        let pushed = area.push(WORD, one) && area.push(WORD, two) && !area.push(WORD, three);
        let popped = area.pop(WORD) == two;
        let batch = [two, three];
        let put = area.push_batch(WORD, batch.as_ptr(), 2) == 1;
        let got = area.pop_batch(WORD, taken.as_mut_ptr(), 3) == 2;
        let emptied = unit.add(WORD / 8).read_volatile() == bottom;
        // The sections wrote to the block through addresses that the compiler does not track.
        core::hint::black_box(block);
        added
            && fetched
            && no_match
            && stored
            && empty
            && pushed
            && popped
            && put
            && got
            && emptied
            && taken[..2] == [two, one]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::{Backend, Index, Missing};

    #[test]
    fn passes_where_rseq_is_in_use() {
        let backend = crate::init(Index::Cpu);
        let found = selftest();
        if crate::missing() == Missing::Registration {
            assert!(!found.registered);
        }
        if matches!(backend, Backend::Rseq(_)) {
            assert!(found.passed(), "{found:?}");
        }
    }
}
