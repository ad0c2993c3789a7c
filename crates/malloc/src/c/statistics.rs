//! glibc's calls that report on malloc and tune it: `mallinfo`, `malloc_info`, `malloc_stats`,
//! `mallopt`. docs/c-api.md says what each number means, and which programs read it.

use super::support::failed;
use super::text::print_into;
use core::ffi::c_int;
use pinfold::internal::arena::{self, ARENA_STAT, ArenaItem};
use pinfold::slab::{Blocks, for_each_blocks};
use pinfold_rseq::kernel;

/// The result of `mallinfo2`: bytes, except in the fields for numbers of blocks.
///
/// `arena = uordblks + fordblks`. Both `fsmblks` and `keepcost` are parts of `fordblks`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Mallinfo2 {
    /// Bytes held from the system, without huge blocks.
    pub arena: usize,
    /// Number of free blocks in slabs.
    pub ordblks: usize,
    /// Number of free blocks that CPUs and nodes keep ready, in sheaves.
    pub smblks: usize,
    /// Number of huge blocks.
    pub hblks: usize,
    /// Bytes in huge blocks.
    pub hblkhd: usize,
    /// Always 0, as in glibc.
    pub usmblks: usize,
    /// Bytes of the blocks that `smblks` counts.
    pub fsmblks: usize,
    /// Bytes in blocks that the program holds, without huge blocks.
    pub uordblks: usize,
    /// Bytes held and free.
    pub fordblks: usize,
    /// Bytes that `malloc_trim` would give back, at least.
    pub keepcost: usize,
}

impl Mallinfo2 {
    /// Adds a cache's blocks to the fields of free blocks.
    fn add(&mut self, blocks: &Blocks) {
        self.ordblks += blocks.in_slabs;
        self.smblks += blocks.in_sheaves;
        self.fsmblks += blocks.in_sheaves * blocks.size;
        self.fordblks += blocks.bytes.saturating_sub(blocks.active * blocks.size);
        self.keepcost += blocks.unused;
    }

    /// Fills in the other fields, after all caches were [added](Self::add).
    fn complete(self) -> Mallinfo2 {
        let (held, dirty) = (arena::held() as usize, arena::dirty() as usize);
        let huge = arena::huge_total();
        let arena = held.saturating_sub(huge);
        // Other threads may move memory between the readings.
        let fordblks = (self.fordblks + dirty).min(arena);
        Mallinfo2 {
            arena,
            hblks: arena::huge_count(),
            hblkhd: huge,
            fsmblks: self.fsmblks.min(fordblks),
            uordblks: arena - fordblks,
            fordblks,
            keepcost: (self.keepcost + dirty).min(fordblks),
            ..self
        }
    }
}

/// Returns how much memory Pinfold holds, and for which use (`mallinfo2`).
///
/// Exact if no other thread allocates or frees during the call. Otherwise wrong by the sheaves,
/// slabs and runs that moved. Reads four words for each CPU and cache, and walks the partial slabs
/// while it holds the nodes' locks.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_mallinfo2() -> Mallinfo2 {
    let mut info = Mallinfo2::default();
    for_each_blocks(|blocks| info.add(&blocks));
    info.complete()
}

/// The result of `mallinfo`: the fields of [`Mallinfo2`] as `int`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Mallinfo {
    /// Bytes held from the system, without huge blocks.
    pub arena: c_int,
    /// Number of free blocks in slabs.
    pub ordblks: c_int,
    /// Number of free blocks that CPUs and nodes keep ready, in sheaves.
    pub smblks: c_int,
    /// Number of huge blocks.
    pub hblks: c_int,
    /// Bytes in huge blocks.
    pub hblkhd: c_int,
    /// Always 0, as in glibc.
    pub usmblks: c_int,
    /// Bytes of the blocks that `smblks` counts.
    pub fsmblks: c_int,
    /// Bytes in blocks that the program holds, without huge blocks.
    pub uordblks: c_int,
    /// Bytes held and free.
    pub fordblks: c_int,
    /// Bytes that `malloc_trim` would give back, at least.
    pub keepcost: c_int,
}

/// Returns the figures of [`pinfold_mallinfo2`], each at most `INT_MAX` (`mallinfo`).
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_mallinfo() -> Mallinfo {
    let info = pinfold_mallinfo2();
    let bounded = |figure: usize| c_int::try_from(figure).unwrap_or(c_int::MAX);
    Mallinfo {
        arena: bounded(info.arena),
        ordblks: bounded(info.ordblks),
        smblks: bounded(info.smblks),
        hblks: bounded(info.hblks),
        hblkhd: bounded(info.hblkhd),
        usmblks: bounded(info.usmblks),
        fsmblks: bounded(info.fsmblks),
        uordblks: bounded(info.uordblks),
        fordblks: bounded(info.fordblks),
        keepcost: bounded(info.keepcost),
    }
}

/// Writes the state of malloc to `stream`, as XML in the form of glibc (`malloc_info`).
///
/// All memory is in one `heap`, which has a `size` for each size of blocks that has free ones.
/// Costs what [`pinfold_mallinfo2`] costs, and the writing.
///
/// Returns 0, or −1 with EINVAL if `options` is not 0, or −1 if the stream fails.
///
/// # Safety
///
/// `stream` is an open C stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_malloc_info(options: c_int, stream: *mut libc::FILE) -> c_int {
    if options != 0 {
        return failed(libc::EINVAL);
    }
    macro_rules! write {
        ($format:literal $(, $number:expr)*) => {
            // SAFETY: the caller promises an open stream. The format takes as many sizes as follow.
            unsafe { libc::fprintf(stream, $format.as_ptr() $(, $number)*) >= 0 }
        };
    }
    let mut info = Mallinfo2::default();
    let mut is_written = write!(c"<malloc version=\"1\">\n<heap nr=\"0\">\n<sizes>\n");
    for_each_blocks(|blocks| {
        info.add(&blocks);
        let (size, free) = (blocks.size, blocks.in_slabs + blocks.in_sheaves);
        if free > 0 {
            is_written &= write!(
                c"  <size from=\"%zu\" to=\"%zu\" total=\"%zu\" count=\"%zu\"/>\n",
                size,
                size,
                free * size,
                free
            );
        }
    });
    let info = info.complete();
    let most = (arena::held_peak() as usize).max(info.arena);
    let mapped = ARENA_STAT.read(ArenaItem::Mapped) as usize;
    is_written &= write!(c"</sizes>\n");
    // The figures of the one heap are followed by those of the process.
    for of_process in [false, true] {
        is_written &= write!(
            c"<total type=\"fast\" count=\"%zu\" size=\"%zu\"/>\n",
            info.smblks,
            info.fsmblks
        );
        is_written &= write!(
            c"<total type=\"rest\" count=\"%zu\" size=\"%zu\"/>\n",
            info.ordblks,
            info.fordblks - info.fsmblks
        );
        if of_process {
            is_written &= write!(
                c"<total type=\"mmap\" count=\"%zu\" size=\"%zu\"/>\n",
                info.hblks,
                info.hblkhd
            );
        }
        is_written &= write!(
            c"<system type=\"current\" size=\"%zu\"/>\n<system type=\"max\" size=\"%zu\"/>\n",
            info.arena,
            most
        );
        is_written &= write!(
            c"<aspace type=\"total\" size=\"%zu\"/>\n<aspace type=\"mprotect\" size=\"%zu\"/>\n",
            mapped,
            mapped
        );
        is_written &= match of_process {
            false => write!(c"</heap>\n"),
            true => write!(c"</malloc>\n"),
        };
    }
    if is_written { 0 } else { -1 }
}

/// Writes how much memory Pinfold holds, and how much of it is in use, to standard error, in the
/// form of glibc (`malloc_stats`). Keeps errno.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_malloc_stats() {
    let info = pinfold_mallinfo2();
    let mut text = [0u8; 512];
    let room = text.len();
    let (held, used) = (info.arena + info.hblkhd, info.uordblks + info.hblkhd);
    // SAFETY: the buffer has `room` bytes.
    let length = unsafe {
        print_into(
            text.as_mut_ptr().cast(),
            room,
            format_args!(
                "Arena 0:\n\
                 system bytes     = {:10}\n\
                 in use bytes     = {:10}\n\
                 Total (incl. mmap):\n\
                 system bytes     = {held:10}\n\
                 in use bytes     = {used:10}\n\
                 mmap bytes       = {:10}\n",
                info.arena, info.uordblks, info.hblkhd
            ),
        )
    };
    // There is no place to report that standard error cannot be written to.
    let _ = kernel::write(2, &text[..length.min(room - 1)]);
}

/// Returns 1 if Pinfold does what glibc's tunable `parameter` asks for with this value, else 0. In
/// either case changes nothing (`mallopt`).
///
/// | parameter | value | result |
/// |---|---|---|
/// | `M_ARENA_MAX` | 1 or more | 1: the number of arenas does not grow with the threads |
/// | `M_CHECK_ACTION` | with the bits 0 and 1 | 1: a fault prints a message and ends the process |
/// | any other | any | 0: docs/tuning.md has the settings that Pinfold has instead |
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_mallopt(parameter: c_int, value: c_int) -> c_int {
    // From glibc's malloc.h. Other C libraries have no such parameters.
    const M_CHECK_ACTION: c_int = -5;
    const M_ARENA_MAX: c_int = -8;
    const PRINT_AND_ABORT: c_int = 3;
    let is_done = match parameter {
        M_ARENA_MAX => value >= 1,
        M_CHECK_ACTION => value & PRINT_AND_ABORT == PRINT_AND_ABORT,
        _ => false,
    };
    is_done.into()
}
