//! `pinfold run --policy` and `PINFOLD_POLICY`, in the programs that are started.

mod shown;
mod texts;

use shown::{command, pinfold, said, works};
use texts::assert_has;

#[test]
fn programs_inherit_the_policy() {
    if !works() {
        return;
    }
    for options in [&["run"][..], &["run", "--stats"], &["run", "--hardened"]] {
        let policies = |policy: &str, program: &[&str]| {
            let all = [options, &["--policy", policy, "--"], program].concat();
            let (out, error, code) = pinfold(&all);
            assert_eq!(code, Some(0), "{error}");
            out
        };
        let maps = policies("interleave:0", &["cat", "/proc/self/numa_maps"]);
        let placed = |line: &&str| line.split(' ').nth(1) == Some("interleave:0");
        assert!(maps.lines().filter(placed).count() > 3, "{maps}");
        // The policy applies to child processes and to their children.
        let script = "sh -c 'cat /proc/self/numa_maps; echo $PINFOLD_POLICY'";
        let maps = policies("bind=static:0", &["sh", "-c", script]);
        assert!(maps.ends_with("\n\n"), "{maps}");
        assert_has(&maps, &[" bind=static:0 "]);
        let pinfold = assert_cmd::cargo::cargo_bin("pinfold");
        let own = policies("prefer (many):0", &[pinfold.to_str().unwrap(), "policy"]);
        assert_has(&own, &["policy      prefer (many):0\n", "in effect"]);
    }
    // --policy replaces PINFOLD_POLICY, even an invalid one. The program does not see the variable.
    for other in ["interleave:0", "nonsense"] {
        let mut both = command(&[
            "run",
            "--policy",
            "bind:0",
            "--",
            "cat",
            "/proc/self/numa_maps",
        ]);
        both.env("PINFOLD_POLICY", other);
        let (maps, ..) = said(both);
        assert!(!maps.contains("interleave"), "{maps}");
        assert_has(&maps, &[" bind:0 "]);
    }
}

#[test]
fn the_variable_is_followed_and_checked() {
    if !works() {
        return;
    }
    let with = |policy: &str| {
        let mut command = command(&["run", "--", "cat", "/proc/self/numa_maps"]);
        command.env("PINFOLD_POLICY", policy);
        said(command)
    };
    let (maps, _, code) = with("interleave:0");
    assert!(code == Some(0) && maps.contains(" interleave:0 "), "{maps}");
    assert_eq!(with("").2, Some(0));
    for (policy, words) in [
        ("bind:0-x", "^~~"),
        ("bind:1023", "node 1023 is not there"),
        ("bind:0@0", "no home node"),
    ] {
        let (out, error, code) = with(policy);
        assert_eq!((out.as_str(), code), ("", Some(2)), "{error}");
        assert!(error.starts_with("pinfold: PINFOLD_POLICY: "), "{error}");
        assert_has(&error, &[words]);
        let advice = "\nNothing was started; correct PINFOLD_POLICY or unset it.\n";
        assert!(error.ends_with(advice), "{error}");
    }
}

#[test]
fn missing_nodes_are_an_error_before_the_program_starts() {
    for stats in [&["run"][..], &["run", "--stats"]] {
        let all = [
            stats,
            &[
                "--policy",
                "interleave:0,1022-1023",
                "--",
                "echo",
                "started",
            ],
        ]
        .concat();
        let (out, error, code) = pinfold(&all);
        assert_eq!((out.as_str(), code), ("", Some(2)));
        let missing = "--policy: nodes 1022-1023 are not there; this machine has node";
        assert_has(&error, &[missing, "Nothing was started"]);
    }
    // The words that need no quotes in a shell, as the help has them.
    let (_, error, code) = pinfold(&["run", "--policy", "nonsense", "--", "true"]);
    assert_eq!(code, Some(2));
    assert_has(
        &error,
        &["\"nonsense\"", "local, prefer-many, weighted-interleave\n"],
    );
    let (_, error, code) = pinfold(&["run", "--policy", "bind:0@0", "--", "true"]);
    assert!(code == Some(2) && error.contains("no home node"), "{error}");
    // Relative positions beyond the last node begin again at the first.
    if works() {
        let all = [
            "run",
            "--policy",
            "interleave=relative:0,1000",
            "--",
            "true",
        ];
        assert_eq!(pinfold(&all).2, Some(0));
    }
}
