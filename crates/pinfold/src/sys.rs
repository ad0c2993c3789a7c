//! What the page layer asks of the system. Every function keeps `errno`, which a successful `free` must not change.

mod files;
mod limits;

pub(crate) use files::{
    FileError, for_each_line, number_at_start, read_file_below, read_in_pieces, read_once,
    with_path_below,
};
pub(crate) use limits::{
    address_space_left, commits_strictly, least_free, mapped, mappings_most, resource_limit,
};

use core::ptr::{NonNull, null_mut};
use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicU32, AtomicUsize};

/// Runs `f` and restores `errno` afterwards.
pub(crate) fn keep_errno<R>(f: impl FnOnce() -> R) -> R {
    // SAFETY: errno is the calling thread's own.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let before = unsafe { *errno };
    let result = f();
    // SAFETY: as above.
    unsafe { *errno = before };
    result
}

/// The size of an OS page in bytes.
pub(crate) fn page_size() -> usize {
    static SIZE: AtomicUsize = AtomicUsize::new(0);
    match SIZE.load(Relaxed) {
        0 => {
            // SAFETY: getauxval only reads the auxiliary vector.
            let size = unsafe { libc::getauxval(libc::AT_PAGESZ) } as usize;
            SIZE.store(size, Relaxed);
            size
        }
        size => size,
    }
}

/// Bytes of physical memory; read once.
pub(crate) fn physical_memory() -> usize {
    static BYTES: Once = Once::new();
    BYTES.get_or_read(|| {
        // `sysconf` makes the same call, but lies on pages that few programs touch.
        // SAFETY: all zeroes are a value of the type.
        let mut info = unsafe { core::mem::zeroed::<libc::sysinfo>() };
        // SAFETY: the kernel writes one `sysinfo` there.
        keep_errno(|| unsafe { libc::syscall(libc::SYS_sysinfo, &raw mut info) });
        (info.totalram as usize).saturating_mul(info.mem_unit as usize)
    })
}

/// A number that is read on the first call. Two threads at once read it both, and the second's
/// stays.
struct Once(AtomicUsize);

impl Once {
    /// Not read yet. No number is as large: those that are kept here are one less at most.
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
    keep_errno(|| {
        // SAFETY: a new private mapping at an address of the kernel's choice.
        let at = unsafe { libc::mmap(null_mut(), size, protection, flags, -1, 0) };
        (at != libc::MAP_FAILED)
            .then_some(at.cast())
            .and_then(NonNull::new)
    })
}

/// What became of [`map_at`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mapped {
    /// The pages are there, zeroed.
    Done,
    /// Something is mapped there already, or addresses do not go so far.
    Taken,
    /// The system has no memory, or a limit forbids.
    NoMemory,
}

/// Maps zeroed pages for reading and writing at a chosen address, if nothing is mapped there.
///
/// # Safety
///
/// The addresses are the caller's to map: nobody is about to map there by `MAP_FIXED`.
pub(crate) unsafe fn map_at(at: *mut u8, size: usize) -> Mapped {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    keep_errno(|| {
        // SAFETY: replaces nothing; the caller's promise.
        let mapped = unsafe { libc::mmap(at.cast(), size, protection, flags, -1, 0) };
        if mapped == at.cast() {
            return Mapped::Done;
        }
        if mapped == libc::MAP_FAILED {
            // SAFETY: errno is the calling thread's own.
            return match unsafe { *libc::__errno_location() } {
                libc::ENOMEM | libc::EAGAIN => Mapped::NoMemory,
                _ => Mapped::Taken,
            };
        }
        // Before Linux 4.17 the flag is not known, and the kernel has chosen another address.
        // SAFETY: mapped just now, and not used yet.
        unsafe { libc::munmap(mapped, size) };
        Mapped::Taken
    })
}

/// Returns where the kernel has room for `size` bytes, at which nothing is mapped now.
pub(crate) fn unmapped_addresses(size: usize) -> Option<usize> {
    let at = map(size, libc::PROT_NONE, libc::MAP_NORESERVE)?;
    // SAFETY: mapped just now, and not used yet.
    unsafe { unmap(at.as_ptr(), size) };
    Some(at.as_ptr() as usize)
}

/// An address in the first thread's stack.
pub(crate) fn stack_address() -> usize {
    // The kernel puts these bytes there.
    // SAFETY: getauxval only reads the auxiliary vector.
    (unsafe { libc::getauxval(libc::AT_RANDOM) }) as usize
}

/// Maps `size` zeroed bytes for reading and writing, charged against the overcommit limit: a size that the machine could
/// never back fails here and not when it is touched.
pub(crate) fn map_memory(size: usize) -> Option<NonNull<u8>> {
    map(size, libc::PROT_READ | libc::PROT_WRITE, 0)
}

/// Maps `size` zeroed bytes for reading and writing of which most will never be touched: free of charge (but where the kernel
/// commits strictly), and in small pages, so that memory is there only for pages that are used.
pub(crate) fn map_sparse(size: usize) -> Option<NonNull<u8>> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let at = map(size, protection, libc::MAP_NORESERVE)?;
    // SAFETY: a mapping of ours; this changes how memory is backed, not what it holds. A kernel without huge pages refuses.
    keep_errno(|| unsafe { libc::madvise(at.as_ptr().cast(), size, libc::MADV_NOHUGEPAGE) });
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
    // SAFETY: front, block and back make up the mapping; front and back are multiples of a page and nobody's.
    unsafe {
        let start = at.as_ptr().add(front);
        unmap(at.as_ptr(), front);
        unmap(start.add(size), back);
        NonNull::new(start)
    }
}

/// Replaces pages by a part of a file, shared with whoever maps it. False when the kernel refuses.
///
/// # Safety
///
/// `[at, at + size)` are whole pages of a mapping of ours whose content nobody needs.
pub(crate) unsafe fn map_file_over(at: *mut u8, size: usize, fd: i32, offset: usize) -> bool {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_SHARED | libc::MAP_FIXED;
    let Ok(offset) = libc::off_t::try_from(offset) else {
        return false;
    };
    keep_errno(|| {
        // SAFETY: the caller's promise.
        let mapped = unsafe { libc::mmap(at.cast(), size, protection, flags, fd, offset) };
        mapped != libc::MAP_FAILED
    })
}

/// Gives pages back, addresses and all. Where the kernel refuses, which it does to a process with
/// too many mappings, the memory goes back and the addresses stay.
///
/// # Safety
///
/// `[at, at + size)` are whole pages of a mapping that nobody uses any more. `size` may be 0.
pub(crate) unsafe fn unmap(at: *mut u8, size: usize) {
    // SAFETY: the caller's promise.
    if size > 0 && !unsafe { try_unmap(at, size) } {
        // SAFETY: the pages are still mapped, and nobody uses them.
        unsafe { purge(at, size) };
    }
}

/// Gives pages back, addresses and all. False where the kernel refuses, and nothing is done.
///
/// # Safety
///
/// As for [`unmap`]; `size` is not 0.
pub(crate) unsafe fn try_unmap(at: *mut u8, size: usize) -> bool {
    // SAFETY: the caller's promise.
    keep_errno(|| unsafe { libc::munmap(at.cast(), size) == 0 })
}

/// Moves pages to other addresses, instead of what is mapped there; nothing is mapped where they
/// were. False where the kernel refuses: what is at `to` may be unmapped then.
///
/// # Safety
///
/// `[from, from + size)` and `[to, to + size)` are whole pages of mappings of ours, which do not
/// overlap; nobody needs what is at `to`.
pub(crate) unsafe fn move_pages(from: *mut u8, to: *mut u8, size: usize) -> bool {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    keep_errno(|| {
        // SAFETY: the caller's promise.
        let moved = unsafe { libc::mremap(from.cast(), size, size, flags, to) };
        moved != libc::MAP_FAILED
    })
}

/// Makes reserved pages readable and writable; false when the overcommit limit or RLIMIT_DATA forbids.
///
/// # Safety
///
/// `[at, at + size)` are whole pages of a mapping of ours.
pub(crate) unsafe fn commit(at: *mut u8, size: usize) -> bool {
    // SAFETY: the caller's promise.
    keep_errno(|| unsafe {
        libc::mprotect(at.cast(), size, libc::PROT_READ | libc::PROT_WRITE) == 0
    })
}

/// Takes all access to pages away, until [`commit`]. False when the kernel refuses.
///
/// # Safety
///
/// `[at, at + size)` are whole pages of a mapping of ours that nobody uses.
pub(crate) unsafe fn close(at: *mut u8, size: usize) -> bool {
    // SAFETY: the caller's promise.
    keep_errno(|| unsafe { libc::mprotect(at.cast(), size, libc::PROT_NONE) == 0 })
}

/// A number that nobody can guess; from the clock where the kernel has no randomness to give yet.
pub(crate) fn random() -> u64 {
    let mut number = 0u64;
    let size = size_of_val(&number);
    // SAFETY: the number is writable, and so large.
    let got = keep_errno(|| unsafe {
        libc::getrandom((&raw mut number).cast(), size, libc::GRND_NONBLOCK)
    });
    if got == size as isize {
        return number;
    }
    // SAFETY: zeroes are a time, and it is writable.
    let now = unsafe {
        let mut now: libc::timespec = core::mem::zeroed();
        libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now);
        now
    };
    (now.tv_nsec as u64 ^ now.tv_sec as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Gives the memory of pages back but keeps their addresses: they read as zeroes afterwards. False when the kernel
/// refused (locked memory), and the content is as before.
///
/// # Safety
///
/// `[at, at + size)` are whole committed pages whose content nobody needs.
pub(crate) unsafe fn purge(at: *mut u8, size: usize) -> bool {
    // SAFETY: the caller's promise.
    keep_errno(|| unsafe { libc::madvise(at.cast(), size, libc::MADV_DONTNEED) == 0 })
}

/// Lets the kernel back pages with huge ones where it can; it may refuse.
///
/// # Safety
///
/// `[at, at + size)` are whole pages of a mapping of ours.
pub(crate) unsafe fn prefer_huge(at: *mut u8, size: usize) {
    // SAFETY: the caller's promise; this changes how memory is backed, not what it holds.
    keep_errno(|| unsafe { libc::madvise(at.cast(), size, libc::MADV_HUGEPAGE) });
}

/// Has the kernel back pages with small ones only; it may refuse.
///
/// # Safety
///
/// As for [`prefer_huge`].
pub(crate) unsafe fn refuse_huge(at: *mut u8, size: usize) {
    // SAFETY: the caller's promise; this changes how memory is backed, not what it holds.
    keep_errno(|| unsafe { libc::madvise(at.cast(), size, libc::MADV_NOHUGEPAGE) });
}

/// Grows or shrinks a mapping, moving it when it must.
///
/// # Safety
///
/// `[at, at + old)` is a whole mapping whose owner calls.
pub(crate) unsafe fn remap(at: *mut u8, old: usize, new: usize) -> Option<NonNull<u8>> {
    keep_errno(|| {
        // SAFETY: the caller's promise.
        let moved = unsafe { libc::mremap(at.cast(), old, new, libc::MREMAP_MAYMOVE) };
        (moved != libc::MAP_FAILED)
            .then_some(moved.cast())
            .and_then(NonNull::new)
    })
}

/// Asks the kernel to place pages on `node` when it can; with `None`, on the node of the CPU that
/// touches a page first. Returns false when the kernel refuses: the policy is as before then.
///
/// # Safety
///
/// `[at, at + size)` are whole pages of a mapping of ours.
pub(crate) unsafe fn prefer_node(at: *mut u8, size: usize, node: Option<usize>) -> bool {
    /// From `include/uapi/linux/mempolicy.h`. Without a node it stands for the local one.
    const MPOL_PREFERRED: libc::c_int = 1;
    let mut mask = [0u64; 16];
    if let Some(node) = node {
        let Some(word) = mask.get_mut(node / 64) else {
            return false;
        };
        *word = 1 << (node % 64);
    }
    // The kernel takes one from the count of bits.
    let bits = mask.len() * 64 + 1;
    // SAFETY: the caller's promise; the mask has as many bits as said.
    let answer = keep_errno(|| unsafe {
        libc::syscall(
            libc::SYS_mbind,
            at,
            size,
            MPOL_PREFERRED,
            mask.as_ptr(),
            bits,
            0,
        )
    });
    answer == 0
}

/// The CPU that the thread runs on, and the system's id of that CPU's node.
pub(crate) fn cpu_and_node() -> Option<(usize, usize)> {
    let (mut cpu, mut node) = (0u32, 0u32);
    let answer = keep_errno(|| {
        // SAFETY: both are writable; the third argument is unused.
        unsafe {
            let unused = null_mut::<u8>();
            libc::syscall(libc::SYS_getcpu, &raw mut cpu, &raw mut node, unused)
        }
    });
    (answer == 0).then_some((cpu as usize, node as usize))
}

/// Milliseconds of a monotonic clock with a resolution of some milliseconds; no system call.
pub(crate) fn coarse_milliseconds() -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `now` is writable.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut now) };
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

/// Sleeps.
pub(crate) fn sleep_microseconds(microseconds: u32) {
    let time = libc::timespec {
        tv_sec: 0,
        tv_nsec: libc::c_long::from(microseconds.min(999_999) as i32) * 1000,
    };
    // SAFETY: the time is readable; what is left after a signal is of no interest.
    keep_errno(|| unsafe { libc::nanosleep(&raw const time, null_mut()) });
}

/// Sleeps until `word` is no longer `value` and somebody calls [`wake`], or for `time`; may return sooner.
pub(crate) fn wait_for_change(word: &AtomicU32, value: u32, time: core::time::Duration) {
    let time = libc::timespec {
        tv_sec: time.as_secs().min(1 << 30) as libc::time_t,
        tv_nsec: libc::c_long::from(time.subsec_nanos() as i32),
    };
    let operation = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the word is valid for the call, the time readable.
    keep_errno(|| unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            operation,
            value,
            &raw const time,
        )
    });
}

/// Wakes whoever waits for a change of `word`.
pub(crate) fn wake(word: &AtomicU32) {
    let operation = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the word is valid for the call.
    keep_errno(|| unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, i32::MAX) });
}

/// Ends the process with a message on standard error: an invariant was violated, going on would lose data.
///
/// Allocates nothing.
#[cold]
pub(crate) fn die(message: core::fmt::Arguments<'_>) -> ! {
    struct Text {
        bytes: [u8; 256],
        length: usize,
    }
    impl core::fmt::Write for Text {
        fn write_str(&mut self, text: &str) -> core::fmt::Result {
            let room = &mut self.bytes[self.length..];
            let n = text.len().min(room.len());
            room[..n].copy_from_slice(&text.as_bytes()[..n]);
            self.length += n;
            Ok(())
        }
    }
    let mut text = Text {
        bytes: [0; 256],
        length: 0,
    };
    let _ = core::fmt::write(&mut text, format_args!("pinfold: {message}\n"));
    // SAFETY: the buffer is readable for its length; abort does not return.
    unsafe {
        libc::write(2, text.bytes.as_ptr().cast(), text.length);
        libc::abort()
    }
}
