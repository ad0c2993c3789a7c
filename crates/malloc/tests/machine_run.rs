//! Programs started with a policy, on a machine with several nodes.

use std::process::Command;

/// Takes and touches a gibibyte, prints how many KiB of its largest mapping lie on each node, and
/// runs `pinfold numastat` on itself.
const PROGRAM: &str = r"
import os, re
block = bytearray(1 << 30)
best, nodes = 0, {}
for line in open('/proc/self/numa_maps'):
    size = int(re.search(r'kernelpagesize_kB=(\d+)', line + ' kernelpagesize_kB=4').group(1))
    found = {int(n): int(p) * size for n, p in re.findall(r'\bN(\d+)=(\d+)', line)}
    if sum(found.values()) > best:
        best, nodes = sum(found.values()), found
for node in sorted(nodes):
    print('node', node, nodes[node], flush=True)
os.system('pinfold numastat %d' % os.getpid())
";

fn said(arguments: &[&str]) -> String {
    let output = Command::new("pinfold").args(arguments).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the KiB on each node that the program printed.
fn nodes(text: &str) -> Vec<(usize, usize)> {
    let lines = text.lines().filter_map(|line| line.strip_prefix("node "));
    lines
        .map(|line| {
            let (node, kib) = line.split_once(' ').unwrap();
            (node.parse().unwrap(), kib.parse().unwrap())
        })
        .collect()
}

/// Returns the kernel's list of the nodes with memory, and the least free MiB of these nodes.
fn machine() -> (String, usize) {
    let read = |file: String| std::fs::read_to_string(file).unwrap();
    let list = read("/sys/devices/system/node/has_memory".to_owned());
    let free = numbers(&list).into_iter().map(|node| {
        let text = read(format!("/sys/devices/system/node/node{node}/meminfo"));
        let line = text.lines().find(|line| line.contains("MemFree:")).unwrap();
        let kib: usize = line.split_whitespace().nth(3).unwrap().parse().unwrap();
        kib / 1024
    });
    let least = free.min().unwrap();
    (list.trim().to_owned(), least)
}

/// Returns the numbers of a list like `0-2,5`.
fn numbers(list: &str) -> Vec<usize> {
    let parse = |number: &str| number.trim().parse::<usize>().unwrap();
    let range = |item: &str| match item.split_once('-') {
        Some((first, last)) => parse(first)..=parse(last),
        None => parse(item)..=parse(item),
    };
    list.split(',').flat_map(range).collect()
}

#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn a_gibibyte_of_python_lies_evenly_on_all_nodes() {
    let (online, free) = machine();
    let shares = numbers(&online).len();
    if shares < 2 {
        eprintln!("skipped: one node");
        return;
    }
    // Each node needs room for its share, and for what the kernel keeps free, also for huge pages.
    if free < 1024 / shares + 150 {
        eprintln!("skipped: a node has {free} MiB free, too few for a share of a gibibyte");
        return;
    }
    let policy = format!("interleave:{online}");
    let text = said(&["run", "--policy", &policy, "--", "python3", "-c", PROGRAM]);
    let nodes = nodes(&text);
    let total: usize = nodes.iter().map(|(_, kib)| kib).sum();
    assert!(nodes.len() > 1 && total >= 1 << 20, "{text}");
    for (node, kib) in &nodes {
        let share = total / nodes.len();
        assert!(
            kib.abs_diff(share) * 100 <= share,
            "node {node}: {kib} of {total} KiB\n{text}"
        );
    }
    println!("{text}");
    // The command prints private memory in MiB, node after node: what the program saw, and a little
    // more.
    let private = text
        .lines()
        .find(|line| line.starts_with("Private"))
        .expect(&text);
    let columns: Vec<f64> = private
        .split_whitespace()
        .skip(1)
        .map(|n| n.parse().unwrap())
        .collect();
    for ((_, kib), column) in nodes.iter().zip(&columns) {
        let mib = *kib as f64 / 1024.0;
        assert!((mib - 1.0..mib + 64.0).contains(column), "{text}");
    }
}

#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn a_bound_program_stays_on_its_node() {
    let program = PROGRAM.replace("1 << 30", "100 << 20");
    let last = *numbers(&machine().0).last().unwrap();
    let policy = format!("bind:{last}");
    let text = said(&["run", "--policy", &policy, "--", "python3", "-c", &program]);
    let nodes = nodes(&text);
    assert_eq!(
        nodes.iter().map(|(node, _)| *node).collect::<Vec<_>>(),
        [last],
        "{text}"
    );
}

#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn missing_nodes_are_refused() {
    let output = Command::new("pinfold")
        .args([
            "run",
            "--policy",
            "interleave:0,900",
            "--",
            "echo",
            "started",
        ])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(output.stdout.is_empty());
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("900"), "{error}");
}

/// Binds the thread to each node by `set_mempolicy`, which the preloaded library has, and prints on
/// which nodes the pages of a pool then lie.
const POOL: &str = r"
import ctypes, os, sys
library = ctypes.CDLL(None)
library.pinfold_pages_create.restype = library.pinfold_pages_alloc.restype = ctypes.c_void_p
create, alloc = library.pinfold_pages_create, library.pinfold_pages_alloc
os.sched_setaffinity(0, [0])
pool = create(b'threads')
for node in map(int, sys.argv[1:]):
    mask = ctypes.c_ulong(1 << node)
    assert library.set_mempolicy(2, ctypes.byref(mask), ctypes.c_ulong(65)) == 0
    found = set()
    for place in range(20):
        page = alloc(ctypes.c_void_p(pool), ctypes.c_ulong(place))
        ctypes.memset(page, 1, 1)
        found.add(library.pinfold_node_of(ctypes.c_void_p(page)))
    print(node, *found)
";

#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn a_pool_of_a_preloaded_program_follows_set_mempolicy() {
    let nodes = numbers(&machine().0);
    let names: Vec<_> = nodes.iter().map(usize::to_string).collect();
    let mut words = vec!["run", "--", "python3", "-c", POOL];
    words.extend(names.iter().map(String::as_str));
    let expected: String = nodes
        .iter()
        .map(|node| format!("{node} {node}\n"))
        .collect();
    assert_eq!(said(&words), expected);
}
