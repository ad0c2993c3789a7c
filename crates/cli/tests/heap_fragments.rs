//! Which call stacks keep free memory in slabs: `pinfold heap dump --fragmentation`.
//!
//! The program is this test itself, run by `pinfold run` in a role that an environment variable
//! names.

mod program;
mod texts;

use program::{Program, ROLE, RUN, eventually, in_role};
use serde_json::Value;
use std::hint::black_box;
use std::io::{BufRead, stdin};
use std::path::Path;
use std::process::{Command, Output};
use std::{env, fs};
use texts::assert_has;

/// The bytes of a block, and the class that serves it.
const BYTES: usize = 200;
const CLASS: &str = "kmalloc-00224";
/// How many blocks there were at first, and which part of them stays.
const BLOCKS: usize = 200_000;
const PART: usize = 20;

/// Returns a block that stays.
#[inline(never)]
fn spreads() -> Vec<u8> {
    black_box(vec![1; black_box(BYTES)])
}

/// Returns a block that is freed soon.
#[inline(never)]
fn transient() -> Vec<u8> {
    black_box(vec![1; black_box(BYTES)])
}

/// Returns blocks of another class, as many bytes as stay of the others.
#[inline(never)]
fn packs() -> Vec<Vec<u8>> {
    let blocks = BLOCKS / PART * BYTES / 500;
    black_box((0..blocks).map(|_| black_box(vec![1; 500])).collect())
}

/// Does what the environment asks for. Does nothing as a test.
#[test]
fn role() {
    let Ok(role) = env::var(ROLE) else {
        return;
    };
    let mut kept = Vec::with_capacity(BLOCKS);
    let mut freed = Vec::with_capacity(BLOCKS);
    for nth in 0..BLOCKS {
        match nth % PART {
            0 => kept.push(spreads()),
            _ => freed.push(transient()),
        }
    }
    let packed = packs();
    drop(black_box(freed));
    if role == "is replaced" {
        // New blocks fill the slabs again, and other slabs take the place of those that went back.
        drop(black_box((kept, packed)));
        let full: Vec<_> = (0..BLOCKS).map(|_| transient()).collect();
        println!("ready");
        let _ = stdin().lock().lines().next();
        drop(full);
        return;
    }
    if role == "waits" {
        println!("ready");
        let _ = stdin().lock().lines().next();
    }
    drop(black_box((kept, packed)));
}

fn pinfold(words: &[&str]) -> Output {
    Command::new(RUN[0]).args(words).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs a command that must succeed, and returns its JSON object.
#[track_caller]
fn object(words: &[&str]) -> Value {
    let output = pinfold(words);
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Asks a process which call stacks keep free bytes.
#[track_caller]
fn fragmentation(pid: &str) -> Value {
    let words = ["heap", "dump", pid, "--fragmentation", "--timeout", "60"];
    object(&[&words[..], &["--json"]].concat())
}

/// Returns the free bytes that all call stacks keep, and those of functions with a name in `names`.
fn kept_free(report: &Value, names: &[&str]) -> (f64, f64) {
    let bytes = |values: &Value| values["fragment_bytes"].as_f64().unwrap();
    let has_name = |stack: &&Value| {
        let mut functions = stack["functions"].as_array().unwrap().iter();
        functions.any(|function| {
            let function = function.as_str().unwrap();
            names.iter().any(|name| function.ends_with(name))
        })
    };
    let stacks = report["stacks"].as_array().unwrap().iter();
    (
        bytes(&report["totals"]),
        stacks
            .filter(has_name)
            .map(|stack| bytes(&stack["values"]))
            .sum(),
    )
}

/// Returns the bytes of free objects in slabs of the class and its twin that have objects in use.
fn free_in_slabs(pid: &str) -> f64 {
    let report = object(&["slabinfo", pid, "--json"]);
    let caches = report["caches"].as_array().unwrap().iter();
    let of_class = caches.filter(|cache| cache["name"].as_str().unwrap().starts_with(CLASS));
    let free = of_class.map(|cache| {
        let number = |field: &str| cache[field].as_f64().unwrap();
        number("objects") - number("active_objects")
    });
    224.0 * free.sum::<f64>()
}

fn start(role: &str) -> Program {
    let words = [&RUN[..2], &["--heap=4k", "--shepherd", "--"]].concat();
    Program::start(&mut in_role(&words, role))
}

#[test]
fn the_blocks_that_stay_are_charged_with_what_is_free_beside_them() {
    let program = start("waits");
    let pid = program.pid();
    let free = free_in_slabs(&pid);
    let report = fragmentation(&pid);
    let (all, spread) = kept_free(&report, &["spreads"]);
    // One standard deviation is 5 %: some 480 blocks that stay are sampled.
    assert!((0.7 * free..1.3 * free).contains(&all), "{all} of {free}");
    assert!(spread > 0.7 * all, "{spread} of {all}");
    let (_, others) = kept_free(&report, &["packs", "transient"]);
    assert!(others < 0.1 * all, "{others} of {all}");

    let words = ["heap", "dump", &pid, "--fragmentation", "--timeout", "60"];
    let output = pinfold(&words);
    assert_has(&text(&output.stdout), &["free in slabs, beside about"]);
    let output = pinfold(&[&words[..], &["--flame", "-"]].concat());
    assert_has(&text(&output.stdout), &["bytes free in slabs"]);
    // Without a request, the command does not show what the process told another command.
    let report = object(&["heap", "dump", &pid, "--json"]);
    assert!(report["totals"]["fragment_bytes"].is_null());
}

#[test]
fn blocks_of_slabs_that_are_full_again_keep_nothing_free() {
    let program = start("is replaced");
    let pid = program.pid();
    let report = fragmentation(&pid);
    let (_, free) = kept_free(&report, &["transient"]);
    assert!(free < 4e6, "{free}");
}

#[test]
fn a_file_says_who_kept_free_memory_at_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("heap");
    let words = [
        &RUN[..2],
        &["--heap=4k", "--heap-file", file.to_str().unwrap(), "--"],
    ]
    .concat();
    let output = in_role(&words, "ends").output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let written = fs::read_dir(folder.path()).unwrap().next().unwrap();
    let written = written.unwrap().path();
    let path = written.to_str().unwrap();
    object(&["heap", "dump", path, "--fragmentation", "--json"]);
    let packed = folder.path().join("heap.pb.gz");
    write_for_pprof(path, &packed);
    let packed = packed.to_str().unwrap();
    let output = pinfold(&["heap", "dump", packed, "--fragmentation"]);
    assert!(!output.status.success());
    assert_has(
        &text(&output.stderr),
        &["does not say who keeps free memory"],
    );
}

fn write_for_pprof(from: &str, to: &Path) {
    let output = pinfold(&["heap", "dump", from, "-o", to.to_str().unwrap()]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    eventually("the file", || to.exists());
}
