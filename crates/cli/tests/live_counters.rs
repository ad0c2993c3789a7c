//! What another process sees of a program's own counters: `pinfold vmstat`.
//!
//! The programs are this test itself, whose allocator is Pinfold, in a role that an environment
//! variable names.

mod program;
mod texts;

use pinfold::counter::{EventCounter, PerCpuCounter};
use pinfold::internal::segment::{COUNTERS, ShowError, hide, show, show_set};
use pinfold::vmstat::{VmEvents, VmStat, Zone};
use program::{Program, ROLE, in_role, work};
use serde_json::Value;
use std::hint::black_box;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};
use texts::assert_has;

#[global_allocator]
static ALLOCATOR: pinfold_malloc::Pinfold = pinfold_malloc::Pinfold;

/// How long a program in a role lives, if no test ends it.
const LIFE: Duration = Duration::from_secs(60);
/// How long a test waits for what must happen.
const PATIENCE: Duration = Duration::from_secs(40);

pinfold::vmstat_items! {
    pub enum Fault { Minor = "pgfault", Major = "pgmajfault" }
}
pinfold::vmstat_items! {
    pub enum Pool { Free = "nr_free", Dirty = "nr_dirty" }
}

static REQUESTS: EventCounter = EventCounter::new();
static OPEN: PerCpuCounter = PerCpuCounter::new();
static FAULTS: VmEvents<Fault> = VmEvents::new();
static POOL: VmStat<Pool> = VmStat::new();

#[inline(never)]
fn keep_blocks() -> Vec<Vec<u8>> {
    (0..2000).map(|_| black_box(vec![1; 3000])).collect()
}

/// Does what the environment asks for. Does nothing as a test.
#[test]
fn role() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    if role == "has no segment" {
        assert_eq!(show("requests", &REQUESTS), Err(ShowError::NoSegment));
        println!("ready");
        return;
    }
    let kept = black_box(keep_blocks());
    show("requests", &REQUESTS).unwrap();
    show("open.connections", &OPEN).unwrap();
    show_set(&FAULTS).unwrap();
    show_set(&POOL).unwrap();
    match role.as_str() {
        "shows" => {}
        "forks" => {
            REQUESTS.add(1000);
            // SAFETY: only the child's own thread runs in it, and Pinfold takes its locks for a
            // fork.
            let child = unsafe { libc::fork() };
            if child != 0 {
                println!("child {child}");
                sleep(LIFE);
                return;
            }
        }
        "hides" => {
            assert!(hide("requests") && !hide("requests"));
            check_refusals();
        }
        _ => panic!("there is no role {role}"),
    }
    REQUESTS.add(7);
    OPEN.add(5);
    OPEN.sub(9);
    FAULTS.add(Fault::Major, 3);
    POOL.add(Zone::normal(0), Pool::Free, 40);
    POOL.add(Zone::huge(0), Pool::Free, 2);
    POOL.dec(Zone::normal(0), Pool::Dirty);
    println!("ready");
    work(LIFE);
    drop(kept);
}

/// Checks the names and numbers of counters that a process may not show.
fn check_refusals() {
    static MORE: [EventCounter; COUNTERS] = [const { EventCounter::new() }; COUNTERS];
    assert_eq!(show("pgfault", &REQUESTS), Err(ShowError::Taken));
    assert_eq!(show_set(&FAULTS), Err(ShowError::Taken));
    assert_eq!(show("two words", &REQUESTS), Err(ShowError::Name));
    // Five names are in use.
    for (nth, counter) in MORE.iter().take(COUNTERS - 5).enumerate() {
        show(&format!("more_{nth}"), counter).unwrap();
    }
    assert_eq!(show("one_more", &REQUESTS), Err(ShowError::Full));
    for nth in 0..COUNTERS - 5 {
        assert!(hide(&format!("more_{nth}")));
    }
}

fn pinfold(words: &[&str]) -> (String, String, Option<i32>) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pinfold"));
    let output = command.args(words).output().unwrap();
    texts::of(output)
}

/// Starts a program and waits until it is ready.
fn start(role: &str, segment: &str) -> Program {
    let mut program = Program::start(
        in_role(&[], role)
            .env("PINFOLD_SEGMENT", segment)
            .env("PINFOLD_HEAP", "4096"),
    );
    if role == "forks" && program.children().is_empty() {
        assert!(program.says("child "), "it ended");
    }
    program
}

fn block(pid: &str) -> Value {
    let (out, error, code) = pinfold(&["vmstat", pid, "--json"]);
    assert_eq!(code, Some(0), "{error}");
    serde_json::from_str(&out).unwrap()
}

fn value(block: &Value, name: &str) -> Option<i64> {
    let counters = block["counters"].as_array().unwrap();
    let counter = counters.iter().find(|counter| counter["name"] == name)?;
    counter["value"].as_i64()
}

/// Waits until the counter `name` has the value `expected`.
fn wait_for(pid: &str, name: &str, expected: i64) -> Value {
    let end = Instant::now() + PATIENCE;
    loop {
        let block = block(pid);
        if value(&block, name) == Some(expected) {
            return block;
        }
        assert!(Instant::now() < end, "{name} is not {expected}: {block}");
        sleep(Duration::from_millis(50));
    }
}

#[test]
fn counters_and_sets_are_shown_by_name() {
    let program = start("shows", "on");
    let pid = program.pid();
    for (name, expected) in [
        ("requests", 7),
        ("open.connections", -4),
        ("pgfault", 0),
        ("pgmajfault", 3),
        ("nr_free", 42),
        ("nr_dirty", -1),
    ] {
        wait_for(&pid, name, expected);
    }
    let block = block(&pid);
    let kind = |nth: usize| block["counters"][nth]["kind"].clone();
    assert_eq!((kind(0), kind(1)), ("events".into(), "level".into()));
    assert!(block["age_seconds"].as_f64().is_some(), "{block}");
    let (out, _, code) = pinfold(&["vmstat", &pid]);
    assert_eq!(code, Some(0));
    assert_eq!(
        out,
        "requests 7\nopen.connections -4\npgfault 0\npgmajfault 3\nnr_free 42\nnr_dirty -1\n"
    );
}

/// A program that contains Pinfold gets no thread that it did not ask for.
#[test]
fn a_missing_shepherd_is_no_problem_in_a_program_that_contains_pinfold() {
    // The test's harness has a second thread.
    let program = Program::start(in_role(&[], "shows").env("RUST_TEST_THREADS", "2"));
    let (out, error, code) = pinfold(&["doctor", &program.pid(), "--json"]);
    assert_eq!(code, Some(0), "{error}");
    let answer: Value = serde_json::from_str(&out).unwrap();
    let checks = answer["checks"].as_array().unwrap();
    let check = checks.iter().find(|check| check["name"] == "shepherd");
    let check = check.unwrap();
    assert_eq!(check["state"], "note", "{check}");
    assert_has(check["follows"].as_str().unwrap(), &["Shepherd::start"]);
    let found = check["found"].as_str().unwrap();
    assert!(!found.contains("PINFOLD_SHEPHERD"), "{found}");
}

#[test]
fn blocks_after_the_first_have_rates() {
    let program = start("shows", "on");
    wait_for(&program.pid(), "requests", 7);
    let (out, error, code) = pinfold(&["vmstat", &program.pid(), "0.02", "2"]);
    assert_eq!(code, Some(0), "{error}");
    let (first, second) = out.split_once("\n\n").unwrap();
    assert_eq!(first.lines().next(), Some("requests 7"));
    let words: Vec<&str> = second.lines().next().unwrap().split_whitespace().collect();
    assert_eq!(words, ["requests", "7", "0.0/s"]);
}

#[test]
fn hidden_counters_are_gone_and_bad_names_are_refused() {
    let program = start("hides", "on");
    let block = wait_for(&program.pid(), "nr_free", 42);
    assert_eq!(value(&block, "requests"), None);
    let counters = block["counters"].as_array().unwrap();
    assert_eq!(counters.len(), 5, "{block}");
}

#[test]
fn a_forked_child_goes_on_with_its_own_values() {
    let program = start("forks", "on");
    let child = program.number("child").to_string();
    // The child makes a segment of its own when `pinfold list` asks for it.
    let end = Instant::now() + PATIENCE;
    while pinfold(&["vmstat", &child]).2 != Some(0) {
        assert!(Instant::now() < end, "the child has no segment");
        assert_eq!(pinfold(&["list"]).2, Some(0));
    }
    wait_for(&child, "requests", 1007);
    let parent = program.id().to_string();
    let (out, _, _) = pinfold(&["vmstat", &parent]);
    assert!(!out.contains("requests 1007"), "{out}");
}

#[test]
fn a_process_without_a_segment_gets_an_error() {
    drop(start("has no segment", "off"));
}

#[test]
fn a_process_without_counters_is_told_how_to_show_them() {
    let mut program = Command::new(env!("CARGO_BIN_EXE_pinfold"))
        .args(["run", "--", "sleep", "60"])
        .env_remove("PINFOLD_STATS")
        .spawn()
        .unwrap();
    let pid = program.id().to_string();
    let end = Instant::now() + PATIENCE;
    let (mut out, mut error, mut code) = pinfold(&["vmstat", &pid]);
    while code != Some(0) {
        assert!(Instant::now() < end, "{error}");
        sleep(Duration::from_millis(20));
        (out, error, code) = pinfold(&["vmstat", &pid]);
    }
    let _ = program.kill();
    let _ = program.wait();
    assert!(out.is_empty(), "{error}");
    assert_has(&error, &["pinfold_counter_show"]);
    assert_eq!(pinfold(&["vmstat", "0"]).2, Some(2));
}

#[test]
fn a_profile_begins_with_the_programs_own_frames() {
    let program = start("shows", "on");
    let (out, error, _) = pinfold(&["heap", "dump", &program.pid(), "--stacks", "1"]);
    let (_, stack) = out.split_once("in use, from:\n").expect(&error);
    let allocates = |line: &&str| line.contains("keep_blocks");
    let before = stack.lines().take_while(|line| !allocates(line)).count();
    assert!(before < stack.lines().count(), "{out}");
    // The standard library's frames are inlined into the program's function. Without the types'
    // debug information, their names have no path.
    let is_own = |line: &&str| !line.contains("/library/alloc/src/");
    for own in ["pinfold", "alloc_", "run_on_stack", "callers"] {
        let mut inner = stack.lines().take(before).filter(is_own);
        assert!(!inner.any(|line| line.trim().starts_with(own)), "{out}");
    }
    let mut inner = stack.lines().take(before);
    assert!(
        !inner.any(|line| line.contains("/crates/pinfold/src/")),
        "{out}"
    );
}
