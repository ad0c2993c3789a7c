//! `pinfold numastat`.

mod shown;

use shown::{command, json, machine, numbers, pinfold};
use std::fs;
use std::process::Stdio;

#[test]
fn pages_of_processes_are_counted_by_node() {
    let mut child = command(&["run", "--", "sleep", "60"])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let pid = child.id().to_string();
    let own = std::process::id().to_string();
    let (out, error, code) = pinfold(&["numastat", &pid, &own]);
    if code == Some(2) && error.contains("without NUMA") {
        child.kill().unwrap();
        child.wait().unwrap();
        return;
    }
    assert_eq!((error.as_str(), code), ("", Some(0)));
    assert_eq!(
        out.matches("Per-node process memory usage (in MiB)")
            .count(),
        2,
        "{out}"
    );
    assert!(
        out.contains("Node 0") && out.contains(&format!("PID {own}")),
        "{out}"
    );
    let answer = json(&["numastat", "--json", &own]);
    let process = &answer["numastat"][0];
    let total: u64 = numbers(&process["total"]).iter().sum();
    let parts = ["huge", "heap", "stack", "private"];
    let parts: u64 = parts.iter().flat_map(|part| numbers(&process[part])).sum();
    assert!(total > 100 << 10 && total == parts, "{answer}");
    assert_eq!(process["pid"].to_string(), own);
    child.kill().unwrap();
    // The test has not waited for the child yet. While it ends, it has no memory for a moment.
    let mut ended = pinfold(&["numastat", &pid]);
    for _ in 0..100 {
        if ended.1.contains("has ended") {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
        ended = pinfold(&["numastat", &pid]);
    }
    assert!(
        ended.2 == Some(2) && ended.1.contains("has ended"),
        "{ended:?}"
    );
    child.wait().unwrap();
    // A process that exists is shown even if another one does not.
    let (out, error, code) = pinfold(&["numastat", "4194305", &own]);
    assert!(
        out.contains(&own) && error.contains("no process 4194305"),
        "{error}"
    );
    assert_eq!(code, Some(2));
    for wrong in ["0", "-1", "self", "99999999999", "+1", ""] {
        let (_, error, code) = pinfold(&["numastat", wrong]);
        assert_eq!(code, Some(2), "{wrong}");
        assert!(wrong == "-1" || error.contains("a process id"), "{error}");
    }
    assert_eq!(pinfold(&["numastat", "-p", &own]).2, Some(0));
}

#[test]
fn errors_say_why_a_process_cannot_be_shown() {
    let root = machine();
    let write = |file: &str, text: &str| {
        let path = root.path().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    let folder = root.path().to_str().unwrap();
    let numastat = || pinfold(&["numastat", "--root", folder, "7"]);
    assert!(numastat().1.contains("no process 7"));
    let numbers: Vec<String> = (4..53).map(|number| number.to_string()).collect();
    let stat = |state: &str| format!("7 (a) (b) {state} {}\n", numbers.join(" "));
    write("proc/7/stat", &stat("Z"));
    assert!(numastat().1.contains("has ended"));
    write("proc/7/stat", &stat("S"));
    assert!(numastat().1.contains("without NUMA"));
    write("proc/7/numa_maps", "");
    write("proc/7/status", "Name:\tkthreadd\n");
    assert!(numastat().1.contains("it is a kernel thread"));
    write(
        "proc/7/numa_maps",
        "1000 bind:2 anon=2 N2=2 N7=256 kernelpagesize_kB=4\n2000 default huge N1=1 kernelpagesize_kB=2048\n",
    );
    let (out, error, code) = numastat();
    assert_eq!((error.as_str(), code), ("", Some(0)));
    let row = |name: &str| {
        let line = out.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_ascii_whitespace()
            .skip(1)
            .collect::<Vec<_>>()
            .join(" ")
    };
    // The table has nodes 0 to 4, which are online, and node 7, which has pages.
    assert_eq!(row("Huge"), "0.00 2.00 0.00 0.00 0.00 0.00 2.00");
    assert_eq!(row("Private"), "0.00 0.00 0.01 0.00 0.00 1.00 1.01");
    assert_eq!(row("Total"), "0.00 2.00 0.01 0.00 0.00 1.00 3.01");
    assert!(out.contains("PID 7 (a) (b)"), "{out}");
    write("proc/7/numa_maps", "1000 default N0=1\n");
    let (_, error, code) = numastat();
    assert!(
        code == Some(2) && error.contains("process 7") && error.contains("Linux 3.19"),
        "{error}"
    );
}

#[test]
fn a_process_of_another_user_is_not_shown() {
    // Process 1 belongs to root. The test applies only if this user may not look at it.
    let refused = fs::read("/proc/1/numa_maps")
        .err()
        .map(|error| error.kind());
    if refused == Some(std::io::ErrorKind::PermissionDenied) {
        let (out, error, code) = pinfold(&["numastat", "1"]);
        assert_eq!((out.as_str(), code), ("", Some(2)));
        assert!(error.contains("as its owner, or as root"), "{error}");
    }
}
