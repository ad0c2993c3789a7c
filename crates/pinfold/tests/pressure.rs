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

/// Runs the program below with `watch` as the file to watch, and calls `press` when it holds free
/// memory. Returns whether it succeeded, and its output.
fn run(watch: &Path, expected: &str, press: impl FnOnce()) -> (bool, String) {
    let folder = tempfile::tempdir().unwrap();
    let holds = folder.path().join("holds");
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", PROGRAM, "--ignored"])
        .env("MEMORY_PRESSURE_WATCH", watch)
        .env("MEMORY_PRESSURE_WRITE", "c28=")
        .env("EXPECTED", expected)
        .env("HOLDS", &holds)
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap();
    while !holds.exists() && child.try_wait().unwrap().is_none() {
        sleep(Duration::from_millis(5));
    }
    press();
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
    let cache = KmemCache::new("pressed", Layout::new::<[u64; 64]>()).unwrap();
    // The first tick, and what the shepherd reads back of the words that it wrote to the pipe, give
    // memory back too. Neither comes twice.
    let mut rounds = 0;
    loop {
        let objects: Vec<_> = (0..100_000).map(|_| cache.alloc().unwrap()).collect();
        for object in objects {
            // SAFETY: this cache allocated the object above, and nothing uses it.
            unsafe { cache.free(object) };
        }
        sleep(Duration::from_millis(300));
        if arena::held() > 4 * MIB {
            break;
        }
        rounds += 1;
        assert!(rounds < 4, "{} KiB", arena::held() >> 10);
    }
    std::fs::write(std::env::var_os("HOLDS").unwrap(), "").unwrap();
    let expected = std::env::var("EXPECTED").unwrap();
    let patience = Duration::from_secs(if expected == "back" { 30 } else { 2 });
    let begun = Instant::now();
    while arena::held() >= MIB && begun.elapsed() < patience {
        sleep(Duration::from_millis(20));
    }
    let went = if arena::held() < MIB {
        "back"
    } else {
        "nowhere"
    };
    assert_eq!(went, expected);
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
    let (succeeded, text) = run(&pipe, "back", || ours.write_all(b"!").unwrap());
    assert!(succeeded, "{text}");
}

#[test]
fn a_user_may_forbid_watching() {
    let (succeeded, text) = run(Path::new("/dev/null"), "nowhere", || {});
    assert!(succeeded, "{text}");
}
