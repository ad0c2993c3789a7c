//! A process's `PINFOLD_` variables. The input's lines are their values. A forked child starts with
//! them, as a program does, and must run, whatever they are: a wrong setting is ignored.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pinfold::slab::KmemCache;
use pinfold_malloc::settings::{LIBRARY, SETTINGS, STATS, Setting};
use std::alloc::Layout;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

/// Returns the variables, except those that name files.
fn names() -> impl Iterator<Item = &'static str> {
    let names = SETTINGS.iter().map(Setting::name);
    names.filter(|name| ![STATS, LIBRARY].contains(name))
}

fuzz_target!(|data: &[u8]| {
    if data.contains(&0) {
        return;
    }
    let values: Vec<&[u8]> = data.splitn(names().count(), |&byte| byte == b'\n').collect();
    let value = |nth: usize| values.get(nth).copied().unwrap_or_default();
    for (nth, name) in names().enumerate() {
        // SAFETY: the target has one thread.
        unsafe { std::env::set_var(name, OsStr::from_bytes(value(nth))) };
        let mut buffer = [0; 64];
        let read = pinfold_rseq::env::read(name, &mut buffer);
        assert_eq!(read, (value(nth).len() <= 64).then_some(value(nth)));
    }
    // SAFETY: the child calls what a starting program calls, and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        start();
    }
    let mut status = 0;
    // SAFETY: `status` is writable.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0, "a program does not run with these settings");
});

fn start() -> ! {
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
