//! A service that counts: `cargo run --release -p pinfold-malloc --example service`.
//!
//! Four threads serve requests. Pinfold is the program's allocator, and its counters tell how the
//! service does:
//!
//! * an [`EventCounter`] of requests, which only counts up;
//! * a [`PerCpuCounter`] of bytes in use, which also bounds them: a request that would pass the
//!   limit is refused, whatever the other threads add at the same time;
//! * a [`PerCpuHistogram`] of the time that a request took.
//!
//! A shepherd keeps the approximate reads fresh. The threads that count are not interrupted.

use pinfold::counter::{EventCounter, PerCpuCounter, PerCpuHistogram};
use pinfold::shepherd::{self, Shepherd};
use std::error::Error;
use std::thread;
use std::time::{Duration, Instant};

#[global_allocator]
static ALLOCATOR: pinfold_malloc::Pinfold = pinfold_malloc::Pinfold;

const THREADS: usize = 4;
const REQUESTS: usize = 50_000;
/// The most bytes that all requests together may have in use.
const LIMIT: i64 = 256 << 10;

static SERVED: EventCounter = EventCounter::new();
static REFUSED: EventCounter = EventCounter::new();
static BYTES_IN_USE: PerCpuCounter = PerCpuCounter::new();
static NANOSECONDS: PerCpuHistogram = PerCpuHistogram::new();

/// Serves one request: builds an answer of `size` bytes and drops it.
fn serve(size: usize) {
    let begin = Instant::now();
    let bytes = size as i64;
    if !BYTES_IN_USE.limited_add(LIMIT, bytes) {
        REFUSED.inc();
        return;
    }
    let answer = "x".repeat(size);
    assert_eq!(answer.len(), size);
    drop(answer);
    BYTES_IN_USE.sub(bytes);
    SERVED.inc();
    NANOSECONDS.record(u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX));
}

/// Prints what a page for operators would show while the service runs.
fn print_status() {
    let (bytes, bound) = BYTES_IN_USE.read_with_bound();
    println!(
        "served {}, about {bytes} bytes in use (within {bound})",
        SERVED.sum()
    );
}

fn main() -> Result<(), Box<dyn Error>> {
    shepherd::watch(&BYTES_IN_USE)?;
    let running = Shepherd::new()
        .interval(Duration::from_millis(10))
        .start()?;

    thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || {
                for request in 0..REQUESTS {
                    serve(64 + (request * 31 + thread * 7) % 4000);
                }
            });
        }
        thread::sleep(Duration::from_millis(5));
        print_status();
    });
    running.stop();

    // No thread adds any more, and each request gave its bytes back.
    assert_eq!(BYTES_IN_USE.sum(), 0);
    assert_eq!(SERVED.sum() + REFUSED.sum(), (THREADS * REQUESTS) as u64);
    let times = NANOSECONDS.snapshot();
    println!(
        "served {}, refused {}; half of the requests took at most {} ns, 99 % at most {} ns",
        SERVED.sum(),
        REFUSED.sum(),
        times.quantile(0.5),
        times.quantile(0.99),
    );
    Ok(())
}
