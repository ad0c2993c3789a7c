//! Attacks by programs that only pretend to run on Pinfold: their files are made up.

use crate::elf::{self, Debug};
use crate::fakes;
use crate::neighbour::stay;
use crate::programs::{ESCAPES, Random, SECRET, set_name};
use pinfold::internal::profile::{FRAMES, MAX_RECORDS};
use pinfold::internal::segment::{
    CacheRow, FILE, MAILBOX_FILE, Mailbox, NodeEvents, PROFILE_FILE, SLOTS, Segment,
};
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::mem::offset_of;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::thread::{sleep, spawn};
use std::time::Duration;

/// More bytes than any segment has.
const LARGE: u64 = 64 << 20;
const WRITABLE: i32 = libc::PROT_READ | libc::PROT_WRITE;

/// Lets this process have as many descriptors as it may.
fn allow_many_files() {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` is readable and writable.
    unsafe {
        libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit);
        limit.rlim_cur = limit.rlim_max;
        libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
    }
}

/// How many files the modes have that show many.
const MANY: u32 = 40;

/// Shows many files without content as its segment. A read of a mapping would fill them.
pub fn sparse(_: &Path) {
    allow_many_files();
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
    let files: Vec<File> = (0..MANY)
        .map(|_| fakes::memory_file(FILE, LARGE, seals))
        .collect();
    fakes::map(&files[0], 4096, libc::PROT_READ, libc::MAP_SHARED);
    stay();
}

/// Maps many files whose names are those of segments of processes that count every call.
pub fn counted(folder: &Path) {
    for nth in 0..MANY {
        let path = folder.join(format!("{}.{nth}", std::process::id()));
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).open(path);
        let file = file.unwrap();
        file.set_len(LARGE).unwrap();
        fakes::map(&file, 4096, WRITABLE, libc::MAP_SHARED);
    }
    stay();
}

/// Shows a segment with more caches than any process has.
pub fn huge(_: &Path) {
    let row = size_of::<CacheRow>() + size_of::<NodeEvents>();
    let names: Vec<String> = (0..LARGE as usize / row - 20)
        .map(|nth| format!("{nth:032}"))
        .collect();
    let names: Vec<&[u8]> = names.iter().map(String::as_bytes).collect();
    fakes::show(FILE, &fakes::segment(&names, &[]));
    stay();
}

const CACHES: [&[u8]; 3] = [b"kmalloc-64", b"sessions", b"pages"];

/// Shows a segment in which a word changes at random all the time.
pub fn random(_: &Path) {
    let whole = fakes::segment(&CACHES, &[b"requests"]);
    let file = fakes::show(FILE, &whole);
    spawn(move || {
        let mut random = Random(0x9e37_79b9_7f4a_7c15);
        loop {
            for _ in 0..20 {
                let end = [size_of::<Segment>(), whole.len()][random.next() as usize % 2];
                let at = random.next() % (end as u64 - 8);
                let word = random.next() >> (random.next() % 64);
                file.write_all_at(&word.to_le_bytes(), at).unwrap();
                sleep(Duration::from_millis(1));
            }
            file.write_all_at(&whole, 0).unwrap();
            sleep(Duration::from_millis(5));
        }
    });
    stay();
}

/// Shows a segment whose counts and places are absurd, in turn.
pub fn absurd(_: &Path) {
    let whole = fakes::segment(&CACHES, &[b"requests"]);
    let file = fakes::show(FILE, &whole);
    spawn(move || {
        let fields = [
            offset_of!(Segment, units),
            offset_of!(Segment, units_at),
            offset_of!(Segment, unit_bytes),
            offset_of!(Segment, calls),
            offset_of!(Segment, memory_at),
            offset_of!(Segment, caches_at),
            offset_of!(Segment, caches),
            offset_of!(Segment, caches_used),
            offset_of!(Segment, events_at),
            offset_of!(Segment, nodes),
            offset_of!(Segment, page_size),
            offset_of!(Segment, counters_at),
            offset_of!(Segment, counters),
            offset_of!(Segment, counters_used),
        ];
        let values = [u32::MAX, 0, i32::MAX as u32, 1 << 20, 8, 0xffff_fff8];
        for nth in 0.. {
            // One field, and then two: a count alone is stopped by the other one.
            file.write_all_at(&whole, 0).unwrap();
            for pair in 0..1 + nth / 84 % 2 {
                let field = fields[(nth + pair) % fields.len()];
                let value: u32 = values[nth / fields.len() % values.len()];
                file.write_all_at(&value.to_le_bytes(), field as u64)
                    .unwrap();
            }
            sleep(Duration::from_millis(3));
        }
    });
    stay();
}

/// Has the functions of a made-up library mapped as code. Returns the library's path, and a call
/// stack in it.
fn map_library(folder: &Path, name: &[u8], library: &[u8]) -> (PathBuf, Vec<u64>) {
    let path = folder.join(OsStr::from_bytes(name));
    fs::write(&path, library).unwrap();
    let file = File::open(&path).unwrap();
    let code = libc::PROT_READ | libc::PROT_EXEC;
    let base = fakes::map(&file, library.len(), code, libc::MAP_PRIVATE) as u64;
    let address = |nth: u64| base + elf::CODE + nth * elf::FUNCTION + 8;
    (path, (0..FUNCTIONS.len() as u64).map(address).collect())
}

const FUNCTIONS: [&[u8]; 3] = [b"main", ESCAPES, b"_ZN3evi\x1b[2J4leafEv"];

fn show_profile(stack: Vec<u64>) {
    let turned = stack.iter().rev().copied().collect();
    fakes::show(PROFILE_FILE, &fakes::profile(&[stack, turned], 1 << 20));
}

/// Has escape sequences in all names: of the process, of caches, counters, functions and files.
pub fn escapes(folder: &Path) {
    set_name(&ESCAPES[..15]);
    let name = &ESCAPES[..ESCAPES.len().min(32)];
    fakes::show(
        FILE,
        &fakes::segment(&[name, b"a\nFORGED\x1b[31m"], &[name]),
    );
    let library = elf::library(&FUNCTIONS, Debug::File(b"x\x1b[2J\nFORGED.c"));
    show_profile(map_library(folder, b"lib\x1b[2J\nFORGED.so", &library).1);
    stay();
}

/// Has a mailbox whose other side answers everything, at once and at random.
pub fn answers(_: &Path) {
    fakes::show(FILE, &fakes::segment(&CACHES, &[]));
    let size = size_of::<Mailbox>();
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
    let file = fakes::memory_file(MAILBOX_FILE, size as u64, seals);
    let at = fakes::map(&file, size, WRITABLE, libc::MAP_SHARED) as usize;
    let mailbox = at as *const Mailbox;
    // SAFETY: the mapping has the mailbox's size, holds zeroes and stays.
    unsafe { (*mailbox).fill_in() };
    spawn(move || {
        // SAFETY: the mailbox has 512 words. All accesses are atomic.
        let word = |nth: usize| unsafe { &*(at as *const AtomicU64).add(nth) };
        let mut random = Random(0x1234_5678_9abc_def1);
        loop {
            for slot in 0..SLOTS {
                let request = word(2 + slot).load(Acquire);
                if request == 0 {
                    continue;
                }
                let code = [1, 2, 3, 4, 5, 6, 7, 0xfe, 0xff][random.next() as usize % 9];
                let value = random.next() >> (8 + random.next() % 56);
                // The codes of consent hold the request's end.
                let value = if code > 7 { request >> 32 << 2 } else { value };
                word(2 + 3 * SLOTS + slot).store(code << 56 | value, Release);
                if random.next().is_multiple_of(8) {
                    word(2 + slot).store(random.next(), Relaxed);
                }
            }
            sleep(Duration::from_micros(300));
        }
    });
    stay();
    drop(file);
}

/// Shows a heap profile with as many records as there can be, absurd counts, and call stacks that
/// lead anywhere.
pub fn profile(_: &Path) {
    fakes::show(FILE, &fakes::segment(&CACHES, &[]));
    let mut random = Random(0x2545_f491_4f6c_dd1d);
    let stacks: Vec<Vec<u64>> = (0..4 * MAX_RECORDS)
        .map(|nth| {
            let depth = [1, FRAMES][nth % 2];
            (0..depth)
                .map(|_| random.next() >> (random.next() % 64))
                .collect()
        })
        .collect();
    let mut bytes = fakes::profile(&stacks, u64::MAX - 7);
    fakes::exaggerate(&mut bytes);
    fakes::show(PROFILE_FILE, &bytes);
    stay();
}

/// Has 64,000 addresses in its call stacks, and 30,000 mappings of code.
pub fn blowup(folder: &Path) {
    fakes::show(FILE, &fakes::segment(&CACHES, &[]));
    let path = folder.join("blow.so");
    fs::write(&path, elf::library(&FUNCTIONS, Debug::Claims(64))).unwrap();
    let file = File::open(path).unwrap();
    let code = libc::PROT_READ | libc::PROT_EXEC;
    let mapped: Vec<u64> = (0..30_000)
        .map(|nth| {
            // Neighbours of one kind and a fitting offset would become one mapping.
            let protection = [code, libc::PROT_NONE][nth % 2];
            fakes::map(&file, 4096, protection, libc::MAP_PRIVATE) as u64
        })
        .collect();
    let addresses: Vec<u64> = (0..64_000u64)
        .map(|nth| mapped[nth as usize % mapped.len()] + nth / 30_000 * 64)
        .collect();
    let stacks: Vec<Vec<u64>> = addresses.chunks(FRAMES).map(<[u64]>::to_vec).collect();
    fakes::show(PROFILE_FILE, &fakes::profile(&stacks, 1 << 20));
    stay();
}

/// Maps a library, shows a profile with call stacks in it, and lets `change` change the file.
fn with_library(folder: &Path, debug: Debug<'_>, change: impl FnOnce(&Path, &[u8])) {
    fakes::show(FILE, &fakes::segment(&CACHES, &[]));
    let library = elf::library(&FUNCTIONS, debug);
    let (path, stack) = map_library(folder, b"evil.so", &library);
    show_profile(stack);
    change(&path, &library);
    stay();
}

/// Puts a pipe in the place of a mapped library.
pub fn fifo(folder: &Path) {
    with_library(folder, Debug::File(b"evil.c"), |path, _| {
        fs::remove_file(path).unwrap();
        make_node(path, libc::S_IFIFO, 0);
    });
}

/// Puts a symbolic link to a file that the process itself may not read in the place of a mapped
/// library.
pub fn symlink(folder: &Path) {
    let secret = folder.join(SECRET);
    fs::write(&secret, "secret").unwrap();
    with_library(folder, Debug::File(b"evil.c"), |path, _| {
        fs::remove_file(path).unwrap();
        std::os::unix::fs::symlink(&secret, path).unwrap();
    });
}

/// Puts a device without an end in the place of a mapped library.
pub fn device(folder: &Path) {
    with_library(folder, Debug::File(b"evil.c"), |path, _| {
        fs::remove_file(path).unwrap();
        if !make_node(path, libc::S_IFCHR, libc::makedev(1, 5)) {
            std::os::unix::fs::symlink("/dev/zero", path).unwrap();
        }
    });
}

fn make_node(path: &Path, kind: libc::mode_t, device: libc::dev_t) -> bool {
    let mut path = path.as_os_str().as_bytes().to_vec();
    path.push(0);
    // SAFETY: the path ends with a zero byte.
    unsafe { libc::mknod(path.as_ptr().cast(), kind | 0o644, device) == 0 }
}

/// Makes a mapped library shorter, and long again, all the time.
pub fn truncate(folder: &Path) {
    with_library(folder, Debug::File(b"evil.c"), |path, library| {
        let file = OpenOptions::new().write(true).open(path).unwrap();
        let library = library.to_vec();
        spawn(move || {
            loop {
                file.set_len(0).unwrap();
                file.write_all_at(&library, 0).unwrap();
                sleep(Duration::from_millis(1));
            }
        });
    });
}

/// Has a mapped library with a compressed section that claims 2^46 bytes.
pub fn bomb(folder: &Path) {
    with_library(folder, Debug::Claims(1 << 46), |_, _| {});
}
