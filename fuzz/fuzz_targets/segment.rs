//! The statistics segment, which another process wrote: as the commands about running processes
//! read it, and as `pinfold run` does.
#![no_main]

use command::fuzzing::Snapshot;
use command::fuzzing::statistics;
use libfuzzer_sys::fuzz_target;
use std::fs;
use std::sync::LazyLock;

static DIRECTORY: LazyLock<statistics::Directory> = LazyLock::new(|| {
    extern "C" fn remove() {
        let _ = fs::remove_dir_all(DIRECTORY.path());
    }
    // SAFETY: the handler is a function without arguments.
    unsafe { libc::atexit(remove) };
    statistics::Directory::make().expect("a directory")
});

fuzz_target!(|data: &[u8]| {
    if let Ok(snapshot) = Snapshot::parse(data) {
        let _ = (snapshot.used(), snapshot.dirty());
        let _ = snapshot.of_caches(|cache| cache.total() | cache.slow());
        for cache in &snapshot.caches {
            let _ = (snapshot.class_of(cache), cache.in_barns(), cache.out());
        }
    }
    fs::write(DIRECTORY.path().join("7.0"), data).expect("room");
    let Some(process) = DIRECTORY.read(7).main else {
        return;
    };
    for class in process.classes() {
        let _ = (class.calls(), class.live());
        assert!(
            class
                .hit_rate()
                .is_none_or(|rate| (0.0..=1.0).contains(&rate))
        );
    }
});
