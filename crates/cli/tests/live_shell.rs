//! The commands in a shell: readers that close a pipe, standard errors that take nothing, names of
//! addresses, and programs that allocate seldom.
//!
//! The program is this test itself, run by `pinfold run`.

mod program;

use program::{Program, ROLE, in_shell};
use std::fs::{File, OpenOptions};
use std::hint::black_box;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How long the program lives, if no test ends it.
const LIFE: Duration = Duration::from_secs(120);
/// How long a test waits for what must happen.
const PATIENCE: Duration = Duration::from_secs(60);

/// Allocates a little every 0.7 s if the environment asks for it. Does nothing as a test.
#[test]
fn role() {
    if std::env::var(ROLE).is_err() {
        return;
    }
    println!("ready");
    let end = Instant::now() + LIFE;
    while Instant::now() < end {
        // The first allocation beyond a sheaf takes a slow path.
        let blocks: Vec<Vec<u8>> = (0..8).map(|_| black_box(vec![1; 20_000])).collect();
        sleep(Duration::from_millis(700));
        drop(black_box(blocks));
    }
}

fn pinfold() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pinfold"));
    command.env_remove("LD_PRELOAD").env_remove("PINFOLD_STATS");
    command
}

/// Starts the role, without a thread of the library's.
fn start() -> Program {
    start_after("true")
}

/// Starts the role in a shell that has run `line`.
fn start_after(line: &str) -> Program {
    let mut command = in_shell(&format!("{line} &&"), "yes");
    command.env_remove("LD_PRELOAD");
    Program::start(command.env("PINFOLD_SHEPHERD", "off"))
}

fn full() -> File {
    OpenOptions::new().write(true).open("/dev/full").unwrap()
}

#[test]
fn a_command_with_an_interval_ends_when_nobody_reads_it() {
    let program = start();
    for words in [&["stat"][..], &["stat", "--json"], &["vmstat", "--json"]] {
        let mut command = pinfold();
        command.args(words).args([&program.pid(), "0.05"]);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        out.read_line(&mut String::new()).unwrap();
        drop(out);
        let begin = Instant::now();
        while child.try_wait().unwrap().is_none() {
            if begin.elapsed() > PATIENCE {
                child.kill().unwrap();
                panic!("{words:?} goes on");
            }
            sleep(Duration::from_millis(20));
        }
        assert_eq!(child.wait().unwrap().code(), Some(0), "{words:?}");
    }
}

#[test]
fn messages_that_nobody_can_read_change_no_exit_status() {
    let status = |words: &[&str]| {
        let status = pinfold().args(words).stderr(full()).status().unwrap();
        status.code()
    };
    assert_eq!(status(&["stat", "4194305"]), Some(2));
    assert_eq!(status(&["run", "--", "/no/such/program"]), Some(127));
    let leaks = ["run", "--heap", "--leaks", "--", "sh", "-c", "exit 3"];
    assert_eq!(status(&leaks), Some(3));
}

#[test]
fn a_server_listens_at_a_name() {
    let program = start();
    let mut serve =
        Program::of(pinfold().args(["serve", "--listen", "localhost:0", &program.pid()]));
    let mut line = String::new();
    serve.lines.read_line(&mut line).unwrap();
    assert!(line.starts_with("serving at http://"), "{line}");
    for wrong in ["9464", "no.such.host.invalid:9464", "127.0.0.1"] {
        let output = pinfold().args(["serve", "--listen", wrong]).output();
        let output = output.unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{wrong}");
        assert!(said.contains("127.0.0.1:9464"), "{said}");
    }
}

#[test]
fn a_program_that_allocates_seldom_looks_at_its_next_slow_path() {
    let program = start();
    // Whatever the first allocations of the process have done, later requests are seen soon.
    for _ in 0..5 {
        let words = ["trim", &program.pid(), "--timeout", "3"];
        let output = pinfold().args(words).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{said}");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(said.contains("RssAnon went from"), "{said}");
    }
}

#[test]
fn a_profile_that_may_have_no_file_is_read_in_the_process() {
    // A unit is 512 bytes. The statistics fit, and a profile does not.
    let program = start_after("ulimit -f 4096");
    let heap = |words: &[&str]| {
        let output = pinfold().arg("heap").args(words).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), said)
    };
    let (pid, patience) = (program.pid(), ["--timeout", "50"]);
    let (code, said) = heap(&[&["start", &pid], &patience[..]].concat());
    assert_eq!(code, Some(0), "{said}");
    let (code, said) = heap(&["dump", &pid]);
    if File::open(format!("/proc/{pid}/mem")).is_ok() {
        assert_eq!(code, Some(0), "{said}");
    } else {
        assert!(code == Some(2) && said.contains("root"), "{said}");
    }
    let (code, said) = heap(&[&["stop", &pid], &patience[..]].concat());
    assert_eq!(code, Some(0), "{said}");
}

#[test]
fn a_list_tells_the_age_of_the_process() {
    let program = start();
    sleep(Duration::from_millis(1500));
    let output = pinfold().args(["list", "--json"]).output().unwrap();
    let list: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = list["processes"].as_array().unwrap();
    let own = rows.iter().find(|row| row["pid"] == program.id());
    let seconds = own.unwrap()["age_seconds"].as_u64().unwrap();
    assert!((1..60).contains(&seconds), "{seconds}");
}
