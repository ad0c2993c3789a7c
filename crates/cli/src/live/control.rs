//! `pinfold trim` and `pinfold set`: what a running process is asked to do.

use super::mail::{Mail, NoAnswer};
use super::source::{Source, name};
use crate::foreign::{Identity, Process};
use crate::output::{self, Table};
use anyhow::{Context, Result, anyhow, bail};
use pinfold::internal::segment::{Answer, Code, GET, HEAP_START, SET, TRIM};
use pinfold_malloc::changeable::{Changeable, SETTINGS, find};
use serde::Serialize;
use serde_json::{Map, Value};
use std::process::ExitCode;
use std::time::Duration;

/// How a process is asked.
#[derive(clap::Args)]
pub struct Ask {
    /// The process id
    #[arg(value_name = "PID", value_parser = super::pid)]
    pid: u32,

    /// Seconds to wait for the process's answer, from 0.01 to 60
    #[arg(long, value_name = "SECONDS", value_parser = patience, default_value = "3")]
    timeout: Duration,
}

/// Have a process give its free memory back to the system
///
/// The process gives back the free memory that one of its threads can reach without disturbing
/// another CPU. With a shepherd that its user asked for (PINFOLD_SHEPHERD=on), it also gives back
/// what other CPUs keep.
#[derive(clap::Args)]
pub struct TrimArgs {
    #[command(flatten)]
    ask: Ask,

    /// Print one JSON object instead of a line
    #[arg(long)]
    json: bool,
}

/// Change settings of a running process, or show what can be changed
///
/// Without NAME=VALUE, shows the settings that can change in a running process, with their present
/// values.
#[derive(clap::Args)]
pub struct SetArgs {
    #[command(flatten)]
    ask: Ask,

    /// A setting and its new value, as decay=1500
    #[arg(value_name = "NAME=VALUE")]
    changes: Vec<String>,

    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

pub fn patience(text: &str) -> Result<Duration, &'static str> {
    let seconds = text.parse().ok().filter(|n| (0.01..=60.0).contains(n));
    seconds
        .map(Duration::from_secs_f64)
        .ok_or("give seconds from 0.01 to 60")
}

impl Ask {
    pub fn new(pid: u32, timeout: Duration) -> Ask {
        Ask { pid, timeout }
    }

    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Asks the process for one thing, and says why there is no answer.
    pub fn ask_for(&self, what: u32, argument: u64) -> Result<Answer> {
        let mail = self.open()?;
        self.ask(&mail, what, argument)
    }

    fn open(&self) -> Result<Mail> {
        Mail::open(self.pid).with_context(|| self.process())
    }

    fn process(&self) -> String {
        format!("process {}", self.pid)
    }

    /// Asks the process, and says why there is no answer.
    fn ask(&self, mail: &Mail, what: u32, argument: u64) -> Result<Answer> {
        let answer = mail.ask(what, argument, self.timeout);
        let why = match answer {
            Ok(answer) => return Ok(answer),
            Err(NoAnswer::Late) => anyhow!(
                "it did not answer within {} s, and will not do it; a program with one thread answers when it allocates, so an idle one cannot be reached: give a longer --timeout if it will allocate soon, or start it with `pinfold run --shepherd`, whose thread answers at any time (`pinfold set PID` and `pinfold stat PID` need no answer)",
                self.timeout.as_secs_f64()
            ),
            Err(NoAnswer::Untraceable) => anyhow!(
                "it did not answer within {} s, and will not do it; it is idle, so that no command can reach it, or its allocations all take the fast path, which does not look for requests: run this as root with CAP_SYS_PTRACE, which has the next allocations look, or start it with `pinfold run --shepherd`, whose thread answers at any time",
                self.timeout.as_secs_f64()
            ),
            Err(NoAnswer::Busy) => anyhow!(
                "it has begun, and was not ready within {} s; give a longer --timeout to see the answer",
                self.timeout.as_secs_f64()
            ),
            Err(NoAnswer::Full) => {
                anyhow!("its mailbox is full of other commands' requests; try again in a minute")
            }
            Err(NoAnswer::Gone) => anyhow!("it has ended"),
            Err(NoAnswer::Slow) => anyhow!(
                "it stopped waiting after 100 ms, before this command had read whether each of its threads has a seccomp filter; try again when the machine is less busy"
            ),
            Err(NoAnswer::Filtered) if what == HEAP_START => anyhow!(
                "it has a seccomp filter, which may end it at the system calls of a profile's start; start it with `pinfold run --heap`"
            ),
            Err(NoAnswer::Filtered) => anyhow!(
                "it has a seccomp filter, and a percentage needs a system call that the filter may forbid; give bytes"
            ),
        };
        Err(why).with_context(|| self.process())
    }
}

/// What a process gave back.
#[derive(Serialize)]
struct Trimmed {
    process: Identity,
    returned_bytes: u64,
    /// Whether the process also gave back what other CPUs keep.
    all_cpus: bool,
    rss_anon_before_bytes: Option<u64>,
    rss_anon_after_bytes: Option<u64>,
}

pub fn trim(args: TrimArgs) -> Result<ExitCode> {
    let mail = args.ask.open()?;
    let before = anonymous_kib(args.ask.pid);
    let answer = args.ask.ask(&mail, TRIM, 0)?;
    let after = anonymous_kib(args.ask.pid);
    let everywhere = match answer.code() {
        Some(Code::Done) => true,
        Some(Code::DoneHere) => false,
        _ => bail!("{}: it does not know this request", args.ask.process()),
    };
    let bytes = answer.value();
    let text = if args.json {
        let trimmed = Trimmed {
            process: Identity::of_pid(args.ask.pid),
            returned_bytes: bytes,
            all_cpus: everywhere,
            rss_anon_before_bytes: before.map(|kib| kib.saturating_mul(1024)),
            rss_anon_after_bytes: after.map(|kib| kib.saturating_mul(1024)),
        };
        output::object("trim", &trimmed)?
    } else {
        let rest = match everywhere {
            true => "",
            false => "; other CPUs give theirs back when the program next runs there",
        };
        let name = name(args.ask.pid);
        let name = output::escaped(&name);
        let process = args.ask.process();
        let shrank = match (before, after) {
            (Some(before), Some(after)) => {
                format!("; its RssAnon went from {before} to {after} KiB")
            }
            _ => String::new(),
        };
        format!(
            "{name} ({process}) gave {} KiB back to the system{shrank}{rest}\n",
            bytes >> 10
        )
    };
    output::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// Returns how much memory of a process is in pages that no file has.
fn anonymous_kib(pid: u32) -> Option<u64> {
    Process::open(pid).ok()?.status().ok()?.number("RssAnon:")
}

/// A change that the user asks for: the setting's number, the setting, and its new value.
type Change = (usize, &'static Changeable, u64);

fn change(text: &str) -> Result<Change> {
    let known = || {
        SETTINGS
            .iter()
            .map(|setting| setting.name)
            .collect::<Vec<_>>()
            .join(", ")
    };
    let (name, value) = text
        .split_once('=')
        .ok_or_else(|| anyhow!("{text}: give NAME=VALUE; the names are {}", known()))?;
    let (number, setting) = find(name).ok_or_else(|| {
        anyhow!(
            "'{name}' cannot change in a running process; these can: {}",
            known()
        )
    })?;
    let value = setting
        .parse(value.as_bytes())
        .ok_or_else(|| anyhow!("{text}: {} takes {}", setting.name, setting.values))?;
    Ok((number, setting, value))
}

/// The settings of a process.
#[derive(Serialize)]
struct Values {
    process: Identity,
    settings: Map<String, Value>,
    /// What changed settings were before.
    #[serde(skip_serializing_if = "Option::is_none")]
    before: Option<Map<String, Value>>,
}

/// Returns the fields of a setting's value: numbers, with the unit in the field's name.
fn fields(setting: &Changeable, value: u64) -> Vec<(String, Value)> {
    let name = setting.name.replace('-', "_");
    let shown = setting.show(value).to_string();
    let number = (!matches!(&shown[..], "none" | "own")).then_some(value);
    let field = |unit: &str, value: Value| (format!("{name}_{unit}"), value);
    match setting.name {
        "memory-limit" => {
            let percent = shown.strip_suffix('%').and_then(|n| n.parse::<u64>().ok());
            let bytes = number.filter(|_| percent.is_none());
            vec![
                field("bytes", bytes.into()),
                field("percent", percent.into()),
            ]
        }
        "sheaf-budget" | "dirty-limit" => vec![field("bytes", number.into())],
        "decay" | "shepherd-interval" => {
            let seconds = number.map(|milliseconds| milliseconds as f64 / 1e3);
            vec![field("seconds", seconds.into())]
        }
        _ => vec![(name, shown.into())],
    }
}

pub fn set(args: SetArgs) -> Result<ExitCode> {
    // All changes are checked before the first is made.
    let changes: Vec<Change> = args
        .changes
        .iter()
        .map(|text| change(text))
        .collect::<Result<_>>()?;
    let last = match changes.is_empty() {
        true => "TAKES",
        false => "BEFORE",
    };
    let mut table = Vec::new();
    let (mut values, mut before) = (Map::new(), Map::new());
    let mut note = |setting: &Changeable, now: u64, old: Option<u64>| {
        let shown = |value| setting.show(value).to_string();
        let was = old.map(shown);
        values.extend(fields(setting, now));
        before.extend(old.into_iter().flat_map(|old| fields(setting, old)));
        let was = was.unwrap_or_else(|| setting.values.to_owned());
        table.push((setting.name, shown(now), was));
    };
    if changes.is_empty() {
        let snapshot = Source::open(args.ask.pid).and_then(|source| source.read());
        let snapshot = snapshot.with_context(|| args.ask.process())?;
        for (setting, &now) in SETTINGS.iter().zip(&snapshot.settings) {
            note(setting, now, None);
        }
    }
    let mail = match changes.is_empty() {
        true => None,
        false => Some(args.ask.open()?),
    };
    let mut make = |mail: &Mail, (number, setting, value): Change| -> Result<()> {
        let before = present(&args.ask, mail, number, setting)?;
        let answer = args.ask.ask(mail, SET + number as u32, value)?;
        match answer.code() {
            Some(Code::Done) => note(setting, answer.value(), Some(before)),
            _ => bail!("{}: it refuses the value", args.ask.process()),
        }
        Ok(())
    };
    // If a change fails, the user learns which ones were made.
    let mut changes = changes.into_iter();
    let result = mail.iter().try_for_each(|mail| {
        changes.try_for_each(|change| {
            let failed = || format!("{}={}", change.1.name, change.1.show(change.2));
            make(mail, change).with_context(failed)
        })
    });
    if result.is_err() && values.is_empty() {
        return result.map(|()| ExitCode::SUCCESS);
    }
    let text = match args.json {
        true => output::object(
            "set",
            &Values {
                process: Identity::of_pid(args.ask.pid),
                settings: values,
                before: (last == "BEFORE").then_some(before),
            },
        )?,
        false => {
            let table = Table::of(&table)
                .column("NAME", |row| row.0)
                .column("VALUE", |row| &row.1);
            let table = match last {
                "TAKES" => table.also_names(last, |row| &row.2),
                _ => table.column(last, |row| &row.2),
            };
            table.table().to_string()
        }
    };
    output::print(&text)?;
    result.map(|()| ExitCode::SUCCESS)
}

/// Returns a setting's present value.
fn present(ask: &Ask, mail: &Mail, number: usize, setting: &Changeable) -> Result<u64> {
    let answer = ask.ask(mail, GET, number as u64)?;
    match answer.code() {
        Some(Code::Done) => Ok(answer.value()),
        _ => bail!(
            "{}: it does not know the setting {}",
            ask.process(),
            setting.name
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program must not have to parse `450 ms`.
    #[test]
    fn settings_are_numbers_with_units() {
        let value = |change: &str| {
            let (_, setting, value) = change_of(change);
            serde_json::to_string(&Map::from_iter(fields(setting, value))).unwrap()
        };
        for (change, expected) in [
            (
                "memory-limit=512M",
                r#"{"memory_limit_bytes":536870912,"memory_limit_percent":null}"#,
            ),
            (
                "memory-limit=50%",
                r#"{"memory_limit_bytes":null,"memory_limit_percent":50}"#,
            ),
            (
                "memory-limit=none",
                r#"{"memory_limit_bytes":null,"memory_limit_percent":null}"#,
            ),
            ("thp=always", r#"{"thp":"always"}"#),
            ("sheaf-budget=32M", r#"{"sheaf_budget_bytes":33554432}"#),
            ("dirty-limit=none", r#"{"dirty_limit_bytes":null}"#),
            ("decay=450", r#"{"decay_seconds":0.45}"#),
            (
                "shepherd-interval=own",
                r#"{"shepherd_interval_seconds":null}"#,
            ),
        ] {
            assert_eq!(value(change), expected);
        }
        let is_tested = |setting: &&Changeable| {
            let (field, _) = &fields(setting, 1)[0];
            field.ends_with("_bytes") || field.ends_with("_seconds") || field == "thp"
        };
        assert_eq!(SETTINGS.iter().filter(is_tested).count(), SETTINGS.len());
    }

    fn change_of(text: &str) -> Change {
        change(text).unwrap()
    }
}
