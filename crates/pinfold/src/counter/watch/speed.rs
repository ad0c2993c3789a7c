//! Measures what a tick costs while nothing is to be folded:
//! `cargo test --release -p pinfold --lib counter::watch::speed -- --ignored --nocapture`.

use super::*;
use crate::counter::Counters;
use std::println;
use std::time::Instant;
use std::vec::Vec;

const COUNTERS: usize = 10_000;
const ROUNDS: usize = 501;

/// Returns the median of the microseconds that `work` takes.
fn microseconds(mut work: impl FnMut()) -> f64 {
    let mut times: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let begin = Instant::now();
            work();
            begin.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    times.sort_unstable_by(f64::total_cmp);
    times[ROUNDS / 2]
}

#[test]
#[ignore = "measures; asserts nothing about time"]
fn idle_counters() {
    let many = Counters::new(&[0; COUNTERS], 1 << 20).unwrap();
    let block = many[0].shards_or_alloc().unwrap().offset();
    assert!(watch_block(block, COUNTERS * SIZE, true));
    many.iter().for_each(|counter| counter.add(1));
    while fold_watched(&|_| true) != 0 {}
    let units = counter_units::used().count();
    let look = microseconds(|| assert_eq!(fold_watched(&|_| true), 0));
    println!("{COUNTERS} idle counters on {units} units: {look:.1} us a tick");
    let fold = microseconds(|| {
        many.iter().for_each(|counter| counter.add(1));
        fold_watched(&|_| true);
    });
    println!("{COUNTERS} counters that moved once: {fold:.1} us a tick, with the adds");
}
