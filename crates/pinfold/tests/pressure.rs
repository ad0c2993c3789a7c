//! Under memory pressure, a shepherd has everything free go back at once. A pipe stands for the
//! file that systemd hands to a service.

use pinfold::internal::arena;
use pinfold::shepherd::Shepherd;
use pinfold::slab::KmemCache;
use std::alloc::Layout;
use std::ffi::CString;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const PROGRAM: &str = "keeps_some_memory";

/// Runs the program below with `watch` as the file to watch. Returns whether it succeeded, and its
/// output.
fn run(watch: &Path, expected: &str, meanwhile: impl FnOnce()) -> (bool, String) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", PROGRAM, "--ignored"])
        .env("MEMORY_PRESSURE_WATCH", watch)
        .env("MEMORY_PRESSURE_WRITE", "c28=")
        .env("EXPECTED", expected)
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap();
    meanwhile();
    let mut text = String::new();
    let mut out = child.stdout.take().unwrap();
    out.read_to_string(&mut text).unwrap();
    (child.wait().unwrap().success(), text)
}

#[test]
#[ignore = "a program for the tests below"]
fn keeps_some_memory() {
    // Without pressure, this shepherd ticks only once, at its start.
    let shepherd = Shepherd::new().interval(Duration::from_secs(3600));
    let _running = shepherd.start().unwrap();
    sleep(Duration::from_millis(300));
    let cache = KmemCache::new("pressed", Layout::new::<[u64; 64]>()).unwrap();
    let objects: Vec<_> = (0..100_000).map(|_| cache.alloc().unwrap()).collect();
    for object in objects {
        // SAFETY: this cache allocated the object above, and nothing uses it.
        unsafe { cache.free(object) };
    }
    assert!(arena::held() > 4 * MIB, "{} KiB", arena::held() >> 10);
    let begun = Instant::now();
    while arena::held() >= MIB && begun.elapsed() < Duration::from_secs(4) {
        sleep(Duration::from_millis(20));
    }
    let went = if arena::held() < MIB {
        "back"
    } else {
        "nowhere"
    };
    assert_eq!(went, std::env::var("EXPECTED").unwrap());
}

#[test]
fn everything_free_goes_back_under_pressure() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pressure");
    let path = CString::new(pipe.as_os_str().as_bytes()).unwrap();
    // SAFETY: `path` is a C string, which ends with a NUL.
    assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
    let mut ours = std::fs::File::options()
        .read(true)
        .write(true)
        .open(&pipe)
        .unwrap();
    let (succeeded, text) = run(&pipe, "back", || {
        // The shepherd writes what `MEMORY_PRESSURE_WRITE` says, and then reads that from the pipe
        // as pressure. So this waits until that is over.
        sleep(Duration::from_millis(1200));
        ours.write_all(b"!").unwrap();
    });
    assert!(succeeded, "{text}");
}

#[test]
fn a_user_may_forbid_watching() {
    let (succeeded, text) = run(Path::new("/dev/null"), "nowhere", || {});
    assert!(succeeded, "{text}");
}
