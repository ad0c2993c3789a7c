//! `pinfold compare`: the user's own program on its own allocator, on Pinfold and on others.

mod child;
mod report;
mod round;

use crate::live::interval as seconds;
use crate::output;
use crate::run::{environment, library, placement, program};
use anyhow::{Context, Result, bail, ensure};
use child::{Children, Stop};
use pinfold_lab::figures::Progress;
use pinfold_lab::stats::turns;
use program::CLibrary;
use report::{Measured, Report};
use round::{Allocator, Cost, Load, Plan, Ready, Run, describe};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, ExitStatus};
use std::time::Duration;

/// Measure a program on its own allocator, on Pinfold and on other allocators
///
/// Runs the program in rounds: once as it is, which is on the C library's malloc unless it brings
/// its own, once on Pinfold, and once on each library of --with. The order changes from round to
/// round, and the first round only warms up. Prints time, CPU time, peak memory and page faults,
/// and says which differences are larger than the spread of the rounds. docs/compare.md explains
/// the figures.
///
/// The program's input is empty and its output is not shown. Variables like PINFOLD_SHEPHERD
/// configure Pinfold, as for `pinfold run`.
///
/// Exit status: 1 if the program fails on one of the allocators or writes something else there,
/// 128+N if signal N ended the measurement, and 2 if nothing was measured.
#[derive(clap::Args)]
pub struct Args {
    /// Another allocator: a shared library, or a name for it and the library
    #[arg(long, value_name = "[NAME=]LIBRARY")]
    with: Vec<OsString>,

    /// How often each allocator is measured, after the round that warms up; at least 6 for verdicts
    #[arg(
        long,
        value_name = "N",
        default_value_t = 9,
        value_parser = clap::value_parser!(u16).range(1..=1000)
    )]
    rounds: u16,

    /// Seconds after which a run has failed
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = seconds)]
    timeout: Duration,

    /// The program is a server: start it, run this shell command against it, and stop it by SIGTERM
    ///
    /// The time is that of the load. The load does not run on the allocator that is measured.
    #[arg(long, value_name = "SHELL COMMAND")]
    load: Option<OsString>,

    /// The server is ready when it accepts connections at this port of localhost, or at this Unix
    /// socket
    #[arg(long, value_name = "PORT|/SOCKET", value_parser = ready, requires = "load")]
    ready: Option<Ready>,

    /// The server is ready when this shell command succeeds
    #[arg(
        long,
        value_name = "SHELL COMMAND",
        requires = "load",
        conflicts_with = "ready"
    )]
    ready_command: Option<OsString>,

    /// How long the server rests after the load, before its settled memory is read
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = seconds, requires = "load")]
    settle: Duration,

    /// Let the program write to this command's own output; it is not compared then
    #[arg(long)]
    show_output: bool,

    /// Print one JSON object
    #[arg(long)]
    json: bool,

    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

fn ready(text: &str) -> Result<Ready, &'static str> {
    if text.starts_with('/') {
        return Ok(Ready::Socket(text.into()));
    }
    let port = text.parse().ok().filter(|&port| port != 0);
    port.map(Ready::Port)
        .ok_or("give a port from 1 to 65535, or the path of a Unix socket that begins with /")
}

pub fn main(args: Args) -> Result<ExitCode> {
    environment::check()?;
    for note in environment::misspelt() {
        output::note(note);
    }
    let name = &args.command[0];
    let found = program::find(name).with_context(|| format!("cannot run {}", name.display()))?;
    let allocators = allocators(&found, &args.with)?;
    if let Some(own) = found.allocator() {
        output::note(format_args!(
            "{} is linked with {own}: \"as it is\" means on that allocator",
            found.binary.display()
        ));
    }
    let (is_quiet, is_json) = (args.json || args.show_output, args.json);
    let load = match args.load {
        None => None,
        Some(command) => Some(Load {
            command,
            ready: (args.ready.or(args.ready_command.map(Ready::Command)))
                .context("--load needs --ready PORT or --ready-command, which tells when the server can be asked")?,
            settle: args.settle,
        }),
    };
    let plan = Plan {
        path: found.path,
        command: args.command,
        timeout: args.timeout,
        show_output: args.show_output,
        load,
    };
    // All allocators get the policy that PINFOLD_POLICY names.
    let _placed = placement::place(None)?;
    let progress = Progress::new("compare", is_quiet);
    let mut rounds = Rounds::new(allocators);
    let signal = rounds.measure(&plan, args.rounds.into(), &progress)?;
    drop(progress);
    let report = rounds.report(&plan);
    output::show(is_json, "compare", &report, || report::text(&report))?;
    if let Some(signal) = signal {
        output::note(format_args!("signal {signal} ended the measurement"));
        return Ok(ExitCode::from(128 + signal as u8));
    }
    let is_bad = |it: &Measured| it.failure.is_some() || it.same_output == Some(false);
    Ok(ExitCode::from(u8::from(
        report.allocators.iter().any(is_bad),
    )))
}

/// Returns the program's own allocator, Pinfold, and those of `--with`, after checking that each
/// can be preloaded into the program.
fn allocators(program: &program::Program, with: &[OsString]) -> Result<Vec<Allocator>> {
    let binary = program.binary.display();
    if program::defines_malloc(&program.binary) == Some(true) {
        bail!(
            "{binary} has a malloc of its own, which goes before every library; build it without one"
        );
    }
    let mut all = vec![Allocator {
        name: "as it is".to_owned(),
        library: None,
    }];
    let pinfold = library::find()?;
    let others = with.iter().map(|text| named(text));
    for found in [Ok(("Pinfold".to_owned(), pinfold))]
        .into_iter()
        .chain(others)
    {
        let (name, path) = found?;
        if let Some(obstacle) = program.obstacle(CLibrary::of(&path)) {
            bail!("{binary} {obstacle}: there is nothing to compare");
        }
        ensure!(
            all.iter().all(|other| other.name != name),
            "two allocators are called {name}; give one another name, as --with NAME={}",
            path.display()
        );
        let preload = library::preload(&path, program.sanitizer());
        all.push(Allocator {
            name,
            library: Some((path, preload)),
        });
    }
    Ok(all)
}

/// Returns the name and the path of an allocator that `--with` names.
fn named(text: &OsStr) -> Result<(String, PathBuf)> {
    let bytes = text.as_bytes();
    let equals = bytes.iter().position(|&byte| byte == b'=' || byte == b'/');
    let (name, path) = match equals.filter(|&at| bytes[at] == b'=') {
        Some(at) => (&bytes[..at], &bytes[at + 1..]),
        None => (file_name(bytes), bytes),
    };
    let path = Path::new(OsStr::from_bytes(path));
    let wrong = |why: &str| format!("--with {}: {why}", text.display());
    let path = path.canonicalize();
    let path = path.with_context(|| wrong("give the path of a shared library"))?;
    ensure!(
        !library::ends_early(&path),
        wrong(
            "the dynamic loader takes a space or a colon for the end of the path; copy the library elsewhere"
        )
    );
    match program::defines_malloc(&path) {
        Some(true) if program::is_for_this_machine(&path) => {}
        Some(true) => bail!(wrong("this library is for another machine")),
        Some(false) => bail!(wrong("this library defines no malloc; give an allocator's")),
        None => bail!(wrong(
            "this is no shared library that can be read; give a file like /usr/lib/libjemalloc.so.2"
        )),
    }
    ensure!(!name.is_empty(), wrong("give a name before the ="));
    Ok((String::from_utf8_lossy(name).into_owned(), path))
}

/// Returns `mimalloc` for `/usr/lib/libmimalloc.so.2`.
fn file_name(path: &[u8]) -> &[u8] {
    let name = path.rsplit(|&byte| byte == b'/').next().unwrap_or(path);
    let name = name.strip_prefix(b"lib").unwrap_or(name);
    let end = name.windows(3).position(|part| part == b".so");
    &name[..end.unwrap_or(name.len())]
}

/// What the rounds have measured of one allocator.
struct Row {
    allocator: Allocator,
    failure: Option<String>,
    costs: Vec<Cost>,
    /// The hashes of standard output.
    outputs: Vec<u64>,
}

struct Rounds {
    rows: Vec<Row>,
    /// How the program ended as it is. It must end like this on each allocator.
    expected: Option<ExitStatus>,
}

impl Rounds {
    fn new(allocators: Vec<Allocator>) -> Rounds {
        let row = |allocator| Row {
            allocator,
            failure: None,
            costs: Vec::new(),
            outputs: Vec::new(),
        };
        Rounds {
            rows: allocators.into_iter().map(row).collect(),
            expected: None,
        }
    }

    /// Measures until all rounds are over, or until a signal arrives, which is returned. The first
    /// run of all is that of the program as it is.
    fn measure(&mut self, plan: &Plan, rounds: usize, progress: &Progress) -> Result<Option<i32>> {
        let children = Children::watch()?;
        progress.begin((rounds + 1) * self.rows.len());
        for round in 0..=rounds {
            for nth in turns(self.rows.len(), round) {
                progress.step();
                if self.rows[nth].failure.is_some() {
                    continue;
                }
                match plan.run(&children, &self.rows[nth].allocator) {
                    Ok(run) => self.add(nth, run, round > 0),
                    Err(Stop::Failed(why)) => self.rows[nth].failure = Some(why),
                    Err(Stop::Signal(signal)) => return Ok(Some(signal)),
                }
                if self.rows[0].failure.is_some() {
                    return Ok(None);
                }
            }
        }
        Ok(None)
    }

    fn add(&mut self, nth: usize, run: Run, counts: bool) {
        let row = &mut self.rows[nth];
        let Run { status, .. } = run;
        if self.expected.is_none() && status.code().is_some_and(|code| code != 0) {
            output::note(format_args!(
                "as it is, the program ends with {}{}",
                describe(status),
                run.last_line
            ));
        }
        let expected = *self.expected.get_or_insert(status);
        // A server may end by the signal that stops it.
        let is_killed = nth == 0 && run.cost.settled_bytes.is_none() && status.code().is_none();
        if status != expected || is_killed {
            row.failure = Some(format!("{}{}", describe(status), run.last_line));
            return;
        }
        row.outputs.push(run.output);
        if counts {
            row.costs.push(run.cost);
        }
    }

    /// Leaves out a round that a signal has cut off.
    fn report(self, plan: &Plan) -> Report {
        let good = self.rows.iter().filter(|row| row.failure.is_none());
        let rounds = good.map(|row| row.costs.len()).min().unwrap_or(0);
        let base = &self.rows[0];
        let measured = |row: &Row| {
            let is_base = row.allocator.library.is_none();
            let costs = if row.failure.is_none() {
                &row.costs[..rounds]
            } else {
                &[]
            };
            let base_costs = (!is_base && base.failure.is_none()).then(|| &base.costs[..rounds]);
            let mut pairs = base.outputs.windows(2);
            let is_steady = pairs.len() > 0 && pairs.all(|pair| pair[0] == pair[1]);
            let is_compared = is_steady && plan.load.is_none() && !plan.show_output;
            let same = || {
                row.outputs
                    .iter()
                    .all(|output| Some(output) == base.outputs.first())
            };
            Measured {
                name: row.allocator.name.clone(),
                library: (row.allocator.library.as_ref())
                    .map(|(path, _)| path.to_string_lossy().into_owned()),
                failure: row.failure.clone(),
                same_output: (is_compared && !is_base && !row.outputs.is_empty()).then(same),
                figures: report::figures(costs, base_costs),
            }
        };
        let allocators: Vec<Measured> = self.rows.iter().map(measured).collect();
        let told = allocators.iter().enumerate();
        let told = told.filter(|(nth, measured)| *nth > 0 || measured.failure.is_some());
        Report {
            program: (plan.command.iter())
                .map(|word| word.to_string_lossy().into_owned())
                .collect(),
            rounds,
            verdicts: told
                .map(|(_, measured)| report::verdict(measured))
                .collect(),
            allocators,
        }
    }
}
