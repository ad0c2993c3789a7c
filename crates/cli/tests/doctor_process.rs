//! `pinfold doctor PID`: verdicts on running processes that differ by one setting.
//!
//! The programs are this test itself, run by `pinfold run` in a role that an environment variable
//! names.

mod program;
mod texts;

use program::{Program, ROLE, RUN, eventually, in_role};
use serde_json::Value;
use std::hint::black_box;
use std::process::Command;
use std::sync::mpsc::sync_channel;
use std::thread::{self, sleep};
use std::time::Duration;

/// How long a program in a role lives, if no test ends it.
const LIFE: Duration = Duration::from_secs(60);
/// Does what the environment asks for. Does nothing as a test.
#[test]
fn role() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    match role.as_str() {
        "sleeps" => {}
        "crosses" => cross(),
        "isolates" => isolate(),
        _ => panic!("there is no role {role}"),
    }
    // The test's harness has a second thread.
    println!("ready");
    sleep(LIFE);
}

fn pin(cpu: usize) {
    pinfold::topology::set_affinity(&[cpu].into_iter().collect());
}

/// Allocates on CPU 0 and frees on CPU 1.
fn cross() {
    let (give, take) = sync_channel::<Vec<Vec<u8>>>(4);
    let freeing = thread::spawn(move || {
        pin(1);
        take.into_iter().for_each(drop);
    });
    pin(0);
    for _ in 0..400 {
        give.send((0..1000).map(|_| black_box(vec![1; 200])).collect())
            .unwrap();
    }
    drop(give);
    freeing.join().unwrap();
}

/// Isolates CPU 0 by the preloaded library, and has the program's other thread give memory back.
fn isolate() {
    let named = |name: &std::ffi::CStr| {
        // SAFETY: the name is a string.
        let function = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
        assert!(!function.is_null(), "{name:?}");
        function
    };
    let (enter, trim) = (named(c"pinfold_isolate_enter"), named(c"malloc_trim"));
    // SAFETY: these are the types of the functions in pinfold.h and malloc.h.
    let (enter, trim) = unsafe {
        (
            std::mem::transmute::<*mut libc::c_void, extern "C" fn() -> *mut libc::c_void>(enter),
            std::mem::transmute::<*mut libc::c_void, extern "C" fn(usize) -> i32>(trim),
        )
    };
    let (entered, wait) = sync_channel(0);
    thread::spawn(move || {
        pin(0);
        assert!(!enter().is_null());
        entered.send(()).unwrap();
        sleep(LIFE);
    });
    wait.recv().unwrap();
    pin(1);
    drop(black_box(vec![1u8; 1 << 22]));
    trim(0);
}

fn doctor(words: &[&str]) -> (String, String, Option<i32>) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pinfold"));
    let output = command.arg("doctor").args(words).output().unwrap();
    texts::of(output)
}

/// Starts a program with variables.
fn start(role: &str, variables: &[(&str, &str)]) -> Program {
    Program::start(
        in_role(&RUN, role)
            .env("RUST_TEST_THREADS", "2")
            .env_remove("LD_PRELOAD")
            .env_remove("PINFOLD_LIBRARY")
            .env_remove("PINFOLD_RSEQ")
            .envs(variables.iter().copied()),
    )
}

/// Returns a check of a program: how it came out, what was found, and what follows.
fn verdict(program: &Program, name: &str) -> (String, String, String) {
    let pid = program.pid();
    let (out, error, code) = doctor(&[&pid, "--json"]);
    assert_eq!(code, Some(0), "{error}");
    let answer: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(answer["process"]["pid"], program.id());
    let checks = answer["checks"].as_array().unwrap();
    let check = checks.iter().find(|check| check["name"] == name).unwrap();
    let text = |field: &str| check[field].as_str().unwrap().to_owned();
    (text("state"), text("found"), text("follows"))
}

#[test]
fn missing_restartable_sequences_are_no_problem_if_the_user_wanted_none() {
    let program = start("sleeps", &[("PINFOLD_RSEQ", "off")]);
    let (state, found, advice) = verdict(&program, "backend");
    assert!(
        state == "note" && found.contains("PINFOLD_RSEQ=off"),
        "{found}"
    );
    assert!(advice.contains("without this setting"), "{advice}");
    let rseq = doctor(&["--json"]).0;
    let machine: Value = serde_json::from_str(&rseq).unwrap();
    let program = start("sleeps", &[]);
    let (state, found, _) = verdict(&program, "backend");
    assert_eq!(machine["checks"][0]["state"], state, "{found}");
}

#[test]
fn a_missing_shepherd_is_noted_for_a_program_with_threads() {
    let program = start("sleeps", &[("PINFOLD_SHEPHERD", "off")]);
    let (state, found, advice) = verdict(&program, "shepherd");
    assert!(state == "note" && found.starts_with("not there"), "{found}");
    assert!(advice.contains("PINFOLD_SHEPHERD=off"), "{advice}");
    for setting in ["auto", "on"] {
        let program = start("sleeps", &[("PINFOLD_SHEPHERD", setting)]);
        eventually(&format!("no shepherd with {setting}"), || {
            verdict(&program, "shepherd").0 == "ok"
        });
        let (_, found, _) = verdict(&program, "shepherd");
        assert!(found.starts_with("there"), "{setting}: {found}");
    }
}

#[test]
fn isolated_cpus_are_named_with_what_disturbed_them() {
    let program = start("sleeps", &[]);
    let (state, found, _) = verdict(&program, "isolated CPUs");
    assert!(state == "ok" && found.contains("no thread"), "{found}");
    if !has_both_cpus() {
        return;
    }
    let program = start("isolates", &[]);
    eventually("no disturbance is shown", || {
        let (state, found, advice) = verdict(&program, "isolated CPUs");
        let named = found.starts_with("CPU 0 was disturbed by") && found.contains("memory back");
        state == "problem" && named && advice.contains("isolation.md")
    });
}

/// Returns whether this process may use CPUs 0 and 1.
fn has_both_cpus() -> bool {
    // SAFETY: the set is a value of this function.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set);
        libc::CPU_ISSET(0, &set) && libc::CPU_ISSET(1, &set)
    }
}

#[test]
fn many_frees_on_another_node_are_a_problem() {
    if !has_both_cpus() {
        return;
    }
    let nodes = [("PINFOLD_FAKE_NODES", "2")];
    let program = start("crosses", &nodes);
    let (state, found, advice) = verdict(&program, "remote frees");
    assert_eq!(state, "problem", "{found}");
    assert!(advice.contains("on one node"), "{advice}");
    // A probe learns it by the exit status.
    let (out, error, code) = doctor(&[&program.pid(), "--check"]);
    assert_eq!(code, Some(1), "{out}{error}");
    let program = start("sleeps", &nodes);
    let (state, found, _) = verdict(&program, "remote frees");
    assert_eq!(state, "ok", "{found}");
    assert!(verdict(&program, "nodes").1.starts_with("2 "));
}

#[test]
fn settings_are_named_and_lines_say_what_to_do() {
    let settings = [("PINFOLD_MEMORY_LIMIT", "512M"), ("PINFOLD_THP", "never")];
    let program = start("sleeps", &settings);
    let found = verdict(&program, "memory limit").1;
    assert!(found.contains("PINFOLD_MEMORY_LIMIT=512M"), "{found}");
    let found = verdict(&program, "huge pages").1;
    assert!(found.contains("PINFOLD_THP=never"), "{found}");
    let pid = program.pid();
    let (out, error, code) = doctor(&[&pid]);
    assert_eq!(code, Some(0), "{error}");
    let (head, rest) = out.split_once('\n').unwrap();
    assert!(head.starts_with(&format!("process {pid} (")), "{head}");
    assert_eq!(rest.lines().count() % 2, 0, "{rest}");
    assert!(rest.contains("nothing to do"), "{rest}");
}

#[test]
fn a_process_that_is_not_on_pinfold_is_refused() {
    let pid = std::process::id().to_string();
    let (out, error, code) = doctor(&[&pid]);
    assert_eq!((out.as_str(), code), ("", Some(2)));
    assert!(error.contains("shows no statistics"), "{error}");
    assert_eq!(doctor(&["0"]).2, Some(2));
}
