//! Measures lookups and sets:
//! `cargo test --release -p pinfold --lib mempolicy::ranges::speed -- --ignored --nocapture`.

use super::*;
use crate::topology::set_affinity;
use core::hint::black_box;
use std::boxed::Box;
use std::println;
use std::sync::{Arc, Barrier, Mutex};
use std::vec::Vec;

/// Words of a policy.
const WORDS: usize = 49;
/// Lookups of each thread in a round.
const LOOKS: u64 = 1_000_000;
/// The subjects take turns, round by round. Odd, so that the median is one round's time.
const ROUNDS: usize = 9;

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
/// once. The slowest thread counts.
fn round(threads: usize, pages: u64, look: impl Fn(u64) + Sync) -> f64 {
    let run = |thread: u64, all_here: &Barrier| {
        pin(thread as usize);
        all_here.wait();
        let begin = thread_time();
        let mut random = thread | 1;
        for _ in 0..LOOKS {
            random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            look(((random >> 40) * pages) >> 24);
        }
        (thread_time() - begin) / LOOKS as f64
    };
    let barrier = Barrier::new(threads);
    std::thread::scope(|scope| {
        let (run, all_here) = (&run, &barrier);
        let threads: Vec<_> = (0..threads as u64)
            .map(|n| scope.spawn(move || run(n, all_here)))
            .collect();
        let times = threads.into_iter().map(|thread| thread.join().unwrap());
        times.fold(0.0, f64::max)
    })
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Not inlined, so that its instructions can be counted.
#[inline(never)]
fn look_up_two(map: &Ranges<WORDS>, page: u64) -> Option<[u64; 2]> {
    map.lookup(page, [0, 17])
}

/// One test, because two tests would run at the same time and disturb each other.
#[test]
#[ignore = "a measurement, which checks nothing"]
fn lookups_and_sets() {
    lookups();
    sets();
}

fn lookups() {
    println!("ns a lookup: ranges threads nothing  tree all words array lock+count tree / array");
    for ranges in [0, 1, 16, 100, 1000, 8000] {
        for threads in [1, 2] {
            lookups_among(ranges, threads);
        }
    }
}

/// Prints the median time of each subject among `ranges` ranges.
fn lookups_among(ranges: u64, threads: usize) {
    let pages = (ranges * 8).max(1);
    let map = map_of(ranges);
    let array = Array::of(ranges);
    // The kernel's design: a lock around the search, and a reference count on the policy.
    let records = (0..ranges).map(|n| (n * 8, n * 8 + 8, Arc::new([n; WORDS])));
    let locked = Mutex::new(records.collect::<Vec<_>>());
    let look_up_counted = |page| {
        let records = locked.lock().unwrap();
        let at = records.partition_point(|record| record.0 <= page);
        let found = at.checked_sub(1).map(|at| records[at].2.clone());
        drop(records);
        black_box(found.map(|words| (words[0], words[17])));
    };
    let mut times = [(); 5].map(|()| Vec::new());
    for _ in 0..ROUNDS {
        let round = [
            round(threads, pages, |page| {
                black_box(page);
            }),
            round(threads, pages, |page| {
                black_box(look_up_two(&map, page));
            }),
            round(threads, pages, |page| {
                black_box(map.lookup_all(page));
            }),
            round(threads, pages, |page| {
                black_box(look_up_two_in_array(&array, page));
            }),
            round(threads, pages, look_up_counted),
        ];
        for (times, time) in times.iter_mut().zip(round) {
            times.push(time);
        }
    }
    let [nothing, tree, all, array, counted] = times.map(|mut times| median(&mut times));
    println!(
        "{ranges:19} {threads:7} {nothing:7.1} {tree:5.1} {all:9.1} {array:5.1} {counted:10.1} {:12.2}",
        tree / array
    );
}

fn sets() {
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

/// Not inlined, so that its instructions can be counted.
#[inline(never)]
fn look_up_two_in_array(array: &Array, page: u64) -> Option<[u64; 2]> {
    array.lookup(page, [0, 17])
}

/// The simplest map whose readers take no lock: two sorted arrays behind the latch, of which one is
/// active.
///
/// The bounds of all ranges stand together, and the words of all ranges behind them. So a search
/// goes through one array, where the tree goes from node to node.
struct Array {
    latch: Latch<Table>,
}

struct Table {
    spans: Vec<[AtomicU64; 2]>,
    words: Vec<[AtomicU64; WORDS]>,
}

impl Array {
    fn of(ranges: u64) -> Array {
        let span = |n| [n * 8, n * 8 + 8].map(AtomicU64::new);
        let table = Box::new(Table {
            spans: (0..ranges).map(span).collect(),
            words: (0..ranges)
                .map(|n| [(); WORDS].map(|()| AtomicU64::new(n)))
                .collect(),
        });
        let none = [AtomicPtr::new(null_mut()), AtomicPtr::new(null_mut())];
        let latch = Latch::new(AtomicU64::new(0), none);
        latch.replace_spare(Box::into_raw(table));
        latch.publish();
        Array { latch }
    }

    #[inline(always)]
    fn lookup<const N: usize>(&self, page: u64, wanted: [usize; N]) -> Option<[u64; N]> {
        self.latch.read(|table| {
            // SAFETY: `of` published the address of a table before the first lookup, and only
            // `drop` frees the table.
            let table = unsafe { table.as_ref() }?;
            let behind = table
                .spans
                .partition_point(|[start, _]| start.load(Relaxed) <= page);
            let at = behind.checked_sub(1)?;
            let [_, end] = table.spans.get(at)?;
            let words = table.words.get(at)?;
            (page < end.load(Relaxed))
                .then(|| wanted.map(|n| words.get(n).map_or(0, |word| word.load(Relaxed))))
        })
    }
}

impl Drop for Array {
    fn drop(&mut self) {
        // SAFETY: `of` made the table with `Box`, and published it. `drop` has the only reference
        // to the array.
        drop(unsafe { Box::from_raw(self.latch.active()) });
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
