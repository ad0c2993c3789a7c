//! Files as the command expects them of other processes, with wrong content.

use pinfold::internal::profile::{FRAMES, HEAP_MAGIC, HEAP_VERSION, Head, RECORDS_AT, Record};
use pinfold::internal::segment::{
    CacheRow, CounterRow, MAGIC, NodeEvents, NodeMemory, Segment, VERSION,
};
use std::ffi::CStr;
use std::fs::File;
use std::mem::offset_of;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::ptr::null_mut;

fn put4(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

fn put8(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

/// Returns a segment with one node, and these names for its caches and counters.
pub fn segment(caches: &[&[u8]], counters: &[&[u8]]) -> Vec<u8> {
    let memory_at = size_of::<Segment>().next_multiple_of(64);
    let caches_at = memory_at + size_of::<NodeMemory>();
    let events_at = (caches_at + caches.len() * size_of::<CacheRow>()).next_multiple_of(64);
    let counters_at = events_at + caches.len() * size_of::<NodeEvents>();
    let mut bytes = vec![0; counters_at + counters.len() * size_of::<CounterRow>()];
    put8(&mut bytes, offset_of!(Segment, magic), MAGIC);
    for (at, value) in [
        (offset_of!(Segment, version), VERSION as usize),
        (offset_of!(Segment, pid), std::process::id() as usize),
        (offset_of!(Segment, backend), 1),
        (offset_of!(Segment, memory_at), memory_at),
        (offset_of!(Segment, caches_at), caches_at),
        (offset_of!(Segment, caches), caches.len()),
        (offset_of!(Segment, caches_used), caches.len()),
        (offset_of!(Segment, events_at), events_at),
        (offset_of!(Segment, nodes), 1),
        (offset_of!(Segment, page_size), 4096),
        (offset_of!(Segment, counters_at), counters_at),
        (offset_of!(Segment, counters), counters.len()),
        (offset_of!(Segment, counters_used), counters.len()),
    ] {
        put4(&mut bytes, at, value as u32);
    }
    for at in [
        offset_of!(Segment, started_ns),
        offset_of!(Segment, held),
        offset_of!(Segment, mapped),
    ] {
        put8(&mut bytes, at, 1 << 30);
    }
    for (nth, name) in caches.iter().enumerate() {
        let row = caches_at + nth * size_of::<CacheRow>();
        bytes[row..row + name.len()].copy_from_slice(name);
        put4(&mut bytes, row + offset_of!(CacheRow, state), 2);
        for at in [offset_of!(CacheRow, object), offset_of!(CacheRow, size)] {
            put4(&mut bytes, row + at, 64);
        }
        put4(&mut bytes, row + offset_of!(CacheRow, per_slab), 64);
        put4(&mut bytes, row + offset_of!(CacheRow, slab), 4096);
        let events = events_at + nth * size_of::<NodeEvents>();
        for word in 0..size_of::<NodeEvents>() / 8 {
            put8(&mut bytes, events + 8 * word, 5);
        }
    }
    for (nth, name) in counters.iter().enumerate() {
        let row = counters_at + nth * size_of::<CounterRow>();
        bytes[row..row + name.len()].copy_from_slice(name);
        put4(&mut bytes, row + offset_of!(CounterRow, state), 2);
        put8(&mut bytes, row + offset_of!(CounterRow, value), 7);
    }
    bytes
}

/// Returns a heap profile with one record for each call stack. Each has `count` in all its counts.
pub fn profile(stacks: &[Vec<u64>], count: u64) -> Vec<u8> {
    let mut bytes = vec![0; RECORDS_AT + stacks.len() * size_of::<Record>()];
    put8(&mut bytes, offset_of!(Head, magic), HEAP_MAGIC);
    put4(&mut bytes, offset_of!(Head, version), HEAP_VERSION);
    put4(&mut bytes, offset_of!(Head, pid), std::process::id());
    put8(&mut bytes, offset_of!(Head, interval), 1 << 19);
    put4(&mut bytes, offset_of!(Head, used), stacks.len() as u32);
    put4(
        &mut bytes,
        offset_of!(Head, record_bytes),
        size_of::<Record>() as u32,
    );
    for (nth, stack) in stacks.iter().enumerate() {
        let row = RECORDS_AT + nth * size_of::<Record>();
        let depth = stack.len().min(FRAMES);
        put4(&mut bytes, row + offset_of!(Record, depth), depth as u32);
        for at in [
            offset_of!(Record, samples),
            offset_of!(Record, objects),
            offset_of!(Record, bytes),
        ] {
            put8(&mut bytes, row + at, count);
        }
        for (frame, &address) in stack.iter().take(FRAMES).enumerate() {
            let at = row + offset_of!(Record, frames) + 8 * frame;
            put8(&mut bytes, at, address);
        }
    }
    bytes
}

/// Makes the number of records and their size in a profile's head absurd.
pub fn exaggerate(profile: &mut [u8]) {
    put4(profile, offset_of!(Head, used), u32::MAX);
    put8(profile, offset_of!(Head, dropped), u64::MAX);
}

/// Makes a file without a name, as the library does for its own.
pub fn memory_file(name: &CStr, size: u64, seals: i32) -> File {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: the name is a C string.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), flags) };
    assert!(fd >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: the descriptor is new, and belongs to this value alone.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(size).unwrap();
    // SAFETY: the call uses no memory of this process.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) };
    file
}

/// Maps a file. The mapping stays until the process ends.
pub fn map(file: &File, bytes: usize, protection: i32, flags: i32) -> *mut u8 {
    // SAFETY: the kernel chooses the place.
    let at = unsafe { libc::mmap(null_mut(), bytes, protection, flags, file.as_raw_fd(), 0) };
    assert_ne!(at, libc::MAP_FAILED);
    at.cast()
}

/// Shows bytes to other processes, as the library shows its segment and its profile. The file stays
/// open until the process ends.
pub fn show(name: &CStr, bytes: &[u8]) -> &'static File {
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
    let file = memory_file(name, bytes.len() as u64, seals);
    file.write_all_at(bytes, 0).unwrap();
    map(&file, 4096, libc::PROT_READ, libc::MAP_SHARED);
    Box::leak(Box::new(file))
}
