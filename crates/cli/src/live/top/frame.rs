//! Draws what `pinfold top` shows. Nothing is told by colour alone.

use super::grid::{Column, Grid};
use super::screen::{List, Screen, Watched};
use super::tables;
use super::view::View;
use crate::live::mib;
use crate::output::escaped;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Block, Borders, Padding, Paragraph, Sparkline, Wrap};

/// Draws the screen. The last line names keys, unless the picture is for a file.
pub fn draw(frame: &mut Frame<'_>, screen: &mut Screen, has_keys: bool) {
    let [body, keys] = Layout::vertical([
        Constraint::Min(0),
        Constraint::Length(u16::from(has_keys && frame.area().height > 1)),
    ])
    .areas(frame.area());
    if screen.has_help {
        help(frame, body);
    } else {
        match &mut screen.watched {
            Watched::Process(_, view) => process(frame, body, view),
            Watched::All(list) => all(frame, body, list, has_keys),
        }
    }
    self::keys(frame, keys, screen);
}

pub(super) fn bold() -> Style {
    Style::new().add_modifier(Modifier::BOLD)
}

/// The columns of the sum. The graphs are beside it if there is room for them.
const SUM: u16 = 42;
const GRAPHS: u16 = 24;

fn process(frame: &mut Frame<'_>, area: Rect, view: &mut View) {
    let lines = if view.sum.counted.is_some() { 11 } else { 9 };
    let [title, body, below] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(lines),
        Constraint::Min(0),
    ])
    .areas(area);
    let text = format!(
        "pinfold top: {} (process {}) on {}",
        escaped(&view.name),
        view.pid,
        view.backend
    );
    frame.render_widget(Line::styled(text, bold()), title);
    if area.width < SUM + GRAPHS {
        sum(frame, body, view);
    } else {
        let [left, right] =
            Layout::horizontal([Constraint::Length(SUM), Constraint::Min(0)]).areas(body);
        sum(frame, left, view);
        let block = Block::new().borders(Borders::LEFT);
        let block = block.padding(Padding::left(1));
        let inner = block.inner(right);
        frame.render_widget(block, right);
        graphs(frame, inner, view);
    }
    tables::draw(frame, below, view);
}

/// Shows the memory as a sum that adds up line by line.
fn sum(frame: &mut Frame<'_>, area: Rect, view: &View) {
    let sum = view.sum;
    // On a narrow screen, the figures stand closer to their names.
    let width = usize::from(area.width.min(SUM).saturating_sub(32)).clamp(6, 10);
    let line = |sign: &str, what: &str, bytes: u64| {
        Line::raw(format!("{sign:1} {what:<24} {:>width$} MiB", mib(bytes)))
    };
    let total = |what: &str, bytes: u64| line("=", what, bytes).style(bold());
    let mut lines = match sum.counted {
        Some(counted) => vec![
            line("", "requested, about", counted.requested),
            line("+", "rounding", counted.rounding),
            total("live", counted.live),
            line("+", "in CPUs' sheaves", counted.in_sheaves),
        ],
        None => vec![line("", "live and CPUs' sheaves*", sum.live_and_sheaves)],
    };
    lines.extend([
        line("+", "in barns", sum.in_barns),
        line("+", "free in slabs", sum.free_in_slabs),
        line("+", "dirty free runs", sum.dirty),
        line("+", "metadata", sum.metadata),
        total("resident, at most", sum.resident),
        line("+", "returned or untouched", sum.returned),
        total("reserved", sum.reserved),
    ]);
    if sum.counted.is_none() {
        lines.push(Line::raw("* told apart under pinfold run --stats"));
    }
    frame.render_widget(Paragraph::new(lines), area);
}

/// Shows the last values of two numbers, each above 0, with the largest of them.
fn graphs(frame: &mut Frame<'_>, area: Rect, view: &View) {
    let [held_title, held, slow_title, slow, rest] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(3),
        Constraint::Length(1),
        Constraint::Length(3),
        Constraint::Min(0),
    ])
    .areas(area);
    let returned = mib(view.sum.returned_so_far);
    frame.render_widget(Line::raw(format!("returned so far, {returned} MiB")), rest);
    let (now, peak) = (mib(view.sum.held), mib(view.sum.peak));
    let title = Line::raw(format!("held, {now} MiB; peak {peak}"));
    frame.render_widget(title, held_title);
    graph(frame, held, view.held.iter().copied().collect(), mib);
    let title = Line::raw(format!("slow calls, {:.0} a second", view.slow));
    frame.render_widget(title, slow_title);
    let values = view.slow_calls.iter().copied().collect();
    graph(frame, slow, values, |value| value.to_string());
}

/// Draws the values that there is room for, beside a scale from 0 to the largest of them.
fn graph(frame: &mut Frame<'_>, area: Rect, mut values: Vec<u64>, name: impl Fn(u64) -> String) {
    let scale = |values: &[u64]| name(values.iter().copied().max().unwrap_or(0));
    // The values that are left out may be larger.
    let width = u16::try_from(scale(&values).chars().count()).unwrap_or(u16::MAX);
    let width = width.saturating_add(1);
    let [axis, picture] =
        Layout::horizontal([Constraint::Length(width), Constraint::Min(0)]).areas(area);
    values.drain(..values.len().saturating_sub(usize::from(picture.width)));
    let lines = (0..area.height).map(|line| {
        let text = match line {
            0 => scale(&values),
            _ if line + 1 == area.height => "0".to_owned(),
            _ => String::new(),
        };
        Line::raw(text + " ").right_aligned()
    });
    let lines: Vec<Line<'_>> = lines.collect();
    frame.render_widget(Paragraph::new(lines), axis);
    frame.render_widget(Sparkline::default().data(&values), picture);
}

fn all(frame: &mut Frame<'_>, area: Rect, list: &mut List, has_keys: bool) {
    let [title, body] = Layout::vertical([Constraint::Length(1), Constraint::Min(0)]).areas(area);
    let plural = if list.rows.len() == 1 { "" } else { "es" };
    let text = format!("pinfold top: {} process{plural}", list.rows.len());
    frame.render_widget(Line::styled(text, bold()), title);
    let columns = [
        Column::new("PID", 9, 0),
        Column::new("HELD MiB", 10, 1),
        Column::new("PEAK MiB", 10, 3),
        Column::new("USED MiB", 10, 2),
        Column::new("DIRTY MiB", 11, 4),
        Column::new("SECONDS", 9, 5),
    ];
    let rows = list.rows.iter().map(|row| {
        vec![
            row.process.pid.to_string(),
            mib(row.held_bytes),
            mib(row.held_peak_bytes),
            mib(row.used_bytes),
            mib(row.dirty_bytes),
            row.seconds().to_string(),
            escaped(match row.command() {
                "" => &row.process.name,
                command => without_folder(command),
            })
            .into_owned(),
        ]
    });
    let mut grid = Grid {
        columns: columns.into(),
        names: Some("COMMAND".to_owned()),
        rows: rows.collect(),
        first: 0,
        chosen: has_keys.then_some(list.at),
    };
    list.page = Grid::page(body);
    grid.first = list.first();
    grid.draw(frame, body);
}

/// Returns as many of the parts, which two spaces separate, as have room. The first one stays.
fn whole_parts(keys: &str, room: u16) -> String {
    let mut shown = keys;
    while shown.len() > usize::from(room) {
        let Some(end) = shown.rfind("  ") else { break };
        shown = &shown[..end];
    }
    shown.to_owned()
}

/// Returns a command line without the folder of its program, so that its arguments have room.
fn without_folder(command: &str) -> &str {
    let program = command.split(' ').next().unwrap_or_default();
    let folder = program.rfind('/').map_or(0, |slash| slash + 1);
    &command[folder..]
}

/// Names the keys, or says why the last one did nothing. On the right: which rows are shown.
fn keys(frame: &mut Frame<'_>, area: Rect, screen: &Screen) {
    let back = screen.behind.as_ref().map_or("", |_| "  Esc back");
    let (keys, place) = match &screen.watched {
        _ if screen.has_help => ("any key: back".to_owned(), String::new()),
        Watched::Process(_, view) => (
            format!("q end  ? help{back}  1-4 tables  arrows, PgUp, PgDn"),
            place(view.first, view.page, view.rows_shown()),
        ),
        Watched::All(list) => (
            "q end  ? help  Enter shows the process".to_owned(),
            place(list.first(), list.page, list.rows.len()),
        ),
    };
    let reserved = u16::try_from(place.chars().count()).unwrap_or(0);
    let text = match &screen.notice {
        Some(notice) => escaped(notice).into_owned(),
        None => whole_parts(&keys, area.width.saturating_sub(reserved + 1)),
    };
    let [left, gap, right] = Layout::horizontal([
        Constraint::Min(0),
        Constraint::Length(u16::from(reserved > 0)),
        Constraint::Length(reserved),
    ])
    .areas(area);
    let style = Style::new().add_modifier(Modifier::REVERSED);
    for (part, text) in [(left, text), (gap, String::new()), (right, place)] {
        frame.render_widget(Paragraph::new(text).style(style), part);
    }
}

/// Returns which of all rows are shown, or an empty text if all are.
fn place(first: usize, page: usize, rows: usize) -> String {
    match page >= rows {
        true => String::new(),
        false => format!("{}-{} of {rows}", first + 1, (first + page).min(rows)),
    }
}

const HELP: &str = "\
q           end
Esc         back to all processes; end
Enter       watch the chosen process
1 2 3 4     caches, CPUs, nodes, shepherd
Tab         the next of these tables
Up Down PgUp PgDn Home End
            move in a table

These sort the caches:
o objects   a active objects
u use       s bytes of an object
l slabs     c bytes of all slabs
r refills   n name

A narrow screen leaves out columns.
`pinfold top --help` and docs/live.md
explain the lines and the columns.";

fn help(frame: &mut Frame<'_>, area: Rect) {
    let mut lines = vec![Line::styled("Keys of pinfold top", bold()), Line::raw("")];
    lines.extend(HELP.lines().map(Line::raw));
    let text = Paragraph::new(lines).wrap(Wrap { trim: false });
    frame.render_widget(text, area);
}
