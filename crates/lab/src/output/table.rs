//! Tables for people.

use super::text::escaped;
use std::fmt::{self, Display};

/// Rows under a heading. Columns of names are left-aligned, the others are right-aligned.
pub struct Table {
    rows: Vec<Vec<String>>,
    left: Vec<usize>,
}

impl Table {
    /// Begins a table with a line for each of `rows`, to which columns are added. The first of them
    /// is left-aligned, the others are right-aligned.
    pub fn of<R: Copy>(rows: impl IntoIterator<Item = R>) -> Columns<R> {
        let rows: Vec<R> = rows.into_iter().collect();
        let table = Table {
            rows: vec![Vec::new(); rows.len() + 1],
            left: vec![0],
        };
        Columns { rows, table }
    }

    /// Returns whether there is no row below the heading.
    pub fn is_empty(&self) -> bool {
        self.rows.len() < 2
    }

    /// Returns the heading and the rows.
    pub fn rows(&self) -> &[Vec<String>] {
        &self.rows
    }

    fn width(&self, column: usize) -> usize {
        let cells = self.rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    }
}

/// A table that is made column by column.
pub struct Columns<R> {
    rows: Vec<R>,
    table: Table,
}

impl<R: Copy> Columns<R> {
    /// Adds a column: its heading, and the cell of each row. What a cell holds cannot end the row.
    pub fn column<C: Display>(mut self, heading: impl Display, cell: impl Fn(R) -> C) -> Self {
        let cells = self.rows.iter().map(|&row| cell(row).to_string());
        let cells = cells.map(|cell| escaped(&cell).into_owned());
        let cells = [heading.to_string()].into_iter().chain(cells);
        for (line, cell) in self.table.rows.iter_mut().zip(cells) {
            line.push(cell);
        }
        self
    }

    /// Adds the column that is left-aligned instead of the first: for names of any length.
    pub fn names<C: Display>(mut self, heading: impl Display, cell: impl Fn(R) -> C) -> Self {
        self.table.left.clear();
        self.also_names(heading, cell)
    }

    /// Adds a further column that is left-aligned.
    pub fn also_names<C: Display>(mut self, heading: impl Display, cell: impl Fn(R) -> C) -> Self {
        self.table.left.push(self.table.rows[0].len());
        self.column(heading, cell)
    }

    /// Returns the table.
    pub fn table(self) -> Table {
        self.table
    }
}

/// Formats a figure with `digits` digits after the point, or "-" if it was not measured.
pub fn figure(value: Option<f64>, digits: usize) -> String {
    value.map_or("-".to_owned(), |value| format!("{value:.digits$}"))
}

impl Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows.first().map_or(0, Vec::len);
        let widths: Vec<_> = (0..columns).map(|column| self.width(column)).collect();
        for row in &self.rows {
            let mut line = String::new();
            for (column, (cell, &width)) in row.iter().zip(&widths).enumerate() {
                line += if column > 0 { "  " } else { "" };
                line += &match self.left.contains(&column) {
                    true => format!("{cell:<width$}"),
                    false => format!("{cell:>width$}"),
                };
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let rows = [("event", 5.5), ("masked-signals", 1234.5)];
        let table = Table::of(rows).column("subject", |row| row.0);
        let table = table.column("cycles", |row| row.1).table();
        assert_eq!(
            table.to_string(),
            "subject         cycles\nevent              5.5\nmasked-signals  1234.5\n"
        );
    }
}
