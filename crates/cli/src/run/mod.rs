//! `pinfold run`: starts a program with the library preloaded.

mod contained;
pub mod environment;
mod leaks;
pub mod library;
pub mod placement;
pub mod program;
mod report;
mod signals;
pub mod statistics;
mod trust;
mod watch;

use crate::foreign::{Identity, Unopened, open_own};
use crate::output;
use anyhow::{Context, Result, bail};
use pinfold_malloc::settings::{
    GUARD, HARDENED, HEAP, HEAP_DUMP, HEAP_FILE, MEMORY_LIMIT, POLICY, SHEPHERD, SLAB_DEBUG, STATS,
    THP,
};
use placement::Placed;
use program::{Obstacle, Program};
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus};
use std::time::SystemTime;

/// The exit status of shells for a command that cannot be executed.
const NOT_EXECUTABLE: u8 = 126;
/// The exit status of shells for a command that does not exist.
const NOT_FOUND: u8 = 127;

/// Start a program on Pinfold: the library is preloaded, nothing else changes
///
/// Output, signals and exit status pass through. A program killed by signal N gives status 128+N,
/// one that cannot be executed 126, one that does not exist 127.
#[derive(clap::Args)]
#[command(after_long_help = environment::help())]
pub struct Args {
    /// When the program has ended, print what the allocator did to standard error, or to FILE; `-`
    /// is standard output
    ///
    /// Counting makes each call a few nanoseconds slower. docs/stats.md explains every line.
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true)]
    stats: Option<Option<PathBuf>>,

    /// With --stats, print one JSON object instead of lines
    #[arg(long, requires = "stats")]
    json: bool,

    /// When to run a background thread that gives idle memory back: auto, on, off, or an interval
    /// in milliseconds
    ///
    /// `auto`, the default, runs the thread while the program has two threads or more. `on`, a
    /// number, or `--shepherd` alone starts the thread with the program. It then serves all CPUs,
    /// and gives all free memory back under memory pressure. `off` forbids the thread: the
    /// program's own calls give idle memory back. docs/tuning.md says more.
    #[arg(long, value_name = "WHEN", num_args = 0..=1, require_equals = true, default_missing_value = "on", value_parser = |value: &str| environment::option(SHEPHERD, value))]
    shepherd: Option<String>,

    /// Check how the program uses its memory, and abort it at an error; alone, it means FZPU for
    /// all sizes
    ///
    /// F checks what is freed, Z puts red zones around objects, P poisons free objects, U records
    /// where each object was allocated and freed, T writes a line for each call. Cache names limit
    /// the checks to certain sizes or caches, as in PINFOLD_SLAB_DEBUG:
    /// `--slab-debug=FZP,kmalloc-*;U,sessions`. Errors are reported on standard error.
    /// docs/slab-debug.md explains the reports.
    #[arg(long, value_name = "SETTINGS", num_args = 0..=1, require_equals = true, default_missing_value = "FZPU", value_parser = |value: &str| environment::option(SLAB_DEBUG, value))]
    slab_debug: Option<String>,

    /// Abort the program at a double free or after a write to freed memory; zero freed memory, and
    /// reuse it late and in random order
    #[arg(long)]
    hardened: bool,

    /// Give some blocks pages of their own, so that an access beyond one or after its free writes a
    /// report; one allocation in BYTES is sampled, and alone, it means 512k
    ///
    /// No block is guarded in the first 100 ms. Reports go to standard error.
    /// docs/guarded-blocks.md explains them.
    #[arg(long, value_name = "BYTES", num_args = 0..=1, require_equals = true, default_missing_value = "on", value_parser = |value: &str| environment::option(GUARD, value))]
    guard: Option<String>,

    /// Sample the program's allocations for a heap profile, one in BYTES; alone, it means 512k
    ///
    /// `pinfold heap dump PID` shows the profile while the program runs. docs/heap-profiles.md
    /// explains the figures.
    #[arg(long, value_name = "BYTES", num_args = 0..=1, require_equals = true, default_missing_value = "on", value_parser = |value: &str| environment::option(HEAP, value))]
    heap: Option<String>,

    /// Have each process write its heap profile to FILE.PID when it ends by itself
    ///
    /// This turns the heap profile on.
    #[arg(long, value_name = "FILE")]
    heap_file: Option<OsString>,

    /// With --heap-file, also write the profile at MOMENTS, like above:90%,peak:10%,every:5m
    ///
    /// `above:BYTES` or `above:N%` (of the memory limit) and `every:TIME` write FILE.PID.N. The
    /// newest 8 of these stay, or `keep:N`. `peak:N%` replaces FILE.PID.peak when the memory in use
    /// is N % above the last peak. `signal:USR1` or `signal:USR2` writes FILE.PID.N when the
    /// process gets this signal. A thread in the program looks once a second.
    #[arg(long, value_name = "MOMENTS", requires = "heap_file", value_parser = |value: &str| environment::option(HEAP_DUMP, value))]
    heap_dump: Option<String>,

    /// When the program has ended, print to standard error what its processes have not freed, by
    /// call stack; alone, it means `sampled`
    ///
    /// This turns the heap profile on. `sampled` records one allocation in 1 KiB, unless --heap or
    /// PINFOLD_HEAP says otherwise, and prints how far the figures may be off. `exact` records each
    /// allocation, as long as fewer than 131,072 blocks are in use, and takes about 3 microseconds
    /// for each. It also tells lost blocks from those to which a pointer leads when the program
    /// calls `exit`.
    #[arg(long, value_name = "HOW", num_args = 0..=1, require_equals = true, default_missing_value = "sampled", value_parser = ["sampled", "exact"])]
    leaks: Option<String>,

    /// With --leaks, end with this status if a process has not freed more than --leaks-above
    ///
    /// Blocks to which a pointer leads do not count, where --leaks=exact can tell.
    /// It replaces the program's own status, unless a signal ended the program that is not SIGTERM,
    /// SIGINT or SIGHUP. It is also given if no process left a profile, or one that cannot be read.
    /// A program that cannot run on Pinfold is not started.
    #[arg(
        long,
        value_name = "STATUS",
        requires = "leaks",
        value_parser = clap::value_parser!(u8).range(1..)
    )]
    leaks_exit_code: Option<u8>,

    /// The bytes that a process may leave unfreed without --leaks-exit-code, like 64k
    ///
    /// The C library's buffers of open files count, 1 to 4 KiB each, and so do the 72 KiB of a C++
    /// runtime that does not free its reserve for exceptions.
    #[arg(
        long,
        value_name = "SIZE",
        default_value = "0",
        requires = "leaks_exit_code",
        value_parser = leaks::size
    )]
    leaks_above: usize,

    /// Take the program's memory from certain nodes, like interleave:0-3; its threads and child
    /// processes inherit this
    ///
    /// The form is `mode[=flag]:nodes`, as in tmpfs's mpol= option: bind:0, prefer:1,
    /// prefer-many:0-1, interleave=relative:0-1, weighted-interleave:all. `pinfold policy` explains
    /// a policy. This option replaces PINFOLD_POLICY.
    #[arg(long, value_name = "POLICY")]
    policy: Option<OsString>,

    /// The memory that the program's allocator should hold at most, like 512M
    ///
    /// The allocator keeps less free memory near the limit. No allocation fails because of it.
    #[arg(long, value_name = "SIZE", value_parser = |value: &str| environment::option(MEMORY_LIMIT, value))]
    memory_limit: Option<String>,

    /// Whether huge pages back the program's memory: never, auto or always
    #[arg(long, value_name = "WHEN", value_parser = |value: &str| environment::option(THP, value))]
    thp: Option<String>,

    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

impl Args {
    /// Returns the interval of the heap profile, if one was asked for. An interval in the
    /// environment stays.
    fn heap_interval(&self) -> Option<&str> {
        let default = match self.leaks.as_deref() {
            Some("exact") => return Some("1"),
            Some(_) => "1k",
            None if self.heap_file.is_some() => "on",
            None => return self.heap.as_deref(),
        };
        let is_set = std::env::var_os(HEAP).is_some_and(|value| !value.is_empty());
        self.heap.as_deref().or((!is_set).then_some(default))
    }

    /// Returns the option that was given without a value and that would accept `word` as its
    /// value.
    fn option_for(&self, word: &OsStr) -> Option<&'static str> {
        let word = word.to_str()?;
        let given = [
            ("heap", HEAP, &self.heap, "on"),
            ("guard", GUARD, &self.guard, "on"),
            ("shepherd", SHEPHERD, &self.shepherd, "on"),
            ("slab-debug", SLAB_DEBUG, &self.slab_debug, "FZPU"),
        ];
        let fits = |&(_, name, value, alone): &(&str, &str, &Option<String>, &str)| {
            value.as_deref() == Some(alone) && environment::option(name, word).is_ok()
        };
        let is_leaks = self.leaks.as_deref() == Some("sampled") && word == "exact";
        let found = given.into_iter().find(fits).map(|(option, ..)| option);
        found.or(is_leaks.then_some("leaks"))
    }
}

pub fn main(args: Args) -> Result<ExitCode> {
    environment::check()?;
    if args.leaks.as_deref() == Some("exact") && args.heap.is_some() {
        bail!("--leaks=exact records each allocation; leave --heap out, or the `=exact`");
    }
    let shepherd = match &args.shepherd {
        Some(given) => Some(OsString::from(given)),
        None => std::env::var_os(SHEPHERD),
    };
    if args.heap_dump.is_some() && shepherd.is_some_and(|wish| wish == "off") {
        bail!("--heap-dump needs the thread that {SHEPHERD}=off or --shepherd=off forbids");
    }
    for note in environment::misspelt() {
        output::note(note);
    }
    if let Some(file) = &args.heap_file {
        check_heap_file(file)?;
    }
    if let Some(Some(file)) = &args.stats {
        output::clear("the statistics", file)?;
    }
    let placed = placement::place(args.policy.as_deref())?;
    let library = library::find()?;
    let (name, arguments) = args.command.split_first().context("no command given")?;
    let program = match program::find(name) {
        Ok(program) => program,
        Err(error) => {
            let status = refuse(name, &error);
            if let Some(option) = args.option_for(name) {
                output::note(format_args!(
                    "to give --{option} a value, write --{option}={}",
                    name.display()
                ));
            }
            return Ok(status);
        }
    };
    let mut command = Command::new(&program.path);
    command.arg0(name).args(arguments);
    if placed.is_some() {
        command.env_remove(POLICY);
    }
    let obstacle = program.obstacle(program::CLibrary::of(&library));
    match &obstacle {
        Some(obstacle) if args.leaks_exit_code.is_some() => {
            let program = program.binary.display();
            bail!("{program} {obstacle}; without Pinfold, nothing is known about its leaks");
        }
        Some(obstacle) => explain(&program, obstacle),
        None => {
            command.env(
                "LD_PRELOAD",
                library::preload(&library, program.sanitizer()),
            );
            let settings = [
                (SHEPHERD, args.shepherd.as_deref()),
                (SLAB_DEBUG, args.slab_debug.as_deref()),
                (HARDENED, args.hardened.then_some("1")),
                (GUARD, args.guard.as_deref()),
                (MEMORY_LIMIT, args.memory_limit.as_deref()),
                (THP, args.thp.as_deref()),
                (HEAP, args.heap_interval()),
                (HEAP_DUMP, args.heap_dump.as_deref()),
            ];
            command.envs(
                settings
                    .into_iter()
                    .filter_map(|(name, value)| Some((name, value?))),
            );
            if let Some(file) = &args.heap_file {
                command.env(HEAP_FILE, std::path::absolute(file)?);
            }
        }
    }
    if (args.stats.is_some() || args.leaks.is_some()) && obstacle.is_none() {
        run_and_report(name, command, placed, &args)
    } else {
        // `exec` replaces this process, so the program keeps its process id, terminal and signals.
        if let Some(file) = args.heap_file.as_ref().filter(|_| obstacle.is_none()) {
            check_place(file, std::process::id())?;
        }
        signals::restore_sigpipe();
        Ok(refuse(name, &command.exec()))
    }
}

/// Refuses a file for heap profiles that is a folder, or whose folder does not exist: the program
/// could not report that when it ends.
fn check_heap_file(file: &OsStr) -> Result<()> {
    let path = std::path::absolute(file)?;
    let wrong = if path.is_dir() {
        format!(
            "this is a folder; give a file, as {}",
            path.join("heap").display()
        )
    } else if path.file_name().is_none() || !path.parent().is_some_and(|folder| folder.is_dir()) {
        "give a file in a folder that exists".to_owned()
    } else {
        return Ok(());
    };
    bail!("--heap-file {}: {wrong}", file.display());
}

/// Checks that process `pid` can write its heap profile to `FILE.PID`. The library replaces nothing
/// but a regular file of its user.
fn check_place(file: &OsStr, pid: u32) -> Result<()> {
    let mut path = std::path::absolute(file)?.into_os_string();
    path.push(format!(".{pid}"));
    let why = match open_own(Path::new(&path)) {
        Ok(_) => return Ok(()),
        Err(Unopened::System(error)) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(Unopened::System(error)) if error.kind() == io::ErrorKind::PermissionDenied => {
            "it is not yours to write".to_owned()
        }
        Err(why) => why.to_string(),
    };
    bail!(
        "--heap-file {}: no heap profile can be written to {}: {why}; remove it, or give a file in a folder where only you can write",
        file.display(),
        path.display()
    );
}

/// Runs the command as a child process, and prints the reports when it has ended.
fn run_and_report(
    name: &OsStr,
    mut command: Command,
    placed: Option<Placed>,
    args: &Args,
) -> Result<ExitCode> {
    let directory = statistics::Directory::make()?;
    if args.stats.is_some() {
        command.env(STATS, directory.path());
    }
    let heap_file = match &args.heap_file {
        Some(file) => std::path::absolute(file)?,
        None => directory.path().join(leaks::FILE),
    };
    if args.leaks.is_some() {
        command.env(HEAP_FILE, &heap_file);
    }
    let relay = signals::Relay::start();
    relay.prepare(&mut command);
    let started = SystemTime::now();
    let spawned = command.spawn();
    drop(placed);
    let mut child = match spawned {
        Ok(child) => child,
        Err(error) => return Ok(refuse(name, &error)),
    };
    let identity = Identity::of_child(child.id(), &args.command);
    relay.send_to(child.id());
    let watch = args.leaks.is_some().then(|| {
        let file = heap_file.clone();
        let has_written = move |pid| leaks::is_written(&file, pid, started);
        signals::blocked(|| watch::Watch::start(child.id(), has_written))
    });
    relay.stop_at_the_end();
    let status = child.wait().context("waiting for the command")?;
    let kept = watch.map_or_else(Vec::new, |watch| watch.end(status.signal().is_some()));
    if let Some(file) = &args.stats {
        let report = directory.read(child.id());
        let form = match args.json {
            true => report::Form::Json(identity),
            false => report::Form::Text,
        };
        // The program has run, so its status counts.
        if let Err(error) = report::write(&report, form, file.as_deref()) {
            output::note(format_args!("{error:#}"));
        }
    }
    if args.leaks.is_some() {
        let most = leaks::print(&heap_file, started, &kept);
        if let Err(error) = check_place(heap_file.as_os_str(), child.id()) {
            output::note(error);
        }
        let leaks = most.is_none_or(|most| most > args.leaks_above as f64);
        if let Some(code) = args
            .leaks_exit_code
            .filter(|_| leaks && ended_by_itself(status))
        {
            return Ok(ExitCode::from(code));
        }
    }
    Ok(exit_code(status))
}

/// Returns whether a program ended by `exit`, or by a signal by which users stop programs.
fn ended_by_itself(status: ExitStatus) -> bool {
    let stops = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];
    status.signal().is_none_or(|signal| stops.contains(&signal))
}

/// Returns the exit status that shells give.
fn exit_code(status: ExitStatus) -> ExitCode {
    let code = status
        .code()
        .or_else(|| status.signal().map(|signal| 128 + signal));
    ExitCode::from(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}

/// Reports why a command did not start, and returns the exit status.
fn refuse(name: &OsStr, error: &io::Error) -> ExitCode {
    let name = name.display();
    if error.kind() == io::ErrorKind::NotFound {
        output::note(format_args!("{name}: command not found"));
        ExitCode::from(NOT_FOUND)
    } else {
        output::note(format_args!("{name}: cannot execute: {error}"));
        ExitCode::from(NOT_EXECUTABLE)
    }
}

fn explain(program: &Program, obstacle: &Obstacle) {
    output::note(format_args!(
        "{} {obstacle}; it runs without Pinfold",
        program.binary.display()
    ));
}
