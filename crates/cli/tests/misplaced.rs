//! `pinfold policy --check` and `pinfold migrate`. On the test machine, crates/pinfold's
//! `machine_misplaced` runs both on real nodes.

mod shown;
mod texts;

use shown::{command, json, machine, numbers, numbers_of, pinfold, said};
use std::fs;
use std::path::Path;
use tempfile::TempDir;
use texts::assert_has;

/// Makes a machine with process 7, whose one thread may run on some CPUs.
fn process(numa_maps: &str, cpus: &str) -> TempDir {
    let root = machine();
    let folder = root.path().join("proc/7");
    fs::create_dir_all(folder.join("task/7")).unwrap();
    let numbers: Vec<String> = (4..53).map(|number| number.to_string()).collect();
    let stat = format!("7 (a\u{1b}[31mb) S {}\n", numbers.join(" "));
    fs::write(folder.join("stat"), stat).unwrap();
    let status = format!("Name:\ta\nVmSize:\t9 kB\nCpus_allowed_list:\t{cpus}\n");
    fs::write(folder.join("status"), &status).unwrap();
    fs::write(folder.join("task/7/status"), &status).unwrap();
    fs::write(folder.join("numa_maps"), numa_maps).unwrap();
    root
}

fn check(root: &Path) -> (String, String, Option<i32>) {
    let mut command = command(&["policy", "--check", "7", "--root"]);
    command.arg(root);
    said(command)
}

fn answer(root: &Path) -> serde_json::Value {
    let root = root.to_str().unwrap();
    json(&["policy", "--check", "7", "--json", "--root", root])
}

/// Each mode decides which nodes are wrong.
#[test]
fn each_policy_names_the_wrong_nodes() {
    for (policy, misplaced) in [
        ("bind:0", 6),
        ("bind:0-1", 4),
        ("bind=static:1-2", 1),
        // The kernel prints the nodes that the policy has, not positions.
        ("bind=relative:2", 3),
        ("bind=static|balancing:0,2", 2),
        ("prefer:1", 5),
        ("prefer (many):0-1", 4),
        ("prefer (many)=static:2", 3),
        ("interleave:0-1", 4),
        ("weighted interleave:1,2", 1),
        ("interleave:0-2", 0),
    ] {
        let line = format!("1000 {policy} anon=7 N0=1 N1=2 N2=4 kernelpagesize_kB=4\n");
        let root = process(&line, "0-7");
        let answer = answer(root.path());
        assert_eq!(answer["misplaced"]["pages"], misplaced, "{policy}");
        let (out, error, code) = check(root.path());
        assert_eq!((error.as_str(), code), ("", Some(i32::from(misplaced > 0))));
        match misplaced {
            0 => assert_has(&out, &["nothing misplaced: 7 pages (0.0 MiB) lie"]),
            _ => assert_has(&out, &["do not lie where their policy wants them", policy]),
        }
    }
}

#[test]
fn the_report_names_mappings_and_nodes() {
    let root = process(
        "10000 bind:1 heap anon=10 N0=4 N1=6 kernelpagesize_kB=4\n\
         20000 prefer:2 file=/dev/hugepages/x huge N1=3 kernelpagesize_kB=2048\n\
         30000 bind:2 file=/memfd:pool\\040(deleted) mapped=5 N2=4 N4=1 kernelpagesize_kB=4\n\
         40000 bind:1\n",
        "0-7",
    );
    let (out, error, code) = check(root.path());
    assert_eq!((error.as_str(), code), ("", Some(1)));
    let lines: Vec<String> = out
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect();
    assert_eq!(
        lines,
        [
            "process 7 (a\\u001b[31mb): 8 pages (6.0 MiB) do not lie where their policy wants them",
            "",
            "address wanted misplaced kB/page pages by node policy memory",
            "10000 1 4 4 0: 4, 1: 6 bind:1 heap",
            "20000 2 3 2048 1: 3 prefer:2 /dev/hugepages/x",
            "30000 2 1 4 2: 4, 4: 1 bind:2 /memfd:pool\\040(deleted)",
        ],
        "{out}"
    );
    let answer = answer(root.path());
    assert_eq!(answer["misplaced"]["bytes"], (3 << 21) + (5 << 12));
    assert_eq!(answer["placed"]["pages"], 10);
    let second = &answer["mappings"][1];
    assert_eq!(
        (&second["misplaced_pages"], numbers(&second["wanted"])),
        (&3.into(), vec![2])
    );
    assert_eq!(second["pages"][0]["node"], 1);
}

/// What the counts do not prove is not counted as misplaced.
#[test]
fn what_is_not_known_is_reported_as_unknown() {
    // Three of four pages are a file's, so at least one of those on node 0 may be too.
    let file = "1000 bind:1 file=/usr/lib/x anon=1 mapped=4 N0=2 N1=2 kernelpagesize_kB=4\n";
    let more = "1000 bind:1 file=/usr/lib/x anon=3 mapped=4 N0=2 N1=2 kernelpagesize_kB=4\n";
    let own = "1000 default anon=5 N0=2 N1=3 kernelpagesize_kB=4\n";
    // The kernel keeps the first 63 bytes. The last number may have had more digits.
    let nodes = "0,".repeat(28) + "10";
    let cut = format!("1000 bind:{nodes} anon=1 N3=1 kernelpagesize_kB=4\n");
    assert_eq!(cut.split(' ').nth(1).unwrap().len(), 63);
    let odd = "1000 someday:1 anon=1 N0=1 kernelpagesize_kB=4\n";
    for (line, cpus, misplaced, unknown, code) in [
        (file, "0-7", 0, ("file", 2), 0),
        (more, "0-7", 1, ("file", 1), 1),
        (own, "0-7", 0, ("local", 5), 0),
        (own, "nonsense", 0, ("local", 5), 0),
        // All threads run on node 1, or on node 3, which has no memory: node 2 is as near as 4.
        (own, "2-3", 2, ("local", 0), 1),
        (own, "6", 5, ("local", 0), 1),
        // Threads on node 1 may use the memory of node 0 only.
        (own, "2-3\nMems_allowed_list:\t0", 3, ("local", 0), 1),
        (own, "2-3\nMems_allowed_list:\t9", 0, ("local", 5), 0),
        (&cut, "0-7", 0, ("text", 1), 0),
        (odd, "0-7", 0, ("text", 1), 0),
    ] {
        let root = process(line, cpus);
        let answer = answer(root.path());
        assert_eq!(answer["misplaced"]["pages"], misplaced, "{line}: {answer}");
        assert_eq!(answer["unknown"][unknown.0]["pages"], unknown.1, "{line}");
        let (out, error, status) = check(root.path());
        assert_eq!((error.as_str(), status), ("", Some(code)), "{line}");
        assert_eq!(out.contains("unknown: "), unknown.1 > 0, "{out}");
    }
    let (out, ..) = check(process(own, "0-7").path());
    assert_has(&out, &["the policy of no page tells its node"]);
}

/// A process can have any number of mappings, with names of any bytes.
#[test]
fn many_mappings_with_long_names_give_a_short_report() {
    let name = "\u{1b}[2J".repeat(1000);
    let line = |nth: usize| {
        let pages = nth % 7 + 1;
        format!("{nth:x}000 bind:1 file=/dev/shm/{name} N0={pages} kernelpagesize_kB=4\n")
    };
    let root = process(&(0..3000).map(line).collect::<String>(), "0-7");
    let (out, error, code) = check(root.path());
    assert_eq!((error.as_str(), code), ("", Some(1)));
    assert!(
        out.len() < 2 << 20 && !out.contains('\u{1b}'),
        "{}",
        out.len()
    );
    assert_has(&out, &["and 2500 mappings with fewer misplaced bytes"]);
    let answer = answer(root.path());
    assert_eq!(answer["mappings"].as_array().unwrap().len(), 500);
    assert_eq!(answer["left_out_mappings"], 2500);
    let pages: u64 = (0..3000).map(|nth| nth % 7 + 1).sum();
    assert_eq!(answer["misplaced"]["pages"], pages);
}

#[test]
fn a_process_that_cannot_be_read_is_an_error() {
    let root = process("1000 bind:1 N0=x kernelpagesize_kB=4\n", "0-7");
    let (_, error, code) = check(root.path());
    assert_eq!(code, Some(2));
    assert_has(&error, &["process 7", "line 1", "N0=x"]);
    for words in [
        &["policy", "--check", "0"][..],
        &["policy", "--check", "7", "bind:0"],
        &["migrate", "7", "0"],
        &["migrate", "0", "0", "0"],
        &["migrate", "7", "x", "0"],
        &["migrate", "7", "0", ""],
    ] {
        assert_eq!(pinfold(words).2, Some(2), "{words:?}");
    }
}

#[test]
fn pages_of_a_running_process_are_checked_and_moved() {
    let own = std::process::id().to_string();
    let (out, error, code) = pinfold(&["policy", "--check", &own]);
    if error.contains("without NUMA") {
        return;
    }
    assert_eq!((error.as_str(), code), ("", Some(0)), "{out}");
    assert_has(&out, &["nothing misplaced"]);
    let (out, error, code) = pinfold(&["migrate", &own, "all", "all"]);
    if !shown::works() || error.contains("ENOSYS") {
        assert_eq!(code, Some(2), "{error}");
        return;
    }
    assert_eq!((error.as_str(), code), ("", Some(0)), "{out}");
    assert_has(
        &out,
        &["pages that could not be moved: 0", "before", "after"],
    );
    let answer = json(&["migrate", "--json", &own, "all", "all"]);
    let before: u64 = numbers_of(&answer["nodes"], "before_bytes").iter().sum();
    assert!(before > 100 << 10, "{answer}");
    assert_eq!(answer["not_moved_pages"], 0);
    for (words, said) in [
        (["migrate", "4194305", "all", "all"], "no process 4194305"),
        (
            ["migrate", &own, "1023", "all"],
            "FROM: node 1023 is not there; this machine has",
        ),
        (
            ["migrate", &own, "all", "1023"],
            "TO: node 1023 is not there; this machine has",
        ),
    ] {
        let (_, error, code) = pinfold(&words);
        assert_eq!(code, Some(2), "{error}");
        assert!(error.contains(said), "{error}");
    }
}

/// A number in `/proc` of another namespace would mean another process.
#[test]
fn numbers_of_another_pid_namespace_are_refused() {
    let own = std::process::id().to_string();
    let apart = |words: &[&str]| {
        let mut command = std::process::Command::new("unshare");
        command.args(["--pid", "--fork"]).args(words);
        said(command)
    };
    if apart(&["true"]).2 != Some(0) {
        eprintln!("this user may make no PID namespace");
        return;
    }
    let command = assert_cmd::cargo::cargo_bin("pinfold");
    let (_, error, code) = apart(&[command.to_str().unwrap(), "migrate", &own, "all", "all"]);
    assert_eq!(code, Some(2), "{error}");
    assert_has(&error, &["another PID namespace"]);
}
