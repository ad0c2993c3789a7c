//! `pinfold top`: a process's memory and caches, or all processes, live on a terminal.

mod cpus;
mod frame;
pub mod nodes;
mod shepherd;
mod sum;
mod tables;
mod view;

use super::list;
use super::source::{Source, Unreadable};
use crate::output;
use anyhow::{Context, Result, bail};
pub use cpus::threads_by_cpu;
use frame::draw;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::{DefaultTerminal, Terminal};
use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
pub use sum::Sum;
use view::{Key, Show, View};

/// Watch a process's memory and caches, or all processes on Pinfold
///
/// Keys: q ends. 1, 2, 3 and 4 show the caches, the CPUs, the nodes and the shepherd, and Tab the
/// next of them. o, a, u, s, l, c, r, n sort the caches by objects, active objects, use, size,
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

    /// Show this table at first
    #[arg(long, value_enum, default_value = "caches")]
    show: Show,

    /// Wait for one update, print one picture as text of 80 columns and 24 lines, and end
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
        let view = View::new(&source, args.show, args.sort);
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
                *rows = list::rows(&mut list::sources()?);
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
        // Rates need a second reading.
        std::thread::sleep(args.delay);
        if !watched.update()? {
            bail!("the process ended before the second reading; give a shorter --delay");
        }
        return once(&watched);
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
    let ended = run(&mut terminal, &mut watched, args.delay);
    ratatui::restore();
    if ended? {
        output::print("the process has ended\n")?;
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
                        KeyCode::Char(letter) => watched.key(letter),
                        KeyCode::Tab => watched.show_next(),
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
    /// Does what a key asks for. A letter sorts the caches, and a digit shows a table.
    fn key(&mut self, letter: char) {
        let Watched::Process(_, view) = self else {
            return;
        };
        if let Some(show) = Show::of_digit(letter) {
            view.show = show;
        }
        if let Some(key) = Key::of_letter(letter) {
            view.sort(key);
        }
    }

    fn show_next(&mut self) {
        if let Watched::Process(_, view) = self {
            view.show = view.show.next();
        }
    }
}

fn once(watched: &Watched) -> Result<ExitCode> {
    let mut terminal = Terminal::new(TestBackend::new(80, 24))?;
    terminal.draw(|frame| draw(frame, watched))?;
    output::print(&text_of(&terminal))?;
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
mod tests {
    use super::super::snapshot::{
        Snapshot,
        tests::{segment, set_call},
    };
    use super::*;
    use pinfold::internal::segment::{Call, SlabEvent};

    fn text(watched: &Watched, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, watched)).unwrap();
        text_of(&terminal)
    }

    /// Returns the views of a process with these caches, by the numbers of their slabs.
    fn watched(slabs: &[(usize, u64)]) -> Watched {
        let source = Source::of_this_process();
        let mut snapshot = Snapshot::parse(&segment(0)).unwrap();
        snapshot.held = 5 << 20;
        for &(nth, slabs) in slabs {
            let cache = &mut snapshot.caches[nth];
            cache.slab = 64 << 10;
            cache.nodes[0][SlabEvent::SlabAlloc as usize] = slabs;
            cache.nodes[1][SlabEvent::Refilled as usize] = 10 * slabs;
            cache.nodes[0][SlabEvent::BarnObjects as usize] = 1 + slabs / 4;
        }
        snapshot.nodes[0].used = 4 << 20;
        snapshot.nodes[1].dirty = 1 << 20;
        (snapshot.mapped, snapshot.metadata) = (12 << 20, 300 << 10);
        let mut view = View::new(&source, Show::Caches, Key::Bytes);
        view.update(snapshot);
        Watched::Process(source, Box::new(view))
    }

    #[test]
    fn the_sum_adds_up_line_by_line() {
        let Watched::Process(_, view) = watched(&[(0, 16), (2, 8)]) else {
            unreachable!();
        };
        let sum = view.sum;
        let objects = 160 * 16 + 80 * 48;
        assert_eq!(sum.in_barns, 5 * 16 + 3 * 48);
        assert_eq!(sum.free_in_slabs, 24 * (64 << 10) - objects);
        let large = (4 << 20) - 24 * (64 << 10);
        assert_eq!(sum.live_and_sheaves, objects - sum.in_barns + large);
        assert_eq!((sum.returned, sum.metadata), (7 << 20, 300 << 10));
        assert_eq!(sum.resident, (5 << 20) + (300 << 10));
        assert_eq!(sum.reserved, (12 << 20) + (300 << 10));
        assert!(sum.counted.is_none());
    }

    #[test]
    fn where_calls_are_counted_the_sum_begins_with_what_was_requested() {
        let mut bytes = segment(1);
        // 100 blocks of 32 bytes were allocated for 2500 bytes, and 60 were freed.
        for (call, count) in [
            (Call::alloc(1), 100),
            (Call::free(1), 60),
            (Call::requested(1), 2500),
        ] {
            set_call(&mut bytes, 0, call, count);
        }
        let mut snapshot = Snapshot::parse(&bytes).unwrap();
        snapshot.nodes[0].used = 1 << 20;
        let cache = &mut snapshot.caches[1];
        cache.slab = 64 << 10;
        cache.nodes[0][SlabEvent::SlabAlloc as usize] = 1;
        cache.nodes[0][SlabEvent::Refilled as usize] = 90;
        cache.nodes[0][SlabEvent::BarnObjects as usize] = 20;
        let sum = Sum::of(&snapshot);
        let counted = sum.counted.unwrap();
        let large = (1 << 20) - (64 << 10);
        assert_eq!(counted.requested, 40 * 25 + large);
        assert_eq!(counted.rounding, 40 * 7);
        assert_eq!(counted.live, 40 * 32 + large);
        assert_eq!((counted.in_sheaves, sum.in_barns), (30 * 32, 20 * 32));
        assert_eq!(counted.live + counted.in_sheaves, sum.live_and_sheaves);
    }

    #[test]
    fn what_only_counting_knows_is_told_apart() {
        for (units, words) in [(0, "live and CPUs' sheaves*"), (1, "requested, about")] {
            let source = Source::of_this_process();
            let mut view = View::new(&source, Show::Caches, Key::Bytes);
            view.update(Snapshot::parse(&segment(units)).unwrap());
            let shown = text(&Watched::Process(source, Box::new(view)), 80, 24);
            assert!(shown.contains(words), "{shown}");
        }
    }

    #[test]
    fn digits_and_tab_show_other_tables() {
        let mut watched = watched(&[(0, 16)]);
        let heads = ["OBJ/SLAB", "THREADS", "DIRTY MiB", "ticks"];
        for (digit, head) in "1234".chars().zip(heads) {
            watched.key(digit);
            let shown = text(&watched, 80, 24);
            assert!(shown.contains(head), "{shown}");
            assert!(shown.contains(&format!("[{digit} ")), "{shown}");
        }
        watched.show_next();
        assert!(text(&watched, 80, 24).contains(heads[0]));
    }

    #[test]
    fn caches_are_sorted_and_the_column_is_marked() {
        let mut watched = watched(&[(0, 1), (1, 3), (4, 2)]);
        let order = |text: &str| {
            let names = text
                .lines()
                .filter_map(|line| line.split("kmalloc-").nth(1));
            let names: Vec<String> = names.take(3).map(str::to_owned).collect();
            names
        };
        let shown = text(&watched, 80, 24);
        assert!(shown.contains("*KiB"), "{shown}");
        assert_eq!(order(&shown), ["32", "80", "16"]);
        watched.key('n');
        let shown = text(&watched, 80, 24);
        assert!(shown.contains("*NAME"), "{shown}");
        assert_eq!(order(&shown), ["16", "32", "48"]);
    }

    #[test]
    fn every_size_of_terminal_is_drawn() {
        let process = watched(&[(0, 1)]);
        let all = Watched::All(Vec::new());
        for width in [1, 2, 10, 41, 43, 80, 300] {
            for height in [1, 2, 9, 10, 24, 100] {
                text(&process, width, height);
                text(&all, width, height);
            }
        }
        let shown = text(&process, 80, 24);
        assert!(shown.lines().all(|line| line.chars().count() <= 80));
        assert!(shown.contains("= reserved"), "{shown}");
    }

    #[test]
    fn numbers_of_any_size_are_shown() {
        let mut snapshot = Snapshot::parse(&segment(0)).unwrap();
        (snapshot.held, snapshot.huge) = (u64::MAX, u64::MAX);
        (snapshot.mapped, snapshot.metadata) = (u64::MAX, u64::MAX);
        for node in &mut snapshot.nodes {
            (node.used, node.dirty) = (u64::MAX, u64::MAX);
        }
        for cache in &mut snapshot.caches {
            (cache.size, cache.slab, cache.per_slab) = (u64::MAX, u64::MAX, u64::MAX);
            cache
                .nodes
                .iter_mut()
                .for_each(|counts| counts[..].fill(u64::MAX));
        }
        let source = Source::of_this_process();
        let mut view = View::new(&source, Show::Caches, Key::Refills);
        view.update(snapshot);
        let mut watched = Watched::Process(source, Box::new(view));
        for digit in "1234".chars() {
            watched.key(digit);
            text(&watched, 80, 24);
        }
    }
}
