//! Heap profiles that a process writes while it runs: `pinfold run --heap-dump`.
//!
//! The program is this test itself, run by `pinfold run` in a role that an environment variable
//! names. It waits for the files of its own process, and says nothing of when they come.

mod program;
mod texts;

use program::{ROLE, RUN, eventually, in_role};
use std::hint::black_box;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::{env, fs};
use texts::assert_has;

/// The variable that names the file for the role.
const FILE: &str = "PINFOLD_HEAP_FILE";

/// Holds memory in blocks of 1,000 bytes.
#[inline(never)]
fn holds(bytes: usize) -> Vec<Vec<u8>> {
    (0..bytes / 1000)
        .map(|_| black_box(vec![1; 1000]))
        .collect()
}

#[inline(never)]
fn holds_the_peak() -> Vec<Vec<u8>> {
    let blocks = holds(64 << 20);
    // Keeps this function's frame during the call.
    black_box(blocks)
}

/// Does what the environment asks for. Does nothing as a test.
#[test]
fn role() {
    let Ok(role) = env::var(ROLE) else {
        return;
    };
    let file = env::var(FILE).unwrap();
    let file = |last: &str| PathBuf::from(format!("{file}.{}.{last}", std::process::id()));
    if role == "rises twice" {
        let _kept = holds(8 << 20);
        for number in ["1", "2"] {
            let peak = holds_the_peak();
            eventually("a profile above the limit", || file(number).exists());
            drop(peak);
            // The held memory falls once the freed runs go back to the system.
            eventually("less memory", || resident() < 40 << 20);
        }
    } else if role == "has a peak" {
        let _kept = holds(8 << 20);
        eventually("the first peak", || file("peak").exists());
        let peak = holds_the_peak();
        let mut more = Vec::new();
        // The first of two new profiles may have begun before the peak.
        for _ in 0..2 {
            let before = fs::metadata(file("peak")).unwrap();
            more.push(holds(16 << 20));
            eventually("the peak", || is_another(&file("peak"), &before));
        }
        drop((peak, more));
        eventually("less memory", || resident() < 40 << 20);
    } else if role == "finds a former profile" {
        fs::write(file("1"), "former").unwrap();
        let _kept = holds(8 << 20);
        eventually("the first profile", || {
            file("1.old").exists() && file("1").exists()
        });
    } else if role == "gets a signal" {
        let _kept = holds(8 << 20);
        for number in ["1", "2"] {
            // SAFETY: the handler of this signal is Pinfold's, which stores a word.
            unsafe { libc::raise(libc::SIGUSR2) };
            eventually("the profile that the signal asks for", || {
                file(number).exists()
            });
        }
    } else if role == "swings" {
        let _kept = holds(22 << 20);
        let low = resident() + (2 << 20);
        for _ in 0..3 {
            let more = holds(5 << 20);
            std::thread::sleep(std::time::Duration::from_millis(100));
            drop(more);
            eventually("less memory", || resident() < low);
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
    } else if role == "goes on" {
        let _kept = holds(8 << 20);
        eventually("the fourth profile", || file("4").exists());
        eventually("the end of the second", || !file("2").exists());
    }
}

/// Returns whether another file has taken this name.
fn is_another(path: &Path, before: &fs::Metadata) -> bool {
    let written = |about: &fs::Metadata| (about.ino(), about.modified().ok());
    fs::metadata(path).is_ok_and(|now| written(&now) != written(before))
}

/// Returns the bytes that this process has in memory.
fn resident() -> usize {
    let text = fs::read_to_string("/proc/self/statm").unwrap();
    let pages = text.split(' ').nth(1).unwrap();
    pages.parse::<usize>().unwrap() * 4096
}

/// Runs a role with profiles at `moments`. Returns the files, by the ends of their names.
#[track_caller]
fn files(folder: &Path, moments: &str, role: &str) -> Vec<(String, PathBuf)> {
    let file = folder.join("heap");
    let option = [
        "--heap=64k",
        "--heap-file",
        file.to_str().unwrap(),
        "--heap-dump",
        moments,
    ];
    let words = [&RUN[..2], &option, &["--"]].concat();
    // The program's thread looks for the moments each 20 ms.
    let output = in_role(&words, role)
        .env("PINFOLD_SHEPHERD", "20")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let files = fs::read_dir(folder).unwrap().map(|entry| {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        // `heap.PID`, `heap.PID.N`
        (
            name.splitn(3, '.').nth(2).unwrap_or_default().to_owned(),
            path,
        )
    });
    let mut files: Vec<_> = files.collect();
    files.sort();
    files
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Returns the bytes in use of a profile, and those of the functions whose names end with `part`.
#[track_caller]
fn in_use(path: &Path, part: &str) -> (f64, f64) {
    let mut command = Command::new(RUN[0]);
    let output = command
        .args(["heap", "dump", "--json"])
        .arg(path)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let bytes = |values: &serde_json::Value| values["inuse_bytes"].as_f64().unwrap();
    let stacks = json["stacks"].as_array().unwrap();
    let has_part = |stack: &&serde_json::Value| {
        let mut functions = stack["functions"].as_array().unwrap().iter();
        functions.any(|name| name.as_str().unwrap().ends_with(part))
    };
    let found = stacks.iter().filter(has_part);
    (
        bytes(&json["totals"]),
        found.map(|stack| bytes(&stack["values"])).sum(),
    )
}

fn ends(files: &[(String, PathBuf)]) -> Vec<&str> {
    files.iter().map(|(end, _)| &end[..]).collect()
}

#[test]
fn each_rise_above_the_limit_writes_one_profile() {
    let folder = tempfile::tempdir().unwrap();
    let files = files(folder.path(), "above:48M", "rises twice");
    assert_eq!(ends(&files), ["", "1", "2"]);
    for (_, path) in &files[1..] {
        assert!(in_use(path, "holds").0 > 30e6);
    }
    assert!(in_use(&files[0].1, "holds_the_peak").1 < 1e6);
}

#[test]
fn the_profile_of_the_peak_stays() {
    let folder = tempfile::tempdir().unwrap();
    let files = files(folder.path(), "peak:5%", "has a peak");
    assert_eq!(ends(&files), ["", "peak"]);
    let (_, at_peak) = in_use(&files[1].1, "holds_the_peak");
    // One standard deviation is 3 %.
    assert!((50e6..85e6).contains(&at_peak), "{at_peak}");
    assert!(in_use(&files[0].1, "holds_the_peak").1 < 1e6);
}

#[test]
fn the_newest_profiles_of_an_interval_stay() {
    let folder = tempfile::tempdir().unwrap();
    let files = files(folder.path(), "every:1s,keep:2", "goes on");
    let ends = ends(&files);
    let numbers: Vec<u32> = ends.iter().filter_map(|end| end.parse().ok()).collect();
    assert!(
        numbers.len() == 2 && numbers[0] >= 3 && numbers[1] == numbers[0] + 1,
        "{ends:?}"
    );
}

/// After the restart of a container, its process has the same number.
#[test]
fn what_a_former_process_has_left_stays() {
    let folder = tempfile::tempdir().unwrap();
    let files = files(
        folder.path(),
        "every:1s,keep:1000",
        "finds a former profile",
    );
    assert_eq!(ends(&files)[..3], ["", "1", "1.old"]);
    assert_eq!(fs::read(&files[2].1).unwrap(), b"former");
    assert!(in_use(&files[1].1, "holds").0 > 1e6);
}

#[test]
fn memory_that_swings_around_the_limit_writes_one_profile() {
    let folder = tempfile::tempdir().unwrap();
    let files = files(folder.path(), "above:24M", "swings");
    assert_eq!(ends(&files), ["", "1"]);
}

#[test]
fn a_signal_asks_for_a_profile() {
    let folder = tempfile::tempdir().unwrap();
    let files = files(folder.path(), "signal:USR2", "gets a signal");
    assert_eq!(ends(&files), ["", "1", "2"]);
    assert!(in_use(&files[1].1, "holds").0 > 1e6);
}

#[test]
fn wrong_moments_are_refused() {
    for (options, words) in [
        (
            &["--heap-file", "/tmp/heap", "--heap-dump", "above:lots"][..],
            "above:BYTES",
        ),
        (&["--heap-dump", "every:5m"], "--heap-file"),
    ] {
        let mut command = Command::new(RUN[0]);
        let output = command
            .arg("run")
            .args(options)
            .args(["--", "true"])
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2));
        assert_has(&said(&output), &[words]);
    }
}
