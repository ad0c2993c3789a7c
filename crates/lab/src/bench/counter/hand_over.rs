//! The hand-over: one CPU adds, and another CPU subtracts the same amount.
//!
//! The workers form pairs. The *giver* of a pair adds the amount, and then its *taker* subtracts
//! the amount. So a pair's share of the counter is 0 or one amount at every moment. The values of
//! the two CPUs move apart until each reaches its batch. A sum that reads one CPU's value before
//! some hand-overs, and the other CPU's value behind them, finds a value that the counter never
//! had.
//!
//! A sum is that slow only if it loses its CPU between two loads. So the pairs work in bursts and
//! sleep in between, as threads do that wait for requests. A worker that wakes up takes its CPU
//! from the thread that sums, at any instruction.
//!
//! The pair's published [`Step`](super::truth::Step) also says whose turn it is:
//!
//! | step mod 4 | the pair |
//! |---|---|
//! | 0 | waits for the giver |
//! | 1 | the giver is adding |
//! | 2 | waits for the taker |
//! | 3 | the taker is subtracting |

use super::designs::Design;
use super::workers::{Control, Worker};
use crate::Padded;
use crate::cpus::{allowed, pin};
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::{Duration, Instant};

/// Hand-overs between two sleeps of the giver.
const BURST: u64 = 64;
/// Looks at the step between two sleeps.
const SPINS: u32 = 2000;
const SLEEP: Duration = Duration::from_micros(20);
/// How long a worker waits for its partner after the end. The partner may have been killed.
const PATIENCE: Duration = Duration::from_secs(10);

/// Number of workers in a pair.
pub const PAIR: usize = 2;

/// Runs worker `number` until `control` stops it: an even number gives, and the next one takes.
pub fn work<D: Design>(
    design: &D,
    pairs: &[Padded<Worker>],
    number: usize,
    control: &Control,
    amount: i64,
) {
    stay_on_own_cpu(number);
    let pair = &pairs[number / PAIR].0;
    control.wait_to_go();
    match number % PAIR {
        0 => give(design, pair, control, amount),
        _ => take(design, pair, control, amount),
    }
}

/// Keeps the workers of a pair on different CPUs. Without the permission to do so, the kernel
/// places them.
fn stay_on_own_cpu(number: usize) {
    let cpus = allowed().unwrap_or_default();
    if let Some(&cpu) = cpus.get(number % cpus.len().max(1)) {
        let _ = pin(cpu);
    }
}

fn give<D: Design>(design: &D, pair: &Worker, control: &Control, amount: i64) {
    let mut given = 0;
    while control.is_going() {
        pair.step.begin();
        design.add(amount);
        pair.step.end();
        given += 1;
        if !wait(control, || pair.step.number().is_multiple_of(4)) {
            break;
        }
        if given % BURST == 0 {
            std::thread::sleep(SLEEP);
        }
    }
    pair.loops.store(given, Release);
    pair.gave_all.store(1, Release);
}

fn take<D: Design>(design: &D, pair: &Worker, control: &Control, amount: i64) {
    loop {
        let is_turn = || pair.step.number() % 4 == 2;
        let gave_all = || pair.gave_all.load(Acquire) != 0;
        if !wait(control, || is_turn() || gave_all()) || !is_turn() {
            return;
        }
        pair.step.begin();
        design.add(-amount);
        pair.step.end();
    }
}

/// Waits for the partner. Returns false if the partner does nothing for [`PATIENCE`] after the end.
///
/// Sleeps instead of yielding: the kernel lets a thread that yields wait behind the thread that
/// sums, for milliseconds.
fn wait(control: &Control, done: impl Fn() -> bool) -> bool {
    let mut end: Option<Instant> = None;
    loop {
        for _ in 0..SPINS {
            if done() {
                return true;
            }
            std::hint::spin_loop();
        }
        if !control.is_going() && end.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
            return false;
        }
        std::thread::sleep(SLEEP);
    }
}
