//! `pinfold run` and `pinfold doctor` as people use them.

mod texts;

use assert_cmd::Command;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use texts::assert_has;

fn pinfold() -> Command {
    let mut command = Command::cargo_bin("pinfold").unwrap();
    command
        .env_remove("LD_PRELOAD")
        .env_remove("PINFOLD_LIBRARY");
    command
}

/// Returns a run's standard output, standard error and exit status.
fn texts(command: &mut Command) -> (String, String, Option<i32>) {
    texts::of(command.output().unwrap())
}

fn script(folder: &Path, name: &str, text: &str, mode: u32) -> PathBuf {
    let path = folder.join(name);
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    path
}

#[test]
fn output_input_and_status_pass_through() {
    for stats in [&["run", "--"][..], &["run", "--stats", "--"]] {
        let (out, _, code) = texts(
            pinfold()
                .args(stats)
                .args(["sh", "-c", "cat; exit 7"])
                .write_stdin("hello"),
        );
        assert_eq!((out.as_str(), code), ("hello", Some(7)), "{stats:?}");
    }
}

#[test]
fn the_library_is_loaded_into_the_program() {
    let (out, _, code) = texts(pinfold().args(["run", "--", "cat", "/proc/self/maps"]));
    assert_eq!(code, Some(0));
    assert!(out.contains("libpinfold"), "{out}");
}

#[test]
fn an_earlier_preload_is_kept() {
    let (out, _, _) = texts(
        pinfold()
            .args(["run", "--", "sh", "-c", "echo $LD_PRELOAD"])
            .env("LD_PRELOAD", "/lib/none.so"),
    );
    assert!(out.trim_end().ends_with(":/lib/none.so"), "{out}");
    assert_has(&out, &["libpinfold"]);
}

#[test]
fn death_by_a_signal_gives_the_status_that_shells_give() {
    let (_, _, code) = texts(pinfold().args(["run", "--stats", "--", "sh", "-c", "kill -TERM $$"]));
    assert_eq!(code, Some(128 + libc::SIGTERM));
    // Without --stats, the program replaces the command, so the signal kills this very process.
    let output = pinfold()
        .args(["run", "--", "sh", "-c", "kill -TERM $$"])
        .output()
        .unwrap();
    assert_eq!(output.status.signal(), Some(libc::SIGTERM));
}

#[test]
fn signals_reach_the_command() {
    for signal in ["TERM", "INT", "QUIT", "USR1", "37"] {
        signal_reaches_the_command(signal);
    }
}

fn signal_reaches_the_command(signal: &str) {
    let folder = tempfile::tempdir().unwrap();
    let ready = folder.path().join("ready");
    let text = format!(
        "trap 'echo caught; exit 5' {signal}; touch {}; for _ in $(seq 400); do sleep 0.05; done",
        ready.display()
    );
    // A shell starts what it runs in the background with some signals ignored, and a shell cannot
    // trap a signal that was ignored when it began.
    let mut child = std::process::Command::new("env")
        .arg("--default-signal")
        .arg(assert_cmd::cargo::cargo_bin("pinfold"))
        .args(["run", "--stats", "--", "sh", "-c", &text])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    while !ready.exists() {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let killed = std::process::Command::new("kill")
        .args([format!("-{signal}"), child.id().to_string()])
        .status()
        .unwrap();
    assert!(killed.success());
    let output = std::io::read_to_string(child.stdout.take().unwrap()).unwrap();
    assert_eq!(
        (output.as_str(), child.wait().unwrap().code()),
        ("caught\n", Some(5)),
        "{signal}"
    );
}

#[test]
fn the_status_is_known_although_the_parent_ignores_sigchld() {
    let text = r#"sleep 20 & exec env --ignore-signal=CHLD "$0" run --stats -- sh -c 'exit 3'"#;
    let begun = std::time::Instant::now();
    let status = std::process::Command::new("sh")
        .args(["-c", text])
        .arg(assert_cmd::cargo::cargo_bin("pinfold"))
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .status()
        .unwrap();
    assert_eq!(status.code(), Some(3));
    assert!(begun.elapsed() < std::time::Duration::from_secs(15));
}

#[test]
fn a_command_that_signals_its_group_gets_the_signal_once() {
    let text = r#"trap 'echo once' USR1; kill -USR1 0; sleep 0.5; kill -USR1 0; sleep 0.5"#;
    let output = std::process::Command::new("setsid")
        .args(["--wait"])
        .arg(assert_cmd::cargo::cargo_bin("pinfold"))
        .args(["run", "--stats", "--", "sh", "-c", text])
        .output()
        .unwrap();
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(out, "once\nonce\n");
}

#[test]
fn orphans_are_reaped_in_a_container() {
    // The command is the first process of its namespace, so it becomes the orphan's parent.
    let text = "(sleep 0.1 & echo $!) && sleep 0.5; cat /proc/[0-9]*/stat | grep -c ' Z '";
    let output = std::process::Command::new("unshare")
        .args([
            "--user",
            "--map-root-user",
            "--pid",
            "--fork",
            "--mount-proc",
        ])
        .arg(assert_cmd::cargo::cargo_bin("pinfold"))
        .args(["run", "--stats", "--", "sh", "-c", text])
        .output();
    let Ok(output) = output else {
        return eprintln!("left out: there is no unshare");
    };
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if said.contains("unshare") {
        return eprintln!("left out: {said}");
    }
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(out.ends_with("\n0\n"), "{out}{said}");
}

#[test]
fn a_misspelt_variable_is_named_and_the_program_runs() {
    let (out, error, code) = texts(
        pinfold()
            .args(["run", "--", "echo", "runs"])
            .env("PINFOLD_TPH", "never")
            .env("PINFOLD_OTHER_PROGRAMS", "1"),
    );
    assert_eq!((out.as_str(), code), ("runs\n", Some(0)));
    assert_has(&error, &["PINFOLD_TPH", "PINFOLD_THP"]);
    assert!(!error.contains("OTHER"), "{error}");
}

#[test]
fn a_value_behind_an_option_without_equals_sign_is_explained() {
    for (option, value) in [("--heap", "64k"), ("--shepherd", "off"), ("--guard", "1M")] {
        let (_, error, code) = texts(pinfold().args(["run", option, value, "--", "true"]));
        assert_eq!(code, Some(127));
        assert_has(&error, &[&format!("{option}={value}")]);
    }
    let (_, error, _) = texts(pinfold().args(["run", "--heap", "no-such-program"]));
    assert!(!error.contains("--heap="), "{error}");
}

#[test]
fn options_set_the_limit_and_huge_pages() {
    let text = "echo $PINFOLD_MEMORY_LIMIT $PINFOLD_THP";
    let options = ["run", "--memory-limit", "64M", "--thp", "never"];
    let (out, _, _) = texts(pinfold().args(options).args(["--", "sh", "-c", text]));
    assert_eq!(out, "64M never\n");
    for option in [["--memory-limit", "much"], ["--thp", "huge"]] {
        let (_, error, code) = texts(pinfold().arg("run").args(option).args(["--", "true"]));
        assert_eq!(code, Some(2));
        assert_has(&error, &[option[0], option[1]]);
    }
}

#[test]
fn a_signal_stays_ignored_if_it_was_ignored_before() {
    // As in the background of a shell without job control.
    let text = r#"trap '' INT; exec "$0" run --stats -- sh -c 'kill -INT $$; echo alive'"#;
    let output = std::process::Command::new("sh")
        .args(["-c", text])
        .arg(assert_cmd::cargo::cargo_bin("pinfold"))
        .output()
        .unwrap();
    let (out, _, code) = texts::of(output);
    assert_eq!((out.as_str(), code), ("alive\n", Some(0)));
}

#[test]
fn commands_that_cannot_start_give_the_status_that_shells_give() {
    let folder = tempfile::tempdir().unwrap();
    let plain = script(folder.path(), "plain", "text", 0o644);
    for stats in [&["run", "--"][..], &["run", "--stats", "--"]] {
        for (name, expected, words) in [
            ("no-such-command-here", 127, "command not found"),
            ("/no/such/file", 127, "command not found"),
            (plain.to_str().unwrap(), 126, "cannot execute"),
            ("/tmp", 126, "cannot execute"),
        ] {
            let (_, error, code) = texts(pinfold().args(stats).arg(name));
            assert_eq!(code, Some(expected), "{name}: {error}");
            assert!(error.lines().count() == 1, "{error}");
            assert_has(&error, &[words, name]);
        }
    }
}

#[test]
fn bad_arguments_are_refused_with_status_2() {
    for arguments in [
        &["run", "--nonsense", "--", "true"][..],
        &["run"],
        &["nonsense"],
        &["doctor", "1", "extra"],
        &[],
    ] {
        let (_, error, code) = texts(pinfold().args(arguments));
        assert_eq!(code, Some(2), "{arguments:?}");
        assert!(
            error.contains("Usage") || error.contains("usage"),
            "{error}"
        );
    }
}

#[test]
fn a_missing_library_is_named() {
    let (_, error, code) = texts(
        pinfold()
            .args(["run", "--", "true"])
            .env("PINFOLD_LIBRARY", "/no/lib.so"),
    );
    assert_eq!(code, Some(2));
    assert_has(&error, &["/no/lib.so", "PINFOLD_LIBRARY"]);
}

#[test]
fn a_library_path_with_a_space_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let library = script(folder.path(), "lib pinfold.so", "", 0o755);
    let (_, error, code) = texts(
        pinfold()
            .args(["run", "--", "true"])
            .env("PINFOLD_LIBRARY", &library),
    );
    assert_eq!(code, Some(2));
    assert!(error.contains("space or a colon"), "{error}");
}

#[test]
fn statistics_count_what_the_program_did() {
    let (_, error, code) = texts(pinfold().args(["run", "--stats", "--", "sort", "/etc/services"]));
    assert_eq!(code, Some(0));
    for words in [
        "calls",
        "requested",
        "held",
        "returned",
        "cache hits",
        "size",
    ] {
        assert!(error.contains(words), "{words}: {error}");
    }
    let backend = match std::env::var("PINFOLD_RSEQ").as_deref() {
        Ok("off") => "on atomics",
        _ => "pinfold: process",
    };
    assert!(error.contains(backend), "{error}");
}

#[test]
fn forked_processes_are_counted_too() {
    let (_, error, _) = texts(pinfold().args([
        "run",
        "--stats",
        "--",
        "sh",
        "-c",
        "ls / >/dev/null; ls / >/dev/null; true",
    ]));
    assert!(error.contains("further processes"), "{error}");
}

#[test]
fn the_statistics_directory_is_removed() {
    let folder = tempfile::tempdir().unwrap();
    let (out, ..) = texts(
        pinfold()
            .args(["run", "--stats", "--", "sh", "-c", "echo $PINFOLD_STATS"])
            .env("TMPDIR", folder.path()),
    );
    assert!(
        !out.trim().is_empty() && !Path::new(out.trim()).exists(),
        "{out}"
    );
}

#[test]
fn a_broken_pipe_ends_the_program_as_usual() {
    let text = "(yes; echo $? >&2) | head -n 1";
    let (out, error, _) = texts(pinfold().args(["run", "--stats", "--", "sh", "-c", text]));
    assert_eq!(out, "y\n");
    assert!(!error.contains("Broken pipe"), "{error}");
}

#[test]
fn static_programs_run_without_the_library_and_a_warning_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let source = script(folder.path(), "s.c", "int main(void) { return 3; }", 0o644);
    let program = folder.path().join("program");
    let built = std::process::Command::new("cc")
        .arg("-static")
        .arg("-o")
        .arg(&program)
        .arg(&source)
        .output();
    if !built.is_ok_and(|output| output.status.success()) {
        // This machine has no static C library, so there is no static program to try.
        return;
    }
    let (_, error, code) = texts(pinfold().args(["run", "--"]).arg(&program));
    assert_eq!(code, Some(3));
    assert_has(&error, &["statically linked", "program"]);
    let wrapper = script(
        folder.path(),
        "wrapper",
        &format!("#!{}\n", program.display()),
        0o755,
    );
    let (_, error, _) = texts(pinfold().args(["run", "--"]).arg(&wrapper));
    assert!(error.contains("statically linked"), "{error}");
}

#[test]
fn doctor_reports_every_check() {
    let (out, _, code) = texts(pinfold().arg("doctor"));
    assert_eq!(code, Some(0));
    for words in [
        "rseq",
        "concurrency ids",
        "membarrier",
        "nodes",
        "isolated CPUs",
        "huge pages",
        "overcommit",
    ] {
        assert!(out.contains(words), "{words}: {out}");
    }
    let (out, ..) = texts(pinfold().args(["doctor", "--json"]));
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert!(
        json["checks"]
            .as_array()
            .unwrap()
            .iter()
            .all(|check| check["state"].is_string() && check["found"].is_string())
    );
}

#[test]
fn doctor_reads_other_machines() {
    let root = tempfile::tempdir().unwrap();
    for (file, text) in [
        ("sys/devices/system/cpu/online", "0-7"),
        ("sys/devices/system/cpu/isolated", "7"),
        ("sys/devices/system/node/online", "0-1"),
        ("sys/devices/system/node/node0/distance", "10 21"),
        ("proc/sys/vm/overcommit_memory", "2"),
        ("proc/self/cgroup", "0::/a/b\n"),
        ("sys/fs/cgroup/a/b/memory.max", "max\n"),
        ("sys/fs/cgroup/a/memory.max", "536870912\n"),
    ] {
        let path = root.path().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    let (out, ..) = texts(pinfold().args(["doctor", "--root"]).arg(root.path()));
    for words in [
        "2 (0-1)",
        "10 21",
        "isolated: 7",
        "CPUs 0-6",
        "overcommit_memory is 2",
        "the cgroup allows 512 MiB",
    ] {
        assert!(out.contains(words), "{words}: {out}");
    }
    fs::write(
        root.path().join("sys/devices/system/cpu/online"),
        "nonsense",
    )
    .unwrap();
    let (out, _, code) = texts(pinfold().args(["doctor", "--root"]).arg(root.path()));
    assert_eq!(code, Some(0));
    assert!(out.contains("cpu/online"), "{out}");
}

/// The library runs a thread if `--shepherd` asks for it. A program with one thread gets no second
/// thread by itself.
#[test]
fn the_shepherd_runs_only_on_request_in_a_program_with_one_thread() {
    let names = |arguments: &[&str]| {
        let script = "sleep 0.2; cat /proc/$$/task/*/comm";
        let mut command = pinfold();
        command.arg("run").args(arguments);
        let (out, error, _) = texts(command.args(["--", "sh", "-c", script]));
        assert_eq!(error, "");
        out.lines().filter(|line| *line == "pinfold").count()
    };
    assert_eq!(names(&[]), 0);
    assert_eq!(names(&["--shepherd"]), 1);
    assert_eq!(names(&["--shepherd=10"]), 1);
    assert_eq!(names(&["--shepherd=off"]), 0);
    let (_, error, code) = texts(pinfold().args(["run", "--shepherd=0", "--", "true"]));
    assert!(error.contains("milliseconds from 1"), "{error}");
    assert_eq!(code, Some(2));
}

/// A program for the test below: it frees a block twice.
#[test]
#[ignore = "a program for the test below"]
fn frees_twice() {
    // SAFETY: unsound on purpose. The second free is the error that the test expects to be found.
    unsafe {
        let block = libc::malloc(18);
        libc::free(std::hint::black_box(block));
        libc::free(std::hint::black_box(block));
    }
}

#[test]
fn requested_checks_find_double_frees() {
    let program = std::env::current_exe().unwrap();
    let program = program.to_str().unwrap();
    let faulty = [program, "--exact", "frees_twice", "--ignored"];
    for option in ["--slab-debug", "--slab-debug=FU,kmalloc-*", "--hardened"] {
        let mut command = pinfold();
        let output = command
            .args(["run", option, "--"])
            .args(faulty)
            .output()
            .unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(
            output.status.signal(),
            Some(libc::SIGABRT),
            "{option}: {error}"
        );
        assert!(
            error.contains("cache kmalloc-00032: object freed twice"),
            "{option}: {error}"
        );
        let named = error.contains("allocated by thread") && error.contains("frees_twice");
        assert_eq!(named, option != "--hardened", "{option}: {error}");
    }
    let mut sound = pinfold();
    let (out, _, code) = texts(sound.args(["run", "--slab-debug", "--", "sh", "-c", "echo sound"]));
    assert_eq!((out.as_str(), code), ("sound\n", Some(0)));
}

/// Settings that the library cannot read.
const UNREADABLE: [(&str, &str); 7] = [
    ("PINFOLD_SLAB_DEBUG", "FZ;X,kmalloc-*"),
    ("PINFOLD_HARDENED", "yes"),
    ("PINFOLD_RSEQ", "maybe"),
    ("PINFOLD_SHEPHERD", "sometimes"),
    ("PINFOLD_MEMORY_LIMIT", "lots"),
    ("PINFOLD_POLICY", "bind:everywhere"),
    ("PINFOLD_STATS", "/no/such/directory"),
];

#[test]
fn unreadable_settings_are_refused() {
    let mut command = pinfold();
    let (_, error, code) = texts(command.args(["run", "--slab-debug=FQ", "--", "true"]));
    assert_eq!(code, Some(2));
    assert!(error.contains("'Q' at 1"), "{error}");
    for (name, value) in UNREADABLE {
        let (_, error, code) = texts(pinfold().args(["run", "--", "true"]).env(name, value));
        assert_eq!(code, Some(2), "{name}");
        assert!(error.contains(name) && error.contains(value), "{error}");
    }
}

/// A library that was preloaded without the command reports each unreadable setting in one line,
/// ignores it, and lets the program run.
#[test]
fn a_preloaded_library_reports_and_ignores_unreadable_settings() {
    let library = std::env::current_exe().unwrap();
    let library = library.parent().unwrap().join("libpinfold_preload.so");
    let preloaded = |name: &str, value: &str| {
        let mut command = std::process::Command::new("ls");
        command
            .arg("/")
            .env("LD_PRELOAD", &library)
            .env(name, value);
        let output = command.output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{name}={value}: {error}");
        error
    };
    for (name, value) in UNREADABLE {
        let error = preloaded(name, value);
        assert!(
            error.lines().count() == 1
                && error.starts_with(&format!("pinfold: {name}={value} is ignored: ")),
            "{error}"
        );
        assert_eq!(preloaded(name, ""), "");
    }
    assert_eq!(preloaded("PINFOLD_SHEPHERD", "on"), "");
}

/// The program's own output must not end up in what another program reads.
#[test]
fn the_report_goes_to_a_file_as_text_or_as_json() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("report");
    let option = format!("--stats={}", file.display());
    let script = "echo out; echo err >&2; exit 7";
    let run = |options: &[&str]| {
        let words = [&["run"], options, &["--", "sh", "-c", script]].concat();
        texts(pinfold().args(words))
    };
    let (out, error, code) = run(&[&option]);
    assert_eq!((&out[..], &error[..], code), ("out\n", "err\n", Some(7)));
    let report = fs::read_to_string(&file).unwrap();
    assert_has(&report, &["pinfold: process ", "  cache hits  "]);
    let (out, error, code) = run(&[&option, "--json"]);
    assert_eq!((&out[..], &error[..], code), ("out\n", "err\n", Some(7)));
    let report = fs::read_to_string(&file).unwrap();
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    assert!(
        report["counts"]["allocations"].as_u64() > Some(0),
        "{report}"
    );
    assert_eq!(report["process"]["command"], format!("sh -c {script}"));
    // Without a file, the object follows what the program wrote.
    let (out, error, code) = run(&["--stats", "--json"]);
    assert_eq!((&out[..], code), ("out\n", Some(7)));
    let object = error.strip_prefix("err\n").unwrap();
    assert!(
        serde_json::from_str::<serde_json::Value>(object).is_ok(),
        "{error}"
    );
    let (out, error, code) = run(&["--stats=/no/such/folder/report"]);
    assert_eq!((&out[..], code), ("", Some(2)));
    assert_has(&error, &["/no/such/folder/report"]);
    assert_eq!(run(&["--json"]).2, Some(2));
}
