//! Two programs whose allocator is chosen when they are built. Prints one line of JSON: the seconds
//! of the work, and the memory that is resident when the program has been idle.
//!
//! Usage: `pinfold-musl readme|service`

use std::error::Error;
use std::time::{Duration, Instant};

mod allocator;
mod readme;
mod service;

/// How long a program is idle before its memory is read, and read again.
const IDLE: [Duration; 2] = [Duration::from_secs(3), Duration::from_secs(10)];

fn main() -> Result<(), Box<dyn Error>> {
    let which = std::env::args().nth(1).unwrap_or_default();
    match which.as_str() {
        "readme" => readme::run(report),
        "service" => service::run(report),
        _ => Err("give readme or service".into()),
    }
}

/// Prints the result of work that began at `begun`, while the program's threads sleep.
fn report(begun: Instant) -> Result<(), Box<dyn Error>> {
    let seconds = begun.elapsed().as_secs_f64();
    let peak = memory("VmHWM:")?;
    std::thread::sleep(IDLE[0]);
    let idle = memory("VmRSS:")?;
    std::thread::sleep(IDLE[1] - IDLE[0]);
    let settled = memory("VmRSS:")?;
    println!(
        "{{\"seconds\":{seconds},\"peak_rss_bytes\":{peak},\"idle_rss_bytes\":{idle},\
         \"settled_rss_bytes\":{settled}}}"
    );
    Ok(())
}

/// Returns the bytes in a line of `/proc/self/status`.
fn memory(name: &str) -> Result<u64, Box<dyn Error>> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    let kib = line.ok_or(name)?.trim().trim_end_matches(" kB");
    Ok(kib.parse::<u64>()? << 10)
}
