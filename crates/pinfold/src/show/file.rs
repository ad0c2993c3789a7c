//! The segment of a process that counts every call: a file in the folder that `PINFOLD_STATS`
//! names.

use super::memory::File;
use super::{announce, begin};
use crate::segment::{
    Call, DIRECTORY_VARIABLE, Parts, Segment, Shared, place_calls, place_of, share_units,
};
use crate::sys::decimal;
use crate::vmstat::VmEvents;
use core::ffi::CStr;
use core::ptr::null_mut;
use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use pinfold_rseq::{env, kernel, possible};

/// The address of the segment's head.
static SEGMENT: AtomicUsize = AtomicUsize::new(0);
/// Bytes of each CPU's memory, its *unit*, that are in the segment.
static UNIT_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Bytes for the path of the segment's file.
const PATH: usize = 512;

/// Makes this process's segment if `PINFOLD_STATS` names a directory. Returns whether it made a
/// segment. Runs at the process's start, before the first count.
#[cold]
#[inline(never)]
pub(crate) fn start_file(calls: &'static VmEvents<Call>) -> bool {
    let mut path = [0u8; PATH];
    if !name_file(&mut path) {
        return false;
    }
    let Some(shared) = place_calls(calls) else {
        return false;
    };
    UNIT_BYTES.store(shared.bytes, Relaxed);
    let Some(at) = map_file(&path, null_mut(), shared) else {
        return false;
    };
    SEGMENT.store(at as usize, Release);
    fill_in(at, shared, calls);
    true
}

/// Replaces the parent's segment by a new one, in the child of a fork: two processes must not count
/// in one segment.
pub(crate) fn start_file_in_child(calls: &VmEvents<Call>) {
    let at = SEGMENT.load(Acquire) as *mut u8;
    let shared = Shared {
        units: possible() + 1,
        bytes: UNIT_BYTES.load(Relaxed),
    };
    let mut path = [0u8; PATH];
    if !(name_file(&mut path) && map_file(&path, at, shared).is_some()) {
        // The critical sections always write to the units. The units still lie in the parent's
        // file, so other memory must replace them.
        let file = File::anonymous(c"pinfold", libc::MFD_CLOEXEC);
        if file.is_none_or(|file| map_over(file, at, shared).is_none()) {
            crate::sys::die(format_args!(
                "a child process cannot have statistics of its own; unset {DIRECTORY_VARIABLE}"
            ));
        }
    }
    fill_in(at, shared, calls);
}

/// Returns the offset of the first unit in the file.
fn units_at() -> usize {
    Parts::here().end().next_multiple_of(kernel::page_size())
}

fn file_size(shared: Shared) -> usize {
    units_at() + shared.units * shared.bytes
}

/// Writes the segment's head, and has the slow paths count there.
fn fill_in(at: *mut u8, shared: Shared, calls: &VmEvents<Call>) {
    // SAFETY: `at` is a zeroed mapping of `units_at()` bytes, which stays mapped.
    let segment: &'static Segment = unsafe { &*at.cast() };
    segment.units.store(shared.units as u32, Relaxed);
    segment.units_at.store(units_at() as u32, Relaxed);
    segment.unit_bytes.store(shared.bytes as u32, Relaxed);
    let calls = place_of(calls).unwrap_or(0);
    segment.calls.store(calls as u32, Relaxed);
    begin(at);
    announce(segment, kernel::process() as u32);
}

/// Writes `DIRECTORY/PID.` into `path`. `map_file` appends a number. Returns false if the variable
/// `PINFOLD_STATS` is not set.
fn name_file(path: &mut [u8; PATH]) -> bool {
    let mut value = [0u8; PATH - 32];
    let Some(directory) = env::read(DIRECTORY_VARIABLE, &mut value) else {
        return false;
    };
    if directory.is_empty() {
        return false;
    }
    let pid = kernel::process() as usize;
    let mut length = directory.len();
    path[..length].copy_from_slice(directory);
    path[length] = b'/';
    length += 1;
    length += decimal(pid, &mut path[length..]);
    path[length] = b'.';
    true
}

/// Makes a file whose name is `path` with the first free number behind it, and maps the file. The
/// head goes to `place`, or anywhere if `place` is null. The file's units replace the units of this
/// process. Returns where the head is.
fn map_file(path: &[u8; PATH], place: *mut u8, shared: Shared) -> Option<*mut u8> {
    let mut path = *path;
    let length = path.iter().position(|&byte| byte == 0)?;
    let flags = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL | libc::O_CLOEXEC | libc::O_NOFOLLOW;
    let fd = (0..1000).find_map(|n| {
        let end = length + decimal(n, &mut path[length..]);
        path[end] = 0;
        let opened = kernel::open(CStr::from_bytes_until_nul(&path).ok()?, flags, 0o600);
        (opened != Err(libc::EEXIST)).then_some(opened)
    })?;
    let mapped = map_over(File(fd.ok()?), place, shared);
    if mapped.is_none() {
        // Other processes must not find a file without content.
        let _ = kernel::unlink(CStr::from_bytes_until_nul(&path).ok()?);
    }
    mapped
}

/// Gives the file its size, maps the head and the units, and closes the file. The head goes to
/// `place`, where the old head is, or anywhere if `place` is null. Returns where the head is.
fn map_over(file: File, place: *mut u8, shared: Shared) -> Option<*mut u8> {
    // Allocates the file's blocks now. A full file system is an error here, and would be a SIGBUS
    // at a later count.
    kernel::fill(file.0, file_size(shared)).ok()?;
    let head = file.map(place, units_at())?;
    // SAFETY: no other thread counts, because this is the process's start, or a child with one
    // thread. `fill` gave the file its size, and a new file reads as zeroes.
    unsafe { share_units(file.0, units_at(), shared) }.then_some(head)
}
