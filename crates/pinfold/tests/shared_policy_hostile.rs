//! Policies by range under hostile conditions: signal handlers that set a map while they interrupt
//! a set, forks during a set, and no memory.

mod common;

use common::timer::Timer;
use common::{Random, StopAtEnd, in_child, limit};
use pinfold::mempolicy::{Mempolicy, RangeError, SharedPolicy};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

static SHARED: SharedPolicy = SharedPolicy::new();
static DONE: AtomicU64 = AtomicU64::new(0);
static REFUSED: AtomicU64 = AtomicU64::new(0);

/// Sets pages from 1000 on, which only handlers set, and looks up the threads' pages.
extern "C" fn on_timer(_: libc::c_int) {
    let policy = Mempolicy::local();
    let turn = DONE.load(Relaxed) + REFUSED.load(Relaxed);
    let page = 1000 + turn % 50;
    let set = SHARED.set(page..page + 3, (!turn.is_multiple_of(3)).then_some(&policy));
    match set {
        Ok(()) => DONE.fetch_add(1, Relaxed),
        Err(RangeError::Busy) => REFUSED.fetch_add(1, Relaxed),
        Err(_) => std::process::abort(),
    };
    // The map is complete, whatever the handler interrupted: the threads' pages are always covered.
    if SHARED.lookup(turn % 300).is_none() || SHARED.lookup(999).is_some() {
        std::process::abort();
    }
}

#[test]
fn handlers_set_or_are_refused_and_see_a_complete_map() {
    let interleave = Mempolicy::parse("interleave:0-3").unwrap();
    let bind = Mempolicy::parse("bind:1").unwrap();
    SHARED.set(0..300, Some(&bind)).unwrap();
    let begin = Instant::now();
    let (shared, policies) = (&SHARED, &[interleave, bind]);
    std::thread::scope(|scope| {
        for seed in 0..2 {
            scope.spawn(move || {
                let _timer = Timer::start(libc::SIGUSR2, on_timer, 100);
                let mut random = Random::new(seed);
                while begin.elapsed() < Duration::from_secs(2) {
                    let start = random.below(299);
                    let end = (start + 1 + random.below(9)).min(300);
                    let policy = &policies[random.below(2) as usize];
                    shared.set(start..end, Some(policy)).unwrap();
                    assert!(shared.lookup(random.below(300)).is_some());
                }
            });
        }
    });
    let (done, refused) = (DONE.load(Relaxed), REFUSED.load(Relaxed));
    println!("handlers: {done} sets, {refused} refused");
    assert!(done > 10 && refused > 10);
}

/// With 500 ranges, a set holds the lock nearly all the time. A fork that did not wait for the lock
/// would leave it held in the child.
#[test]
fn a_forked_child_finds_the_map_complete_and_sets_it() {
    let shared = SharedPolicy::new();
    let policies =
        ["interleave:0-3", "bind:1", "prefer:2"].map(|text| Mempolicy::parse(text).unwrap());
    for n in 0..500 {
        shared
            .set(n * 2..n * 2 + 2, Some(&policies[n as usize % 2]))
            .unwrap();
    }
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        for seed in 0..2 {
            let (shared, policies, stop) = (&shared, &policies, &stop);
            scope.spawn(move || {
                let mut random = Random::new(seed);
                while !stop.load(Relaxed) {
                    let page = random.below(999);
                    let policy = &policies[random.below(2) as usize];
                    shared.set(page..page + 1, Some(policy)).unwrap();
                }
            });
        }
        for _ in 0..200 {
            in_child(20, || {
                let whole = (0..1000).all(|page| shared.lookup(page).is_some());
                let set = shared.set(100..900, Some(&policies[2]));
                let seen =
                    (100..900).all(|page| shared.lookup(page).as_ref() == Some(&policies[2]));
                whole
                    && set.is_ok()
                    && seen
                    && shared.set(0..1000, None).is_ok()
                    && shared.is_empty()
            });
        }
    });
}

#[test]
fn without_memory_a_set_fails_and_changes_nothing() {
    let shared = SharedPolicy::new();
    let policy = Mempolicy::local();
    in_child(20, || {
        for n in 0..20 {
            if shared.set(n * 2..n * 2 + 1, Some(&policy)).is_err() {
                return false;
            }
        }
        // No memory can be mapped from here on.
        limit(libc::RLIMIT_AS, 1);
        let empty = SharedPolicy::new();
        let first =
            empty.set(0..1, Some(&policy)) == Err(RangeError::OutOfMemory) && empty.is_empty();
        let mut n = 20;
        let error = loop {
            match shared.set(n * 2..n * 2 + 1, Some(&policy)) {
                Ok(()) => n += 1,
                Err(error) => break error,
            }
        };
        let kept = (0..n * 2).all(|page| shared.lookup(page).is_some() == (page % 2 == 0));
        let same = shared.len() as u64 == n && shared.lookup(n * 2).is_none();
        // A set that needs no larger buffer still works.
        let cleared = shared.set(0..2, None).is_ok() && shared.lookup(0).is_none();
        let snapshot = matches!(shared.ranges(), Err(RangeError::OutOfMemory));
        // Printing still works.
        use std::fmt::Write;
        let mut text = Lines(0);
        let printed = write!(text, "{shared}").is_ok() && text.0 as u64 == n - 1;
        first && error == RangeError::OutOfMemory && kept && same && cleared && snapshot && printed
    });
}

/// Counts the lines that are written to it.
struct Lines(usize);

impl std::fmt::Write for Lines {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        self.0 += text.matches('\n').count();
        Ok(())
    }
}
