//! `pinfold heap`: which call stacks hold a process's memory.

mod naming;
mod raw;
pub mod report;

use crate::foreign::{Identity, Unopened, open_regular};
use crate::live::{Ask, name, patience};
use crate::output;
use anyhow::{Context, Result, bail};
use naming::Subject;
pub use naming::{PATIENCE, Patience, child_main};
use pinfold::internal::profile::NoWalks;
use pinfold::internal::segment::{Code, HEAP_FRAGMENTS, HEAP_START, HEAP_STOP};
use pinfold_lab::figures::date;
use pinfold_malloc::heap_profile::{DEFAULT_INTERVAL, MAX_INTERVAL};
use pinfold_malloc::settings::parse_heap_interval;
use pinfold_pprof::Error;
use pinfold_pprof::internal::flame::{self, Picture};
use pinfold_pprof::internal::pprof;
use pinfold_pprof::internal::profile::{Profile, What};
use pinfold_pprof::internal::raw::{Raw, nanoseconds};
pub use raw::Kept;
use serde::Serialize;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, UNIX_EPOCH};

/// Show which call stacks hold a process's memory, by a sample of its allocations
///
/// A profile costs a process nothing until it is started. docs/heap-profiles.md explains what the
/// figures mean.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    Start(StartArgs),
    Stop(StopArgs),
    Dump(DumpArgs),
}

/// Start a heap profile in a running process, or change its interval
#[derive(clap::Args)]
struct StartArgs {
    #[command(flatten)]
    ask: Ask,

    /// The mean bytes from one sample to the next: fewer give finer figures and cost more
    ///
    /// 512k grows while it would give more than some 4,000 samples a second. Other values stay.
    #[arg(long, value_name = "BYTES", value_parser = interval, default_value = "512k")]
    interval: u64,

    /// Print one JSON object instead of a line
    #[arg(long)]
    json: bool,
}

/// Stop the heap profile of a process; what was sampled stays known
#[derive(clap::Args)]
struct StopArgs {
    #[command(flatten)]
    ask: Ask,

    /// Print one JSON object instead of a line
    #[arg(long)]
    json: bool,
}

/// The answer of a process, for programs.
#[derive(Serialize)]
struct Answered {
    process: Identity,
    /// The mean bytes from one sample to the next, if sampling was started.
    #[serde(skip_serializing_if = "Option::is_none")]
    interval_bytes: Option<u64>,
}

/// Print a heap profile, or write it for other tools
#[derive(clap::Args)]
struct DumpArgs {
    /// A process id, or a file that `-o` or `pinfold run --heap-file` wrote; `-` is standard input
    #[arg(value_name = "PID|FILE")]
    from: String,

    /// Write the profile for `go tool pprof` and its relatives, as a gzip'd protocol buffer; `-` is
    /// standard output
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Draw a flame graph as an SVG file; `-` is standard output
    #[arg(long, value_name = "FILE")]
    flame: Option<PathBuf>,

    /// Subtract an older profile of the same program
    #[arg(long, value_name = "OLD")]
    diff: Option<PathBuf>,

    /// Show everything that was ever allocated, not only what is in use
    #[arg(long)]
    alloc: bool,

    /// Show which call stacks keep free memory in slabs: the free blocks beside their blocks in use
    ///
    /// A process is asked to look. It answers when it allocates, as docs/heap-profiles.md explains.
    #[arg(long, conflicts_with_all = ["alloc", "diff", "output"])]
    fragmentation: bool,

    /// Seconds to wait for the process's answer, from 0.01 to 60
    #[arg(long, value_name = "SECONDS", value_parser = patience, default_value = "3")]
    #[arg(requires = "fragmentation")]
    timeout: Duration,

    /// How many functions to list
    #[arg(long, value_name = "N", default_value_t = 20)]
    top: usize,

    /// List the N largest call stacks instead of functions
    #[arg(long, value_name = "N")]
    stacks: Option<usize>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

fn interval(text: &str) -> Result<u64, String> {
    parse_heap_interval(text.as_bytes()).ok_or_else(|| {
        format!("give bytes from 1 to {MAX_INTERVAL}, as {DEFAULT_INTERVAL} or 512k")
    })
}

pub fn main(args: Args) -> Result<ExitCode> {
    match args.command {
        Command::Start(args) => start(&args),
        Command::Stop(args) => stop(&args),
        Command::Dump(args) => dump(&args),
    }
}

fn start(args: &StartArgs) -> Result<ExitCode> {
    let (ask, pid) = (&args.ask, args.ask.pid());
    let answer = ask.ask_for(HEAP_START, args.interval)?;
    match answer.code() {
        Some(Code::Done) => {}
        Some(Code::Refused) if answer.value() == NoWalks::Unwinder as u64 => bail!(
            "process {pid}: it cannot have a profile, because its unwinder takes the loader's lock and a sample could wait for this lock forever; a profile needs libgcc_s.so.1 of GCC 12 or later and glibc 2.35 or later"
        ),
        Some(Code::Refused) if answer.value() == NoWalks::Tables as u64 => bail!(
            "process {pid}: its call stacks cannot be walked, because it has registered unwinding tables, as just-in-time compilers do; `pinfold run --heap` takes samples until it registers the first one"
        ),
        Some(Code::Refused) => bail!(
            "process {pid}: it could not start a profile within a second: it is loading a library, may make no file for the profile (`ulimit -n`, `ulimit -f`), has no memory, or cannot load libgcc_s.so.1; try again, or start it with `pinfold run --heap`"
        ),
        _ => bail!("process {pid}: it does not know this request"),
    }
    let answered = Answered {
        process: Identity::of_pid(pid),
        interval_bytes: Some(args.interval),
    };
    output::show(args.json, "heap start", &answered, || {
        format!(
            "{} (process {pid}) takes a sample for each {} that it allocates, on average\n",
            output::escaped(&name(pid)),
            report::bytes(args.interval as f64)
        )
    })?;
    Ok(ExitCode::SUCCESS)
}

fn stop(args: &StopArgs) -> Result<ExitCode> {
    let pid = args.ask.pid();
    match args.ask.ask_for(HEAP_STOP, 0)?.code() {
        Some(Code::Done) => {}
        Some(Code::Refused) => {
            bail!("process {pid}: it has no heap profile that is on, or is starting one just now")
        }
        _ => bail!("process {pid}: it does not know this request"),
    }
    let answered = Answered {
        process: Identity::of_pid(pid),
        interval_bytes: None,
    };
    output::show(args.json, "heap stop", &answered, || {
        format!(
            "{} (process {pid}) samples no more; `pinfold heap dump {pid}` shows what it sampled\n",
            output::escaped(&name(pid))
        )
    })?;
    Ok(ExitCode::SUCCESS)
}

/// The most bytes of a file with a profile.
const MOST_BYTES: u64 = 256 << 20;

/// Reads a file of a process, or one that this command wrote. `-` is standard input. A pipe under
/// another name is refused: where other users may write, its open could wait without end.
fn read_file(path: &Path) -> Result<Profile> {
    let cannot_read = || {
        format!(
            "cannot read {}; give a file of `pinfold heap dump -o`, or one that a process left",
            path.display()
        )
    };
    let read = || {
        if path == Path::new("-") {
            let input = io::stdin().as_fd().try_clone_to_owned()?;
            return profile_in(&input.into());
        }
        match open_regular(path) {
            Ok(file) => profile_in(&file),
            Err(Unopened::NotRegular) => {
                bail!("it is not a regular file; `-` reads a pipe from standard input")
            }
            Err(why) => Err(why.into()),
        }
    };
    read().with_context(cannot_read)
}

/// The user and the group that own nothing. They stand in for those of a pipe's writer, which are
/// not known.
const NOBODY: u32 = 65_534;

/// Reads the profile in a file that is open.
fn profile_in(file: &File) -> Result<Profile> {
    let mut bytes = Vec::new();
    file.take(MOST_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MOST_BYTES {
        bail!("it is larger than any heap profile");
    }
    if bytes.starts_with(&[0x1f, 0x8b]) {
        return Ok(pprof::decode(&bytes)?);
    }
    let about = file.metadata()?;
    let (uid, gid) = match about.is_file() {
        true => (about.uid(), about.gid()),
        false => (NOBODY, NOBODY),
    };
    let mut raw = Raw::parse(&bytes)?;
    if let Ok(written) = about.modified() {
        raw.time_ns = nanoseconds(written);
    }
    Ok(named(&raw, Subject::File { uid, gid }, PATIENCE))
}

/// Subtracts the profile in a file. Says what makes the difference hard to understand. Returns when
/// the other profile was read or written, in nanoseconds since the epoch.
fn subtract(profile: &mut Profile, path: &Path) -> Result<i64> {
    let old = read_file(path)?;
    let (path, programs) = (
        path.display(),
        [&old, profile].map(|of| output::escaped(of.program())),
    );
    if let [one, other] = &programs
        && one != other
        && programs.iter().all(|name| !name.is_empty())
    {
        output::note(format_args!(
            "{path} is a profile of {one}, and is subtracted from one of {other}"
        ));
    }
    if old.time_ns > profile.time_ns {
        output::note(format_args!(
            "{path} is newer than this profile, so growth has a minus"
        ));
    }
    profile.subtract(&old);
    Ok(old.time_ns)
}

/// Returns the profile that the user names, and the process if it is that of a running one.
fn read(from: &str) -> Result<(Profile, Option<Identity>)> {
    match from.parse::<u32>() {
        Ok(pid) if pid > 0 => Ok((of_process(pid, PATIENCE)?, Some(Identity::of_pid(pid)))),
        _ => Ok((read_file(Path::new(from))?, None)),
    }
}

/// Has a process look which call stacks keep free memory in slabs, and returns its profile.
fn with_fragments(pid: u32, timeout: Duration) -> Result<(Profile, Option<Identity>)> {
    // Says why there is no profile.
    raw::of_process(pid)?;
    let answer = Ask::new(pid, timeout).ask_for(HEAP_FRAGMENTS, 0)?;
    if !matches!(answer.code(), Some(Code::Done | Code::Refused)) {
        bail!(
            "process {pid}: its version of Pinfold does not know this request; restart it with this version"
        );
    }
    let (raw, subject) = raw::of_process(pid)?;
    if answer.code() == Some(Code::Refused) || !raw.has_fragments {
        bail!("process {pid}: it is looking for another command or file just now; try again");
    }
    Ok((named(&raw, subject, PATIENCE), Some(Identity::of_pid(pid))))
}

fn of_process(pid: u32, patience: impl Into<Patience>) -> Result<Profile> {
    let (mut raw, subject) = raw::of_process(pid)?;
    // What the process has told another command is out of date.
    raw.has_fragments = false;
    Ok(named(&raw, subject, patience))
}

/// Finds the names of a profile's functions. What has no name when `patience` is over keeps its
/// address.
fn named(raw: &Raw, subject: Subject, patience: impl Into<Patience>) -> Profile {
    Profile::of(raw, |mappings, places| {
        naming::find(subject, mappings, places, &patience.into())
    })
}

/// Returns the profile of a running process in the format of pprof. What has no name when
/// `patience` is over keeps its address.
pub fn pprof_of_process(pid: u32, patience: Patience) -> Result<Vec<u8>> {
    Ok(pprof::encode(&of_process(pid, patience)?))
}

/// The most call stacks of a flame graph for a browser. A process chooses how many it has.
const SERVED_STACKS: usize = 5000;

/// Returns the memory in use of a running process as a flame graph, by its heap profile. What has
/// no name when `patience` is over keeps its address.
pub fn flame_of_process(pid: u32, patience: Patience) -> Result<Vec<u8>> {
    let profile = of_process(pid, patience)?;
    let picture = picture(What::InUse, moment(profile.time_ns), SERVED_STACKS);
    Ok(flame::draw(&profile, picture)?)
}

fn picture(what: What, subtitle: String, most: usize) -> Picture {
    Picture {
        what,
        subtitle: Some(subtitle),
        most,
        clean: output::escaped,
    }
}

/// Formats a moment in UTC, from nanoseconds since the epoch. Files of other tools may have none.
fn moment(nanoseconds: i64) -> String {
    if nanoseconds <= 0 {
        return "an unknown time".to_owned();
    }
    let since = Duration::from_nanos(nanoseconds.try_into().unwrap_or(0));
    let (day, time) = date(UNIX_EPOCH + since);
    format!("{day} {time} UTC")
}

/// What a program left in use when it ended.
pub struct Leaks {
    /// The bytes that are lost, if the program has looked for lost blocks, or else all.
    pub bytes: f64,
    /// The report, by call stack.
    pub text: String,
}

/// Returns what a program that has ended left in use, from the file that it wrote.
pub fn leaks(file: &File) -> Result<Leaks> {
    Ok(leaks_of(&profile_in(file)?))
}

/// Returns what a program left in use that has ended without writing a file.
pub fn leaks_without_exit(kept: &Kept) -> Result<Leaks> {
    let mut profile = named(&kept.raw()?, Subject::own_file(), PATIENCE);
    profile.notes.push(
        "a signal or _exit ended it, so what its exit would have freed counts as well".to_owned(),
    );
    Ok(leaks_of(&profile))
}

fn leaks_of(profile: &Profile) -> Leaks {
    let mut text = report::summary(profile, What::InUse);
    let (bytes, kinds) = match profile.has_looked {
        true => {
            text += &report::lost(profile);
            let kinds = &[What::Lost, What::Reachable][..];
            (profile.totals().lost_bytes, kinds)
        }
        false => (profile.totals().bytes, &[What::InUse][..]),
    };
    for kind in kinds {
        text += &report::stacks(profile, *kind, 10);
    }
    Leaks { bytes, text }
}

fn dump(args: &DumpArgs) -> Result<ExitCode> {
    let (mut profile, process) = match args.from.parse() {
        Ok(pid) if pid > 0 && args.fragmentation => with_fragments(pid, args.timeout)?,
        _ => read(&args.from)?,
    };
    if args.fragmentation && !profile.has_fragments {
        bail!(
            "{}: it does not say who keeps free memory in slabs; give the number of a process, or a file that a process wrote itself, as by `pinfold run --heap-file`",
            args.from
        );
    }
    let older = match &args.diff {
        Some(old) => Some(subtract(&mut profile, old)?),
        None => None,
    };
    if args.output.is_some() || args.flame.is_some() {
        // The files have no place for the notes.
        profile.notes.iter().for_each(output::note);
    }
    let what = match args.alloc {
        true => What::Allocated,
        false if args.fragmentation => What::Fragments,
        false => What::InUse,
    };
    if let Some(path) = &args.output {
        output::write("the profile", path, &pprof::encode(&profile))?;
    }
    if let Some(path) = &args.flame {
        let subtitle = match older {
            None => moment(profile.time_ns),
            Some(older) => format!(
                "{} to {}; red has grown, blue has shrunk",
                moment(older),
                moment(profile.time_ns)
            ),
        };
        let picture = flame::draw(&profile, picture(what, subtitle, usize::MAX));
        if let (Some(old), Err(Error::Nothing)) = (&args.diff, &picture) {
            bail!(
                "{}: no call stack holds more or less memory than in {}, so there is nothing to draw",
                path.display(),
                old.display()
            );
        }
        let picture = picture.with_context(|| path.display().to_string())?;
        output::write("the flame graph", path, &picture)?;
    }
    if args.json {
        let most = args.stacks.unwrap_or(usize::MAX);
        let report = report::json(&profile, process.as_ref(), what, most);
        output::print(&output::object("heap dump", report)?)?;
    } else if args.output.is_none() && args.flame.is_none() {
        let list = match args.stacks {
            Some(most) => report::stacks(&profile, what, most),
            None => report::functions(&profile, what, args.top),
        };
        output::print(&format!("{}\n{list}", report::summary(&profile, what)))?;
    }
    Ok(ExitCode::SUCCESS)
}
