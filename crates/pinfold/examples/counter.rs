//! Counters that each CPU adds to on its own: `cargo run --release -p pinfold --example counter`.
//!
//! * An [`EventCounter`] only goes up. Its `sum` is exact.
//! * A [`PerCpuCounter`] goes up and down. Its `read` is a few loads, off by at most `error_bound`.
//!   Its `sum` is exact, and its `limited_add` keeps a limit.
//! * A [`PerCpuHistogram`] counts how often values of each size occur.
//!
//! A [`Shepherd`] folds what the CPUs keep to themselves, so that `read` stays fresh.

use pinfold::counter::{EventCounter, PerCpuCounter, PerCpuHistogram};
use pinfold::shepherd::{self, Shepherd};
use std::error::Error;
use std::thread;

static REQUESTS: EventCounter = EventCounter::new();
static BYTES_IN_USE: PerCpuCounter = PerCpuCounter::new();
static SIZES: PerCpuHistogram = PerCpuHistogram::new();

/// The most bytes that requests may use at once.
const LIMIT: i64 = 1 << 20;

fn serve(bytes: u64) -> bool {
    if !BYTES_IN_USE.limited_add(LIMIT, bytes as i64) {
        return false;
    }
    REQUESTS.inc();
    SIZES.record(bytes);
    BYTES_IN_USE.sub(bytes as i64);
    true
}

fn main() -> Result<(), Box<dyn Error>> {
    shepherd::watch(&BYTES_IN_USE)?;
    let running = Shepherd::new().start()?;
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (1..=10_000).for_each(|bytes| assert!(serve(bytes))));
        }
    });
    assert!(!serve(LIMIT as u64 + 1));

    let (about, bound) = BYTES_IN_USE.read_with_bound();
    println!("{} requests", REQUESTS.sum());
    println!("about {about} bytes in use, off by at most {bound}");
    println!("exactly {} bytes in use", BYTES_IN_USE.sum());
    println!(
        "half of the requests are below {} bytes",
        SIZES.snapshot().quantile(0.5)
    );
    running.stop();
    Ok(())
}
