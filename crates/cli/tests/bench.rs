//! `pinfold bench` in small runs: the output, and what is refused. The tests do not judge speed.

mod runs;
mod texts;

use runs::*;
use serde_json::Value;
use std::fs;
use std::path::Path;
use texts::assert_has;

const VMSTAT: &str = "vmstat --rounds 3 --calls 500";
const SLAB: &str = "slab --rounds 2 --calls 150 --size 64,4096";

#[test]
fn vmstat_measures_each_change_with_and_without_signals() {
    let sections: &[&str] = if cfg!(target_arch = "x86_64") && pinfold_has_rseq() {
        &["rseq-cmpxchg", "rseq-inc-check"]
    } else {
        &[]
    };
    let has_two_cpus = std::thread::available_parallelism().unwrap().get() > 1;
    let (by_two, rest): (Vec<_>, Vec<_>) =
        rows(VMSTAT).into_iter().partition(|row| row["cpus"] == 2);
    assert_eq!(by_two.is_empty(), !has_two_cpus);
    assert!(by_two.iter().all(|row| row["cycles"].as_f64() > Some(0.0)));
    let is = |row: &Value, prefix: &str| row["subject"].as_str().unwrap().starts_with(prefix);
    let (pairs, rest): (Vec<_>, Vec<_>) =
        (rest.into_iter()).partition(|row| row["op"] == "event" && row["items"] == 2);
    assert_eq!(
        subjects(&pairs),
        ["two-atomics", "two-events", "event-pair"]
    );
    let in_sections: &[&str] = match sections {
        [] => &[],
        _ => &["cmpxchg", "inc-check"],
    };
    let packed = ["1-byte", "8-bytes", "16-bytes", "32-bytes"];
    let tables: [(&str, &[&str]); 2] = [("cold-", &packed), ("read-", &["unprotected"])];
    let mut rest = rest;
    for (prefix, forms) in tables {
        let (of_table, others): (Vec<_>, Vec<_>) =
            rest.into_iter().partition(|row| is(row, prefix));
        rest = others;
        if prefix == "read-" && !has_two_cpus {
            assert!(of_table.is_empty());
            continue;
        }
        let cells: Vec<_> = [forms, in_sections, &["rseq"]]
            .concat()
            .iter()
            .flat_map(|form| {
                [1, 4, 16].map(|items| (format!("{prefix}{form}").into(), items.into()))
            })
            .collect();
        let found = (of_table.iter()).map(|row| (row["subject"].clone(), row["items"].clone()));
        assert_eq!(found.collect::<Vec<(Value, Value)>>(), cells);
        assert!(
            of_table
                .iter()
                .all(|row| row["cycles"].as_f64() > Some(0.0))
        );
    }
    let (all, several): (Vec<_>, Vec<_>) = rest.into_iter().partition(|row| row["items"] == 1);
    assert_eq!(
        subjects(&several),
        ["unprotected-byte", "rseq"],
        "items in turn"
    );
    for (row, items) in several.iter().zip([4, 16].iter().cycle()) {
        assert_eq!(
            (&row["op"], &row["items"]),
            (&"inc".into(), &(*items).into())
        );
        assert!(row["cycles"].as_f64() > Some(0.0), "{row}");
    }
    let names = subjects(&all);
    let rivals = [
        "unprotected",
        "unprotected-byte",
        "locked",
        "masked-signals",
        "cmpxchg",
    ];
    assert_eq!(
        names,
        [&rivals, sections, &["rseq", "event", "rseq-called"]].concat()
    );
    for name in names {
        let rows: Vec<_> = all.iter().filter(|row| row["subject"] == name).collect();
        // A signal's handler would make the unprotected subjects lose counts.
        let signals: &[bool] = if name.starts_with("unprotected") {
            &[false]
        } else {
            &[false, true]
        };
        let ops = ["inc", "dec", "event"];
        let cells = if name == "event" { &ops[..1] } else { &ops };
        let cells = cells.iter().copied();
        let cells: Vec<_> = cells
            .flat_map(|op| signals.iter().map(move |on| (op, *on)))
            .collect();
        assert_eq!(rows.len(), cells.len(), "{name}");
        for (row, (op, signals)) in rows.into_iter().zip(cells) {
            assert_eq!(
                fields(row),
                [
                    "cpus",
                    "cycles",
                    "items",
                    "min_cycles",
                    "op",
                    "signals",
                    "subject"
                ]
            );
            assert_eq!((&row["op"], &row["signals"]), (&op.into(), &signals.into()));
            let (median, least) = (row["cycles"].as_f64(), row["min_cycles"].as_f64());
            assert!(least > Some(0.0) && median >= least, "{row}");
        }
    }
}

/// Returns whether the command runs on restartable sequences here.
fn pinfold_has_rseq() -> bool {
    output(VMSTAT).contains("on rseq")
}

#[test]
fn vmstat_shows_the_cost_of_protection() {
    let text = output(VMSTAT);
    let line = |name: &str| {
        let name = format!("x {name} ");
        let line = text.lines().find(|line| line.contains(&name)).unwrap();
        line.split_whitespace()
            .skip(3)
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let unprotected = line("unprotected");
    assert_eq!(unprotected[3..], ["-", "-"], "{text}");
    let figure = |cell: &str| cell.parse::<f64>().unwrap();
    let locked = line("locked");
    let cost = figure(&locked[0]) - figure(&unprotected[0]);
    // Each of the three figures is rounded to a tenth.
    assert!((cost - figure(&locked[3])).abs() < 0.16, "{text}");
}

#[test]
fn vmstat_counts_exactly_on_every_backend() {
    // The command fails if a total is wrong.
    for backend in ["off", "cpu", "cid"] {
        output_of(bench(VMSTAT).env("PINFOLD_RSEQ", backend));
    }
}

#[test]
fn slab_measures_the_six_scenarios_and_bulk_calls() {
    let all_subjects = [
        "pinfold-cache",
        "pinfold-malloc",
        "pinfold-hardened",
        "unprotected",
        "rseq",
        "tid",
        "locked",
        "masked-signals",
    ];
    let rows = rows(SLAB);
    let of = |scenario: &str| -> Vec<Value> {
        let rows = rows.iter().filter(|row| row["scenario"] == scenario);
        rows.cloned().collect()
    };
    for row in &rows {
        assert!(row["cycles"].as_f64() > Some(0.0), "{row}");
    }
    // The scenarios with several threads use one thread for each CPU that the command may use.
    let all = of("concurrent")[0]["threads"].as_u64().unwrap();
    for (scenario, ops, threads) in [
        ("single", &["alloc", "free"][..], 1),
        ("pair", &["pair"], 1),
        ("concurrent", &["alloc", "free"], all),
        ("concurrent_pair", &["pair"], all),
        ("remote", &["alloc", "free"], all),
        ("one_to_n", &["alloc", "free"], all),
    ] {
        let rows = of(scenario);
        if all == 1 && ["remote", "one_to_n"].contains(&scenario) {
            assert!(rows.is_empty());
            continue;
        }
        // Several threads would use the unprotected arrays of one CPU.
        let with_one = ["single", "pair"].contains(&scenario);
        let subjects_here: Vec<_> = (all_subjects.into_iter())
            .filter(|name| with_one || *name != "unprotected")
            .collect();
        let in_cell = subjects_here.len() * ops.len();
        assert_eq!(rows.len(), 2 * in_cell, "{scenario}");
        let cells = rows.chunks(in_cell);
        for (cell, size) in cells.zip([64, 4096]) {
            assert_eq!(subjects(cell), subjects_here);
            for (at, row) in cell.iter().enumerate() {
                assert_eq!(
                    fields(row),
                    ["cycles", "op", "scenario", "size", "subject", "threads"]
                );
                assert_eq!(row["op"], ops[at % ops.len()], "{row}");
                assert_eq!(
                    (&row["size"], &row["threads"]),
                    (&size.into(), &threads.into())
                );
            }
        }
    }
    let batches: Vec<_> = of("bulk")
        .iter()
        .map(|row| row["batch"].as_u64().unwrap())
        .collect();
    assert_eq!(batches, [1, 2, 4, 8, 16, 32, 64, 128, 158, 250]);
    for row in of("bulk") {
        assert_eq!(
            (&row["subject"], &row["op"]),
            (&"pinfold-cache".into(), &"pair".into())
        );
        assert_eq!((&row["size"], &row["threads"]), (&256.into(), &1.into()));
        assert!(row["single_cycles"].as_f64() > Some(0.0), "{row}");
    }
}

#[test]
fn slab_prints_the_words_of_slab_test() {
    let text = output(SLAB);
    let has = |start: &str, end: &str| {
        let fits = |line: &str| line.starts_with(start) && line.ends_with(end);
        assert!(text.lines().any(fits), "{start} … {end}: {text}");
    };
    has("Single thread testing", "");
    has("1. Kmalloc: Repeatedly allocate then free test", "");
    has("150 times kmalloc(64) -> ", " cycles");
    has("2. Kmalloc: alloc/free test", "");
    has("150 times kmalloc(4096)/kfree -> ", " cycles");
    has("Kmalloc N*alloc N*free(64): Average=", "");
    has("Kmalloc N*(alloc free)(64): Average=", "");
    if !text.contains("it needs two CPUs") {
        has("N*remote free(4096): Average=", "");
        has("1 alloc N free(4096): Average=", "");
    }
    has("N*(alloc free): pair", "");
    has("the protection of rseq costs ", " cycles");
    has("the protection of locked costs ", " cycles");
    has("removing the lock: ", " %");
    has("removing masked signals and the lock: ", " %");
    has("removing the transaction id: ", " %");
    has("replacing the lock by the transaction id: ", " %");
}

#[test]
fn slab_measures_only_what_was_requested_on_every_backend() {
    let only = "slab --rounds 1 --calls 300 --size 24";
    for backend in ["off", "cpu", "cid"] {
        let (_, rows) = rows_of(bench(only).env("PINFOLD_RSEQ", backend));
        assert!(!rows.is_empty());
    }
    let rows = rows(&format!(
        "{only} --subject rseq,pinfold-cache --scenario pair"
    ));
    assert_eq!(subjects(&rows), ["pinfold-cache", "rseq"]);
    assert_eq!(rows.len(), 2);
    refused(
        "slab --subject masked-signals --scenario bulk",
        &["only pinfold-cache takes part in bulk"],
    );
}

#[test]
fn tables_name_rounds_threads_and_combinations() {
    let text = output(VMSTAT);
    assert!(text.contains("500 x masked-signals"), "{text}");
    let text = output(&format!("{COUNTER} --mmap no"));
    assert_has(&text, &["3 threads, amount 32768, no mmap, summing"]);
    // The baseline is compared with itself.
    assert!(
        text.lines()
            .any(|line| line.starts_with("spinlock-batch") && line.contains(" 1.00 ")),
        "{text}"
    );
}

#[test]
fn plots_are_svg_files_with_readable_text() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("figures.svg");
    let name = file.to_str().unwrap();
    // The command must replace an existing file.
    fs::write(&file, "x".repeat(100_000)).unwrap();
    let lines = format!("{COUNTER} --threads 1,2 --subject atomic");
    let bulk = format!("{SLAB} --scenario bulk");
    for (line, words) in [
        (VMSTAT, ["masked-signals", "inc_zone with signals"]),
        (COUNTER, ["add-start", "amount 32768, no mmap, no sums"]),
        (&lines, ["threads", "atomic, amount 32768, mmap, summing"]),
        (SLAB, ["pair, pair", "masked-signals"]),
        (&bulk, ["objects per call", "single calls"]),
    ] {
        output(&format!("{line} --plot {name}"));
        let picture = fs::read_to_string(&file).unwrap();
        assert!(
            picture.starts_with("<svg") && picture.ends_with("</svg>\n"),
            "{picture}"
        );
        for word in words {
            assert!(
                picture.lines().any(|line| line == word),
                "{word}: {picture}"
            );
        }
    }
}

#[test]
fn wrong_numbers_are_refused_with_advice() {
    for (line, words) in [
        ("vmstat --rounds 0", ["--rounds", "1 or more"]),
        ("vmstat --calls 0", ["--calls", "1 or more"]),
        ("vmstat --calls -1", ["--calls", "from 1"]),
        ("slab --rounds 0", ["--rounds", "1 or more"]),
        ("slab --calls 100001", ["--calls", "1 to 100000"]),
        ("slab --size 12", ["--size", "multiple of 8"]),
        ("slab --size 8,0", ["--size", "8 to 16384"]),
        ("slab --size -8", ["--size", "8 to 16384"]),
        ("slab --scenario two", ["two", "one_to_n"]),
        ("slab --subject slub", ["slub", "pinfold-cache"]),
        ("counter --rounds 0", ["--rounds", "1 or more"]),
        ("counter --threads 0", ["--threads", "1 or more"]),
        ("counter --threads 1,x", ["--threads", "1 to 4096"]),
        ("counter --threads 9999", ["--threads", "1 to 4096"]),
        ("counter --amount 0", ["--amount", "1 or more"]),
        ("counter --amount 8,-1", ["--amount", "1 to 16777216"]),
        ("counter --batch 0", ["--batch", "1 or more"]),
        ("counter --batch 2147483648", ["--batch", "1 to 1073741824"]),
        ("counter --seconds 0", ["--seconds", "above 0"]),
        ("counter --seconds nan", ["--seconds", "above 0"]),
        ("counter --subject mutex", ["mutex", "spinlock-batch"]),
    ] {
        refused(line, &words);
    }
}

#[test]
fn unwritable_files_are_refused_before_measuring() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("none/figures.svg");
    for bench in ["vmstat", "counter", "slab", "pft"] {
        // So many rounds that measuring first would be noticed.
        for file in [missing.as_path(), folder.path(), Path::new("/proc/x.svg")] {
            let name = file.to_str().unwrap();
            refused(
                &format!("{bench} --rounds 4000000000 --plot {name}"),
                &[name, "give a file in a folder"],
            );
        }
    }
}
