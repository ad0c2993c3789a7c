//! Draws what `pinfold top` shows. Nothing is told by colour alone.

use super::Watched;
use super::tables;
use super::view::View;
use crate::live::{list, mib};
use crate::output::escaped;
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

pub(super) fn bold() -> Style {
    Style::new().add_modifier(Modifier::BOLD)
}

fn process(frame: &mut Frame<'_>, view: &View) {
    let lines = if view.sum.counted.is_some() { 11 } else { 9 };
    let [title, body, below] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(lines),
        Constraint::Min(0),
    ])
    .areas(frame.area());
    let text = format!(
        "pinfold top: {} (process {}) on {}",
        escaped(&view.name),
        view.pid,
        view.backend
    );
    frame.render_widget(Line::styled(text, bold()), title);
    let [sum, lines] = Layout::horizontal([Constraint::Length(42), Constraint::Min(0)]).areas(body);
    self::sum(frame, sum, view);
    sparklines(frame, lines, view);
    tables::draw(frame, below, view);
}

/// Shows the memory as a sum that adds up line by line.
fn sum(frame: &mut Frame<'_>, area: Rect, view: &View) {
    let sum = view.sum;
    let line = |sign: &str, what: &str, bytes: u64| {
        Line::raw(format!("{sign:1} {what:<24} {:>10} MiB", mib(bytes)))
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

fn sparklines(frame: &mut Frame<'_>, area: Rect, view: &View) {
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
    for (title, title_area, area, values) in [
        (
            format!(
                "held, {} MiB; peak {}",
                mib(view.sum.held),
                mib(view.sum.peak)
            ),
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

fn all(frame: &mut Frame<'_>, rows: &[list::Row]) {
    let [title, body] =
        Layout::vertical([Constraint::Length(1), Constraint::Min(0)]).areas(frame.area());
    let plural = if rows.len() == 1 { "" } else { "es" };
    let text = format!("pinfold top: {} process{plural}", rows.len());
    frame.render_widget(Line::styled(text, bold()), title);
    let heads = [
        "PID",
        "HELD MiB",
        "PEAK MiB",
        "USED MiB",
        "DIRTY MiB",
        "SECONDS",
    ];
    let columns = heads.map(|head| (head.to_owned(), 11));
    let rows = rows.iter().map(|row| {
        vec![
            row.pid.to_string(),
            mib(row.held_bytes),
            mib(row.held_peak_bytes),
            mib(row.used_bytes),
            mib(row.dirty_bytes),
            row.seconds.to_string(),
            escaped(&row.name).into_owned(),
        ]
    });
    table(frame, body, &columns, Some("NAME".to_owned()), rows);
}

/// Draws a table: right-aligned columns with their headings and widths, and left-aligned names
/// behind them if these have a heading.
pub(super) fn table(
    frame: &mut Frame<'_>,
    area: Rect,
    columns: &[(String, u16)],
    names: Option<String>,
    rows: impl Iterator<Item = Vec<String>>,
) {
    let line = |cells: Vec<String>| {
        let cells = cells.into_iter().enumerate();
        Row::new(cells.map(|(nth, cell)| match nth < columns.len() {
            true => Line::raw(cell).right_aligned(),
            false => Line::raw(format!("  {cell}")),
        }))
    };
    let widths = columns.iter().map(|&(_, width)| Constraint::Length(width));
    let widths = widths.chain(names.iter().map(|_| Constraint::Min(10)));
    let heads = columns.iter().map(|(head, _)| head.clone());
    let header = line(heads.chain(names.clone()).collect());
    let table = Table::new(rows.map(line), widths)
        .header(header.style(Style::new().add_modifier(Modifier::REVERSED)))
        .column_spacing(0);
    frame.render_widget(table, area);
}
