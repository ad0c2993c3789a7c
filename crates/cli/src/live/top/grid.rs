//! A table that fits on its screen: right-aligned columns of numbers, and left-aligned names after
//! them. Where there is no room for all columns, the least important ones are left out.

use super::frame::bold;
use ratatui::Frame;
use ratatui::layout::{Constraint, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Row, Table};

pub struct Column {
    head: String,
    /// The least width, with a gap on the left.
    width: u16,
    /// The column of the lowest rank is the last one to be left out.
    rank: u8,
}

impl Column {
    pub fn new(head: impl Into<String>, width: u16, rank: u8) -> Column {
        Column {
            head: head.into(),
            width,
            rank,
        }
    }
}

pub struct Grid {
    pub columns: Vec<Column>,
    /// The heading of the names, if there are some.
    pub names: Option<String>,
    /// The cells of all columns, and after them the name.
    pub rows: Vec<Vec<String>>,
    /// The first row that is shown.
    pub first: usize,
    /// The row with a mark.
    pub chosen: Option<usize>,
}

/// The least width of the names.
const NAMES: u16 = 15;

fn length(text: &str) -> u16 {
    u16::try_from(text.chars().count()).unwrap_or(u16::MAX)
}

impl Grid {
    /// Returns how many rows there is room for.
    pub fn page(area: Rect) -> usize {
        usize::from(area.height.saturating_sub(1))
    }

    /// Returns the columns that there is room for, with their widths. Each is wide enough for its
    /// cells and a gap.
    fn fitting(&self, width: u16) -> Vec<(usize, u16)> {
        let mut left = width.saturating_sub(if self.names.is_some() { NAMES } else { 0 });
        let needed = |nth: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(nth));
            let longest = cells.map(|cell| length(cell)).max().unwrap_or(0);
            let column = &self.columns[nth];
            let longest = longest.max(length(&column.head));
            column.width.max(longest.saturating_add(1))
        };
        let mut order: Vec<usize> = (0..self.columns.len()).collect();
        order.sort_by_key(|&nth| self.columns[nth].rank);
        let mut fitting: Vec<(usize, u16)> = Vec::new();
        for nth in order {
            let width = needed(nth);
            if width <= left {
                left -= width;
                fitting.push((nth, width));
            }
        }
        fitting.sort_unstable();
        fitting
    }

    pub fn draw(&self, frame: &mut Frame<'_>, area: Rect) {
        let shown = self.fitting(area.width);
        let line = |cells: &[String], name: Option<&String>| {
            let numbers = shown.iter().filter_map(|&(nth, _)| cells.get(nth));
            let numbers = numbers.map(|cell| Line::raw(cell.clone()).right_aligned());
            Row::new(numbers.chain(name.map(|name| Line::raw(format!("  {name}")))))
        };
        let widths = shown.iter().map(|&(_, width)| Constraint::Length(width));
        let widths = widths.chain(self.names.iter().map(|_| Constraint::Min(NAMES)));
        let heads: Vec<String> = self
            .columns
            .iter()
            .map(|column| column.head.clone())
            .collect();
        let header = line(&heads, self.names.as_ref());
        let page = Grid::page(area);
        let rows = self.rows.iter().skip(self.first).take(page);
        let rows = rows.map(|row| line(row, row.get(self.columns.len())));
        let table = Table::new(rows, widths)
            .header(header.style(Style::new().add_modifier(Modifier::REVERSED)))
            .column_spacing(0);
        frame.render_widget(table, area);
        let place = self.chosen.and_then(|row| row.checked_sub(self.first));
        let place = place.filter(|&place| place < page && place < self.rows.len());
        if let Some(place) = place.and_then(|place| u16::try_from(place + 1).ok()) {
            let mark = Rect::new(area.x, area.y + place, area.width.min(1), 1);
            frame.render_widget(Line::styled(">", bold()), mark);
        }
    }
}
