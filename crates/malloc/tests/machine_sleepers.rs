//! What a preloaded program's threads leave behind, on a machine with more CPUs than threads.
//!
//! Each test runs this file's [`program`] under `pinfold run`.

use std::process::Command;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

/// How many threads come and go, for [`program`].
const VARIABLE: &str = "SLEEPERS_COME_AND_GO";
/// The threads that sleep after their work.
const SLEEPERS: usize = 8;
/// How many of the threads that come and go run at once.
const AT_ONCE: usize = 32;
/// The bytes that a sleeping thread has allocated and freed.
const USED: usize = 4 << 20;
/// The bytes that a thread that comes and goes allocates and frees.
const USED_AND_GONE: usize = 128 << 10;
/// How long the memory may take to go back. It takes about three seconds on a machine that is not
/// busy.
const PATIENCE: Duration = Duration::from_secs(20);
/// The most KiB that may stay above the start, stacks and thread-local data of the sleeping threads
/// included.
const MOST: u64 = 6 << 10;

/// Returns the KiB of resident memory that belongs to no file.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("RssAnon:"));
    line.unwrap()
        .trim()
        .trim_end_matches(" kB")
        .parse()
        .unwrap()
}

/// Allocates `bytes` in blocks of 16 to 4,096 bytes, and frees them.
fn work(mut seed: u64, bytes: usize) {
    let mut blocks = Vec::new();
    let mut used = 0;
    while used < bytes {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let size = 16 << ((seed >> 33) % 9);
        blocks.push(vec![1u8; size]);
        used += size;
    }
}

/// The program. Does nothing without [`VARIABLE`].
#[test]
#[ignore = "a part of the other tests"]
fn program() {
    let Ok(coming) = std::env::var(VARIABLE) else {
        return;
    };
    let coming: u64 = coming.parse().unwrap();
    work(0, USED);
    let start = resident();
    let worked = Barrier::new(SLEEPERS + 1);
    thread::scope(|scope| {
        let sleepers: Vec<_> = (0..SLEEPERS)
            .map(|nth| {
                let worked = &worked;
                scope.spawn(move || {
                    work(nth as u64, USED);
                    worked.wait();
                    thread::park();
                })
            })
            .collect();
        worked.wait();
        let mut left = coming;
        while left > 0 {
            let now = left.min(AT_ONCE as u64);
            let threads: Vec<_> = (0..now)
                .map(|nth| scope.spawn(move || work(left + nth, USED_AND_GONE)))
                .collect();
            threads
                .into_iter()
                .for_each(|thread| thread.join().unwrap());
            left -= now;
        }
        let used = resident();
        let begin = Instant::now();
        while resident() > start + MOST && begin.elapsed() < PATIENCE {
            thread::sleep(Duration::from_millis(100));
        }
        let time = begin.elapsed().as_secs_f64();
        println!(
            "{start} KiB at the start, {used} KiB after the work, {} KiB {time:.1} s later",
            resident()
        );
        assert!(resident() <= start + MOST);
        sleepers
            .iter()
            .for_each(|sleeper| sleeper.thread().unpark());
    });
}

/// Runs the program, which fails if too much memory stays.
fn judge(coming: &str) {
    let output = Command::new("pinfold")
        .args(["run", "--"])
        .arg(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "program", "--nocapture"])
        .env(VARIABLE, coming)
        .output()
        .unwrap();
    let text = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    let line = text[0].lines().find(|line| line.contains("at the start"));
    println!("{SLEEPERS} sleep, {coming} come and go: {line:?}");
    assert!(line.is_some() && output.status.success(), "{text:?}");
}

#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn sleeping_threads_leave_little() {
    judge("0");
}

#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn a_thousand_threads_leave_little() {
    judge("1000");
}
