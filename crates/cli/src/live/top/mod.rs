//! `pinfold top`: a process's memory and caches, or all processes, live on a terminal.

mod cpus;
mod frame;
mod grid;
pub mod nodes;
mod screen;
mod shepherd;
mod sum;
mod tables;
mod view;

use super::list::{self, Unread};
use super::snapshot::Snapshot;
use super::source::Source;
use super::status::{Process, Status};
use crate::foreign::Identity;
use crate::output;
use anyhow::{Context, Result, bail};
pub use cpus::threads_by_cpu;
use frame::draw;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::{DefaultTerminal, Terminal};
use screen::{Next, Screen};
use std::fs::File;
use std::io::IsTerminal;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
pub use sum::Sum;
use view::{Key, Show};

/// Watch a process's memory and caches, or all processes on Pinfold
///
/// Keys: q ends, and ? shows all keys. 1, 2, 3 and 4 show the caches, the CPUs, the nodes and the
/// shepherd, and Tab the next of them. Arrows, PgUp, PgDn, Home and End move in a table. o, a, u,
/// s, l, c, r, n sort the caches by objects, active objects, use, size, slabs, bytes, refills, and
/// name. In the table of all processes, Enter watches the chosen one, and Esc leads back. Ends with
/// the process that was given.
#[derive(clap::Args)]
pub struct Args {
    /// The process id; all processes without it
    #[arg(value_name = "PID", value_parser = super::pid)]
    pid: Option<u32>,

    /// Seconds between updates, from 0.01 to 86400
    #[arg(short, long, value_name = "SECONDS", value_parser = super::interval, default_value = "1")]
    delay: Duration,

    /// Sort the caches by this at first
    #[arg(short, long, value_enum, default_value = "bytes")]
    sort: Key,

    /// Show this table at first
    #[arg(long, value_enum, default_value = "caches")]
    show: Show,

    /// Wait for one update, print one picture as text of 80 columns and 24 lines, and end
    #[arg(long)]
    once: bool,

    /// With --once, print the numbers of this moment as one JSON object instead of a picture
    #[arg(long, requires = "once")]
    json: bool,
}

/// Whether a signal asks this process to end.
static ENDS: AtomicBool = AtomicBool::new(false);

extern "C" fn note_signal(_: libc::c_int) {
    ENDS.store(true, Relaxed);
}

pub fn main(args: Args) -> Result<ExitCode> {
    if args.json {
        return json(args.pid);
    }
    let mut screen = Screen::open(&args)?;
    if !screen.update()? {
        return Ok(ExitCode::SUCCESS);
    }
    if args.once {
        // Rates need a second reading.
        std::thread::sleep(args.delay);
        if !screen.update()? {
            bail!("the process ended before the second reading; give a shorter --delay");
        }
        return once(&mut screen);
    }
    if !std::io::stdout().is_terminal() {
        bail!("standard output is not a terminal; give --once for one picture as text");
    }
    if !output::can_move_cursor() {
        bail!(
            "this terminal cannot move its cursor, by TERM; set TERM to the terminal's type, or give \
             --once for one picture as text"
        );
    }
    for signal in [libc::SIGTERM, libc::SIGHUP, libc::SIGINT] {
        let handler: extern "C" fn(libc::c_int) = note_signal;
        // SAFETY: the handler only stores to an atomic.
        unsafe { libc::signal(signal, handler as libc::sighandler_t) };
    }
    let mut terminal = ratatui::try_init().context("cannot use the terminal")?;
    let ended = run(&mut terminal, &mut screen, args.delay);
    if ratatui::try_restore().is_err() {
        // The terminal is gone. Dropping it would try to show the cursor, and panic because
        // standard error is gone too.
        std::mem::forget(terminal);
    }
    if ended? {
        output::print("the process has ended\n")?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Draws until the user, the terminal or the process ends. Returns whether the process has ended.
fn run(terminal: &mut DefaultTerminal, screen: &mut Screen, delay: Duration) -> Result<bool> {
    let keys = keyboard()?;
    loop {
        terminal.draw(|frame| draw(frame, screen, true))?;
        let next = Instant::now() + delay;
        'waiting: while let Some(left) = next.checked_duration_since(Instant::now()) {
            // A signal that arrives just before the wait is noticed after a second at most.
            if !wait(&keys, left.min(Duration::from_secs(1))) || ENDS.load(Relaxed) {
                return Ok(false);
            }
            while event::poll(Duration::ZERO)? {
                match event::read()? {
                    Event::Key(key) if key.kind == KeyEventKind::Press => {
                        let control = key.modifiers.contains(KeyModifiers::CONTROL);
                        if control && key.code == KeyCode::Char('c') {
                            return Ok(false);
                        }
                        match screen.press(key.code) {
                            Next::Draw => {}
                            Next::Read => break 'waiting,
                            Next::End => return Ok(false),
                        }
                    }
                    Event::Resize(..) => {}
                    _ => continue,
                }
                terminal.draw(|frame| draw(frame, screen, true))?;
            }
        }
        if !screen.update()? {
            return Ok(true);
        }
    }
}

/// Opens the terminal from which crossterm reads keys.
#[expect(clippy::disallowed_methods, reason = "a device of the kernel's own")]
fn keyboard() -> Result<OwnedFd> {
    let input = std::io::stdin();
    let keys = match input.is_terminal() {
        true => input.as_fd().try_clone_to_owned(),
        false => File::open("/dev/tty").map(OwnedFd::from),
    };
    keys.context("cannot use the terminal")
}

/// Waits until a key or a signal arrives, or the time is over. Returns false if the terminal is
/// gone: crossterm would read its end again and again, and not return.
fn wait(keys: &OwnedFd, time: Duration) -> bool {
    let mut poll = libc::pollfd {
        fd: keys.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // A part of a millisecond counts as a whole one, so that the wait takes some time.
    let milliseconds = time.as_millis() as libc::c_int + 1;
    // SAFETY: the call reads and writes one structure.
    unsafe { libc::poll(&mut poll, 1, milliseconds) };
    poll.revents & (libc::POLLHUP | libc::POLLERR | libc::POLLNVAL) == 0
}

fn once(screen: &mut Screen) -> Result<ExitCode> {
    let mut terminal = Terminal::new(TestBackend::new(80, 24))?;
    terminal.draw(|frame| draw(frame, screen, false))?;
    output::print(&text_of(&terminal))?;
    Ok(ExitCode::SUCCESS)
}

/// Prints the numbers of a process, or of all.
fn json(pid: Option<u32>) -> Result<ExitCode> {
    let of = |source: &Source, snapshot: &Snapshot| {
        let cpus = threads_by_cpu(source.process(), snapshot);
        Process::of(Identity::of(source.process()), snapshot, &cpus)
    };
    let status = match pid {
        Some(pid) => {
            let source = Source::open(pid).with_context(|| format!("process {pid}"))?;
            let snapshot = source.read().with_context(|| format!("process {pid}"))?;
            Status {
                processes: vec![of(&source, &snapshot)],
                unread: Unread::default(),
            }
        }
        None => {
            let mut found = list::sources()?;
            found.sources.sort_by_key(|source| source.pid);
            Status {
                processes: list::read(&mut found, of),
                unread: found.unread(),
            }
        }
    };
    output::print(&output::object("top", &status)?)?;
    Ok(ExitCode::SUCCESS)
}

/// Returns what a terminal shows, line by line.
fn text_of(terminal: &Terminal<TestBackend>) -> String {
    let buffer = terminal.backend().buffer();
    let mut text = String::new();
    for y in 0..buffer.area.height {
        let line: String = (0..buffer.area.width)
            .map(|x| buffer[(x, y)].symbol())
            .collect();
        text += line.trim_end();
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests;
