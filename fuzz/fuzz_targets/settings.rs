//! A process's `PINFOLD_` variables. The input's lines are their values. A forked child starts with
//! them, as a program does, and must run, or end with a message where a setting is wrong and must
//! not be ignored.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pinfold::slab::KmemCache;
use pinfold::slab::debug::check_settings;
use std::alloc::Layout;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

const NAMES: [&str; 6] = [
    "PINFOLD_RSEQ",
    "PINFOLD_HARDENED",
    "PINFOLD_SLAB_DEBUG",
    "PINFOLD_POLICY",
    "PINFOLD_SHEPHERD",
    "PINFOLD_FAKE_NODES",
];

fuzz_target!(|data: &[u8]| {
    if data.contains(&0) {
        return;
    }
    let values: Vec<&[u8]> = data.splitn(NAMES.len(), |&byte| byte == b'\n').collect();
    let value = |nth: usize| values.get(nth).copied().unwrap_or_default();
    for (nth, name) in NAMES.into_iter().enumerate() {
        // SAFETY: the target has one thread.
        unsafe { std::env::set_var(name, OsStr::from_bytes(value(nth))) };
        let mut buffer = [0; 64];
        let read = pinfold_rseq::env::read(name, &mut buffer);
        assert_eq!(read, (value(nth).len() <= 64).then_some(value(nth)));
    }
    let debug = std::str::from_utf8(value(2)).is_ok_and(|text| check_settings(text).is_ok());
    // A value that is too long for the setting's buffer is as none.
    let hardened = value(1).len() > 4096 || matches!(value(1), b"" | b"0" | b"1");
    // SAFETY: the child calls what a starting program calls, and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        start();
    }
    let mut status = 0;
    // SAFETY: `status` is writable.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    let died = libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGABRT;
    assert!(status == 0 || died, "{status:#x}");
    if debug && hardened {
        assert_eq!(status, 0, "right settings, and the process ended");
    }
    if !debug {
        assert!(died, "a wrong PINFOLD_SLAB_DEBUG was ignored");
    }
});

fn start() -> ! {
    // SAFETY: what the library says of itself as it ends the process is no finding; a sanitizer's
    // report is one, and ends the process by another way than SIGABRT.
    unsafe {
        let nowhere = libc::open(c"/dev/null".as_ptr(), libc::O_WRONLY);
        libc::dup2(nowhere, 2);
        libc::signal(libc::SIGABRT, libc::SIG_DFL);
    }
    pinfold_malloc::background::library_loaded();
    let layout = Layout::new::<[u64; 4]>();
    let cache = KmemCache::new("fuzz", layout).expect("memory");
    let objects: Vec<_> = (0..20).map(|_| cache.alloc().expect("memory")).collect();
    for object in objects {
        // SAFETY: the object is of this cache and not used afterwards.
        unsafe { cache.free(object) };
    }
    // SAFETY: no preconditions.
    unsafe { libc::_exit(0) }
}
