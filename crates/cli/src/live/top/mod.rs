//! `pinfold top`: a process's memory and caches, or all processes, live on a terminal.

mod frame;
mod view;

use super::list;
use super::source::{Source, Unreadable};
use crate::figures;
use anyhow::{Context, Result, bail};
use frame::draw;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::{DefaultTerminal, Terminal};
use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use view::{Key, View};

/// Watch a process's memory and caches, or all processes on Pinfold
///
/// Keys: q ends; o, a, u, s, l, c, r, n sort the caches by objects, active objects, use, size,
/// slabs, bytes, refills, and name. Ends with the process.
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

    /// Print one picture as text, of 80 columns and 24 lines, and end
    #[arg(long)]
    once: bool,
}

/// Whether a signal asks this process to end.
static ENDS: AtomicBool = AtomicBool::new(false);

extern "C" fn note_signal(_: libc::c_int) {
    ENDS.store(true, Relaxed);
}

/// What is watched.
enum Watched {
    Process(Source, Box<View>),
    All(Vec<list::Row>),
}

impl Watched {
    fn open(args: &Args) -> Result<Watched> {
        let Some(pid) = args.pid else {
            return Ok(Watched::All(Vec::new()));
        };
        let source = Source::open(pid).with_context(|| format!("process {pid}"))?;
        let view = View::new(&source, args.sort);
        Ok(Watched::Process(source, Box::new(view)))
    }

    /// Reads the numbers of this moment. Returns false if the process has ended.
    fn update(&mut self) -> Result<bool> {
        match self {
            Watched::Process(source, view) => match source.read() {
                Ok(snapshot) => view.update(snapshot),
                Err(Unreadable::Gone) => return Ok(false),
                Err(error) => {
                    return Err(error).with_context(|| format!("process {}", source.pid));
                }
            },
            Watched::All(rows) => {
                *rows = list::rows(Duration::ZERO)?.rows;
                rows.sort_by_key(|row| std::cmp::Reverse(row.held_bytes));
            }
        }
        Ok(true)
    }
}

pub fn main(args: Args) -> Result<ExitCode> {
    let mut watched = Watched::open(&args)?;
    if !watched.update()? {
        return Ok(ExitCode::SUCCESS);
    }
    if args.once {
        return once(&watched);
    }
    if !std::io::stdout().is_terminal() {
        bail!("standard output is not a terminal; give --once for one picture as text");
    }
    for signal in [libc::SIGTERM, libc::SIGHUP, libc::SIGINT] {
        let handler: extern "C" fn(libc::c_int) = note_signal;
        // SAFETY: the handler only stores to an atomic.
        unsafe { libc::signal(signal, handler as libc::sighandler_t) };
    }
    let mut terminal = ratatui::try_init().context("cannot use the terminal")?;
    let ended = run(&mut terminal, &mut watched, args.delay);
    ratatui::restore();
    if ended? {
        println!("the process has ended");
    }
    Ok(ExitCode::SUCCESS)
}

/// Draws until the user or the process ends. Returns whether the process has ended.
fn run(terminal: &mut DefaultTerminal, watched: &mut Watched, delay: Duration) -> Result<bool> {
    loop {
        terminal.draw(|frame| draw(frame, watched))?;
        let next = Instant::now() + delay;
        while let Some(left) = next.checked_duration_since(Instant::now()) {
            // A signal that arrives just before the wait is noticed after a second at most.
            let arrived = event::poll(left.min(Duration::from_secs(1)));
            if ENDS.load(Relaxed) {
                return Ok(false);
            }
            if !arrived? {
                continue;
            }
            match event::read()? {
                Event::Key(key) if key.kind == KeyEventKind::Press => {
                    let control = key.modifiers.contains(KeyModifiers::CONTROL);
                    match key.code {
                        KeyCode::Char('c') if control => return Ok(false),
                        KeyCode::Char('q') | KeyCode::Esc => return Ok(false),
                        KeyCode::Char(letter) => watched.sort(letter),
                        _ => {}
                    }
                }
                Event::Resize(..) => {}
                _ => continue,
            }
            terminal.draw(|frame| draw(frame, watched))?;
        }
        if !watched.update()? {
            return Ok(true);
        }
    }
}

impl Watched {
    fn sort(&mut self, letter: char) {
        if let (Watched::Process(_, view), Some(key)) = (self, Key::of_letter(letter)) {
            view.sort(key);
        }
    }
}

/// Prints one picture as text.
fn once(watched: &Watched) -> Result<ExitCode> {
    let mut terminal = Terminal::new(TestBackend::new(80, 24))?;
    terminal.draw(|frame| draw(frame, watched))?;
    figures::print(&text_of(&terminal))?;
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
