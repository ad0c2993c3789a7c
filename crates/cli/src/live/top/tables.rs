//! Draws the tables below the sum: the caches, the CPUs, the nodes, and the shepherd.

use super::frame::bold;
use super::grid::{Column, Grid};
use super::view::{Key, Show, View};
use crate::live::mib;
use crate::output::escaped;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Paragraph, Wrap};
use std::time::{SystemTime, UNIX_EPOCH};

pub fn draw(frame: &mut Frame<'_>, area: Rect, view: &mut View) {
    let [tabs, table] = Layout::vertical([Constraint::Length(1), Constraint::Min(0)]).areas(area);
    frame.render_widget(self::tabs(view.show), tabs);
    match view.show {
        Show::Caches => caches(frame, table, view),
        Show::Cpus => cpus(frame, table, view),
        Show::Nodes => nodes(frame, table, view),
        Show::Shepherd => shepherd(frame, table, view),
    }
}

/// Names the tables. Brackets mark the one that is shown.
fn tabs(shown: Show) -> Line<'static> {
    let names = ["caches", "CPUs", "nodes", "shepherd"];
    let tabs = Show::ALL.iter().zip(names).enumerate();
    let tabs = tabs.map(|(nth, (&show, name))| match show == shown {
        true => Span::styled(format!("[{} {name}]", nth + 1), bold()),
        false => Span::raw(format!(" {} {name} ", nth + 1)),
    });
    Line::from(tabs.collect::<Vec<_>>())
}

/// Draws a table from the row on that the view begins with.
fn scrolled(frame: &mut Frame<'_>, area: Rect, view: &mut View, mut grid: Grid) {
    view.page = Grid::page(area);
    view.first = view.first.min(grid.rows.len().saturating_sub(view.page));
    grid.first = view.first;
    grid.draw(frame, area);
}

/// The columns of the caches before the name: the heading, the width, the rank, and the key that
/// sorts by it.
const COLUMNS: [(&str, u16, u8, Option<Key>); 8] = [
    ("OBJS", 8, 2, Some(Key::Objects)),
    ("ACTIVE", 8, 4, Some(Key::Active)),
    ("USE", 5, 3, Some(Key::Use)),
    ("SIZE", 7, 5, Some(Key::Size)),
    ("SLABS", 7, 6, Some(Key::Slabs)),
    ("OBJ/SLAB", 9, 8, None),
    ("KiB", 9, 1, Some(Key::Bytes)),
    ("REFILL/s", 10, 7, Some(Key::Refills)),
];

fn caches(frame: &mut Frame<'_>, area: Rect, view: &mut View) {
    // A star marks the column that the rows are sorted by.
    let heading = |head: &str, is_key: bool| match is_key {
        true => format!("*{head}"),
        false => head.to_owned(),
    };
    let columns = COLUMNS.map(|(head, width, rank, key)| {
        let is_key = key == Some(view.key);
        Column::new(heading(head, is_key), width, if is_key { 0 } else { rank })
    });
    let rows = view.rows.iter().map(|row| {
        vec![
            row.cache.total().to_string(),
            row.cache.out().to_string(),
            format!("{:.0}%", 100.0 * row.share()),
            row.cache.size.to_string(),
            row.cache.slabs().to_string(),
            row.cache.per_slab.to_string(),
            (row.bytes() >> 10).to_string(),
            format!("{:.0}", row.refills),
            escaped(&row.cache.name).into_owned(),
        ]
    });
    let grid = Grid {
        columns: columns.into(),
        names: Some(heading("NAME", view.key == Key::Name)),
        rows: rows.collect(),
        first: 0,
        chosen: None,
    };
    scrolled(frame, area, view, grid);
}

fn cpus(frame: &mut Frame<'_>, area: Rect, view: &mut View) {
    let heads = ["CPU", "THREADS", "BUSY", "ALLOC/s", "FREE/s"];
    let rows = view.cpus.iter().map(|cpu| {
        let calls = |of: fn(&super::cpus::Rates) -> f64| match &cpu.calls {
            Some(calls) => format!("{:.0}", of(calls)),
            None => "*".to_owned(),
        };
        vec![
            cpu.name.clone(),
            cpu.threads.map_or_else(String::new, |n| n.to_string()),
            cpu.busy
                .map_or_else(String::new, |percent| format!("{percent:.0}%")),
            calls(|calls| calls.allocated),
            calls(|calls| calls.freed),
        ]
    });
    let note = match view.sum.counted {
        Some(_) => "BUSY: the time of the THREADS that ran on this CPU last",
        None => "BUSY: the time of the THREADS here last; * known under pinfold run --stats",
    };
    let rows = rows.collect();
    with_note(frame, area, view, (&heads, rows), note);
}

fn nodes(frame: &mut Frame<'_>, area: Rect, view: &mut View) {
    let memory = ["NODE", "USED MiB", "SLABS MiB", "DIRTY MiB", "BARNS MiB"];
    let heads = [&memory[..], &["REFILL/s", "REMOTE/s", "OTHER/s"]].concat();
    let rows = view.nodes.iter().enumerate().map(|(nth, node)| {
        vec![
            nth.to_string(),
            mib(node.used),
            mib(node.slabs),
            mib(node.dirty),
            mib(node.in_barns),
            format!("{:.0}", node.refills),
            format!("{:.0}", node.remote),
            format!("{:.0}", node.mismatches),
        ]
    });
    let note = "REMOTE: freed on another node; OTHER: taken here though another was wanted";
    let rows = rows.collect();
    with_note(frame, area, view, (&heads, rows), note);
}

/// Draws a table whose columns are equally wide, and a note below. A narrow screen has two lines
/// for the note.
fn with_note(
    frame: &mut Frame<'_>,
    area: Rect,
    view: &mut View,
    (heads, rows): (&[&str], Vec<Vec<String>>),
    note: &'static str,
) {
    let is_narrow = usize::from(area.width) < note.len();
    let lines = Constraint::Length(1 + u16::from(is_narrow));
    let [body, below] = Layout::vertical([Constraint::Min(0), lines]).areas(area);
    let columns = (0..)
        .zip(heads)
        .map(|(rank, &head)| Column::new(head, 10, rank));
    let grid = Grid {
        columns: columns.collect(),
        names: None,
        rows,
        first: 0,
        chosen: None,
    };
    scrolled(frame, body, view, grid);
    frame.render_widget(Paragraph::new(note).wrap(Wrap { trim: true }), below);
}

fn shepherd(frame: &mut Frame<'_>, area: Rect, view: &View) {
    let work = &view.shepherd;
    let so_far = work.so_far;
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let age = now.map_or(0, |now| u64::try_from(now.as_nanos()).unwrap_or(u64::MAX));
    let who = match so_far.threads {
        _ if so_far.ticks == 0 => "nobody has ticked yet".to_owned(),
        0 => "slow paths tick, because there is no thread".to_owned(),
        1 => "a thread ticks".to_owned(),
        threads => format!("{threads} threads tick"),
    };
    let last = work.age(age);
    let last = last.map_or(String::new(), |age| format!(", the last {age:.1} s ago"));
    let lines = [
        who,
        format!("{:>14.1} ticks a second{last}", work.ticks),
        format!("{:>14.3} ms a second in ticks", work.in_ticks),
        format!("{:>14.0} counts of CPUs folded a second", work.folds),
        format!("{:>14} MiB returned a second", mib(work.returned as u64)),
        format!(
            "so far: {} ticks in {:.1} ms, {} folds, {} MiB returned",
            so_far.ticks,
            so_far.in_ticks_ns as f64 / 1e6,
            so_far.folds,
            mib(view.sum.returned_so_far)
        ),
    ];
    let lines: Vec<Line<'_>> = lines.into_iter().map(Line::raw).collect();
    let text = Paragraph::new(lines).wrap(Wrap { trim: false });
    frame.render_widget(text, area);
}
