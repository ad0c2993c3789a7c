//! `pinfold stat`: what a process's allocator holds and does, line by line, as `vmstat` shows the
//! system.

use super::repeat::Repeat;
use super::snapshot::Snapshot;
use anyhow::Result;
use pinfold::internal::segment::SlabEvent;
use serde::Serialize;
use std::process::ExitCode;
use std::time::Duration;

/// Show what a process's allocator holds and does, one line per interval
///
/// The first line shows rates since the process began, or in a forked child since its parent began.
/// Each other line shows rates since the line before. Ends with the process.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    repeat: Repeat,
}

/// The number of lines after which the header is repeated.
const LINES: u64 = 20;

/// One line. All rates are per second.
#[derive(Serialize)]
struct Line {
    held_bytes: u64,
    used_bytes: u64,
    dirty_bytes: u64,
    /// Bytes of objects out of their slabs.
    objects_bytes: u64,
    slow_calls: f64,
    refilled: f64,
    flushed: f64,
    remote_frees: f64,
    slabs_made: f64,
    slabs_freed: f64,
    returned_bytes: f64,
}

/// The sums that rates are made of.
#[derive(Clone, Copy, Default)]
struct Sums {
    slow: u64,
    refilled: u64,
    flushed: u64,
    remote: u64,
    made: u64,
    freed: u64,
    returned: u64,
}

impl Sums {
    fn of(snapshot: &Snapshot) -> Sums {
        let mut sums = Sums {
            returned: snapshot.returned,
            ..Sums::default()
        };
        for cache in &snapshot.caches {
            for (sum, count) in [
                (&mut sums.slow, cache.slow()),
                (&mut sums.refilled, cache.count(SlabEvent::Refilled)),
                (&mut sums.flushed, cache.count(SlabEvent::Flushed)),
                (&mut sums.remote, cache.count(SlabEvent::FreeRemote)),
                (&mut sums.made, cache.count(SlabEvent::SlabAlloc)),
                (&mut sums.freed, cache.count(SlabEvent::SlabFree)),
            ] {
                *sum = sum.wrapping_add(count);
            }
        }
        sums
    }
}

impl Line {
    fn of(snapshot: &Snapshot, before: Sums, now: Sums, time: Duration) -> Line {
        // Destroying a cache removes its counts, so a sum may fall.
        let rate = |before: u64, now: u64| now.saturating_sub(before) as f64 / time.as_secs_f64();
        Line {
            held_bytes: snapshot.held,
            used_bytes: snapshot.used(),
            dirty_bytes: snapshot.dirty(),
            objects_bytes: snapshot.of_caches(|cache| cache.out().saturating_mul(cache.size)),
            slow_calls: rate(before.slow, now.slow),
            refilled: rate(before.refilled, now.refilled),
            flushed: rate(before.flushed, now.flushed),
            remote_frees: rate(before.remote, now.remote),
            slabs_made: rate(before.made, now.made),
            slabs_freed: rate(before.freed, now.freed),
            returned_bytes: rate(before.returned, now.returned),
        }
    }

    fn text(&self) -> String {
        let kib = |bytes: u64| bytes >> 10;
        format!(
            "{:>9} {:>9} {:>9} {:>9} {:>9.0} {:>9.0} {:>9.0} {:>7.0} {:>6.0} {:>6.0} {:>8.0}\n",
            kib(self.held_bytes),
            kib(self.used_bytes),
            kib(self.dirty_bytes),
            kib(self.objects_bytes),
            self.slow_calls,
            self.refilled,
            self.flushed,
            self.remote_frees,
            self.slabs_made,
            self.slabs_freed,
            self.returned_bytes / 1024.0,
        )
    }
}

const HEADER: &str = "\
---------------- KiB ----------------- -------------------- counts a second ------------------ KiB/s
     held      used     dirty   objects slowcalls    refill     flush  remote  +slab  -slab returned
";

pub fn main(args: Args) -> Result<ExitCode> {
    let (mut before, mut when) = (Sums::default(), None);
    args.repeat.main(|snapshot, nth, now| {
        let since = when.unwrap_or(Duration::from_nanos(snapshot.started_ns));
        // A clock that was set back must not make a rate infinite.
        let time = now.saturating_sub(since).max(Duration::from_millis(1));
        let sums = Sums::of(snapshot);
        let line = Line::of(snapshot, before, sums, time);
        (before, when) = (sums, Some(now));
        Ok(match args.repeat.json {
            true => serde_json::to_string(&line)? + "\n",
            false if nth % LINES == 0 => HEADER.to_owned() + &line.text(),
            false => line.text(),
        })
    })
}
