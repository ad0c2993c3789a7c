//! The system calls that Pinfold makes.
//!
//! Every function keeps `errno`, because a successful `free` must not change it. The functions call
//! the kernel themselves ([`pinfold_rseq::syscall`]), because another library may have replaced the
//! C library's functions.

mod files;
mod frame;
mod futex;
mod limits;
mod loader;
mod statics;
mod text;

pub use files::decimal;
pub(crate) use files::{
    FileError, for_each_line, number_at_start, read_file_below, read_in_pieces, read_once,
    with_path_below,
};
pub use frame::{here, keep_frame};
pub(crate) use futex::{wait_for_change, wait_for_shared_change, wake, wake_one, wake_shared};
pub(crate) use limits::{
    address_space_left, allowed_nodes, commits_strictly, least_free, mapped, mappings_most,
    resource_limit,
};
pub use loader::loader_is_idle;
pub(crate) use statics::make_statics_resident;
pub use text::Text;
pub(crate) use text::whole_characters;

use crate::spared::{self, Kind};
use core::ptr::{NonNull, null_mut};
use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::Relaxed;
use pinfold_rseq::{kernel, syscall};

/// Runs `f` and restores `errno` afterwards.
pub fn keep_errno<R>(f: impl FnOnce() -> R) -> R {
    // This function may lie between the program and a probe, if the compiler does not inline it.
    keep_frame();
    let before = errno();
    let result = f();
    set_errno(before);
    result
}

/// Returns the calling thread's `errno`.
#[inline]
pub fn errno() -> libc::c_int {
    // SAFETY: the C library returns the address of the calling thread's errno, which no other
    // thread accesses.
    unsafe { *libc::__errno_location() }
}

/// Sets the calling thread's `errno`.
#[inline]
pub fn set_errno(errno: libc::c_int) {
    // SAFETY: the C library returns the address of the calling thread's errno, which no other
    // thread accesses.
    unsafe { *libc::__errno_location() = errno };
}

/// Runs `f`, which may call cancellation points. A cancellation of this thread takes effect later.
pub fn uncancelled<R>(f: impl FnOnce() -> R) -> R {
    let mut before = 0;
    // SAFETY: `before` is writable.
    unsafe { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &raw mut before) };
    let result = f();
    // SAFETY: `before` is the state that the first call stored, and null is allowed.
    unsafe { pthread_setcancelstate(before, null_mut()) };
    result
}

unsafe extern "C" {
    // The libc crate declares this function for other systems only.
    fn pthread_setcancelstate(state: libc::c_int, old: *mut libc::c_int) -> libc::c_int;
}
/// From `pthread.h`.
const PTHREAD_CANCEL_DISABLE: libc::c_int = 1;

/// Returns the size of an OS page in bytes.
pub(crate) fn page_size() -> usize {
    static SIZE: Once = Once::new();
    SIZE.get_or_read(kernel::page_size)
}

/// Returns the bytes of physical memory. Asks the system once.
pub(crate) fn physical_memory() -> usize {
    static BYTES: Once = Once::new();
    BYTES.get_or_read(|| {
        // SAFETY: `sysinfo` consists of integers, so zeroes are valid.
        let mut info = unsafe { core::mem::zeroed::<libc::sysinfo>() };
        // SAFETY: `info` is a writable `sysinfo`, and the kernel writes one.
        let _ = unsafe { syscall(libc::SYS_sysinfo, [(&raw mut info) as usize]) };
        (info.totalram as usize).saturating_mul(info.mem_unit as usize)
    })
}

/// A number that is read on the first call. If two threads read it at once, the second result
/// stays.
struct Once(AtomicUsize);

impl Once {
    /// The value before the first read. Numbers are stored as at most one less.
    const UNREAD: usize = usize::MAX;

    const fn new() -> Once {
        Once(AtomicUsize::new(Once::UNREAD))
    }

    fn get_or_read(&self, read: impl FnOnce() -> usize) -> usize {
        match self.0.load(Relaxed) {
            Once::UNREAD => {
                let number = read();
                self.0.store(number.min(Once::UNREAD - 1), Relaxed);
                number
            }
            number => number,
        }
    }
}

fn map(size: usize, protection: libc::c_int, extra: libc::c_int) -> Option<NonNull<u8>> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | extra;
    // SAFETY: makes a new private mapping at an address that the kernel chooses.
    let mapped = unsafe { kernel::map(0, size, protection, flags, -1, 0) };
    mapped.ok().and_then(|at| NonNull::new(at as *mut u8))
}

/// The result of [`map_at`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mapped {
    /// The pages are mapped and read as zeroes.
    Done,
    /// Something is mapped there already, or the kernel does not allow the address.
    Taken,
    /// The system has no memory, a limit forbids the mapping, or the addresses lie beyond the end
    /// of the address space.
    NoMemory,
}

/// Maps zeroed pages for reading and writing at a chosen address, if nothing is mapped there.
///
/// # Safety
///
/// No other code relies on the addresses `[at, at + size)` being unmapped, for example because it
/// is about to map there by `MAP_FIXED`.
pub(crate) unsafe fn map_at(at: *mut u8, size: usize) -> Mapped {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: `MAP_FIXED_NOREPLACE` replaces no mapping, and the caller promises that no other code
    // uses the addresses.
    match unsafe { kernel::map(at as usize, size, protection, flags, -1, 0) } {
        Ok(mapped) if mapped == at as usize => Mapped::Done,
        Ok(mapped) => {
            // Linux before 4.17 does not know `MAP_FIXED_NOREPLACE`, and has chosen another
            // address.
            // SAFETY: this function has just mapped these pages, and no other code knows of them.
            unsafe { try_unmap(mapped as *mut u8, size) };
            Mapped::Taken
        }
        Err(libc::ENOMEM | libc::EAGAIN) => Mapped::NoMemory,
        Err(_) => Mapped::Taken,
    }
}

/// Returns an address at which `size` bytes are unmapped now.
pub(crate) fn unmapped_addresses(size: usize) -> Option<usize> {
    let at = map(size, libc::PROT_NONE, libc::MAP_NORESERVE)?;
    // SAFETY: `map` has just mapped these pages, and no other code knows of them.
    unsafe { unmap(at.as_ptr(), size) };
    Some(at.as_ptr() as usize)
}

/// Returns an address in the first thread's stack.
pub(crate) fn stack_address() -> usize {
    // `AT_RANDOM` is the address of bytes that the kernel puts on that stack.
    // SAFETY: getauxval only reads the auxiliary vector.
    (unsafe { libc::getauxval(libc::AT_RANDOM) }) as usize
}

/// Maps `size` zeroed bytes for reading and writing.
///
/// The bytes count against the overcommit limit. So a size that the machine could never back fails
/// here, and not when the program touches the memory.
pub(crate) fn map_memory(size: usize) -> Option<NonNull<u8>> {
    map(size, libc::PROT_READ | libc::PROT_WRITE, 0)
}

/// Maps `size` zeroed bytes for reading and writing, most of which will never be touched.
///
/// The bytes count against the overcommit limit only if `vm.overcommit_memory` is 2. The pages are
/// small, so that only touched pages take memory.
pub(crate) fn map_sparse(size: usize) -> Option<NonNull<u8>> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let at = map(size, protection, libc::MAP_NORESERVE)?;
    // SAFETY: `map` has just made this mapping. The advice changes how it is backed, not its
    // content. A kernel without huge pages refuses the advice.
    unsafe { advise(at.as_ptr(), size, libc::MADV_NOHUGEPAGE) };
    Some(at)
}

/// Maps `size` zeroed bytes at a multiple of `align`, a power of two of at least a page.
pub(crate) fn map_aligned(size: usize, align: usize) -> Option<NonNull<u8>> {
    if align <= page_size() {
        return map_memory(size);
    }
    let whole = size.checked_add(align)?;
    let at = map_memory(whole)?;
    let skip = at.as_ptr().align_offset(align);
    let (front, back) = (skip, whole - skip - size);
    let start = at.as_ptr().wrapping_add(front);
    for (part, size) in [(at.as_ptr(), front), (start.wrapping_add(size), back)] {
        if size > 0 {
            // No page there was touched, so the kernel flushes no translations, and this is not
            // noted as memory that goes back.
            // SAFETY: the front, the block and the back make up the new mapping. The front and the
            // back are whole pages, and no other code knows of them.
            let _ = unsafe { kernel::unmap(part as usize, size) };
        }
    }
    NonNull::new(start)
}

/// Maps the part of the file `fd` that begins at `offset` over pages. Every process that maps the
/// file shares this part.
///
/// Returns false if the kernel refuses.
///
/// # Safety
///
/// `[at, at + size)` are whole pages of a mapping of this library, and their content is not needed.
pub(crate) unsafe fn map_file_over(at: *mut u8, size: usize, fd: i32, offset: usize) -> bool {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_SHARED | libc::MAP_FIXED;
    // SAFETY: the caller promises whole pages of this library whose content is not needed, so
    // replacing them loses nothing.
    unsafe { kernel::map(at as usize, size, protection, flags, fd, offset) }.is_ok()
}

/// Gives pages and their addresses back to the system.
///
/// The kernel refuses this to a process with too many mappings. Then the memory goes back, but the
/// addresses stay mapped.
///
/// # Safety
///
/// `[at, at + size)` are whole pages of a mapping that is not used any more. `size` may be 0.
pub(crate) unsafe fn unmap(at: *mut u8, size: usize) {
    // SAFETY: `size` is not 0, and the caller promises unused whole pages.
    if size > 0 && !unsafe { try_unmap(at, size) } {
        // SAFETY: the kernel refused, so the pages are still mapped. The caller promises that they
        // are unused.
        unsafe { purge(at, size) };
    }
}

/// Gives pages and their addresses back to the system. Returns false and does nothing if the kernel
/// refuses.
///
/// # Safety
///
/// `[at, at + size)` are whole pages of a mapping that is not used any more. `size` is not 0.
pub(crate) unsafe fn try_unmap(at: *mut u8, size: usize) -> bool {
    spared::note(Kind::GiveBack);
    // SAFETY: the caller promises unused whole pages.
    unsafe { kernel::unmap(at as usize, size) }.is_ok()
}

/// Moves pages to other addresses, and replaces the pages there. Nothing is mapped at the old
/// addresses afterwards.
///
/// Returns false if the kernel refuses. The pages at `to` may be unmapped then.
///
/// # Safety
///
/// `[from, from + size)` and `[to, to + size)` are whole pages of mappings of this library. They do
/// not overlap, and the content at `to` is not needed.
pub(crate) unsafe fn move_pages(from: *mut u8, to: *mut u8, size: usize) -> bool {
    spared::note(Kind::GiveBack);
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    let arguments = [from as usize, size, size, flags as usize, to as usize];
    // SAFETY: the caller promises two ranges of this library that do not overlap, and that the
    // content at `to` is not needed.
    unsafe { syscall(libc::SYS_mremap, arguments) }.is_ok()
}

/// Makes pages readable and writable, after [`close`].
///
/// Returns false if the overcommit limit or `RLIMIT_DATA` forbids it.
///
/// # Safety
///
/// `[at, at + size)` are whole pages of a mapping of this library.
pub(crate) unsafe fn commit(at: *mut u8, size: usize) -> bool {
    // SAFETY: the caller promises whole pages of this library. More access breaks no code.
    unsafe { protect(at, size, libc::PROT_READ | libc::PROT_WRITE) }
}

/// Takes all access to pages away, until [`commit`]. Returns false if the kernel refuses.
///
/// # Safety
///
/// `[at, at + size)` are whole pages of a mapping of this library that no code uses.
pub(crate) unsafe fn close(at: *mut u8, size: usize) -> bool {
    spared::note(Kind::GiveBack);
    // SAFETY: the caller promises that no code uses the pages.
    unsafe { protect(at, size, libc::PROT_NONE) }
}

/// Sets which access pages allow. Returns false if the kernel refuses.
///
/// # Safety
///
/// `[at, at + size)` are whole pages of a mapping of this library. No code accesses them in a way
/// that `protection` forbids.
unsafe fn protect(at: *mut u8, size: usize, protection: libc::c_int) -> bool {
    // SAFETY: the caller promises pages of this library, and access that stays allowed.
    unsafe { syscall(libc::SYS_mprotect, [at as usize, size, protection as usize]) }.is_ok()
}

/// Advises the kernel about pages. Returns false if the kernel refuses.
///
/// # Safety
///
/// `[at, at + size)` are whole pages of a mapping of this library. If the advice drops their
/// content, no code needs that content.
unsafe fn advise(at: *mut u8, size: usize, advice: libc::c_int) -> bool {
    // SAFETY: the caller promises pages of this library, and that no code needs what is dropped.
    unsafe { syscall(libc::SYS_madvise, [at as usize, size, advice as usize]) }.is_ok()
}

/// Returns a number that cannot be guessed. Soon after boot the kernel may have no random numbers.
/// Then this function computes a number from the clock.
pub(crate) fn random() -> u64 {
    let mut number = 0u64;
    let size = size_of_val(&number);
    let at = (&raw mut number) as usize;
    // SAFETY: `number` is writable for `size` bytes.
    let got = unsafe {
        syscall(
            libc::SYS_getrandom,
            [at, size, libc::GRND_NONBLOCK as usize],
        )
    };
    if got == Ok(size) {
        return number;
    }
    let now = kernel::clock(libc::CLOCK_MONOTONIC);
    (now.tv_nsec as u64 ^ now.tv_sec as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Gives the memory of pages back to the system but keeps their addresses. The pages read as zeroes
/// afterwards. Pages that the program has locked (`mlockall`) stay locked: the next access to a
/// page brings it back, and locks it.
///
/// Returns false if the kernel refuses, for example for locked memory before Linux 5.18. The
/// content is unchanged then.
///
/// # Safety
///
/// `[at, at + size)` are whole committed pages whose content is not needed.
pub(crate) unsafe fn purge(at: *mut u8, size: usize) -> bool {
    /// From `include/uapi/asm-generic/mman-common.h`. Does what `MADV_DONTNEED` does, and does it
    /// to locked pages too.
    const MADV_DONTNEED_LOCKED: libc::c_int = 24;
    spared::note(Kind::GiveBack);
    [libc::MADV_DONTNEED, MADV_DONTNEED_LOCKED]
        .into_iter()
        // SAFETY: the caller promises that the content of the pages is not needed.
        .any(|advice| unsafe { advise(at, size, advice) })
}

/// Allows the kernel to back pages with huge pages. The kernel may refuse.
///
/// # Safety
///
/// `[at, at + size)` are whole pages of a mapping of this library.
pub(crate) unsafe fn prefer_huge(at: *mut u8, size: usize) {
    // SAFETY: the caller promises pages of this library. The advice changes how they are backed,
    // not their content.
    unsafe { advise(at, size, libc::MADV_HUGEPAGE) };
}

/// Makes the kernel back pages with small pages only. The kernel may refuse.
///
/// # Safety
///
/// `[at, at + size)` are whole pages of a mapping of this library.
pub(crate) unsafe fn refuse_huge(at: *mut u8, size: usize) {
    // SAFETY: the caller promises pages of this library. The advice changes how they are backed,
    // not their content.
    unsafe { advise(at, size, libc::MADV_NOHUGEPAGE) };
}

/// Makes pages resident and writable. Ignores a refusal of the kernel, for example before Linux
/// 5.14. The pages then fault as before.
///
/// A page that is read before it is written is at first the kernel's shared page of zeroes. The
/// first write replaces the page, and then the kernel interrupts all CPUs of the process to flush
/// the old translation. A page that is resident causes no such interrupt.
///
/// # Safety
///
/// `[at, at + size)` are whole pages of a mapping of this library.
#[cold]
pub(crate) unsafe fn make_resident(at: *mut u8, size: usize) {
    // SAFETY: the caller promises pages of this library. Their content stays.
    unsafe { advise(at, size, libc::MADV_POPULATE_WRITE) };
}

/// Grows or shrinks a mapping, and moves it if necessary. Returns the new address, or `None` if the
/// kernel refuses.
///
/// # Safety
///
/// `[at, at + old)` is a whole mapping that the caller owns.
pub(crate) unsafe fn remap(at: *mut u8, old: usize, new: usize) -> Option<NonNull<u8>> {
    spared::note(Kind::GiveBack);
    let arguments = [at as usize, old, new, libc::MREMAP_MAYMOVE as usize];
    // SAFETY: the caller owns the whole mapping, so no other code uses the old addresses.
    let moved = unsafe { syscall(libc::SYS_mremap, arguments) };
    moved.ok().and_then(|at| NonNull::new(at as *mut u8))
}

/// Asks the kernel to place pages on `node` if it can. With `None`, asks for the node of the CPU
/// that touches a page first.
///
/// Returns false if the kernel refuses. The policy is unchanged then.
///
/// # Safety
///
/// `[at, at + size)` are whole pages of a mapping of this library.
pub(crate) unsafe fn prefer_node(at: *mut u8, size: usize, node: Option<usize>) -> bool {
    /// From `include/uapi/linux/mempolicy.h`. With an empty mask, this mode means the local node.
    const MPOL_PREFERRED: libc::c_int = 1;
    let mut mask = [0u64; 16];
    if let Some(node) = node {
        let Some(word) = mask.get_mut(node / 64) else {
            return false;
        };
        *word = 1 << (node % 64);
    }
    // The kernel subtracts one from the number of bits.
    let bits = mask.len() * 64 + 1;
    let (mode, mask) = (MPOL_PREFERRED as usize, mask.as_ptr() as usize);
    // SAFETY: the caller promises pages of this library. The kernel reads `bits - 1` bits, which
    // `mask` has.
    unsafe { syscall(libc::SYS_mbind, [at as usize, size, mode, mask, bits, 0]) }.is_ok()
}

/// Returns the CPU that the thread runs on, and the system's id of that CPU's node.
pub(crate) fn cpu_and_node() -> Option<(usize, usize)> {
    let (mut cpu, mut node) = (0u32, 0u32);
    let (to, and) = ((&raw mut cpu) as usize, (&raw mut node) as usize);
    // SAFETY: `cpu` and `node` are writable. The kernel ignores the third argument.
    let answer = unsafe { syscall(libc::SYS_getcpu, [to, and, 0]) };
    answer.ok().map(|_| (cpu as usize, node as usize))
}

/// Returns the milliseconds of a monotonic clock with a resolution of some milliseconds. Makes no
/// system call where the kernel offers a vDSO.
pub fn coarse_milliseconds() -> u64 {
    let now = kernel::clock(libc::CLOCK_MONOTONIC_COARSE);
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

/// Returns the nanoseconds of a monotonic clock. Makes no system call where the kernel offers a
/// vDSO that can read the machine's clock.
pub(crate) fn nanoseconds() -> u64 {
    let now = kernel::clock(libc::CLOCK_MONOTONIC);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Sleeps for at most `microseconds`, and less if a signal arrives.
pub(crate) fn sleep_microseconds(microseconds: u32) {
    let time = libc::timespec {
        tv_sec: 0,
        tv_nsec: libc::c_long::from(microseconds.min(999_999) as i32) * 1000,
    };
    // SAFETY: `time` is readable, and a null second argument is allowed.
    let _ = unsafe { syscall(libc::SYS_nanosleep, [(&raw const time) as usize, 0]) };
}

/// Ends the process with a message on standard error, after an invariant was violated.
///
/// Going on would lose data. Allocates nothing.
#[cold]
pub fn die(message: core::fmt::Arguments<'_>) -> ! {
    crate::last_words::write(message);
    // SAFETY: `abort` has no preconditions.
    unsafe { libc::abort() }
}
