//! `pinfold numastat`.

mod shown;
mod texts;

use shown::{command, json, machine, numbers_of, pinfold};
use std::fs;
use std::process::Stdio;
use texts::assert_has;

#[test]
fn pages_of_processes_are_counted_by_node() {
    let mut child = command(&["run", "--", "sleep", "60"])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let pid = child.id().to_string();
    let own = std::process::id().to_string();
    let (out, error, code) = pinfold(&["numastat", "-v", &pid, &own]);
    if code == Some(2) && error.contains("without NUMA") {
        child.kill().unwrap();
        child.wait().unwrap();
        return;
    }
    assert_eq!((error.as_str(), code), ("", Some(0)));
    assert_eq!(
        out.matches("Per-node process memory usage (in MBs)")
            .count(),
        2,
        "{out}"
    );
    assert_has(&out, &["Node 0", &format!("PID {own}")]);
    let answer = json(&["numastat", "--json", &own]);
    let process = &answer["processes"][0];
    let sum = |field| numbers_of(&process["nodes"], field).iter().sum::<u64>();
    let total = sum("total_bytes");
    let parts = ["huge_bytes", "heap_bytes", "stack_bytes", "private_bytes"];
    let parts: u64 = parts.into_iter().map(sum).sum();
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
    for wrong in ["0", "-1", "99999999999", ""] {
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
    assert_eq!(code, Some(2), "{error}");
    assert_has(&error, &["process 7", "Linux 3.19"]);
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

/// Writes the files of five nodes. Node 1 has no huge pages, and the numbers grow with the node.
fn write_nodes(root: &std::path::Path) {
    for node in 0..5 {
        let folder = root.join(format!("sys/devices/system/node/node{node}"));
        fs::create_dir_all(&folder).unwrap();
        let pages = 256 * (node + 1);
        let numastat = format!("numa_hit {pages}\ninterleave_hit {node}\n");
        fs::write(folder.join("numastat"), numastat).unwrap();
        let meminfo = format!(
            "Node {node} MemTotal:       {} kB\nNode {node} Other:   9 kB\nNode {node} HugePages_Total:     {node}\n",
            2048 * (node + 1)
        );
        fs::write(folder.join("meminfo"), meminfo).unwrap();
    }
}

#[test]
fn the_system_is_shown_in_the_layout_of_numastat() {
    let root = machine();
    write_nodes(root.path());
    let folder = root.path().to_str().unwrap();
    let shown = |flag: &str| {
        let mut words = vec!["numastat", "--root", folder];
        words.extend((!flag.is_empty()).then_some(flag));
        let (out, error, code) = pinfold(&words);
        assert_eq!((error.as_str(), code), ("", Some(0)));
        out
    };
    let pages = "                           node0           node1           node2           node3           node4\n\
        numa_hit                     256             512             768            1024            1280\n\
        interleave_hit                 0               1               2               3               4\n";
    assert_eq!(shown(""), pages);
    let memory = shown("-m");
    let lines: Vec<&str> = memory.lines().collect();
    assert_eq!(lines[1], "Per-node system memory usage (in MBs):");
    let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(words(lines[4]), "MemTotal 2.00 4.00 6.00 8.00 10.00 30.00");
    assert_eq!(
        words(lines[5]),
        "HugePages_Total 0.00 2.00 4.00 6.00 8.00 20.00"
    );
    assert_eq!(lines.len(), 6, "{memory}");
    let allocations = shown("-n");
    assert!(allocations.contains("\nPer-node numastat info (in MBs):\n"));
    assert!(allocations.contains("\nInterleave_Hit "), "{allocations}");
    let answer = json(&["numastat", "--json", "--root", folder]);
    let nodes = answer["system"]["nodes"].as_array().unwrap();
    let memory: Vec<_> = nodes.iter().map(|node| &node["memory_bytes"]).collect();
    let of = |name: &str| memory.iter().map(|of| of[name].as_u64().unwrap()).collect();
    let (total, other): (Vec<u64>, Vec<u64>) = (of("MemTotal"), of("Other"));
    assert_eq!(total, [2, 4, 6, 8, 10].map(|mib| mib << 20));
    assert_eq!(other, [9 << 10; 5]);
}

/// Compares the words and the columns, because the numbers change all the time.
#[test]
fn tables_have_the_words_of_numastat_where_it_is_installed() {
    let parent = std::os::unix::process::parent_id().to_string();
    let own = std::process::id().to_string();
    for flags in [
        &[][..],
        &["-m"],
        &["-n"],
        &["-p", &own],
        &["-p", &own, &parent],
        &["-v", "-p", &own, &parent],
    ] {
        let Ok(output) = std::process::Command::new("numastat").args(flags).output() else {
            eprintln!("numastat is not installed: nothing to compare with");
            return;
        };
        let theirs = String::from_utf8_lossy(&output.stdout).into_owned();
        let theirs = theirs.lines().filter(|line| !line.starts_with("Token "));
        let mut words = vec!["numastat"];
        words.extend(flags);
        let (out, _, code) = pinfold(&words);
        if code == Some(2) {
            // A kernel without NUMA has no such files.
            return;
        }
        if out.contains("ode 3") || out.contains("ode3") {
            // `numastat` folds tables that are wider than a terminal.
            return;
        }
        let label = |line: &str| {
            (
                line.len(),
                line.split_whitespace().next().map(str::to_owned),
            )
        };
        assert_eq!(
            out.lines().map(label).collect::<Vec<_>>(),
            theirs.map(label).collect::<Vec<_>>(),
            "{flags:?}"
        );
    }
}

#[test]
fn processes_are_found_by_their_command_lines() {
    let root = machine();
    let folder = root.path().to_str().unwrap();
    let numbers: Vec<String> = (4..53).map(|number| number.to_string()).collect();
    for (pid, command) in [
        (7, "/bin/store\0--fast"),
        (8, "/bin/other\0"),
        (9, "a\0store"),
    ] {
        let process = root.path().join(format!("proc/{pid}"));
        fs::create_dir_all(&process).unwrap();
        let stat = format!("{pid} (p) S {}\n", numbers.join(" "));
        fs::write(process.join("stat"), stat).unwrap();
        fs::write(process.join("cmdline"), command).unwrap();
        let maps = "1000 default anon=1 N0=1 kernelpagesize_kB=4\n";
        fs::write(process.join("numa_maps"), maps).unwrap();
    }
    let (out, error, code) = pinfold(&["numastat", "-s=0", "--root", folder, "store"]);
    assert_eq!((error.as_str(), code), ("", Some(0)));
    let is_shown = |pid: u32| out.contains(&format!("\n{pid} (p) "));
    assert_eq!([7, 8, 9].map(is_shown), [true, false, true], "{out}");
    let (_, error, code) = pinfold(&["numastat", "--root", folder, "nowhere"]);
    assert_eq!(code, Some(2));
    assert!(error.contains("no process has \"nowhere\""), "{error}");
}
