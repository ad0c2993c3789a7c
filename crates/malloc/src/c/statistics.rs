//! glibc's older calls that report on malloc and tune it: `mallinfo`, `malloc_stats`, `mallopt`.

use super::malloc::pinfold_mallinfo2;
use super::text::print_into;
use core::ffi::c_int;
use pinfold_rseq::kernel;

/// The result of `mallinfo`: the fields of [`Mallinfo2`](super::malloc::Mallinfo2) as `int`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Mallinfo {
    /// Bytes held from the system, without huge blocks.
    pub arena: c_int,
    /// Always 0.
    pub ordblks: c_int,
    /// Always 0.
    pub smblks: c_int,
    /// Always 0.
    pub hblks: c_int,
    /// Bytes in huge blocks.
    pub hblkhd: c_int,
    /// Always 0.
    pub usmblks: c_int,
    /// Always 0.
    pub fsmblks: c_int,
    /// Bytes in blocks in use, and in free blocks that CPUs and nodes keep.
    pub uordblks: c_int,
    /// Bytes held and free.
    pub fordblks: c_int,
    /// Bytes that `malloc_trim` could give back.
    pub keepcost: c_int,
}

/// Returns the figures of [`pinfold_mallinfo2`], each at most `INT_MAX` (`mallinfo`).
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_mallinfo() -> Mallinfo {
    let info = pinfold_mallinfo2();
    let bounded = |bytes: usize| c_int::try_from(bytes).unwrap_or(c_int::MAX);
    Mallinfo {
        arena: bounded(info.arena),
        hblkhd: bounded(info.hblkhd),
        uordblks: bounded(info.uordblks),
        fordblks: bounded(info.fordblks),
        keepcost: bounded(info.keepcost),
        ..Mallinfo::default()
    }
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
