//! `pinfold bench compare`: what it prints for two runs, and which files it refuses.

mod runs;

use runs::*;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

const RUN: &str = "slab --rounds 1 --calls 100 --size 64 --scenario pair --subject rseq,locked";

/// Writes a run into the folder, after `edit` has changed it.
fn saved(folder: &Path, name: &str, run: &Value, edit: impl FnOnce(&mut Value)) -> PathBuf {
    let mut run = run.clone();
    edit(&mut run);
    let file = folder.join(name);
    fs::write(&file, run.to_string()).unwrap();
    file
}

fn line(old: &Path, new: &Path) -> String {
    format!("compare {} {}", old.display(), new.display())
}

fn a_run() -> Value {
    serde_json::from_str(&output(&format!("{RUN} --json"))).unwrap()
}

#[test]
fn each_row_has_its_ratio() {
    let folder = tempfile::tempdir().unwrap();
    let run = a_run();
    let old = saved(folder.path(), "old", &run, |run| {
        run["rows"][0]["cycles"] = 4.0.into();
    });
    let new = saved(folder.path(), "new", &run, |run| {
        run["rows"][0]["cycles"] = 6.0.into();
        run["machine"]["kernel"] = "another".into();
    });
    let text = output(&line(&old, &new));
    let row = text
        .lines()
        .find(|line| line.starts_with("rseq, pair, pair, size 64, "));
    let row: Vec<_> = row.expect(&text).split_whitespace().rev().take(3).collect();
    assert_eq!(row, ["1.50", "6.00", "4.00"], "{text}");
    assert!(text.contains("locked, pair, pair, size 64, "), "{text}");
    assert!(text.contains("old, cycles here: locked add "), "{text}");
}

#[test]
fn runs_from_different_kinds_of_host_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = a_run();
    run["machine"]["primitives"]["locked_add_cycles"] = 3.5.into();
    let same = saved(folder.path(), "old", &run, |_| ());
    let dear = saved(folder.path(), "dear", &run, |run| {
        run["machine"]["primitives"]["locked_add_cycles"] = 14.0.into();
    });
    let remedy = "measure both on one machine";
    refused(
        &line(&same, &dear),
        &["a locked add took 3.5 cycles", "14 in the new", remedy],
    );
    refused(
        &line(&dear, &same),
        &["a locked add took 14 cycles", "3.5 in the new", remedy],
    );
    for (field, words) in [("cpu", "CPU model"), ("architecture", "architecture")] {
        let other = saved(folder.path(), "other", &run, |run| {
            run["machine"][field] = "\u{1b}[2J".into();
        });
        refused(&line(&same, &other), &[words, remedy]);
    }
    let silent = saved(folder.path(), "silent", &run, |run| {
        run["machine"].as_object_mut().unwrap().remove("primitives");
    });
    refused(
        &line(&silent, &same),
        &["the old run does not say", "measure it again"],
    );
    refused(
        &line(&same, &silent),
        &["the new run does not say", "measure it again"],
    );
}

#[test]
fn runs_of_different_benchmarks_and_subjects_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let run = a_run();
    let same = saved(folder.path(), "old", &run, |_| ());
    let other = saved(folder.path(), "other", &run, |run| {
        run["bench"] = "pft".into();
    });
    refused(
        &line(&same, &other),
        &["\"slab\"", "\"pft\"", "give two runs of one benchmark"],
    );
    let none = saved(folder.path(), "none", &run, |run| {
        run["rows"] = json!([]);
    });
    refused(&line(&same, &none), &["no row in common"]);
}

/// A file may come from anyone.
#[test]
fn hostile_files_are_refused_with_a_clear_error() {
    let folder = tempfile::tempdir().unwrap();
    let good = saved(folder.path(), "good", &a_run(), |_| ());
    let file = folder.path().join("file");
    let deep = "[".repeat(100_000);
    let cases: [(&[u8], &str); 7] = [
        (b"", "not a run of a benchmark"),
        (b"{\"bench\": \"slab\"}", "not a run of a benchmark"),
        (
            b"{\"bench\": \"slab\", \"machine\": {}, \"rows\": 1}",
            "not a run of a benchmark",
        ),
        (deep.as_bytes(), "not a run of a benchmark"),
        (b"\xff\xfe", "not a text"),
        (&vec![b' '; 9 << 20], "more than 8 MiB"),
        (b"\x1b[2J", "not a run of a benchmark"),
    ];
    for (content, why) in cases {
        fs::write(&file, content).unwrap();
        refused(&line(&good, &file), &[why, "file"]);
        refused(&line(&file, &good), &[why, "file"]);
    }
    refused(
        &line(&folder.path().join("none"), &good),
        &["cannot read", "none"],
    );
    refused(&line(folder.path(), &good), &["not a regular file"]);
    refused(
        &line(Path::new("/dev/zero"), &good),
        &["not a regular file"],
    );
    // Waiting for a pipe's writer would never end.
    let pipe = folder.path().join("pipe");
    let made = std::process::Command::new("mkfifo")
        .arg(&pipe)
        .status()
        .unwrap();
    assert!(made.success());
    refused(&line(&pipe, &good), &["not a regular file"]);
}
