//! Runs the command, and makes a machine for it to look at.
#![allow(dead_code, reason = "each test uses a part")]

use assert_cmd::Command;
use std::fs;

pub fn command(arguments: &[&str]) -> std::process::Command {
    let mut command = std::process::Command::new(assert_cmd::cargo::cargo_bin("pinfold"));
    command
        .args(arguments)
        .env_remove("LD_PRELOAD")
        .env_remove("PINFOLD_POLICY");
    command
}

/// Returns a command's standard output, standard error and exit status.
pub fn said(command: std::process::Command) -> (String, String, Option<i32>) {
    let output = Command::from_std(command).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (
        text(&output.stdout),
        text(&output.stderr),
        output.status.code(),
    )
}

/// Returns whether policies can be set here.
pub fn works() -> bool {
    pinfold(&["policy", "local"]).2 == Some(0)
}

pub fn pinfold(arguments: &[&str]) -> (String, String, Option<i32>) {
    said(command(arguments))
}

pub fn json(arguments: &[&str]) -> serde_json::Value {
    let (out, error, _) = pinfold(arguments);
    serde_json::from_str(&out).unwrap_or_else(|_| panic!("{out}{error}"))
}

pub fn numbers(value: &serde_json::Value) -> Vec<u64> {
    let items = value.as_array().unwrap().iter();
    items.map(|item| item.as_u64().unwrap()).collect()
}

/// Returns a field of each item of an array.
pub fn numbers_of(items: &serde_json::Value, field: &str) -> Vec<u64> {
    let items = items.as_array().unwrap().iter();
    items.map(|item| item[field].as_u64().unwrap()).collect()
}

/// Makes the files of a machine with five nodes in a row. Node 3 has no memory, node 4 has no CPUs,
/// and node 1 has weight 3. The process may use the memory of nodes 0 to 3, and runs on node 1.
pub fn machine() -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    let write = |file: &str, text: &str| {
        let path = root.path().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    write("sys/devices/system/cpu/online", "0-7\n");
    write("sys/devices/system/cpu/possible", "0-7\n");
    write("sys/devices/system/node/online", "0-4\n");
    write("sys/devices/system/node/has_memory", "0-2,4\n");
    for node in 0..5usize {
        let folder = format!("sys/devices/system/node/node{node}");
        let row: Vec<String> = (0..5usize)
            .map(|to| (10 + 10 * node.abs_diff(to)).to_string())
            .collect();
        write(&format!("{folder}/distance"), &row.join(" "));
        let cpus = match node {
            4 => String::new(),
            _ => format!("{}-{}\n", 2 * node, 2 * node + 1),
        };
        write(&format!("{folder}/cpulist"), &cpus);
    }
    let weights = "sys/kernel/mm/mempolicy/weighted_interleave";
    write(&format!("{weights}/node1"), "3\n");
    write("proc/self/status", "Name:\tcat\nMems_allowed_list:\t0-3\n");
    // The process runs on CPU 3, which belongs to node 1.
    let numbers: Vec<String> = (4..53).map(|number| number.to_string()).collect();
    let stat = numbers.join(" ").replace(" 39 ", " 3 ");
    write("proc/self/stat", &format!("7 (a) b) S {stat}\n"));
    write("proc/sys/kernel/osrelease", "6.1.0-test\n");
    root
}
