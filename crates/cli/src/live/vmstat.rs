//! `pinfold vmstat`: the counters that a program shows by name, in the form of `/proc/vmstat`.

use super::repeat::Repeat;
use super::snapshot::{Counter, Snapshot};
use crate::foreign::Identity;
use crate::output;
use anyhow::Result;
use serde::Serialize;
use std::collections::HashMap;
use std::fmt::Write;
use std::process::ExitCode;
use std::time::Duration;

/// Show the counters that a program shows by name, as /proc/vmstat does
///
/// With an interval, a third column shows each counter's change per second since the block before.
/// Ends with the process. A program shows its counters with `pinfold::export::show`, or in C with
/// `pinfold_counter_show`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    repeat: Repeat,
}

/// The counters at one moment.
#[derive(Serialize)]
struct Block<'b> {
    process: &'b Identity,
    /// How long ago the process wrote the values, or `None` if it never did.
    age_seconds: Option<f64>,
    counters: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    name: String,
    /// `events` or `level`.
    kind: &'static str,
    value: i128,
    /// The change since the block before, or `None` in the first block.
    per_second: Option<f64>,
}

impl Counter {
    /// Returns the value with its sign, if it has one.
    pub fn number(&self) -> i128 {
        if self.is_level {
            i128::from(self.value.cast_signed())
        } else {
            i128::from(self.value)
        }
    }
}

/// The values of the block before, and when the process wrote them.
#[derive(Default)]
struct Before {
    values: HashMap<String, i128>,
    counted_ns: u64,
}

impl<'b> Block<'b> {
    fn of(process: &'b Identity, snapshot: &Snapshot, before: &Before, now: Duration) -> Block<'b> {
        let time = snapshot.counted_ns.saturating_sub(before.counted_ns);
        let rate = |name: &str, value: i128| {
            let old = before.values.get(name)?;
            // The process has written nothing since the block before.
            if time == 0 {
                return Some(0.0);
            }
            Some((value - old) as f64 / Duration::from_nanos(time).as_secs_f64())
        };
        let counters = snapshot.counters.iter().map(|counter| Row {
            name: counter.name.clone(),
            kind: if counter.is_level { "level" } else { "events" },
            value: counter.number(),
            per_second: rate(&counter.name, counter.number()),
        });
        let written = Duration::from_nanos(snapshot.counted_ns);
        Block {
            process,
            age_seconds: (snapshot.counted_ns != 0)
                .then(|| now.saturating_sub(written).as_secs_f64()),
            counters: counters.collect(),
        }
    }

    fn text(&self) -> String {
        let widest = self
            .counters
            .iter()
            .map(|row| printable(&row.name).len())
            .max();
        let widest = widest.unwrap_or_default();
        let mut text = String::new();
        for row in &self.counters {
            // Writing to a string does not fail.
            let _ = match row.per_second {
                None => writeln!(text, "{} {}", printable(&row.name), row.value),
                Some(rate) => {
                    writeln!(
                        text,
                        "{:<widest$} {:>20} {rate:>14.1}/s",
                        printable(&row.name),
                        row.value
                    )
                }
            };
        }
        text
    }

    /// Returns a line for people who should know that the values are missing or old.
    fn remark(&self) -> Option<String> {
        match self.age_seconds {
            _ if self.counters.is_empty() => Some(format!(
                "process {} shows no counters: a program shows them with pinfold::export::show or pinfold_counter_show",
                self.process.pid
            )),
            Some(age) if age > OLD.as_secs_f64() => Some(format!(
                "the values are {age:.0} s old: the process has no shepherd, and has hardly allocated since; start it with `pinfold run --shepherd`"
            )),
            _ => None,
        }
    }
}

/// Values are usually younger.
const OLD: Duration = Duration::from_secs(3);

/// Returns a name from a file that may hold anything, without control characters and spaces.
fn printable(name: &str) -> String {
    name.replace(|char: char| !char.is_ascii_graphic(), "_")
}

pub fn main(args: Args) -> Result<ExitCode> {
    let mut before = Before::default();
    let mut is_remarked = false;
    args.repeat.main(|process, snapshot, nth, now| {
        let block = Block::of(process, snapshot, &before, now);
        let values = snapshot.counters.iter();
        before = Before {
            values: values.map(|c| (c.name.clone(), c.number())).collect(),
            counted_ns: snapshot.counted_ns,
        };
        if args.repeat.json {
            return output::object("vmstat", &block);
        }
        if let Some(remark) = block.remark().filter(|_| !is_remarked) {
            output::note(remark);
            is_remarked = true;
        }
        let text = block.text();
        let gap = if nth == 0 || text.is_empty() {
            ""
        } else {
            "\n"
        };
        Ok(gap.to_owned() + &text)
    })
}
