//! What another process sees of a running program: `pinfold list`, `stat` and `slabinfo`.
//!
//! The programs are this test itself, run by `pinfold run` in a role that an environment variable
//! names.

mod program;
mod served;
mod texts;

use program::{Program, ROLE, fork_child, in_shell, work};
use serde_json::Value;
use served::Server;
use std::fs;
use std::hint::black_box;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;
use texts::assert_has;

/// How long a program in a role lives, if no test ends it.
const LIFE: Duration = Duration::from_secs(60);

/// Does what the environment asks for. Does nothing as a test.
#[test]
fn role() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    // Blocks of a size that nothing else has.
    let kept: Vec<Vec<u8>> = (0..1000).map(|_| black_box(vec![1; 3000])).collect();
    match role.as_str() {
        "sleeps" => {}
        "closes" => {
            // SAFETY: nothing uses a descriptor from 3 on afterwards.
            unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) };
        }
        "forks" => _ = fork_child("child", || work(LIFE)),
        _ => panic!("there is no role {role}"),
    }
    println!("ready {}", std::process::id());
    sleep(LIFE);
    drop(black_box(kept));
}

fn pinfold() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pinfold"));
    command
        .env_remove("LD_PRELOAD")
        .env_remove("PINFOLD_LIBRARY")
        .env_remove("PINFOLD_STATS");
    command
}

/// Returns the files that a program shows itself by.
fn files(program: &Program) -> Vec<PathBuf> {
    let entries = fs::read_dir(format!("/proc/{}/fd", program.id())).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let is_ours = |path: &Path| {
        fs::read_link(path).is_ok_and(|target| target.to_string_lossy().contains("memfd:pinfold"))
    };
    paths.filter(|path| is_ours(path)).collect()
}

/// Starts a program with words of `sh` before it.
fn start_after(shell: &str, role: &str) -> Program {
    Program::start(&mut in_shell(shell, role))
}

fn start(role: &str) -> Program {
    start_after("", role)
}

/// Runs the command. Returns its output, its errors, and its exit status.
fn run(words: &[&str]) -> (String, String, Option<i32>) {
    let output = pinfold().args(words).output().unwrap();
    texts::of(output)
}

fn json(words: &[&str]) -> Value {
    let (out, error, code) = run(words);
    assert_eq!(code, Some(0), "{error}");
    serde_json::from_str(&out).unwrap()
}

/// Returns the row of process `pid` in `pinfold list`.
fn listed(pid: u32) -> Option<Value> {
    let answer = json(&["list", "--json"]);
    let rows = answer["processes"].as_array().unwrap();
    rows.iter().find(|row| row["pid"] == pid).cloned()
}

/// Returns a cache of `pinfold slabinfo`.
fn cache(pid: u32, name: &str) -> Value {
    let answer = json(&["slabinfo", &pid.to_string(), "--json"]);
    let caches = answer["caches"].as_array().unwrap().clone();
    let mut caches = caches.into_iter();
    caches.find(|cache| cache["name"] == name).unwrap()
}

#[test]
fn a_running_program_is_listed_with_its_memory() {
    let program = start("sleeps");
    let row = listed(program.id()).unwrap();
    assert!(row["held_bytes"].as_u64().unwrap() >= 3_000_000, "{row}");
    assert!(
        row["used_bytes"].as_u64() <= row["held_bytes"].as_u64(),
        "{row}"
    );
    let pid = program.id();
    drop(program);
    assert!(listed(pid).is_none());
}

#[test]
fn slabinfo_tells_the_objects_of_each_cache() {
    let program = start("sleeps");
    let row = cache(program.id(), "kmalloc-03072");
    let active = row["active_objects"].as_u64().unwrap();
    // Beside the blocks in use, only sheaves hold objects.
    assert!((1000..1500).contains(&active), "{row}");
    assert!(row["objects"].as_u64().unwrap() >= active, "{row}");
    let (text, ..) = run(&["slabinfo", &program.pid()]);
    assert!(
        text.starts_with("slabinfo - version: 2.1\n# name"),
        "{text}"
    );
    assert!(
        text.lines().any(|line| line.starts_with("kmalloc-03072 ")),
        "{text}"
    );
}

#[test]
fn stat_shows_rates_and_ends_with_the_process() {
    let program = start("forks");
    let child = program.number("child");
    assert!(listed(child).is_some());
    let (text, error, code) = run(&["stat", &child.to_string(), "0.2", "3", "--json"]);
    assert_eq!(code, Some(0), "{error}");
    let lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines.len(), 3);
    assert!(
        lines
            .iter()
            .all(|line| line["slow_calls_per_second"].as_f64().unwrap() > 0.0),
        "{text}"
    );
    let stat = pinfold()
        .args(["stat", &child.to_string(), "0.05"])
        .stdout(Stdio::piped())
        .spawn();
    let mut stat = stat.unwrap();
    let mut lines = BufReader::new(stat.stdout.take().unwrap()).lines();
    // Two header lines and a line.
    assert!(lines.by_ref().take(3).all(|line| line.is_ok()));
    drop(program);
    assert!(stat.wait().unwrap().success());
}

#[test]
fn a_forked_child_is_shown_at_the_first_look() {
    let program = start("forks");
    let child = program.number("child");
    let row = listed(child).expect("the child is shown");
    assert!(row["held_bytes"].as_u64().unwrap() >= 3_000_000, "{row}");
    // What the parent had at the fork counts for both, what came later for one.
    let parent = cache(program.id(), "kmalloc-00224");
    let child = cache(child, "kmalloc-00224");
    assert!(
        child["refills"].as_u64() > parent["refills"].as_u64(),
        "{child} {parent}"
    );
}

#[test]
fn other_processes_cannot_write_to_the_statistics() {
    use std::os::unix::fs::FileExt;
    let program = start("sleeps");
    let before = cache(program.id(), "kmalloc-03072");
    for path in files(&program) {
        let Ok(file) = fs::OpenOptions::new().write(true).open(&path) else {
            continue;
        };
        assert!(file.set_len(0).is_err());
        let link = fs::read_link(&path).unwrap();
        if link.to_string_lossy().contains("mailbox") {
            // Any request is ignored or served.
            file.write_at(&[0xff; 4096], 0).unwrap();
        } else {
            assert!(file.write_at(&[0xff; 64], 0).is_err());
        }
    }
    assert_eq!(before, cache(program.id(), "kmalloc-03072"));
    assert!(listed(program.id()).is_some());
}

#[test]
fn descriptors_are_high_and_not_inherited_by_exec() {
    let program = start("sleeps");
    let files = files(&program);
    assert_eq!(files.len(), 2);
    for file in files {
        let number: u32 = file.file_name().unwrap().to_str().unwrap().parse().unwrap();
        assert!(number >= 240, "{number}");
        let info = fs::read_to_string(format!("/proc/{}/fdinfo/{number}", program.id())).unwrap();
        let flags = info
            .lines()
            .find_map(|line| line.strip_prefix("flags:"))
            .unwrap();
        let flags = u32::from_str_radix(flags.trim(), 8).unwrap();
        assert_ne!(flags & libc::O_CLOEXEC as u32, 0);
    }
}

#[test]
fn root_can_read_a_program_that_has_closed_its_descriptors() {
    let program = start("closes");
    assert_eq!(files(&program).len(), 0);
    let (_, error, code) = run(&["stat", &program.pid()]);
    if fs::File::open(format!("/proc/{}/mem", program.id())).is_ok() {
        assert_eq!(code, Some(0), "{error}");
    } else {
        assert_eq!(code, Some(2));
        assert!(error.contains("root"), "{error}");
    }
}

#[test]
fn a_program_that_may_have_no_segment_runs_without_one() {
    // No file of any size, and few descriptors.
    for limit in ["ulimit -f 0;", "ulimit -n 20;"] {
        let program = start_after(limit, "sleeps");
        assert!(listed(program.id()).is_none(), "{limit}");
    }
}

#[test]
fn numbers_are_served_over_http_until_the_process_ends() {
    let program = start("sleeps");
    let pid = program.pid();
    let mut server = Server::start(1000, &[&pid]);
    let metrics = server.get("/metrics");
    assert!(metrics.starts_with("HTTP/1.1 200"), "{metrics}");
    let held = format!("pinfold_held_bytes{{pid=\"{pid}\"");
    let held = metrics
        .lines()
        .find(|line| line.starts_with(&held))
        .unwrap();
    let held: u64 = held.rsplit(' ').next().unwrap().parse().unwrap();
    assert!(held >= 3_000_000, "{metrics}");
    assert!(metrics.contains("cache=\"kmalloc-03072\""), "{metrics}");
    assert_has(&metrics, &["process_resident_memory_bytes{"]);
    let status = server.get("/status.json");
    let status: Value = serde_json::from_str(status.split_once("\r\n\r\n").unwrap().1).unwrap();
    let shown = &status["processes"][0];
    assert_eq!(shown["held_bytes"], held);
    for value in [
        &shown["cpus"][0]["threads"],
        &shown["nodes"][0]["used_bytes"],
    ] {
        assert!(value.as_u64() > Some(0), "{shown}");
    }
    assert!(server.get("/").contains("<title>Pinfold</title>"));
    assert!(server.get("/other").starts_with("HTTP/1.1 404"));
    let posted = server.answer("POST /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n");
    assert!(posted.unwrap().starts_with("HTTP/1.1 405"));
    drop(program);
    assert!(server.await_end().success());
}

#[test]
fn top_prints_one_picture_as_text() {
    let program = start("sleeps");
    let pid = program.pid();
    let (text, error, code) = run(&["top", "--once", "--sort", "size", &pid]);
    assert_eq!(code, Some(0), "{error}");
    assert_eq!(text.lines().count(), 24);
    assert_has(&text, &["= reserved", "*SIZE"]);
    let (text, ..) = run(&["top", "--once", "--delay", "0.05"]);
    assert!(text.contains(&program.pid()), "{text}");
    let (_, error, code) = run(&["top", &program.pid()]);
    assert_eq!(code, Some(2));
    assert!(error.contains("--once"), "{error}");
}

#[test]
fn a_process_that_counts_every_call_is_shown_too() {
    let folder = std::env::temp_dir().join(format!("pinfold-counts-{}", std::process::id()));
    fs::create_dir(&folder).unwrap();
    let variable = format!("export PINFOLD_STATS='{}';", folder.display());
    let program = start_after(&variable, "sleeps");
    let pid = program.pid();
    assert!(listed(program.id()).is_some());
    let row = cache(program.id(), "kmalloc-03072");
    assert!(
        (1000..1500).contains(&row["active_objects"].as_u64().unwrap()),
        "{row}"
    );
    let held = json(&["stat", &pid, "--json"])["held_bytes"].as_u64();
    assert!(held >= Some(3_000_000), "{held:?}");
    let (picture, error, _) = run(&["top", "--once", "--delay", "0.05", &pid]);
    assert!(picture.contains("requested, about"), "{picture}{error}");
    let (said, error, _) = run(&["doctor", &pid]);
    assert!(said.contains("every call is counted"), "{said}{error}");
    drop(program);
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_process_that_cannot_be_read_is_named_with_the_reason() {
    for (pid, reason) in [
        ("4194305", "no such process"),
        (&*std::process::id().to_string(), "does not run on Pinfold"),
    ] {
        for command in ["stat", "slabinfo"] {
            let (out, error, code) = run(&[command, pid]);
            assert_eq!((out.as_str(), code), ("", Some(2)), "{command} {pid}");
            assert!(error.contains(pid) && error.contains(reason), "{error}");
        }
    }
    for bad in [
        &["stat", "0"][..],
        &["stat", "1", "0"],
        &["stat", "1", "1", "0"],
    ] {
        assert_eq!(run(bad).2, Some(2), "{bad:?}");
    }
}
