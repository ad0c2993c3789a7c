//! Counting calls, while somebody asked for it: the statistics segment of this process.
//!
//! When `PINFOLD_STATS` names a directory, the process makes its segment there and the fast paths stay closed, so that
//! every call comes by here. Otherwise nothing here costs anything.

use core::mem::offset_of;
use core::ptr::null_mut;
use core::sync::atomic::AtomicBool;
use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use pinfold::page::HELD;
use pinfold::segment::{
    CLASSES, DIRECTORY_VARIABLE, MAGIC, Segment, Shard, VERSION, install, segment_size,
    shard_offset,
};
use pinfold::slab::kmalloc;
use pinfold_rseq::{Backend, Index, Units, backend, possible};

static ACTIVE: AtomicBool = AtomicBool::new(false);
/// Where the segment is mapped.
static SEGMENT: AtomicUsize = AtomicUsize::new(0);
/// Each shard of the segment is the unit of its index.
static SHARDS: Units = Units::new();

/// Room for a directory's name and a file's.
const PATH: usize = 512;

/// Whether calls are counted.
#[inline]
pub(crate) fn active() -> bool {
    ACTIVE.load(Relaxed)
}

fn add(field: usize, n: usize) {
    if active() {
        // SAFETY: the field is a word of the shard. An index beyond the shards has no unit and is not counted.
        unsafe { SHARDS.add(field, n as u64) };
    }
}

pub(crate) fn allocated_class(class: usize) {
    add(offset_of!(Shard, alloc) + 8 * class, 1);
}

pub(crate) fn freed_class(class: usize) {
    add(offset_of!(Shard, free) + 8 * class, 1);
}

pub(crate) fn allocated_large(bytes: usize) {
    add(offset_of!(Shard, large_alloc), 1);
    add(offset_of!(Shard, large_bytes), bytes);
}

pub(crate) fn freed_large(bytes: usize) {
    add(offset_of!(Shard, large_free), 1);
    add(offset_of!(Shard, large_bytes_freed), bytes);
}

pub(crate) fn reallocated() {
    add(offset_of!(Shard, realloc), 1);
}

pub(crate) fn failed() {
    add(offset_of!(Shard, failed), 1);
}

/// A call for `size` bytes was answered with `block`.
pub(crate) fn requested(block: *mut u8, size: usize) {
    if !block.is_null() {
        add(offset_of!(Shard, requested), size);
    }
}

/// Makes this process's segment if it was asked for; whether it was, and could be made.
pub(crate) fn start() -> bool {
    let mut path = [0u8; PATH];
    if !name_file(&mut path) {
        return false;
    }
    let Some(at) = map_file(&path, null_mut()) else {
        return false;
    };
    SEGMENT.store(at as usize, Release);
    for index in 0..possible() {
        // SAFETY: the segment has that many shards.
        let shard = unsafe { at.add(shard_offset(index)) };
        // Nobody else installs here.
        let _ = SHARDS.install(index, shard);
    }
    fill_in(at);
    ACTIVE.store(true, Release);
    true
}

/// In a child after fork: a segment of its own in the place of the parent's, which the two must not share.
pub(crate) fn start_in_child() {
    if !active() {
        return;
    }
    let at = SEGMENT.load(Acquire) as *mut u8;
    let mut path = [0u8; PATH];
    if !(name_file(&mut path) && map_file(&path, at).is_some()) {
        // Nobody will read it, but it must be there.
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        // SAFETY: replaces the mapping of the segment, whole.
        unsafe {
            libc::mmap(
                at.cast(),
                segment_size(possible()),
                READ_WRITE,
                flags,
                -1,
                0,
            )
        };
    }
    fill_in(at);
}

const READ_WRITE: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;

/// Writes the segment's head and lets the slow paths count there.
fn fill_in(at: *mut u8) {
    // SAFETY: a mapping of a whole segment, zeroed, which stays.
    let segment: &'static Segment = unsafe { &*at.cast() };
    segment.version.store(VERSION, Relaxed);
    segment.shards.store(possible() as u32, Relaxed);
    // SAFETY: no preconditions.
    segment.pid.store(unsafe { libc::getpid() } as u32, Relaxed);
    let code = match backend() {
        Backend::Atomic => 0,
        Backend::Rseq(Index::Cpu) => 1,
        Backend::Rseq(Index::Cid) => 2,
    };
    segment.backend.store(code, Relaxed);
    segment.started_ns.store(now_ns(), Relaxed);
    for (class, row) in segment.classes.iter().enumerate().take(kmalloc::CLASSES) {
        kmalloc::count_in(class, row);
    }
    // SAFETY: as above.
    unsafe { install(at.cast()) };
    HELD.publish();
    // Release pairs with the reader's acquire: it sees all of the above.
    segment.magic.store(MAGIC, Release);
}

const _: () = assert!(kmalloc::CLASSES <= CLASSES);

fn now_ns() -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `now` is writable.
    unsafe { libc::clock_gettime(libc::CLOCK_REALTIME, &raw mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Writes `DIRECTORY/PID.` into `path`; `map_file` adds the number. False when nobody asked.
fn name_file(path: &mut [u8; PATH]) -> bool {
    let mut value = [0u8; PATH - 32];
    let Some(directory) = pinfold_rseq::env::read(DIRECTORY_VARIABLE, &mut value) else {
        return false;
    };
    if directory.is_empty() {
        return false;
    }
    // SAFETY: no preconditions.
    let pid = unsafe { libc::getpid() } as u32;
    let mut length = directory.len();
    path[..length].copy_from_slice(directory);
    path[length] = b'/';
    length += 1;
    length += decimal(pid, &mut path[length..]);
    path[length] = b'.';
    true
}

/// Writes `n` in decimal; returns how many digits.
fn decimal(n: u32, to: &mut [u8]) -> usize {
    let digits = n.checked_ilog10().unwrap_or(0) as usize + 1;
    let mut rest = n;
    for place in to[..digits].iter_mut().rev() {
        *place = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    digits
}

/// Makes the first file of `path` + number that is not there yet and maps it, at `place` if that is not null.
fn map_file(path: &[u8; PATH], place: *mut u8) -> Option<*mut u8> {
    let mut path = *path;
    let length = path.iter().position(|&byte| byte == 0)?;
    let flags = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL | libc::O_CLOEXEC | libc::O_NOFOLLOW;
    let fd = (0..1000).find_map(|n| {
        let end = length + decimal(n, &mut path[length..]);
        path[end] = 0;
        // SAFETY: the path ends with a NUL.
        let fd = unsafe { libc::open(path.as_ptr().cast(), flags, 0o600) };
        // SAFETY: errno is the calling thread's own.
        let taken = fd < 0 && unsafe { *libc::__errno_location() } == libc::EEXIST;
        (!taken).then_some(fd)
    })?;
    if fd < 0 {
        return None;
    }
    let size = segment_size(possible());
    let fixed = if place.is_null() { 0 } else { libc::MAP_FIXED };
    // SAFETY: the file is ours; a fixed place is the old segment's, whole.
    let at = unsafe {
        if libc::ftruncate(fd, size as libc::off_t) != 0 {
            libc::close(fd);
            return None;
        }
        let at = libc::mmap(
            place.cast(),
            size,
            READ_WRITE,
            libc::MAP_SHARED | fixed,
            fd,
            0,
        );
        libc::close(fd);
        at
    };
    (at != libc::MAP_FAILED).then_some(at.cast())
}
