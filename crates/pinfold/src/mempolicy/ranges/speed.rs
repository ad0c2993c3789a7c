//! Measures lookups and sets:
//! `cargo test --release -p pinfold --lib mempolicy::ranges::speed -- --ignored --nocapture`.

use super::*;
use crate::topology::set_affinity;
use core::hint::black_box;
use std::println;
use std::sync::{Arc, Barrier, Mutex};
use std::vec::Vec;

/// Words of a policy.
const WORDS: usize = 49;
const ROUNDS: u64 = 4_000_000;

fn map_of(ranges: u64) -> Ranges<WORDS> {
    let map = Ranges::new();
    for n in 0..ranges {
        map.set(n * 8, n * 8 + 8, Some(&[n; WORDS])).unwrap();
    }
    map
}

/// Returns the calling thread's CPU time in nanoseconds. Time in which the thread sleeps or waits
/// for a CPU does not count.
fn thread_time() -> f64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `now` is a valid `timespec` that the kernel may write.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut now) };
    now.tv_sec as f64 * 1e9 + now.tv_nsec as f64
}

/// Moves the thread to one CPU, if that CPU exists and is allowed.
fn pin(cpu: usize) {
    set_affinity(&[cpu].into_iter().collect());
}

/// Returns the nanoseconds for one `look` at a page below `pages`, while `threads` threads look at
/// once. The slowest thread counts; median of seven rounds.
fn time(threads: usize, pages: u64, look: impl Fn(u64) + Sync) -> f64 {
    let run = |thread: u64, all_here: &Barrier| {
        pin(thread as usize);
        all_here.wait();
        let begin = thread_time();
        let mut random = thread | 1;
        for _ in 0..ROUNDS {
            random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            look(((random >> 40) * pages) >> 24);
        }
        (thread_time() - begin) / ROUNDS as f64
    };
    let mut times = [0; 7].map(|_| {
        let barrier = Barrier::new(threads);
        std::thread::scope(|scope| {
            let (run, all_here) = (&run, &barrier);
            let threads: Vec<_> = (0..threads as u64)
                .map(|n| scope.spawn(move || run(n, all_here)))
                .collect();
            let times = threads.into_iter().map(|thread| thread.join().unwrap());
            times.fold(0.0, f64::max)
        })
    });
    times.sort_by(f64::total_cmp);
    times[3]
}

/// Prints the times of one and of two threads.
fn print(what: &str, ranges: u64, look: impl Fn(u64) + Sync) {
    let pages = (ranges * 8).max(1);
    let [one, two] = [1, 2].map(|threads| time(threads, pages, &look));
    println!("{what:14} {ranges:6} {one:9.1} {two:10.1}");
}

/// Not inlined, so that its instructions can be counted.
#[inline(never)]
fn look_up_two(map: &Ranges<WORDS>, page: u64) -> Option<[u64; 2]> {
    map.lookup(page, [0, 17])
}

#[test]
#[ignore = "a measurement, which checks nothing"]
fn lookups_and_sets() {
    println!("ns a lookup    ranges  1 thread  2 threads");
    for ranges in [0, 1, 16, 1000] {
        let map = map_of(ranges);
        print("nothing", ranges, |page| {
            black_box(page);
        });
        print("two words", ranges, |page| {
            black_box(look_up_two(&map, page));
        });
        print("all words", ranges, |page| {
            black_box(map.lookup_all(page));
        });
        // The kernel's design: a lock around the search, and a reference count on the policy.
        let records = (0..ranges).map(|n| (n * 8, n * 8 + 8, Arc::new([n; WORDS])));
        let locked = Mutex::new(records.collect::<Vec<_>>());
        print("lock and count", ranges, |page| {
            let records = locked.lock().unwrap();
            let at = records.partition_point(|record| record.0 <= page);
            let found = at.checked_sub(1).map(|at| records[at].2.clone());
            drop(records);
            black_box(found.map(|words| (words[0], words[17])));
        });
    }
    println!("\nns a set       ranges       tree      array   array / tree");
    for ranges in [16, 1000, 8000, 64_000] {
        let map = map_of(ranges);
        let mut array = Copied::of(ranges);
        let (tree, array) = (
            time_sets(ranges, |start, end, n| {
                map.set(start, end, Some(&[n; WORDS])).unwrap();
            }),
            time_sets(ranges, |start, end, n| array.set(start, end, n)),
        );
        println!(
            "among          {ranges:6} {tree:10.0} {array:10.0} {:14.1}",
            array / tree
        );
    }
    for ranges in [16, 1000, 8000] {
        let begin = thread_time();
        black_box(map_of(ranges));
        let tree = (thread_time() - begin) / ranges as f64;
        let begin = thread_time();
        let mut array = Copied::of(0);
        (0..ranges).for_each(|n| array.set(n * 8, n * 8 + 8, n));
        let array = (thread_time() - begin) / ranges as f64;
        println!(
            "one by one     {ranges:6} {tree:10.0} {array:10.0} {:14.1}",
            array / tree
        );
    }
}

/// Returns the nanoseconds for each of 400 sets: ranges are split, and joined again.
fn time_sets(ranges: u64, mut set: impl FnMut(u64, u64, u64)) -> f64 {
    let begin = thread_time();
    for n in 0..200 {
        let at = n * 7919 % ranges * 8;
        set(at + 2, at + 4, n);
        set(at, at + 8, n);
    }
    (thread_time() - begin) / 400.0
}

/// The simplest map that readers may read meanwhile: a sorted array that each set copies.
struct Copied {
    arrays: [Vec<(u64, u64, [u64; WORDS])>; 2],
    active: usize,
}

impl Copied {
    fn of(ranges: u64) -> Copied {
        let records = (0..ranges).map(|n| (n * 8, n * 8 + 8, [n; WORDS]));
        Copied {
            arrays: [records.collect(), Vec::new()],
            active: 0,
        }
    }

    fn set(&mut self, start: u64, end: u64, n: u64) {
        let [even, odd] = &mut self.arrays;
        let (old, new) = if self.active == 0 {
            (even, odd)
        } else {
            (odd, even)
        };
        new.clear();
        let first = old.partition_point(|record| record.1 <= start);
        let last = old.partition_point(|record| record.0 < end);
        new.extend_from_slice(&old[..first]);
        let overlapping = &old[first..last];
        if let Some(left) = overlapping.first().filter(|left| left.0 < start) {
            new.push((left.0, start, left.2));
        }
        new.push((start, end, [n; WORDS]));
        if let Some(right) = overlapping.last().filter(|right| right.1 > end) {
            new.push((end, right.1, right.2));
        }
        new.extend_from_slice(&old[last..]);
        self.active ^= 1;
    }
}
