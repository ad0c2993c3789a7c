//! `pinfold jitter` in small runs: the output, and what is refused. The tests do not judge speed.

mod texts;

use assert_cmd::Command;
use serde_json::Value;
use texts::assert_has;

fn jitter(line: &str) -> std::process::Output {
    let mut command = Command::cargo_bin("pinfold").unwrap();
    command
        .arg("jitter")
        .args(line.split(' '))
        .output()
        .unwrap()
}

fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

const SUBJECTS: [&str; 6] = [
    "none",
    "local-worker",
    "pinfold",
    "idle-local-worker",
    "idle-on-demand",
    "fifo",
];

#[test]
fn a_local_worker_causes_context_switches_and_pinfold_folds() {
    let output = jitter("--seconds 1 --interval 20 --json");
    let error = String::from_utf8_lossy(&output.stderr);
    if cpus() < 2 {
        assert_eq!(output.status.code(), Some(2));
        assert!(error.contains("needs another"), "{error}");
        return;
    }
    assert_eq!(output.status.code(), Some(0), "{error}");
    let figures: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(figures["bench"], "jitter");
    assert!(figures["machine"]["cpu"].is_string());
    let rows = figures["rows"].as_array().unwrap();
    let names: Vec<_> = rows
        .iter()
        .map(|row| row["subject"].as_str().unwrap())
        .collect();
    // Without the right to a real-time policy, the command says so and leaves the loop out.
    match error.contains("fifo is left out") {
        true => {
            assert!(error.contains("ulimit -r 1"), "{error}");
            assert_eq!(names, SUBJECTS[..5]);
        }
        false => assert_eq!(names, SUBJECTS),
    }
    let number = |row: usize, field: &str| rows[row][field].as_u64().unwrap();
    assert_eq!(number(0, "folds"), 0);
    for row in 1..3 {
        assert!(number(row, "folds") >= 5, "{figures}");
    }
    // A loop that does not count leaves nothing to fold.
    for row in 3..5 {
        assert_eq!(number(row, "folds"), 0, "{figures}");
    }
    // A worker that folds on the loop's CPU takes the CPU from the loop each time. Two folds may
    // happen during one switch.
    assert!(
        number(1, "context_switches") * 2 >= number(1, "folds"),
        "{figures}"
    );
    for (row, _) in rows.iter().enumerate() {
        for field in ["interrupts", "ipis", "timer_interrupts"] {
            number(row, field);
        }
        assert!(number(row, "p50_cycles") > 0);
        assert!(number(row, "p999_cycles") <= number(row, "max_cycles"));
    }
}

#[test]
fn wrong_arguments_are_refused_before_measuring() {
    for (arguments, said) in [
        ("--cpu 9000", "--cpu"),
        ("--seconds 0", "above 0"),
        ("--seconds -1", "above 0"),
        ("--interval 0", "--interval"),
        ("--plot /nonexistent/jitter.svg", "/nonexistent"),
    ] {
        let begin = std::time::Instant::now();
        let output = jitter(arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
        assert!(error.contains(said) || cpus() < 2, "{arguments:?}: {error}");
        assert!(
            begin.elapsed().as_secs() < 30,
            "{arguments:?}: the command measured before it refused"
        );
    }
}

#[test]
fn a_plot_is_drawn() {
    if cpus() < 2 {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("jitter.svg");
    let output = jitter(&format!("--seconds 0.2 --plot {}", file.display()));
    assert_eq!(output.status.code(), Some(0));
    let text = String::from_utf8(output.stdout).unwrap();
    assert_has(&text, &["local-worker", "from other CPUs"]);
    let picture = std::fs::read_to_string(file).unwrap();
    assert!(picture.starts_with("<svg") && picture.contains("pinfold"));
}

/// Takes the right to real-time policies from the command.
#[test]
fn without_the_right_to_it_the_real_time_loop_is_left_out() {
    if cpus() < 2 {
        return;
    }
    let mut command = std::process::Command::new("setpriv");
    command.args(["--bounding-set=-sys_nice", "--inh-caps=-sys_nice", "--"]);
    command.arg(assert_cmd::cargo::cargo_bin("pinfold"));
    command.args(["jitter", "--seconds", "0.1", "--interval", "20"]);
    let Ok(output) = command.output() else {
        return;
    };
    let [text, error] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    // `setpriv` itself is refused where the user has no right to change the sets.
    if error.starts_with("setpriv") {
        return;
    }
    assert_eq!(output.status.code(), Some(0), "{error}");
    assert_has(
        &error,
        &["fifo is left out, because the loop may not have the policy SCHED_FIFO"],
    );
    assert!(!text.contains("\nfifo "), "{text}");
    assert_has(&text, &["\npinfold "]);
}
