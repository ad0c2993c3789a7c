//! One benchmark of the report, in a process of its own.
//!
//! The benchmarks change their process: they choose how CPUs are numbered, switch huge pages off,
//! and move threads. In one process, each would measure what the ones before it left behind.

use super::Args;
use crate::bench::{counter, on_own_thread, pft, slab, vmstat};
use crate::figures::{Progress, Sheet};
use crate::jitter;
use anyhow::{Context, Result, bail};
use clap::{ArgMatches, Command, FromArgMatches};
use std::process::{self, Stdio};

/// The shortest run of the counter's loop, in seconds. Each of its 16 processes must get a turn on
/// a CPU.
const COUNTER_LEAST: f64 = 0.2;

crate::names! {
    /// A benchmark of the report.
    pub enum Part {
        Vmstat = "vmstat",
        Slab = "slab",
        Jitter = "jitter",
        Counter = "counter",
        Pft = "pft",
    }
}

impl Part {
    /// Returns the benchmark's own arguments.
    fn words(self, args: &Args) -> Vec<String> {
        let quick = args.quick;
        let seconds = args.seconds.unwrap_or(if quick { 0.5 } else { 20.0 });
        let words = match (self, quick) {
            (Part::Vmstat, true) => "--rounds 5 --calls 1000".to_owned(),
            (Part::Vmstat, false) => "--rounds 101".to_owned(),
            (Part::Slab, quick) => format!(
                "--subject pinfold-cache,pinfold-malloc,unprotected,rseq,tid,locked,masked-signals {}",
                if quick {
                    "--rounds 2 --calls 300"
                } else {
                    "--rounds 21"
                }
            ),
            (Part::Jitter, _) => format!("--seconds {seconds}"),
            (Part::Counter, quick) => format!(
                "--processes 16 --amount 32768 --rounds {} --seconds {}",
                if quick { 1 } else { 5 },
                (seconds / 50.0).max(COUNTER_LEAST)
            ),
            (Part::Pft, true) => "--rounds 2 --memory 16M".to_owned(),
            (Part::Pft, false) => "--rounds 10".to_owned(),
        };
        words.split_whitespace().map(str::to_owned).collect()
    }

    /// Returns the command that measures the same alone.
    pub fn command(self, args: &Args) -> String {
        let name = match self {
            Part::Jitter => "pinfold jitter".to_owned(),
            _ => format!("pinfold bench {}", self.name()),
        };
        format!("{name} {}", self.words(args).join(" "))
    }

    /// Measures the benchmark in a new process of this command.
    pub fn run(self, args: &Args) -> Result<Sheet, String> {
        self.child(args)
            .unwrap_or_else(|error| Err(format!("{error:#}")))
    }

    fn child(self, args: &Args) -> Result<Result<Sheet, String>> {
        let mut command = process::Command::new("/proc/self/exe");
        command.args(["bench", "all", "--part", self.name()]);
        command.args(args.quick.then_some("--quick"));
        command.args(args.seconds.map(|seconds| format!("--seconds={seconds}")));
        // The child draws its own progress on this process's standard error.
        command.stdin(Stdio::null()).stderr(Stdio::inherit());
        let output = command
            .output()
            .context("starting the benchmark's process")?;
        if !output.status.success() {
            bail!("the benchmark's process ended with {}", output.status);
        }
        serde_json::from_slice(&output.stdout).context("reading the benchmark's results")
    }

    /// Measures the benchmark in this process.
    pub fn measure(self, args: &Args) -> Result<Sheet, String> {
        let at = Part::ALL.iter().position(|part| *part == self);
        let all = Part::ALL.len();
        let what = format!("{} of {all}: {:<7}", at.unwrap_or(0) + 1, self.name());
        let progress = Progress::new(&what, false);
        let words = self.words(args);
        let measured = match self {
            Part::Vmstat => parse(words).and_then(|args| vmstat::sheet(&args, &progress)),
            Part::Slab => parse(words).and_then(|args| slab::sheet(&args, &progress)),
            Part::Jitter => {
                parse(words).and_then(|args| on_own_thread(|| jitter::sheet(&args, &progress)))
            }
            Part::Counter => parse(words).and_then(|args| counter::sheet(&args, &progress)),
            Part::Pft => parse(words).and_then(|args| pft::sheet(&args, &progress)),
        };
        measured.map_err(|error| format!("{error:#}"))
    }
}

/// Parses a benchmark's arguments as its own command does.
fn parse<A: clap::Args + FromArgMatches>(words: Vec<String>) -> Result<A> {
    let command = A::augment_args(Command::new("pinfold").no_binary_name(true));
    let matches: ArgMatches = command.try_get_matches_from(words)?;
    Ok(A::from_arg_matches(&matches)?)
}
