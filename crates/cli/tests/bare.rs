//! The command where neither `/proc` nor `/sys` is mounted, as in a small chroot.

mod texts;

use std::process::{Command, Output};
use texts::assert_has;

/// Runs the command with these words, with empty folders over `/proc` and `/sys`. Returns `None` if
/// this machine allows no mounts.
fn bare(words: &[&str], variables: &[(&str, &str)]) -> Option<Output> {
    let script = "mount -t tmpfs none /sys && mount -t tmpfs none /proc || exit 99; exec \"$@\"";
    let output = Command::new("unshare")
        .args(["--mount", "--map-root-user", "sh", "-c", script, "sh"])
        .arg(assert_cmd::cargo::cargo_bin("pinfold"))
        .args(words)
        .envs(variables.iter().copied())
        .output();
    let output = output.ok().filter(|output| {
        let error = String::from_utf8_lossy(&output.stderr);
        output.status.code() != Some(99) && !error.starts_with("unshare:")
    });
    if output.is_none() {
        eprintln!("this machine allows no mounts");
    }
    output
}

#[test]
fn commands_that_need_proc_say_so() {
    let mount = "mount -t proc proc /proc";
    for words in [
        &["list"][..],
        &["stat", "1"],
        &["numastat", "1"],
        &["heap", "dump", "1"],
        &["trim", "1"],
        &["run", "--", "true"],
    ] {
        let Some(output) = bare(words, &[]) else {
            return;
        };
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{words:?}: {error}");
        assert_has(&error, &[mount]);
    }
}

#[test]
fn doctor_and_run_work() {
    let Some(doctor) = bare(&["doctor"], &[]) else {
        return;
    };
    assert_eq!(doctor.status.code(), Some(0), "{doctor:?}");
    let text = String::from_utf8_lossy(&doctor.stdout);
    assert_has(&text, &["/sys cannot be read", "cannot be read"]);

    let command = assert_cmd::cargo::cargo_bin("pinfold");
    let library = command.with_file_name("deps/libpinfold_preload.so");
    if !library.is_file() {
        eprintln!("the library is not built: {}", library.display());
        return;
    }
    // The library counts into this folder, which shows that it is loaded.
    let counts = tempfile::tempdir().unwrap();
    let variables = [
        ("PINFOLD_LIBRARY", library.to_str().unwrap()),
        ("PINFOLD_STATS", counts.path().to_str().unwrap()),
    ];
    let run = bare(&["run", "--", "sh", "-c", "echo here; exit 3"], &variables).unwrap();
    assert_eq!(run.status.code(), Some(3), "{run:?}");
    assert_eq!(run.stdout, b"here\n");
    assert!(counts.path().read_dir().unwrap().next().is_some());
}
