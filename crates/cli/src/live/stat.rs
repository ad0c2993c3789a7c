//! `pinfold stat`: what a process's allocator holds and does, line by line, as `vmstat` shows the
//! system.

use super::per_second;
use super::repeat::Repeat;
use super::snapshot::{Cache, Snapshot};
use crate::foreign::Identity;
use crate::output;
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
struct Line<'l> {
    process: &'l Identity,
    held_bytes: u64,
    used_bytes: u64,
    dirty_bytes: u64,
    /// Bytes of objects out of their slabs.
    objects_bytes: u64,
    slow_calls_per_second: f64,
    refills_per_second: f64,
    flushes_per_second: f64,
    remote_frees_per_second: f64,
    slabs_made_per_second: f64,
    slabs_freed_per_second: f64,
    returned_bytes_per_second: f64,
}

/// The sums that rates are made of: calls that the fast path did not serve, refills, flushes,
/// remote frees, slabs made, slabs freed, and bytes returned.
type Sums = [u64; 7];

fn sums(snapshot: &Snapshot) -> Sums {
    let of = |event| snapshot.of_caches(|cache| cache.count(event));
    [
        snapshot.of_caches(Cache::slow),
        of(SlabEvent::Refilled),
        of(SlabEvent::Flushed),
        of(SlabEvent::FreeRemote),
        of(SlabEvent::SlabAlloc),
        of(SlabEvent::SlabFree),
        snapshot.returned,
    ]
}

impl<'l> Line<'l> {
    fn of(
        process: &'l Identity,
        snapshot: &Snapshot,
        before: Sums,
        now: Sums,
        time: Duration,
    ) -> Line<'l> {
        // Destroying a cache removes its counts, so a sum may fall.
        let rate = |nth: usize| per_second(Some(time.as_secs_f64()), before[nth], now[nth]);
        Line {
            process,
            held_bytes: snapshot.held,
            used_bytes: snapshot.used(),
            dirty_bytes: snapshot.dirty(),
            objects_bytes: snapshot.of_caches(|cache| cache.out().saturating_mul(cache.size)),
            slow_calls_per_second: rate(0),
            refills_per_second: rate(1),
            flushes_per_second: rate(2),
            remote_frees_per_second: rate(3),
            slabs_made_per_second: rate(4),
            slabs_freed_per_second: rate(5),
            returned_bytes_per_second: rate(6),
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
            self.slow_calls_per_second,
            self.refills_per_second,
            self.flushes_per_second,
            self.remote_frees_per_second,
            self.slabs_made_per_second,
            self.slabs_freed_per_second,
            self.returned_bytes_per_second / 1024.0,
        )
    }
}

const HEADER: &str = "\
---------------- KiB ----------------- -------------------- counts a second ------------------ KiB/s
     held      used     dirty   objects slowcalls    refill     flush  remote  +slab  -slab returned
";

pub fn main(args: Args) -> Result<ExitCode> {
    let (mut before, mut when) = (Sums::default(), None);
    args.repeat.main(|process, snapshot, nth, now| {
        let since = when.unwrap_or(Duration::from_nanos(snapshot.started_ns));
        // A clock that was set back must not make a rate infinite.
        let time = now.saturating_sub(since).max(Duration::from_millis(1));
        let sums = sums(snapshot);
        let line = Line::of(process, snapshot, before, sums, time);
        (before, when) = (sums, Some(now));
        Ok(match args.repeat.json {
            true => output::object("stat", &line)?,
            false if nth % LINES == 0 => HEADER.to_owned() + &line.text(),
            false => line.text(),
        })
    })
}
