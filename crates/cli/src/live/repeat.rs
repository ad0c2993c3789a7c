//! Readings of one process, once or at an interval.

use super::snapshot::Snapshot;
use super::source::{Source, Unreadable};
use crate::foreign::Identity;
use crate::output;
use anyhow::{Context, Result};
use std::process::ExitCode;
use std::thread::sleep;
use std::time::{Duration, SystemTime};

#[derive(clap::Args)]
pub struct Repeat {
    /// The process id
    #[arg(value_name = "PID", value_parser = super::pid)]
    pub pid: u32,

    /// Seconds between readings, from 0.01 to 86400; one reading without it
    #[arg(value_parser = super::interval)]
    interval: Option<Duration>,

    /// The number of readings; without it, readings until the process ends
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,

    /// Print one JSON object a line, for each reading
    #[arg(long)]
    pub json: bool,
}

impl Repeat {
    /// Prints the text that `show` makes of the process, each reading, its number and its time
    /// since the epoch. Ends with the process, or when standard output is closed.
    pub fn main(
        &self,
        mut show: impl FnMut(&Identity, &Snapshot, u64, Duration) -> Result<String>,
    ) -> Result<ExitCode> {
        let process = || format!("process {}", self.pid);
        let source = Source::open(self.pid).with_context(process)?;
        let identity = Identity::of(source.process());
        let readings = self.interval.map_or(1, |_| self.count.unwrap_or(u64::MAX));
        for nth in 0..readings {
            if nth > 0 {
                sleep(self.interval.unwrap_or_default());
            }
            let snapshot = match source.read() {
                Err(Unreadable::Gone) if nth > 0 => break,
                read => read.with_context(process)?,
            };
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
            if !output::print_more(&show(&identity, &snapshot, nth, now)?)? {
                break;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}
