//! `pinfold trim` and `pinfold set`: what a running process is asked to do.

use super::mail::{Mail, NoAnswer, has_filter};
use super::source::name;
use crate::figures::{self, Table};
use anyhow::{Context, Result, anyhow, bail};
use pinfold::segment::{Answer, Code, GET, SET, TRIM};
use pinfold_malloc::changeable::{Changeable, SETTINGS, find};
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

fn patience(text: &str) -> Result<Duration, &'static str> {
    let seconds = text.parse().ok().filter(|n| (0.01..=60.0).contains(n));
    seconds
        .map(Duration::from_secs_f64)
        .ok_or("give seconds from 0.01 to 60")
}

/// Whether a process has a seccomp filter, which may end it at a system call.
pub enum Seccomp {
    NoFilter,
    Filter,
}

impl Ask {
    pub fn pid(&self) -> u32 {
        self.pid
    }

    pub fn seccomp(&self) -> Seccomp {
        match has_filter(self.pid) {
            true => Seccomp::Filter,
            false => Seccomp::NoFilter,
        }
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
                "it has not looked at the request within {} s, and will not do it; a process looks when its threads next allocate or free, and one with a shepherd (PINFOLD_SHEPHERD) looks at once; give a longer --timeout",
                self.timeout.as_secs_f64()
            ),
            Err(NoAnswer::Busy) => anyhow!(
                "it has begun, and was not ready within {} s; give a longer --timeout to see the answer",
                self.timeout.as_secs_f64()
            ),
            Err(NoAnswer::Full) => {
                anyhow!("others ask it for too many things at once; try again in a minute")
            }
            Err(NoAnswer::Gone) => anyhow!("it has ended"),
        };
        Err(why).with_context(|| self.process())
    }
}

pub fn trim(args: TrimArgs) -> Result<ExitCode> {
    let mail = args.ask.open()?;
    let answer = args.ask.ask(&mail, TRIM, 0)?;
    let everywhere = match answer.code() {
        Some(Code::Done) => true,
        Some(Code::DoneHere) => false,
        _ => bail!("{}: it does not know this request", args.ask.process()),
    };
    let bytes = answer.value();
    let text = if args.json {
        let row = serde_json::json!({"pid": args.ask.pid, "returned_bytes": bytes, "all_cpus": everywhere});
        format!("{}\n", serde_json::json!({ "trim": row }))
    } else {
        let rest = match everywhere {
            true => "",
            false => "; what other CPUs keep goes back when it has been idle",
        };
        let name = name(args.ask.pid);
        let process = args.ask.process();
        format!(
            "{name} ({process}) gave {} KiB back to the system{rest}\n",
            bytes >> 10
        )
    };
    figures::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// A change that the user asks for: the setting's number, the setting, and its new value.
type Change = (usize, &'static Changeable, u64);

/// Reads `NAME=VALUE`.
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
            "{name} cannot change in a running process; these can: {}",
            known()
        )
    })?;
    let value = setting
        .parse(value.as_bytes())
        .ok_or_else(|| anyhow!("{text}: {} takes {}", setting.name, setting.values))?;
    Ok((number, setting, value))
}

pub fn set(args: SetArgs) -> Result<ExitCode> {
    // All changes are checked before the first is made.
    let changes: Vec<Change> = args
        .changes
        .iter()
        .map(|text| change(text))
        .collect::<Result<_>>()?;
    let mail = args.ask.open()?;
    let mut table = Table::new(["NAME", "VALUE", "BEFORE", "TAKES"]);
    let mut rows = Vec::new();
    let mut note = |setting: &Changeable, now: u64, before: Option<u64>| {
        let shown = |value| setting.show(value).to_string();
        let was = before.map(shown);
        rows.push(serde_json::json!({"name": setting.name, "value": shown(now), "before": was}));
        table.row([
            setting.name.to_owned(),
            shown(now),
            was.unwrap_or_else(|| "-".into()),
            setting.values.to_owned(),
        ]);
    };
    if changes.is_empty() {
        for (number, setting) in SETTINGS.iter().enumerate() {
            let now = present(&args.ask, &mail, number, setting)?;
            note(setting, now, None);
        }
    }
    for (number, setting, value) in changes {
        if setting.needs_the_machine(value) && has_filter(args.ask.pid) {
            bail!(
                "{}: it has a seccomp filter, and a percentage needs a system call that the filter may forbid; give bytes",
                args.ask.process()
            );
        }
        let before = present(&args.ask, &mail, number, setting)?;
        let answer = args.ask.ask(&mail, SET + number as u32, value)?;
        match answer.code() {
            Some(Code::Done) => note(setting, answer.value(), Some(before)),
            _ => bail!(
                "{}: it refuses {}={}",
                args.ask.process(),
                setting.name,
                setting.show(value)
            ),
        }
    }
    let text = match args.json {
        true => format!(
            "{}\n",
            serde_json::json!({"set": {"pid": args.ask.pid, "settings": rows}})
        ),
        false => table.to_string(),
    };
    figures::print(&text)?;
    Ok(ExitCode::SUCCESS)
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
