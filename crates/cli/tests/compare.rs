//! `pinfold compare`.

mod program;
mod texts;

use program::{ROLE, eventually, in_role};
use serde_json::Value;
use std::fs;
use std::hint::black_box;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};
use texts::assert_has;

const PINFOLD: &str = env!("CARGO_BIN_EXE_pinfold");
/// The variable with the server's socket.
const SOCKET: &str = "PINFOLD_TEST_SOCKET";
const MIB: f64 = (1 << 20) as f64;

/// Runs `pinfold compare` with these words.
fn compare(words: &[&str]) -> (String, String, Option<i32>) {
    let mut command = Command::new(PINFOLD);
    command.arg("compare").args(words).env_remove("LD_PRELOAD");
    texts::of(command.output().unwrap())
}

/// Runs `pinfold compare --json` with these words. Returns the allocators and the exit status.
fn measured(words: &[&str]) -> (Vec<Value>, Option<i32>) {
    let (out, error, code) = compare(&[&["--json"], words].concat());
    (allocators(&out, &error), code)
}

fn allocators(out: &str, error: &str) -> Vec<Value> {
    let report: Value = serde_json::from_str(out).unwrap_or_else(|_| panic!("{out}{error}"));
    report["allocators"].as_array().unwrap().clone()
}

fn median(allocator: &Value, key: &str) -> f64 {
    allocator["figures"][key]["median"].as_f64().unwrap()
}

/// The programs that the tests below run on the allocators.
#[test]
fn role() {
    let role = std::env::var(ROLE).unwrap_or_default();
    let socket = || std::env::var(SOCKET).unwrap();
    match role.as_str() {
        "large" => drop(black_box(vec![1_u8; 64 << 20])),
        "server" => {
            let listener = UnixListener::bind(socket()).unwrap();
            let mut held = Vec::new();
            for stream in listener.incoming() {
                let (mut stream, mut byte) = (stream.unwrap(), [0]);
                // The command connects without a word to see whether this server is ready.
                if stream.read(&mut byte).unwrap() == 1 {
                    held.push(black_box(vec![1_u8; 32 << 20]));
                    stream.write_all(&byte).unwrap();
                }
            }
        }
        "client" => {
            let (mut stream, mut byte) = (UnixStream::connect(socket()).unwrap(), [0]);
            stream.write_all(&byte).unwrap();
            stream.read_exact(&mut byte).unwrap();
        }
        _ => return,
    }
    // The test's own last line would name its time.
    std::process::exit(0);
}

/// A program's memory counts, and that of the command and of its other children does not.
#[test]
fn the_peak_is_that_of_the_program() {
    let words = [PINFOLD, "compare", "--json", "--rounds", "1", "--"];
    let output = in_role(&words, "large").env_remove("LD_PRELOAD").output();
    let (out, error, code) = texts::of(output.unwrap());
    assert_eq!(code, Some(0), "{out}{error}");
    let found = allocators(&out, &error);
    assert_eq!(
        (&found[0]["name"], &found[1]["name"]),
        (&"as it is".into(), &"Pinfold".into())
    );
    assert_eq!(found[1]["same_output"], true);
    for allocator in &found {
        let peak = median(allocator, "peak_bytes") / MIB;
        assert!((64.0..90.0).contains(&peak), "{allocator}");
        assert!(median(allocator, "page_faults") > 0.0, "{allocator}");
    }
    let (small, _) = measured(&["--rounds", "1", "--", "true"]);
    assert!(median(&small[0], "peak_bytes") < 5.0 * MIB, "{small:?}");
}

#[test]
fn a_program_that_fails_or_differs_on_one_allocator_is_told() {
    let on_pinfold = |act: &str| format!("case $LD_PRELOAD in *pinfold*) {act};; esac; echo x");
    let (out, _, code) = compare(&[
        "--rounds",
        "6",
        "--",
        "sh",
        "-c",
        &on_pinfold("echo no >&2; exit 3"),
    ]);
    assert_eq!(code, Some(1), "{out}");
    assert_has(&out, &["Pinfold: FAILED: exit status 3: no", "as it is"]);
    let (out, _, code) = compare(&[
        "--rounds",
        "1",
        "--",
        "sh",
        "-c",
        &on_pinfold("kill -SEGV $$"),
    ]);
    assert_eq!(code, Some(1), "{out}");
    assert_has(&out, &["Pinfold: FAILED: signal 11"]);
    let (out, _, code) = compare(&["--rounds", "1", "--", "sh", "-c", &on_pinfold("echo y")]);
    assert_eq!(code, Some(1), "{out}");
    assert_has(&out, &["ITS STANDARD OUTPUT DIFFERS"]);
    // A program that always writes something else is not judged by it.
    let (found, code) = measured(&["--rounds", "1", "--", "sh", "-c", "echo $$"]);
    assert_eq!((&found[1]["same_output"], code), (&Value::Null, Some(0)));
}

#[test]
fn a_program_that_fails_everywhere_in_one_way_is_measured() {
    let (out, error, code) = compare(&["--rounds", "1", "--", "sh", "-c", "echo why >&2; exit 4"]);
    assert_eq!(code, Some(0), "{out}{error}");
    assert_has(&error, &["ends with exit status 4: why"]);
    assert_has(&out, &["too few rounds"]);
}

#[test]
fn a_run_that_takes_too_long_has_failed() {
    let (out, _, code) = compare(&["--timeout", "0.5", "--", "sleep", "100"]);
    assert_eq!(code, Some(1), "{out}");
    assert_has(
        &out,
        &["as it is: FAILED: it did not end within 0.5 s; raise --timeout"],
    );
}

#[test]
fn a_server_is_measured_under_its_load() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let socket = socket.to_str().unwrap();
    // A stale socket of the server before would be in the way.
    let this = std::env::current_exe().unwrap();
    let this = this.to_str().unwrap();
    let client = format!("{ROLE}=client '{this}' --exact role && rm '{socket}'");
    let words = [
        PINFOLD, "compare", "--json", "--rounds", "2", "--settle", "0.01",
    ];
    let words = [&words[..], &["--ready", socket, "--load", &client, "--"]].concat();
    let output = in_role(&words, "server").env(SOCKET, socket).output();
    let (out, error, code) = texts::of(output.unwrap());
    assert_eq!(code, Some(0), "{out}{error}");
    for allocator in allocators(&out, &error) {
        for key in ["settled_bytes", "peak_bytes"] {
            assert!(
                (32.0..60.0).contains(&(median(&allocator, key) / MIB)),
                "{allocator}"
            );
        }
        assert_eq!(
            allocator["figures"]["seconds"]["rounds"]
                .as_array()
                .unwrap()
                .len(),
            2
        );
    }
}

#[test]
fn a_server_that_fails_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("pid").display().to_string();
    let [dies, kills] = [
        format!("echo $$ > {file}; exec sleep 100"),
        format!("until test -s {file}; do sleep 0.02; done; kill $(cat {file}); sleep 100"),
    ];
    for (server, load, said) in [
        (
            "echo broken >&2; exit 1",
            "true",
            "before it was ready (exit status 1)",
        ),
        (
            "exec sleep 100",
            "echo refused >&2; exit 7",
            "the load failed: exit status 7: refused",
        ),
        (&dies, &kills, "the server ended during the load"),
    ] {
        let ready = if load == "true" { "false" } else { "true" };
        let words = [
            "--ready-command",
            ready,
            "--load",
            load,
            "--",
            "sh",
            "-c",
            server,
        ];
        let (out, _, code) = compare(&words);
        assert_eq!(code, Some(1), "{out}");
        assert_has(&out, &["as it is: FAILED", said]);
    }
}

/// A process that has left the program's group and session would disturb the next run.
#[test]
fn no_process_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("left");
    let text = format!("setsid sleep 600 & echo $! >> {}", file.display());
    let (_, code) = measured(&["--rounds", "1", "--", "sh", "-c", &text]);
    assert_eq!(code, Some(0));
    let left = fs::read_to_string(file).unwrap();
    assert_eq!(left.lines().count(), 4);
    for pid in left.lines() {
        assert!(!Path::new("/proc").join(pid).exists(), "{pid}");
    }
}

#[test]
fn an_interrupt_prints_what_there_is() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("runs");
    let text = format!("echo $$ >> {}; sleep 0.05", file.display());
    let mut child = Command::new("env");
    child.args([
        "--default-signal",
        PINFOLD,
        "compare",
        "--rounds",
        "1000",
        "--",
    ]);
    child
        .args(["sh", "-c", &text])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let child = child.spawn().unwrap();
    let runs = || fs::read_to_string(&file).unwrap_or_default();
    eventually("two rounds", || runs().lines().count() > 6);
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    let (out, error, code) = texts::of(child.wait_with_output().unwrap());
    assert_eq!(code, Some(128 + libc::SIGINT), "{out}{error}");
    assert_has(&out, &["time s", "Pinfold:"]);
    assert_has(&error, &["signal 2 ended the measurement"]);
    let last = runs().lines().last().unwrap().to_owned();
    eventually("the program has ended", || {
        !Path::new("/proc").join(&last).exists()
    });
}

/// The server takes long to end after SIGTERM.
#[test]
fn an_interrupt_while_a_server_stops_ends_the_measurement() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let [started, stops] = [at("started"), at("stops")];
    let server = format!(
        "trap 'echo > {stops}; sleep 600' TERM; echo > {started}; while :; do sleep 0.1; done"
    );
    let ready = format!("test -e {started}");
    let mut command = Command::new("env");
    command.args(["--default-signal", PINFOLD, "compare", "--settle", "0.01"]);
    command.args(["--ready-command", &ready, "--load", "true", "--"]);
    command.args(["sh", "-c", &server]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = child.spawn().unwrap();
    eventually("the server stops", || Path::new(&stops).exists());
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    let (out, error, code) = texts::of(child.wait_with_output().unwrap());
    assert_eq!(code, Some(128 + libc::SIGINT), "{out}{error}");
}

#[test]
fn wrong_input_is_an_error_with_a_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text.so");
    fs::write(&text, "no library").unwrap();
    let text = text.to_str().unwrap();
    for (words, said) in [
        (&["--", "/no/such"][..], &["/no/such"][..]),
        (&["--rounds", "0", "--", "true"], &["1..=1000"]),
        (
            &["--with", "/no/such.so", "--", "true"],
            &["/no/such.so", "give the path"],
        ),
        (
            &["--with", "/bin/sh", "--", "true"],
            &["/bin/sh", "defines no malloc"],
        ),
        (
            &["--with", text, "--", "true"],
            &["text.so", "give a file like"],
        ),
        (&["--load", "true", "--", "true"], &["--ready PORT"]),
        (
            &["--load", "true", "--ready", "0", "--", "true"],
            &["from 1 to 65535"],
        ),
        (&["--ready", "80", "--", "true"], &["--load"]),
        (&["--timeout", "0", "--", "true"], &["0.01 to 86400"]),
    ] {
        let (out, error, code) = compare(words);
        assert_eq!((out.as_str(), code), ("", Some(2)), "{error}");
        assert_has(&error, said);
    }
}

/// Such a library would leave the program on its own allocator, and its figures would lie.
#[test]
fn a_library_that_the_loader_refuses_has_no_figures() {
    let folder = tempfile::tempdir().unwrap();
    let script = "echo 'void *malloc(unsigned long n) { return 0; }' > x.c && \
                  cc -w -fno-builtin -shared -fPIC -o libx.so x.c";
    let made = Command::new("sh")
        .args(["-c", script])
        .current_dir(&folder)
        .status();
    if !made.unwrap().success() {
        return eprintln!("left out: there is no C compiler");
    }
    let library = folder.path().join("libx.so");
    let mut bytes = fs::read(&library).unwrap();
    // From now on, the library is for FreeBSD, and the other one for another machine.
    bytes[7] = 9;
    fs::write(&library, &bytes).unwrap();
    bytes[18] = if cfg!(target_arch = "x86_64") {
        183
    } else {
        62
    };
    let other = folder.path().join("libother.so");
    fs::write(&other, bytes).unwrap();
    let (_, error, code) = compare(&[&format!("--with={}", other.display()), "--", "true"]);
    assert_eq!(code, Some(2), "{error}");
    assert_has(&error, &["libother.so", "for another machine"]);
    let with = format!("--with={}", library.display());
    let (out, _, code) = compare(&[&with, "--rounds", "1", "--", "true"]);
    assert_eq!(code, Some(1), "{out}");
    assert_has(
        &out,
        &["x: FAILED: ERROR: ld.so: object '", "cannot be preloaded"],
    );
    assert!(out.contains("Pinfold: too few rounds"), "{out}");
    let twice = compare(&[&with, &with, "--", "true"]);
    assert_eq!(twice.2, Some(2));
    assert_has(&twice.1, &["two allocators are called x", "--with NAME="]);
}
