//! The statistics segment that `pinfold run` reads: a file that another process wrote.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::fs;
use std::sync::LazyLock;

#[path = "../../crates/cli/src/run/statistics.rs"]
#[allow(dead_code, reason = "the target uses a part")]
mod statistics;

static DIRECTORY: LazyLock<statistics::Directory> = LazyLock::new(|| {
    extern "C" fn remove() {
        let _ = fs::remove_dir_all(DIRECTORY.path());
    }
    // SAFETY: the handler is a function without arguments.
    unsafe { libc::atexit(remove) };
    statistics::Directory::make().expect("a directory")
});

fuzz_target!(|data: &[u8]| {
    fs::write(DIRECTORY.path().join("7.0"), data).expect("room");
    let Some(process) = DIRECTORY.read(7).main else {
        return;
    };
    for class in &process.classes {
        let _ = (class.calls(), class.live());
        assert!(
            class
                .hit_rate()
                .is_none_or(|rate| (0.0..=1.0).contains(&rate))
        );
    }
});
