//! `pinfold bench pft` in small runs: the output, and what is refused. The tests do not judge
//! speed.

mod runs;
mod texts;

use runs::*;
use std::fs;
use texts::assert_has;

const SUBJECTS: [&str; 4] = ["kernel", "counted", "shared-counted", "pinfold"];
const KINDS: [(&str, &str); 4] = [
    ("anon", "system"),
    ("anon", "range"),
    ("shmem", "system"),
    ("shmem", "range"),
];
const SMALL: &str = "pft --threads 3 --rounds 2 --memory 1M";

/// Returns whether the kernel can set policies for ranges here. If it cannot, the subject `kernel`
/// is left out of those tables.
fn has_mbind() -> bool {
    !output(SMALL).contains("kernel is left out")
}

/// Returns whether a subject takes part in the tables of a policy.
fn takes_part(subject: &str, policy: &str, has_mbind: bool) -> bool {
    subject != "kernel" || policy == "system" || has_mbind
}

/// Returns the subject that a subject is a control of: without a policy, all but the kernel do the
/// same; and for shared memory, both counting subjects count.
fn same_code_as(subject: &str, memory: &str, policy: &str) -> Option<&'static str> {
    match (subject, memory, policy) {
        ("shared-counted" | "pinfold", _, "system") | ("shared-counted", "shmem", "range") => {
            Some("counted")
        }
        _ => None,
    }
}

#[test]
fn all_combinations_are_measured() {
    let has_mbind = has_mbind();
    let mut rows = rows(SMALL).into_iter();
    for (memory, policy) in KINDS {
        for threads in 1..=3 {
            for subject in SUBJECTS {
                if !takes_part(subject, policy, has_mbind) {
                    continue;
                }
                let mut row = rows.next().unwrap();
                for figure in ["faults_per_cpu_second", "faults_per_wall_second"] {
                    let figure = row.as_object_mut().unwrap().remove(figure);
                    let figure = figure.and_then(|figure| figure.as_f64());
                    assert!(figure.is_some_and(|figure| figure > 0.0), "{row}");
                }
                let expected = serde_json::json!({
                    "memory": memory, "policy": policy, "threads": threads, "subject": subject,
                    "same_code_as": same_code_as(subject, memory, policy),
                });
                assert_eq!(row, expected);
            }
        }
    }
    assert!(rows.next().is_none());
}

#[test]
fn tables_have_the_form_of_2008() {
    let text = output(SMALL);
    let titles = [
        "anon+sys-default",
        "anon+vma-policy",
        "shmem+sys-default",
        "shmem+vma-policy",
    ];
    let mut rest = &text[..];
    for title in titles {
        rest = rest.split_once(&format!("\n\t\t{title}\n")).expect(title).1;
        let mut lines = rest.lines();
        let names: Vec<&str> = lines.next().unwrap().split_whitespace().collect();
        assert_eq!(names[0], "N");
        assert!(names.ends_with(&SUBJECTS[1..]), "{text}");
        for threads in 1..=3 {
            let line = lines.next().unwrap().split_whitespace();
            let numbers: Vec<u64> = line.map(|number| number.parse().unwrap()).collect();
            assert_eq!(numbers[0], threads);
            assert_eq!(numbers.len(), 1 + 2 * (names.len() - 1), "{text}");
        }
        for (after, before) in [
            ("shared-counted", "counted"),
            ("pinfold", "counted"),
            ("pinfold", "shared-counted"),
        ] {
            let gain = lines.next().unwrap();
            let begin = format!("{after} / {before}: ");
            for words in [&begin[..], " at 1 thread; ", " at 3 threads"] {
                assert!(gain.contains(words), "{gain}");
            }
            // Where both run the same code, the line must not look like a gain.
            let control = title.ends_with("sys-default")
                || title == "shmem+vma-policy" && after == "shared-counted";
            assert_eq!(
                gain.contains("(control: both run the same code"),
                control,
                "{gain}"
            );
        }
    }
    assert!(text.contains("The kernel's column is other work"), "{text}");
    assert_has(&text, &["medians of 2 rounds. A region of 1M, "]);
}

#[test]
fn it_runs_on_every_backend_and_on_several_nodes() {
    let few = "pft --threads 2 --rounds 1 --memory 512K";
    for backend in ["off", "cpu", "cid"] {
        let text = output_of(bench(few).env("PINFOLD_RSEQ", backend));
        assert_eq!(text.contains("runs on atomics"), backend == "off", "{text}");
    }
    let (_, rows) = rows_of(bench(few).env("PINFOLD_FAKE_NODES", "2"));
    assert!(rows.len() >= 4 * 2 * 2);
}

#[test]
fn one_page_per_thread_is_enough() {
    let page = page_size();
    let with = |memory| format!("pft --threads 2 --rounds 1 --memory {memory}");
    assert!(!rows(&with(2 * page)).is_empty());
    refused(&with(2 * page - 1), &["--memory", "2 threads", "or more"]);
}

/// Returns the size of the pages that programs are loaded into.
fn page_size() -> usize {
    let text = fs::read_to_string("/proc/self/smaps").unwrap();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("KernelPageSize:"));
    let kilobytes = line.unwrap().trim().trim_end_matches(" kB");
    kilobytes.parse::<usize>().unwrap() * 1024
}

#[test]
fn the_plot_has_a_panel_for_each_table() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("pft.svg");
    output(&format!("{SMALL} --plot {}", file.display()));
    let picture = fs::read_to_string(&file).unwrap();
    assert!(picture.ends_with("</svg>\n"));
    let has = |text: &str| picture.lines().any(|line| line == text);
    for text in ["anon+sys-default", "shmem+vma-policy", "threads", "counted"] {
        assert!(has(text), "{text}: {picture}");
    }
    let panels = picture
        .lines()
        .filter(|line| *line == "faults per wall-clock second");
    assert_eq!(panels.count(), 4);
}

#[test]
fn wrong_arguments_are_refused_with_advice() {
    for (option, value, word) in [
        ("--threads", "0", "1 or more"),
        ("--threads", "-1", "from 1"),
        ("--threads", "9999", "1 to 4096"),
        ("--rounds", "0", "1 or more"),
        ("--memory", "0", "like 64M"),
        ("--memory", "-4096", "like 64M"),
        ("--memory", "much", "like 64M"),
        ("--memory", "64X", "like 64M"),
        ("--memory", "99999999999T", "like 64M"),
        // More than any machine has.
        ("--memory", "9000T", "available; give"),
        ("--memory", "15000000T", "available; give"),
    ] {
        refused(&format!("pft {option} {value}"), &[option, word]);
    }
    refused(
        "pft --memory 1000 --threads 1",
        &["less than a page", "or more"],
    );
}
