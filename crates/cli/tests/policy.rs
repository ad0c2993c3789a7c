//! `pinfold policy`, and what `doctor` reports about policies. The tests work with one node or
//! many.

mod filter;
mod shown;
mod texts;

use filter::forbid;
use shown::{command, json, machine, numbers, pinfold, said, works};
use std::path::Path;
use texts::assert_has;

/// The system calls of memory policies.
const CALLS: [libc::c_long; 3] = [
    libc::SYS_set_mempolicy,
    libc::SYS_get_mempolicy,
    libc::SYS_mbind,
];

fn on(root: &Path, arguments: &[&str]) -> (String, String, Option<i32>) {
    let mut command = command(&["policy", "--root"]);
    command.arg(root).args(arguments);
    said(command)
}

#[test]
fn a_policy_is_explained() {
    let root = machine();
    let (out, error, code) = on(root.path(), &["weighted-interleave:0-1"]);
    assert_eq!((error.as_str(), code), ("", Some(0)));
    for line in [
        "policy      weighted interleave:0-1",
        "            for a tmpfs: mpol=weighted interleave:0-1",
        "nodes       names 0-1; here that means 0-1 (this process may use 0-2)",
        "weights     0 x 1, 1 x 3",
        "pages       page    0    1    2    3    4    5    6    7",
        "            node    0    1    1    1    0    1    1    1",
        "fallback    from node 0: 0 (distance 10), 1 (distance 20), 2 (distance 30); then none",
        "            from node 1: 1 (distance 10), 2 (distance 20), 0 (distance 20); then none",
        "kernel      Linux 6.1.0-test was not asked, because it is not the running kernel",
    ] {
        assert!(out.lines().any(|found| found == line), "{line}\n{out}");
    }
}

#[test]
fn flags_nodes_and_homes_are_explained() {
    let root = machine();
    for (policy, words) in [
        (
            "bind=static|balancing:0-1",
            &[
                "static: the nodes are these numbers",
                "balancing: pages may move",
            ][..],
        ),
        ("bind=static:0-1", &["those of 0-1 that are allowed then"]),
        (
            "bind=relative:0-1",
            &["at positions 0-1", "relative: the nodes are positions"],
        ),
        (
            "bind:0-1",
            &[
                "the n-th node allowed now",
                "from node 1: 1 (distance 10), 0 (distance 20); then",
            ],
        ),
        (
            "bind:0-2@0",
            &[
                "measured from node 0",
                "from node 0: 0 (distance 10), 1 (",
                "a thread's policy has no home",
            ],
        ),
        (
            "interleave",
            &[
                "names no nodes; here that means 0-2",
                "the kernel is given nodes 0-2 now, and replaces them by the nodes at the same positions",
            ],
        ),
        (
            "prefer:2",
            &[
                "node    2    2",
                "from node 2: 2 (",
                "they are a preference",
            ],
        ),
        (
            "prefer (many):0",
            &["from node 1: 0 (distance 20), 1 (distance 10), 2 ("],
        ),
        (
            "default",
            &["is local", "node    1    1", "nothing changes"],
        ),
        (
            "bind:all",
            &[
                "names all; here that means 0-2",
                "is given nodes 0-2 now, and replaces them",
            ],
        ),
        (
            "interleave=static:all",
            &["is given nodes 0-2 now, and keeps those of them"],
        ),
        ("bind=relative:0", &["the one at position 0 among"]),
    ] {
        let (out, error, code) = on(root.path(), &[policy]);
        assert_eq!(code, Some(0), "{policy}: {error}");
        for words in words {
            let home = words.contains("no home") || out.contains(words);
            assert!(home, "{policy}: {words}\n{out}");
        }
        assert_eq!(
            out.contains("tmpfs"),
            ![
                "bind=static|balancing:0-1",
                "bind:0-2@0",
                "bind:all",
                "default"
            ]
            .contains(&policy)
        );
    }
    let (out, ..) = on(root.path(), &["--from", "2", "local"]);
    assert_has(&out, &["node    2    2", "by a CPU of node 2"]);
    let (_, error, code) = on(root.path(), &["--from", "9", "local"]);
    assert_eq!(code, Some(2), "{error}");
    assert_has(&error, &["no such node", "0-4"]);
}

#[test]
fn an_unusable_policy_is_explained() {
    let root = machine();
    for (policy, words) in [
        ("bind:7", "node 7 is not there; this machine has nodes 0-4"),
        (
            "bind:3",
            "node 3 is without memory; nodes 0-2,4 have memory",
        ),
        (
            "bind:4",
            "node 4 is not allowed for this process; it may use nodes 0-2",
        ),
    ] {
        let (out, error, code) = on(root.path(), &[policy]);
        assert_eq!((error.as_str(), code), ("", Some(1)), "{out}");
        assert!(out.contains(words) && !out.contains("pages "), "{out}");
    }
    let (out, _, code) = on(root.path(), &["bind:0@7"]);
    let words = "cannot be used here: home node 7 is not there; this machine has nodes 0-4\n";
    assert!(code == Some(1) && out.contains(words), "{out}");
    let (out, _, code) = pinfold(&["policy", "bind:0@1023"]);
    let words = "home node 1023 is not there; this machine has node";
    assert!(code == Some(1) && out.contains(words), "{out}");
}

#[test]
fn a_tmpfs_needs_memory_on_every_node() {
    let root = machine();
    let folder = root.path().to_str().unwrap();
    for (policy, refused, takes) in [
        ("bind:0,4", None, true),
        ("bind:0,3", Some("node 3"), false),
        ("bind=relative:2,3,7", Some("nodes 3,7"), false),
        ("bind=balancing:3", None, false),
    ] {
        let (out, ..) = on(root.path(), &[policy]);
        let line =
            refused.map(|nodes| format!("a tmpfs here would refuse {nodes}, without memory\n"));
        let said = line.map_or(!out.contains("would refuse"), |line| out.contains(&line));
        assert!(said && out.contains("for a tmpfs") == takes, "{out}");
        let answer = json(&["policy", "--json", "--root", folder, policy]);
        assert_eq!(answer["tmpfs"], takes, "{policy}");
    }
}

#[test]
fn a_policy_that_run_refuses_is_reported() {
    let words = "`pinfold run --policy` refuses it: ";
    let root = machine();
    let folder = root.path().to_str().unwrap();
    for (policy, fault) in [
        ("bind:0-2", None),
        ("bind:0,7", Some("node 7 is not there")),
        ("bind:0@0", Some("a thread's policy has no home node")),
    ] {
        let (out, _, code) = on(root.path(), &[policy]);
        assert_eq!(code, Some(0), "{out}");
        let said = fault.map(|fault| format!("{words}{fault}"));
        let as_said = said.map_or(!out.contains(words), |said| out.contains(&said));
        assert!(as_said, "{out}");
        let answer = json(&["policy", "--json", "--root", folder, policy]);
        assert_eq!(answer["runnable"], fault.is_none(), "{policy}");
    }
    if works() {
        let (out, _, code) = pinfold(&["policy", "bind:0,1022-1023"]);
        let said = format!("{words}nodes 1022-1023 are not there");
        assert!(code == Some(0) && out.contains(&said), "{out}");
    }
}

#[test]
fn the_variables_policy_is_explained() {
    let with = |policy: &str, arguments: &[&str]| {
        let mut command = command(arguments);
        command.env("PINFOLD_POLICY", policy);
        said(command)
    };
    let (out, error, code) = with("bind:0-x", &["policy"]);
    assert_eq!((out.as_str(), code), ("", Some(2)));
    let named = error.starts_with("pinfold: PINFOLD_POLICY: \"0-x\" at byte 5");
    assert!(named && error.ends_with("         ^~~\n"), "{error}");
    let (out, _, code) = with("bind:1023", &["policy"]);
    let words = ["from PINFOLD_POLICY", "node 1023 is not there"];
    assert_eq!(code, Some(1));
    assert!(words.iter().all(|words| out.contains(words)), "{out}");
    let (out, _, code) = with("bind:0@0", &["policy"]);
    assert!(code == Some(1) && out.contains("no home node"), "{out}");
    // The argument takes precedence over the variable.
    let (out, ..) = with("bind:0-x", &["policy", "local"]);
    assert!(!out.contains("PINFOLD"), "{out}");
    assert_has(&out, &["policy      local\n"]);
    for (policy, words) in [
        ("bind:0-x", "PINFOLD_POLICY is not understood"),
        ("bind:0", "PINFOLD_POLICY is understood: bind:0"),
    ] {
        let (out, _, code) = with(policy, &["doctor"]);
        assert!(code == Some(0) && out.contains(words), "{out}");
    }
    if works() {
        let (out, error, code) = with("interleave:0", &["policy"]);
        assert_eq!((error.as_str(), code), ("", Some(0)));
        assert_has(&out, &["policy      interleave:0\n", "from PINFOLD_POLICY"]);
        // `run` sets the policy itself, so it applies even without the library.
        let script = "cat /proc/self/numa_maps; echo ${PINFOLD_POLICY-unset}";
        let mut plain = command(&["run", "--", "env", "-u", "LD_PRELOAD", "sh", "-c", script]);
        plain.env("PINFOLD_POLICY", "interleave:0");
        let (maps, _, code) = said(plain);
        assert!(code == Some(0) && maps.ends_with("\nunset\n"), "{maps}");
        assert_has(&maps, &[" interleave:0 "]);
    }
}

#[test]
fn a_wrong_text_is_shown_with_a_caret() {
    let (out, error, code) = pinfold(&["policy", "bind:0-x"]);
    assert_eq!((out.as_str(), code), ("", Some(2)));
    assert_eq!(
        error,
        "pinfold: \"0-x\" at byte 5: not a list of nodes; write numbers and ranges, like 0-3,8\n    bind:0-x\n         ^~~\n"
    );
    for (text, words) in [
        ("", "no such mode"),
        ("bind", "bind needs nodes"),
        ("bind:", "no nodes behind the colon"),
        ("bind:,", "no nodes behind the colon"),
        ("local:0", "takes no nodes"),
        ("prefer:0-0", "prefer takes one node"),
        ("bind=static|relative:0", "exclude each other"),
        ("interleave=fast:0", "no such flag"),
        ("bind:1024", "below 1024"),
        ("interleave:0@0", "home node"),
        ("bind:\u{1b}[31m", "?[31m"),
    ] {
        for arguments in [
            &["policy", text][..],
            &["run", "--policy", text, "--", "true"],
        ] {
            let (out, error, code) = pinfold(arguments);
            assert_eq!((out.as_str(), code), ("", Some(2)), "{text}: {error}");
            assert!(
                error.contains(words) && error.contains('^'),
                "{text}: {error}"
            );
            assert!(!error.contains('\u{1b}'), "{error:?}");
        }
    }
    use std::os::unix::ffi::OsStrExt;
    let mut strange = command(&["policy"]);
    strange.arg(std::ffi::OsStr::from_bytes(b"bind:\xff"));
    let (_, error, code) = said(strange);
    assert!(code == Some(2) && error.contains("UTF-8"), "{error}");
}

/// The kernel passes no argument or variable above 128 KiB.
#[test]
fn errors_about_the_longest_arguments_are_short() {
    let long = "bind:0,".repeat(18_000);
    for (name, value) in [("--policy", true), ("PINFOLD_POLICY", false)] {
        let mut command = match value {
            true => command(&["run", "--policy", &long, "--", "true"]),
            false => command(&["run", "--", "true"]),
        };
        if !value {
            command.env(name, &long);
        }
        let (out, error, code) = said(command);
        assert_eq!((out.as_str(), code), ("", Some(2)));
        assert!(error.len() < 1000 && error.contains(name), "{error}");
    }
    let (_, error, code) = pinfold(&["policy", &long]);
    assert!(code == Some(2) && error.len() < 1000, "{error}");
    assert_has(&error, &["8192"]);
}

#[test]
fn forbidden_calls_are_named_and_nothing_starts() {
    for (errno, word) in [(libc::EPERM, "EPERM"), (libc::ENOSYS, "ENOSYS")] {
        for calls in [&CALLS[..], &CALLS[..1]] {
            let filtered = |arguments: &[&str]| {
                let mut command = command(arguments);
                forbid(&mut command, calls, errno);
                said(command)
            };
            let (out, error, code) =
                filtered(&["run", "--policy", "bind:0", "--", "echo", "started"]);
            assert_eq!((out.as_str(), code), ("", Some(2)), "{error}");
            assert_has(
                &error,
                &["set_mempolicy", word, "filter", "Nothing was started"],
            );
            let (out, error, code) = filtered(&["run", "--", "echo", "started"]);
            assert_eq!((out.as_str(), code), ("started\n", Some(0)), "{error}");
            let (out, _, code) = filtered(&["policy", "bind:0"]);
            assert_eq!(code, Some(1), "{out}");
            assert_has(&out, &["rejects it", word]);
            let (out, ..) = filtered(&["doctor"]);
            let line = out.lines().find(|line| line.starts_with("memory policies"));
            let line = line.unwrap_or_default();
            assert!(line.contains(" note ") && line.contains(word), "{out}");
        }
        let mut own = command(&["policy"]);
        forbid(&mut own, &CALLS, errno);
        let (_, error, code) = said(own);
        assert_eq!(code, Some(1), "{error}");
        assert_has(&error, &["get_mempolicy", word]);
    }
}

#[test]
fn json_has_the_same_facts() {
    let root = machine();
    let folder = root.path().to_str().unwrap();
    let policy = json(&[
        "policy",
        "--json",
        "--root",
        folder,
        "interleave=relative:0,2",
    ]);
    assert_eq!(policy["text"], "interleave=relative:0,2");
    assert_eq!(policy["mode"], "interleave");
    assert_eq!(policy["flags"][0]["name"], "relative");
    assert_eq!(numbers(&policy["nodes"]), [0, 2]);
    assert_eq!(numbers(&policy["allowed"]), [0, 1, 2]);
    assert_eq!(numbers(&policy["pages"]), [0, 2, 0, 2, 0, 2, 0, 2]);
    assert_eq!(policy["fallback"][1]["nodes"][1]["node"], 1);
    assert_eq!(
        (&policy["from"], &policy["usable"]),
        (&1.into(), &true.into())
    );
}

#[test]
fn doctor_reports_the_policy() {
    if !works() {
        return;
    }
    let (out, ..) = pinfold(&[
        "run",
        "--policy",
        "bind:0",
        "--",
        assert_cmd::cargo::cargo_bin("pinfold").to_str().unwrap(),
        "doctor",
    ]);
    let line = out
        .lines()
        .find(|line| line.starts_with("memory policies"))
        .unwrap();
    assert_has(
        line,
        &["can be set; this process's policy is bind:0; it may use node"],
    );
}
