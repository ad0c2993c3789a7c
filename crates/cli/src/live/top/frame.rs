//! Draws what `pinfold top` shows. Nothing is told by colour alone.

use super::Watched;
use super::view::{Key, View};
use crate::live::list;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Paragraph, Row, Sparkline, Table};

pub fn draw(frame: &mut Frame<'_>, watched: &Watched) {
    match watched {
        Watched::Process(_, view) => process(frame, view),
        Watched::All(rows) => all(frame, rows),
    }
}

fn bold() -> Style {
    Style::new().add_modifier(Modifier::BOLD)
}

fn reversed() -> Style {
    Style::new().add_modifier(Modifier::REVERSED)
}

fn mib(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / f64::from(1 << 20))
}

fn process(frame: &mut Frame<'_>, view: &View) {
    let [title, body, caches] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(9),
        Constraint::Min(0),
    ])
    .areas(frame.area());
    let text = format!(
        "pinfold top: {} (process {}) on {}",
        view.name, view.pid, view.backend
    );
    frame.render_widget(Line::styled(text, bold()), title);
    let [sum, lines] = Layout::horizontal([Constraint::Length(42), Constraint::Min(0)]).areas(body);
    self::sum(frame, sum, view);
    sparklines(frame, lines, view);
    self::caches(frame, caches, view);
}

/// Shows the memory held as a sum that adds up line by line.
fn sum(frame: &mut Frame<'_>, area: Rect, view: &View) {
    let sum = view.sum;
    let line = |sign: &str, what: &str, bytes: u64| {
        Line::raw(format!("{sign:1} {what:<24} {:>10} MiB", mib(bytes)))
    };
    let lines = vec![
        line("", "objects and sheaves", sum.objects),
        line("+", "free in slabs", sum.free_in_slabs),
        line("+", "large blocks", sum.large),
        line("+", "dirty free runs", sum.dirty),
        line("+", "never touched", sum.untouched),
        line("=", "held", sum.held).style(bold()),
        line("", "held at the peak", sum.peak),
        line("", "returned so far", sum.returned),
    ];
    frame.render_widget(Paragraph::new(lines), area);
}

fn sparklines(frame: &mut Frame<'_>, area: Rect, view: &View) {
    let [held_title, held, slow_title, slow, _] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(3),
        Constraint::Length(1),
        Constraint::Length(3),
        Constraint::Min(0),
    ])
    .areas(area);
    for (title, title_area, area, values) in [
        (
            format!("held, {} MiB", mib(view.sum.held)),
            held_title,
            held,
            &view.held,
        ),
        (
            format!("slow calls, {:.0} a second", view.slow),
            slow_title,
            slow,
            &view.slow_calls,
        ),
    ] {
        frame.render_widget(Line::raw(title), title_area);
        let skipped = values.len().saturating_sub(usize::from(area.width));
        let shown: Vec<u64> = values.iter().skip(skipped).copied().collect();
        frame.render_widget(Sparkline::default().data(&shown), area);
    }
}

/// The columns of the caches before the name: the heading, the width, and the key that sorts by it.
const COLUMNS: [(&str, u16, Option<Key>); 8] = [
    ("OBJS", 8, Some(Key::Objects)),
    ("ACTIVE", 8, Some(Key::Active)),
    ("USE", 5, Some(Key::Use)),
    ("SIZE", 7, Some(Key::Size)),
    ("SLABS", 7, Some(Key::Slabs)),
    ("OBJ/SLAB", 9, None),
    ("KiB", 9, Some(Key::Bytes)),
    ("REFILL/s", 10, Some(Key::Refills)),
];

fn caches(frame: &mut Frame<'_>, area: Rect, view: &View) {
    // A star marks the column that the rows are sorted by.
    let heading = |head: &str, key: Option<Key>| match key == Some(view.key) {
        true => format!("*{head}"),
        false => head.to_owned(),
    };
    let mut header: Vec<Line<'_>> = COLUMNS
        .iter()
        .map(|&(head, _, key)| right(heading(head, key)))
        .collect();
    header.push(Line::raw(format!("  {}", heading("NAME", Some(Key::Name)))));
    let rows = view.rows.iter().map(|row| {
        Row::new([
            right(row.objects.to_string()),
            right(row.active.to_string()),
            right(format!("{:.0}%", 100.0 * row.share())),
            right(row.size.to_string()),
            right(row.slabs.to_string()),
            right(row.per_slab.to_string()),
            right((row.bytes >> 10).to_string()),
            right(format!("{:.0}", row.refills)),
            Line::raw(format!("  {}", row.name)),
        ])
    });
    let widths = COLUMNS
        .iter()
        .map(|&(_, width, _)| Constraint::Length(width));
    let widths = widths.chain([Constraint::Min(10)]);
    let table = Table::new(rows, widths)
        .header(Row::new(header).style(reversed()))
        .column_spacing(0);
    frame.render_widget(table, area);
}

fn right(text: String) -> Line<'static> {
    Line::raw(text).right_aligned()
}

/// Shows all processes.
fn all(frame: &mut Frame<'_>, rows: &[list::Row]) {
    let [title, body] =
        Layout::vertical([Constraint::Length(1), Constraint::Min(0)]).areas(frame.area());
    let text = format!("pinfold top: {} processes", rows.len());
    frame.render_widget(Line::styled(text, bold()), title);
    let heads = [
        "PID",
        "HELD MiB",
        "PEAK MiB",
        "USED MiB",
        "DIRTY MiB",
        "SECONDS",
    ];
    let mut header: Vec<Line<'_>> = heads.iter().map(|&head| right(head.to_owned())).collect();
    header.push(Line::raw("  NAME"));
    let rows = rows.iter().map(|row| {
        Row::new([
            right(row.pid.to_string()),
            right(mib(row.held_bytes)),
            right(mib(row.held_peak_bytes)),
            right(mib(row.used_bytes)),
            right(mib(row.dirty_bytes)),
            right(row.seconds.to_string()),
            Line::raw(format!("  {}", row.name)),
        ])
    });
    let widths = heads.iter().map(|_| Constraint::Length(11));
    let table = Table::new(rows, widths.chain([Constraint::Min(10)]))
        .header(Row::new(header).style(reversed()))
        .column_spacing(0);
    frame.render_widget(table, body);
}
