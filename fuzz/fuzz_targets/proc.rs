//! The kernel's texts about a process, in which the process has chosen names and paths: `stat`,
//! `status`, `comm` and `maps`. The input's parts, between bytes 0xfe, become the files of a
//! made-up folder of `/proc`.
#![no_main]

use command::fuzzing::{Mapping, Process, escaped, open_mapped};
use libfuzzer_sys::fuzz_target;
use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

const FILES: [&str; 4] = ["stat", "status", "comm", "maps"];

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = PathBuf::from(format!("/dev/shm/pinfold-fuzz-proc-{}", std::process::id()));
    // The made-up process has this folder for its root, in which there is nothing to open.
    fs::create_dir_all(folder.join("root")).expect("a folder");
    fs::create_dir_all(folder.join("task/7")).expect("a folder");
    extern "C" fn remove() {
        let _ = fs::remove_dir_all(&*FOLDER);
    }
    // SAFETY: the handler is a function without arguments.
    unsafe { libc::atexit(remove) };
    folder
});

fuzz_target!(|data: &[u8]| {
    let mut parts = data.split(|&byte| byte == 0xfe);
    for file in FILES {
        fs::write(FOLDER.join(file), parts.next().unwrap_or_default()).expect("room");
    }
    let Ok(process) = Process::at(&FOLDER, 7) else {
        return;
    };
    let _ = (process.has_ended(), process.inner_pid());
    if let Ok(name) = process.name() {
        assert!(!escaped(&name).chars().any(char::is_control), "{name:?}");
    }
    if let Ok(stat) = process.stat() {
        let _ = stat.name();
        let _ = [0, 1, 3, 14, 22, usize::MAX].map(|nth| stat.number(nth));
    }
    if let Ok(status) = process.status() {
        let _ = (status.number("VmRSS:"), status.field("Seccomp:"));
        let _ = status.is_whole_status();
    }
    for mapping in process.maps().expect("a list").map_while(Result::ok) {
        let _ = (mapping.is_executable(), mapping.map_file());
        assert!(open_mapped(&process, &mapping).is_err());
    }
    for line in data.split(|&byte| byte == b'\n') {
        if let Some(mapping) = Mapping::parse(line) {
            assert!(mapping.is_same_file(&mapping));
        }
    }
});
